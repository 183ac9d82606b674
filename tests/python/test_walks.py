"""Calls that users make often pass through few Python frames of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedpg
from checks import frames
from checks.compiled import compiles
from fusedpg import fusion
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only


def count(call: Callable[[], object]) -> int:
    """How many functions of the package begin, or generators go on, while `call` runs."""
    with frames.watching():
        return frames.during(call, alone=True).total()


def step(g: fusion.Partial, w: fusion.Replicate, lr: float) -> Any:
    return w - lr * fusion.all_reduce(g, "mean")


def momentum(g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float) -> Any:
    m = 0.9 * m + fusion.reduce_scatter(g, "mean")
    return w - lr * fusion.all_gather(m), m


@on_ranks(2)
def test_fused_calls(context: Context) -> None:
    """Limits for the first call, which traces and schedules, and for those that follow.

    The cache has the generated code.
    """
    w, g = torch.ones(1000), torch.ones(1000)
    m = torch.zeros(fusedpg.shard_range(1000, context.world_size, context.rank)[1])
    with compiles(context):
        for function, tensors, limits in (
            (step, (g, w), (5_430, 14, 14, 14)),
            (momentum, (g, w, m), (7_750, 14, 14, 14)),
        ):
            fusedpg.fuse(function)(*tensors, lr=0.1)
            fused = fusedpg.fuse(function)
            counts = [
                count(lambda fused=fused, tensors=tensors: fused(*tensors, lr=0.1)) for _ in limits
            ]
            assert all(n <= most for n, most in zip(counts, limits)), (function, counts)


@on_ranks(2)
def test_all_reduce(_: Context) -> None:
    tensor = torch.ones(1024)
    fusedpg.all_reduce_(tensor)  # the name's first use imports its module
    assert count(lambda: fusedpg.all_reduce_(tensor)) == 1
