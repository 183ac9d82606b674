"""Many parameters: what is done for all of them at once gives what it gave one by one."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.optim import refused
from checks.optim_seams import Pair, net
from fusedpg.optim import _gradients
from harness import Context

STEPS = 4


def clipped_at_once(context: Context) -> None:
    """torch's clipping asks once for all norms and multiplies all gradients at once."""
    pair = Pair(context, "SGD", view=False, lr=0.1)
    handled: list[Any] = []
    original = _gradients.ShardedGrad.__torch_dispatch__

    def count(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handled.append(func)
        return original(func, types, args, kwargs)

    for step in range(STEPS):
        norms = []
        for module, ddp, optimizer in zip(pair.nets, pair.ddps, pair.optimizers, strict=True):
            optimizer.zero_grad()
            pair.loss(ddp, step).backward()
            handled.clear()
            _gradients.ShardedGrad.__torch_dispatch__ = classmethod(count)  # type: ignore[assignment, method-assign]
            try:
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.01))
            finally:
                _gradients.ShardedGrad.__torch_dispatch__ = original  # type: ignore[method-assign]
            assert len(handled) == (2 if optimizer is pair.optimizers[0] else 0), handled
            optimizer.step()
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        pair.compare()


def clipped_with_others(context: Context) -> None:
    """Gradients of a model of which an optimizer of torch has a part, in one clipping."""
    nets = [net(), net()]
    ddps = [DistributedDataParallel(module) for module in nets]
    norms = []
    for ours, module, ddp in zip((True, False), nets, ddps, strict=True):
        params = list(module.parameters())
        first: Any = (
            fusedpg.optim.SGD(params[:3], lr=0.1, ddp=ddp)
            if ours
            else torch.optim.SGD(params[:3], lr=0.1)
        )
        second = torch.optim.SGD(params[3:], lr=0.1)
        generator = torch.Generator().manual_seed(context.rank)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        ddp(x).pow(2).sum().backward()
        if ours:
            with refused("cannot be mixed"):
                nn.utils.clip_grad_norm_(params, 0.01, foreach=True)
        norms.append(nn.utils.clip_grad_norm_(params, 0.01))
        first.step()
        second.step()
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
    for a, b in zip(*(module.parameters() for module in nets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def gradients_again(context: Context) -> None:
    """Manual mode: the object in ``p.grad`` serves again, unless somebody has kept it."""
    param = nn.Parameter(torch.ones(70, dtype=torch.float64))
    optimizers = [fusedpg.optim.SGD([param], lr=0.0)]
    rank, size = context.rank, context.world_size
    mean = (size - 1) / 2

    def backward(factor: float) -> Any:
        optimizers[0].zero_grad()
        (param * (factor + rank)).sum().backward()
        return param.grad

    def norm(factor: float) -> float:
        return float((factor + mean) * 70**0.5)

    kept = backward(1.0)
    assert backward(2.0) is not kept
    assert kept.unreduced()[0] == 1 + rank
    number = id(param.grad)
    for factor in (3.0, 4.0):
        backward(factor)
        assert id(param.grad) == number
        assert param.grad is not None
        assert abs(float(param.grad.norm()) - norm(factor)) < 1e-12
        assert abs(float(optimizers[0].clip_grad_norm_(1e9)) - norm(factor)) < 1e-12
        optimizers[0].step()
    # Reduced, and then a further backward.
    backward(5.0)
    optimizers[0].reduce_gradients()
    (param * (1.0 + rank)).sum().backward()
    assert abs(float(optimizers[0].clip_grad_norm_(1e9)) - norm(5.0) - norm(1.0)) < 1e-12
    # Nobody makes one for an optimizer that is gone.
    del kept
    optimizers.clear()
    gc.collect()
    param.grad = None
    param.sum().backward()
    assert type(param.grad) is torch.Tensor
    dist.barrier()


def edited_state(context: Context, mode: str) -> None:
    """State, groups and gradients that somebody edits between steps."""
    modules = [net(), net()]
    ddps = [module if mode == "manual" else DistributedDataParallel(module) for module in modules]
    optimizers: list[Any] = []
    for kind, module, ddp in zip((fusedpg.optim, torch.optim), modules, ddps, strict=True):
        ours = kind is fusedpg.optim
        options = {"ddp": ddp, "overlap": mode == "overlap"} if ours and mode != "manual" else {}
        groups = [{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(module.parameters())]
        optimizers.append(kind.AdamW(groups, amsgrad=True, **options))  # type: ignore[attr-defined]
    for step in range(7):
        for module, ddp, optimizer in zip(modules, ddps, optimizers, strict=True):
            params = list(module.parameters())
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            ddp(x).pow(2).sum().backward()
            optimizer.step()
            state = optimizer.state[params[1]]
            if step == 1:
                state["exp_avg"] = state["exp_avg"] * 2  # another tensor
            if step == 2:
                optimizer.state[params[2]] = {k: v.clone() for k, v in state.items()} | dict(
                    optimizer.state[params[2]]
                )
                optimizer.param_groups[0]["lr"] = 0.05
            if step == 3:
                del optimizer.state[params[3]]  # begins anew
            if step == 4:
                optimizer.state.clear()
            if step == 5:
                optimizer.param_groups[0], optimizer.param_groups[1] = (
                    optimizer.param_groups[1],
                    optimizer.param_groups[0],
                )
        for a, b in zip(*(module.parameters() for module in modules), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
