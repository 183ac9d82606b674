"""Fused optimizers under torch's Join, where ranks look at gradients and change them before step():
numbers of DistributedDataParallel with torch's optimizers on Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from harness import Context, on_ranks

clip = torch.nn.utils.clip_grad_norm_


def between(how: str, model: nn.Module, optimizers: list[Any], scaler: Any) -> None:
    """What is done between backward and the steps."""
    if how == "clip":
        clip(model.parameters(), 0.05)
    elif how == "clip, largest":
        clip(model.parameters(), 0.01, norm_type=float("inf"))
    elif how == "clip one by one":
        clip(model.parameters(), 0.05, foreach=False)
    elif how == "clip by the optimizer":
        for optimizer in optimizers:
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            if isinstance(optimizer, fusedpg.optim.FusedOptimizer):
                optimizer.clip_grad_norm_(0.05)
            else:
                clip(mine, 0.05)
    elif how == "by hand":
        for p in model.parameters():
            p.grad.mul_(0.5).div_(3)
        next(model.parameters()).grad.zero_()
        next(model.parameters()).grad.norm()
    elif how == "scaler, clip":
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip(model.parameters(), 0.05)


HOW = (
    "clip", "clip, largest", "clip one by one", "clip by the optimizer", "by hand", "scaler",
    "scaler, clip", "nothing",
)  # fmt: skip


def trained(context: Context, mode: str, how: str, several: bool, group: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3))
    net: Any = model if mode == "manual" else DistributedDataParallel(model, process_group=group)
    lists = [list(part.parameters()) for part in model] if several else [list(model.parameters())]
    kind: Any = torch.optim.AdamW
    options: dict[str, Any] = {}
    if mode != "torch":
        kind = fusedpg.optim.AdamW
        options = {} if mode == "manual" else {"ddp": net}
    optimizers = [kind(params, lr=0.01, **options) for params in lists]
    joinables = [] if mode == "manual" else [net]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scaled = how.startswith("scaler")
    with Join([*joinables, *(optimizers if mode != "torch" else [])]):
        for step in range(3 + 2 * context.rank):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = net(torch.ones(2, 16) * (step + context.rank + 1)).square().mean()
            (scaler.scale(loss) if scaled else loss).backward()
            between(how, model, optimizers, scaler)
            for optimizer in optimizers[::-1]:
                if scaled:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
            scaler.update() if scaled else None
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("mode", "several"), [("sharded", False), ("sharded", True), ("manual", False)]
)
@on_ranks(2, 3)
def test_numbers_of_gloo(context: Context, mode: str, several: bool) -> None:
    gloo = dist.new_group(backend="gloo")
    for how in HOW:
        expected = trained(context, "torch", how, several, gloo)
        found = trained(context, mode, how, several, None)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(2)
def test_factors_are_exact_on_ranks_that_have_joined(context: Context) -> None:
    """One that float32 does not hold, for gradients in float64."""
    results = []
    for group in (dist.new_group(backend="gloo"), None):
        torch.manual_seed(0)
        model = nn.Linear(16, 3, dtype=torch.float64)
        net: Any = DistributedDataParallel(model, process_group=group)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        if group is None:
            optimizer = fusedpg.optim.SGD(model.parameters(), lr=1.0, ddp=net)
        with Join([net, *([optimizer] if group is None else [])]):
            for _ in range(1 + context.rank):
                optimizer.zero_grad()
                net(torch.ones(2, 16, dtype=torch.float64)).square().mean().backward()
                for p in model.parameters():
                    p.grad.mul_(0.1)
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@on_ranks(2)
def test_ranks_that_do_different_things(context: Context) -> None:
    """Both ranks hear of it, and the group goes on."""
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    optimizer = fusedpg.optim.SGD(model.parameters(), lr=0.1, ddp=ddp)
    with Join([ddp, optimizer]):
        ddp(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=r"do different things .*(step|norms)"):
            if context.rank:
                optimizer.step()
            else:
                clip(model.parameters(), 0.1)
        optimizer.step()
