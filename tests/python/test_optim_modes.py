"""Fused optimizers under torch's modes: dispatch modes, torch.compile, inference mode."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.optim_differential import Mode
from checks.optim_script import in_mode
from harness import Context, on_ranks


@on_ranks(1)
def test_a_copy_by_hand_is_still_seen_under_a_mode(context: Context) -> None:
    model = nn.Linear(8, 8)
    ddp = DistributedDataParallel(model)
    optimizer = fusedpg.optim.SGD(model.parameters(), lr=0.1, ddp=ddp)
    ddp(torch.ones(2, 8)).sum().backward()
    with Mode(), pytest.raises(RuntimeError, match="holds only its slice"):
        torch.empty(8, 8).copy_(model.weight.grad)
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["sharded", "overlap", "manual"])
@on_ranks(2)
def test_compiled_steps(context: Context, kind: str) -> None:
    """A compiled training step, and a compiled ``optimizer.step``, print nothing, are compiled
    once, and give what they give without the compiler."""

    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        net, optimizer = in_mode(kind, model, lr=0.1)

        def backward(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()

        def whole(x: torch.Tensor) -> None:
            backward(x)
            optimizer.step()

        step = optimizer.step
        if compiled:
            whole = torch.compile(whole, backend="eager")
            step = torch.compile(optimizer.step, backend="eager")
        for now in range(12):
            x = torch.full((2, 8), now + context.rank + 1.0)
            with torch._dynamo.config.patch(error_on_recompile=now % 6 > 2):
                if now < 6:
                    whole(x)
                else:
                    backward(x)
                    step()
        return [p.detach().clone() for p in model.parameters()]

    unraisable: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, unraisable.append
    torch._dynamo.reset()
    try:
        for one, other in zip(run(True), run(False), strict=True):
            assert torch.equal(one, other)
    finally:
        sys.unraisablehook = before
        torch._dynamo.reset()
    assert not unraisable


@pytest.mark.parametrize("kind", ["sharded", "overlap", "manual", "shared"])
@on_ranks(2)
def test_made_and_stepped_in_inference_mode(context: Context, kind: str) -> None:
    """Neither parameters nor state become inference tensors."""
    model = nn.Linear(8, 8)
    ddp = DistributedDataParallel(model) if kind in ("sharded", "overlap") else None
    with torch.inference_mode():
        optimizer = fusedpg.optim.AdamW(
            model.parameters(), lr=0.1, ddp=ddp, overlap=kind == "overlap",
            share_parameters=kind == "shared",
        )  # fmt: skip
    assert not any(p.is_inference() for p in model.parameters())
    net = ddp or model
    for now in range(3):
        net(torch.ones(2, 8, requires_grad=True)).square().sum().backward()
        with torch.inference_mode(now == 0):
            optimizer.step()
            optimizer.zero_grad()
    for values in optimizer.state.values():
        assert not any(value.is_inference() for value in values.values())
        assert float(values["step"]) == 3
