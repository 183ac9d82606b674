"""Modules of which a part belongs to an optimizer of torch: sparse and complex parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import harness
from checks.cases import digest
from harness import Context

STEPS = 4


class Sparse(nn.Module):
    """An embedding with sparse gradients, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Embedding(30, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, step: int, rank: int) -> torch.Tensor:
        tokens = torch.tensor([step, 2 * rank + 1, 7, 7])
        out: torch.Tensor = self.head(self.other(tokens))
        return out


class Complex(nn.Module):
    """A complex layer behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)
        self.other = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.cfloat)) for shape in ((16, 16), (16,))
        )

    def forward(self, step: int, rank: int) -> torch.Tensor:
        x = torch.linspace(-1, 1 + rank + step, 32).reshape(2, 16)
        y = self.head(x).to(torch.cfloat) @ self.other[0] + self.other[1]
        return y.abs()


KINDS: dict[str, type[nn.Module]] = {"sparse": Sparse, "complex": Complex}


def _trained(
    context: Context, kind: str, mode: str, group: Any, view: bool
) -> Iterator[list[torch.Tensor]]:
    import fusedpg

    torch.manual_seed(5)
    module: Any = KINDS[kind]()
    ddp = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=view
    )
    head = list(module.head.parameters())
    optimizers: list[Any] = [torch.optim.SGD(module.other.parameters(), lr=0.3)]
    if mode == "plain":
        optimizers.append(torch.optim.AdamW(head, lr=0.1))
    else:
        hook = {"comm_hook": (None, allreduce_hook)} if mode == "hook" else {}
        overlap = mode == "overlap"
        optimizers.append(fusedpg.optim.AdamW(head, lr=0.1, ddp=ddp, overlap=overlap, **hook))
    for step in range(STEPS):
        ddp(step, context.rank).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield [param.detach().clone() for param in module.parameters()]


pytestmark = pytest.mark.fused_only


def trains(context: Context, kind: str, mode: str, view: bool) -> str:
    """Ours has the head, torch's optimizer the rest; against plain DDP on Gloo."""
    now: list[torch.Tensor] = []
    ours = _trained(context, kind, mode, None, view)
    theirs = _trained(context, kind, "plain", context.oracle, view)
    for now, want in zip(ours, theirs, strict=True):
        for a, b in zip(now, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return digest([one if not one.is_complex() else torch.view_as_real(one) for one in now])


@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
@pytest.mark.parametrize("mode", ["plain", "ddp", "overlap", "hook"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_torch(pair: harness.Workers, kind: str, mode: str, view: bool) -> None:
    pair.agree(trains, kind, mode, view)
