"""Clipping, GradScaler and accumulation with fused optimizers, and what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest, same
from checks.optim import Run, Trainer, fused, healthy, unchanged
from checks.refused import refused
from harness import Context


def _clip(trainer: Trainer, how: str, max_norm: float, order: float) -> torch.Tensor | None:
    if how == "method":
        return trainer.optimizer.clip_grad_norm_(max_norm, order)
    if how == "torch":
        if trainer.ddp is None:
            trainer.optimizer.reduce_gradients()
        return nn.utils.clip_grad_norm_(trainer.net.parameters(), max_norm, order)
    return None  # the constructor's max_grad_norm


def clipped(context: Context, run: Run, how: str, max_norm: float, order: float = 2.0) -> str:
    """Clipping by the norm over all ranks, the same as in one process."""
    if how == "constructor":
        run = dataclasses.replace(run, ours={**run.ours, "max_grad_norm": max_norm})
    trainer = Trainer(context, run)
    for step in range(run.steps):
        trainer.optimizer.zero_grad()
        trainer.backward(step)
        mine = _clip(trainer, how, max_norm, order)
        trainer.prepare(step)
        want = nn.utils.clip_grad_norm_(trainer.twin.parameters(), max_norm, order)
        assert want > 2.0, "the test clips in some of its cases alone"
        if mine is not None:
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=0)
        trainer.optimizer.step()
        trainer.oracle.step()
    return trainer.agree(3e-6)


SCALING: dict[str, Callable[[Trainer, bool], object]] = {
    "method": lambda trainer, first: trainer.optimizer.clip_grad_norm_(1.0 if first else 0.5),
    "method, then one for all": lambda trainer, first: [
        trainer.optimizer.clip_grad_norm_(norm) for norm in (1.0 if first else 0.5, 1e6)
    ],
    "torch": lambda trainer, first: nn.utils.clip_grad_norm_(trainer.params, 1.0 + first),
    "torch, one by one": lambda trainer, first: nn.utils.clip_grad_norm_(
        trainer.params, 1.0 + first, foreach=False
    ),
    "by hand": lambda trainer, first: trainer.params[1].grad.mul_(2.0 + first),  # type: ignore[union-attr]
    "other operations": lambda trainer, first: (
        trainer.params[1].grad.mul_(2.0) if first else trainer.params[1].grad.div_(2.0)  # type: ignore[union-attr]
    ),
    "others' gradients": lambda trainer, first: trainer.params[first].grad.mul_(2.0),  # type: ignore[union-attr]
}


def scaled_differently(context: Context, mode: str, how: str) -> None:
    """Parameters would be updated by slices of different scales."""
    trainer = Trainer(context, Run("SGD", mode))
    before = [param.detach().clone() for param in trainer.params]

    def backward() -> None:
        trainer.optimizer.zero_grad()
        trainer.backward(0)
        trainer.optimizer.clip_grad_norm_(1e6)  # in manual mode gradients are reduced by it

    backward()
    SCALING[how](trainer, context.rank == 0)
    with refused("which gradients were", dist.DistBackendError):
        trainer.optimizer.step()
    unchanged([param.detach() for param in trainer.params], before)
    healthy(context)
    # What has multiplied gradients that are gone does not matter.
    for norm in (None, 1.0):
        trainer.optimizer.zero_grad()
        trainer.backward(0)
        if norm is not None:
            trainer.optimizer.clip_grad_norm_(norm)
        trainer.optimizer.step()


def norms(context: Context) -> None:
    """What may be asked of a reduced gradient, and what is refused."""
    trainer = Trainer(context, Run(mode="ddp"))
    trainer.backward(0)
    trainer.prepare(0)
    for param, twin in zip(trainer.params, trainer.twin.parameters(), strict=True):
        assert param.grad is not None
        assert twin.grad is not None
        assert param.grad.shape == twin.grad.shape
        torch.testing.assert_close(torch.linalg.vector_norm(param.grad), twin.grad.norm())
        torch.testing.assert_close(param.grad.norm(1), twin.grad.norm(1))
    grad: Any = trainer.params[0].grad
    for ask in (torch.isfinite, torch.clone, torch.sum, lambda g: g + 1, lambda g: g[0]):
        with refused("slice"):
            ask(grad)
    with refused("slice"):
        nn.utils.clip_grad_value_(trainer.params, 0.5)
    for param in trainer.params:
        param.grad.mul_(0.5)  # type: ignore[union-attr]
    trainer.optimizer.step()
    for twin in trainer.twin.parameters():
        twin.grad.mul_(0.5)  # type: ignore[union-attr]
    trainer.oracle.step()
    trainer.agree()


def _scaled_step(
    trainer: Trainer, scaler: Any, step: int, overflow: bool, clip: str, unscale: bool
) -> None:
    trainer.optimizer.zero_grad()
    last = trainer.context.rank == trainer.context.world_size - 1
    loss = trainer.net(trainer.gradients(step)) * (torch.inf if overflow and last else 1.0)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(trainer.optimizer)
        _clip(trainer, clip, 5.0, 2.0)
    scaler.step(trainer.optimizer)
    scaler.update()


def scaler(context: Context, run: Run, unscale: bool = False, clip: str = "none") -> str:
    """An overflow on one rank stops all of them and halves the scale on all."""
    if clip == "constructor":
        run = dataclasses.replace(run, ours={"max_grad_norm": 5.0})
    trainer = Trainer(context, run)
    amp = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = 1024.0
    for step in range(run.steps):
        overflow = step in (1, 4)
        before = trainer.state()
        _scaled_step(trainer, amp, step, overflow, clip, unscale)
        expected *= 0.5 if overflow else 1.0
        assert amp.get_scale() == expected, step
        if overflow:
            unchanged(trainer.state(), before)
            continue
        trainer.prepare(step)
        if clip != "none":
            assert nn.utils.clip_grad_norm_(trainer.twin.parameters(), 5.0) > 5.0
        trainer.oracle.step()
    return trainer.agree(3e-6)


def accumulated(context: Context, run: Run) -> str:
    """Three backwards for each step, two of them under no_sync."""
    trainer = Trainer(context, run)
    for step in range(run.steps):
        trainer.optimizer.zero_grad()
        parts = [10 * step + part for part in range(3)]
        for part in parts:
            last = part == parts[-1]
            with contextlib.nullcontext() if last else trainer.ddp.no_sync():
                trainer.backward(part)
        trainer.optimizer.step()
        trainer.prepare(*parts)
        trainer.oracle.step()
    return trainer.agree()


def synced_twice(context: Context, run: Run, clip: bool, some: bool) -> str:
    """Several reduced backwards before a step, and ``some`` that are not: DDP's sum of means."""
    trainer = Trainer(context, run)
    for step in range(run.steps):
        trainer.optimizer.zero_grad()
        parts = [10 * step + part for part in range(4)]
        for i, part in enumerate(parts):
            with trainer.ddp.no_sync() if some and i == 1 else contextlib.nullcontext():
                trainer.backward(part)
        trainer.prepare(*parts)
        if clip:
            mine = nn.utils.clip_grad_norm_(trainer.params, 3.0)
            want = nn.utils.clip_grad_norm_(trainer.twin.parameters(), 3.0)
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=0)
        trainer.optimizer.step()
        trainer.oracle.step()
    return trainer.agree(3e-6)


