"""Fused optimizers under torch's Join, where ranks look at gradients and change them before step():
numbers of DistributedDataParallel with torch's optimizers on Gloo."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.optim_script import in_mode
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only

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
            p.grad.mul_(0.1).div_(3)
        next(model.parameters()).grad.zero_()
        next(model.parameters()).grad.norm()
    elif how == "scaler, clip":
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip(model.parameters(), 0.05)


HOW = (
    "nothing", "no_sync", "clip", "clip, largest", "clip one by one", "clip by the optimizer",
    "by hand", "scaler", "scaler, clip",
)  # fmt: skip


def trained(context: Context, who: str, mode: str, how: str, group: Any) -> list[torch.Tensor]:
    """Parameters after ranks had unequal numbers of batches."""
    torch.manual_seed(0)
    # In float64, so that a factor of float32 shows.
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)).double()
    manual = who == "fused" and mode == "manual"
    net: Any = model if manual else DistributedDataParallel(model, process_group=group)
    parts = model if "several" in mode else [model]
    kind: Any = torch.optim.AdamW
    options: dict[str, Any] = {}
    if who == "fused":
        kind = fusedpg.optim.AdamW
        options = {} if manual else {"ddp": net, "overlap": "overlap" in mode}
    optimizers = [kind(part.parameters(), lr=0.01, **options) for part in parts]
    joined = [] if manual else [net]
    if who == "fused" and "module alone" not in mode:
        joined += optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    scaled = how.startswith("scaler")
    zero_last = scaled or "module alone" in mode
    with Join(joined, divide_by_initial_world_size=BY_ACTIVE not in mode):
        for step in range(3 + 2 * context.rank):
            for optimizer in () if zero_last else optimizers:
                optimizer.zero_grad(set_to_none=step % 2 == 0 or "overlap" in mode)
            x = torch.ones(2, 16, dtype=torch.float64) * (step + context.rank + 1)
            if how == "no_sync":
                with contextlib.nullcontext() if manual else net.no_sync():
                    net(2 - x).square().mean().backward()
            loss = net(x).square().mean()
            (scaler.scale(loss) if scaled else loss).backward()
            between(how, model, optimizers, scaler)
            for optimizer in optimizers[::-1]:
                if scaled:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
            scaler.update() if scaled else None
            for optimizer in optimizers if zero_last else ():
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


MODES = ("sharded", "sharded, several", "overlap", "overlap, module alone")
BY_ACTIVE = "divided by those who have data"


@pytest.mark.parametrize("mode", ["manual", *MODES, *(f"{mode}, {BY_ACTIVE}" for mode in MODES)])
@on_ranks(2, 3)
def test_numbers_of_gloo(context: Context, mode: str) -> None:
    gloo = dist.new_group(backend="gloo")
    for how in HOW[:2] if "overlap" in mode else HOW:
        expected = trained(context, "torch", mode, how, gloo)
        found = trained(context, "fused", mode, how, None)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("uneven", [False, True], ids=["", "join"])
@pytest.mark.parametrize("mode", ["manual", "sharded", "overlap"])
@on_ranks(3)
def test_local_batch_sizes(context: Context, mode: str, uneven: bool) -> None:
    """Batches of different sizes: the gradient is that of the mean over all samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3)).double()
    twin = copy.deepcopy(model)
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    net, optimizer = in_mode(mode, model, "SGD", **sgd)
    oracle = torch.optim.SGD(twin.parameters(), **sgd)
    ranks = range(context.world_size)
    lengths = [3 + (rank if uneven else 0) for rank in ranks]

    def batch(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        samples = 2 + (3 * rank + step) % 7
        return torch.randn(samples, 5, generator=generator, dtype=torch.float64)

    def train(step: int) -> None:
        optimizer.zero_grad()
        net(batch(step, context.rank)).square().mean().backward()
        optimizer.step()

    def of_torch(*batches: torch.Tensor) -> None:
        oracle.zero_grad()
        for x in batches:
            (twin(x).square().mean() / len(batches)).backward()
        oracle.step()

    with Join([optimizer] if mode == "manual" else [net, optimizer], enable=uneven):
        for step in range(lengths[context.rank]):
            optimizer.set_local_batch_size(len(batch(step, context.rank)))
            train(step)
    for step in range(max(lengths)):
        of_torch(torch.cat([batch(step, rank) for rank in ranks if step < lengths[rank]]))
    optimizer.set_local_batch_size(None)
    train(100)
    of_torch(*(batch(100, rank) for rank in ranks))
    for mine, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mode", ["manual", "sharded", "overlap", "module alone", "torch"])
@on_ranks(2, 3)
def test_steps_after_join(context: Context, mode: str) -> None:
    """They go on from the moments of all steps, as one process that saw all batches would.

    torch's optimizer on a rank that joined early has missed the others' steps: its moments are
    old, and the parameters of DDP's ranks differ from the next step on.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)).double()
    twin = copy.deepcopy(model)
    oracle = torch.optim.AdamW(twin.parameters(), lr=0.01)
    ranks, size = range(context.world_size), context.world_size
    gloo = dist.new_group(backend="gloo")
    net: Any = model
    if mode != "manual":
        net = DistributedDataParallel(model, process_group=gloo if mode == "torch" else None)
    kind, options = (
        fusedpg.optim.AdamW,
        {"ddp": net, "overlap": mode in ("overlap", "module alone")},
    )
    if mode in ("torch", "manual"):
        kind, options = torch.optim.AdamW if mode == "torch" else kind, {}
    optimizer: Any = kind(model.parameters(), lr=0.01, **options)
    joined = {"manual": [optimizer], "module alone": [net], "torch": [net]}
    lengths = [3 + 2 * rank for rank in ranks]

    def loss(net: Any, step: int, rank: int) -> torch.Tensor:
        x = torch.ones(2, 16, dtype=torch.float64) * (step % 100 + rank + 1)
        return net(x).square().mean()

    def train(step: int) -> None:
        loss(net, step, context.rank).backward()
        optimizer.step()
        optimizer.zero_grad()

    def far() -> float:
        """How far the rank's parameters are from the oracle's after its step."""
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)

    def of_oracle(step: int, ranks: Sequence[int]) -> None:
        oracle.zero_grad()
        for rank in ranks:
            (loss(twin, step, rank) / size).backward()
        oracle.step()

    with Join(joined.get(mode, [net, optimizer])):
        for step in range(lengths[context.rank]):
            train(step)
    for step in range(max(lengths)):
        of_oracle(step, [rank for rank in ranks if step < lengths[rank]])
    assert far() < 1e-12
    for step in (100, 101):
        train(step)
        of_oracle(step, ranks)
        if mode != "torch":
            assert far() < 1e-12
        elif step == 100:
            last = context.rank == size - 1
            assert far() < 1e-12 if last else far() > 1e-4


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
