"""Fused functions of pipeline stages, their groups, and what plain torch makes of them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks.fusion import Contributions, reference_all_reduce, reference_dropout
from fusedpg.fusion import (
    Partial,
    all_reduce,
    dropout,
    recv,
    send,
)
from harness import Context

P_DROP = 0.25
# Of the groups; who waits for one has not been told.
DEADLINE = 20.0
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@fusedpg.fuse
def first(x: Partial, b, r, seed: int):
    return send(dropout(all_reduce(x) + b, P_DROP, seed) + r)


@fusedpg.fuse
def middle(like, w):
    return send(torch.sigmoid(recv(like)) * w)


@fusedpg.fuse
def last(like, w):
    y = recv(like)
    return torch.tanh(y) * w, y


class Place:
    """This rank's stage, and its groups in a stage and over stages."""

    def __init__(
        self, context: Context, backend: str, stages: int = 2, seconds: float = 60
    ) -> None:
        limit = datetime.timedelta(seconds=seconds)
        size = context.world_size // stages
        self.stage, self.rank = divmod(context.rank, size)
        self.size, self.count, self.last = size, stages, self.stage == stages - 1
        parts = [list(range(s * size, (s + 1) * size)) for s in range(stages)]
        across = [list(range(r, context.world_size, size)) for r in range(size)]
        made = [
            [dist.new_group(ranks, backend=backend, timeout=limit) for ranks in g]
            for g in (parts, across)
        ]
        self.group, self.stages = made[0][self.stage], made[1][self.rank]
        self.groups = {"group": self.group, "stages": self.stages}
        self._all = context.oracle

    def close(self) -> None:
        dist.barrier(group=self._all)
        dist.destroy_process_group(self.stages)
        dist.destroy_process_group(self.group)


def backends(context: Context) -> list[str]:
    return ["fused", "gloo"] if context.fused else ["gloo"]


def drawer(seed: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def agree(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    bound = BOUNDS.get(want.dtype, 2e-2)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound, msg=lambda m: f"{m}\n{what}")


def run_first(x: list[torch.Tensor], b: Any, r: Any, seed: int) -> torch.Tensor:
    return reference_dropout(reference_all_reduce(Contributions(x)) + b, P_DROP, seed) + r


def raises(call: Callable[[], Any], what: str, kind: type[Exception], text: str = "") -> None:
    begun = time.monotonic()
    try:
        call()
    except kind as error:
        assert text in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what} raised nothing")
    took = time.monotonic() - begun
    assert took < DEADLINE / 4, f"{what} raised after {took:.1f} s"