def unsynchronised(context: Context, mode: str, before: bool) -> None:
    """step() refuses gradients that were never reduced."""
    trainer = Trainer(context, Run(mode=mode))
    if before:
        trainer.backward(0)
        if mode == "overlap":
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    with trainer.ddp.no_sync():
        trainer.backward(1)
    kept = trainer.state()
    with refused("never reduced"):
        trainer.optimizer.step()
    unchanged(trainer.state(), kept)
    healthy(context)


def overlap_refuses(context: Context, what: str) -> None:
    """What cannot work when parameters change during backward."""
    if what == "max_grad_norm":
        with refused("overlap=False", ValueError):
            Trainer(context, Run(mode="overlap", ours={"max_grad_norm": 1.0}))
        return
    trainer = Trainer(context, Run(mode="overlap"))
    amp = torch.amp.GradScaler("cpu")
    loss = trainer.net(trainer.gradients(0))
    if what.startswith("scaler"):
        loss = amp.scale(loss)
    loss.backward()
    healthy(context)  # behind the updates that are under way
    kept = trainer.state()
    with refused("overlap=False"):
        if what == "torch clip":
            nn.utils.clip_grad_norm_(trainer.net.parameters(), 1.0)
        elif what == "torch clip, foreach":
            nn.utils.clip_grad_norm_(trainer.net.parameters(), 1.0, foreach=True)
        elif what == "clip value":
            nn.utils.clip_grad_value_(trainer.net.parameters(), 1.0)
        elif what == "method":
            trainer.optimizer.clip_grad_norm_(1.0)
        elif what == "scaler":
            amp.step(trainer.optimizer)
        elif what == "scaler unscale":
            amp.unscale_(trainer.optimizer)
        elif what == "isfinite":
            all(bool(torch.isfinite(param.grad).all()) for param in trainer.params)  # type: ignore[arg-type]
        elif what == "norm":
            [param.grad.norm() for param in trainer.params]  # type: ignore[union-attr]
        elif what == "second backward":
            trainer.backward(1)
        elif what == "second backward, gradients dropped":
            for param in trainer.params:
                param.grad = None
            trainer.backward(1)
        elif what == "rate changed":
            trainer.optimizer.param_groups[0]["lr"] *= 2
            trainer.optimizer.step()
        else:
            raise AssertionError(what)
    unchanged(trainer.state(), kept)
    healthy(context)


OVERLAP_REFUSES = (
    "max_grad_norm",
    "torch clip",
    "torch clip, foreach",
    "clip value",
    "method",
    "scaler",
    "scaler unscale",
    "isfinite",
    "norm",
    "second backward",
    "second backward, gradients dropped",
    "rate changed",
)


def refuses(context: Context, what: str) -> None:
    """What no fused optimizer takes."""
    bag = Trainer(context, Run()).bag
    params = list(bag.parameters())
    if what == "differentiable":
        for name in ("SGD", "Adam", "AdamW", "LAMB"):
            with refused("differentiable", ValueError):
                fused(Run(name), params, differentiable=True)
    elif what == "capturable":
        for name in ("Adam", "AdamW", "LAMB"):
            with refused("capturable", ValueError):
                fused(Run(name), params, capturable=True)
    elif what == "complex":
        with refused("complex64", TypeError):
            fused(Run(), [nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    elif what == "gaps":
        with refused("dense", TypeError):
            fused(Run(), [nn.Parameter(torch.zeros(6)[::2])])
    elif what == "gloo":
        with refused("backend", ValueError):
            fused(Run(), params, process_group=context.oracle)
        ddp = DistributedDataParallel(bag, process_group=context.oracle)
        with refused("backend", ValueError):
            fused(Run(), params, ddp=ddp)
    elif what == "options":
        for options in (
            {"reduce": "max"},
            {"max_grad_norm": 0.0},
            {"master_dtype": torch.float64},
        ):
            with refused(next(iter(options)), ValueError):
                fused(Run(), params, **options)
    elif what == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp = DistributedDataParallel(bag)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with refused("communication hook"):
            fused(Run(), params, ddp=ddp)
    elif what == "foreign":
        ddp = DistributedDataParallel(nn.Linear(3, 3))
        with refused("does not belong", ValueError):
            fused(Run(), params, ddp=ddp)
    elif what == "twice":
        ddp = DistributedDataParallel(bag)
        kept = fused(Run(), params, ddp=ddp)
        with refused("two optimizers", ValueError):
            fused(Run(), params, ddp=ddp)
        del kept
    else:
        raise AssertionError(what)
    healthy(context)


REFUSES = (
    "differentiable",
    "capturable",
    "complex",
    "gaps",
    "gloo",
    "options",
    "hook",
    "foreign",
    "twice",
)


def sparse(context: Context, mode: str) -> None:
    """Sparse gradients raise on every rank."""
    module = nn.Embedding(50, 4, sparse=True)
    net: Any = DistributedDataParallel(module) if mode != "manual" else module
    ddp = net if mode != "manual" else None
    optimizer = fused(Run("SGD", mode), module.parameters(), lr=0.1, ddp=ddp)
    before = module.weight.detach().clone()
    with refused("sparse"):
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert same(module.weight.detach(), before)
    healthy(context)


def shared(context: Context, mode: str, early: bool) -> str:
    """Shared parameters: one copy, and writes outside step() raise unless announced."""
    run = Run(mode=mode, ours={"share_parameters": True})
    trainer = Trainer(context, run)
    trainer.both(0)
    trainer.optimizer.zero_grad()
    if not early:
        trainer.backward(1)
    torch.distributed.barrier()  # a rank that is still computing must not see the write
    with torch.no_grad():
        trainer.params[0].mul_(1.0)
    with refused("outside step()"):
        if early:
            trainer.backward(1)
        trainer.optimizer.step()
    healthy(context)

    trainer = Trainer(context, run)
    trainer.both(0)
    with trainer.optimizer.writing_parameters():
        if context.rank == 0:
            with torch.no_grad():
                trainer.params[0].fill_(2.0)
    with torch.no_grad():
        next(trainer.twin.parameters()).fill_(2.0)
    assert bool((trainer.params[0] == 2.0).all()), "the parameters are not shared"
    trainer.both(1)
    trainer.agree()
    return digest(trainer.params)


def scaler_by_hand(context: Context, unscale: bool, types: int) -> str:
    """Manual mode, gradients put in by hand, infinite ones on one rank: all scalers back off."""
    import fusedpg

    dtypes = (torch.float32, torch.float64)[:types]
    params = [nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in dtypes]
    optimizer = fusedpg.optim.SGD(params, lr=0.1)
    amp = torch.amp.GradScaler("cpu", init_scale=4.0)
    expected, scale = 1.0, 4.0
    for step in range(6):
        overflow = step in (1, 3, 4)
        amp.scale(torch.ones(()))  # as a loss would
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, scale)
            if overflow and context.rank == step % context.world_size and i == step % types:
                param.grad[7] = torch.inf
        if unscale:
            amp.unscale_(optimizer)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        scale *= 0.5 if overflow else 1.0
        expected -= 0.0 if overflow else 0.1
        assert amp.get_scale() == scale, step
        for param in params:
            torch.testing.assert_close(param.detach(), torch.full_like(param, expected))
    # Backward's gradients are reduced before they are unscaled.
    (amp.scale(sum(param.sum() for param in params))).backward()
    amp.step(optimizer)
    amp.update()
    torch.testing.assert_close(params[0].detach(), torch.full((300,), expected - 0.1))
    return digest(params)


def found_inf_without_scaler(context: Context) -> None:
    """A script that sets ``found_inf`` on one rank alone is told so, on all ranks."""
    import fusedpg

    param = nn.Parameter(torch.ones(10))
    optimizer = fusedpg.optim.SGD([param], lr=0.1)
    param.grad = torch.ones(10)
    optimizer.found_inf = torch.tensor(float(context.rank == 0))
    with refused("found_inf"):
        optimizer.step()
    assert bool((param == 1).all())
    del optimizer.found_inf
