"""Reducing gradients to this rank's slices, and the step on those: manual and sharded mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusedpg._registration import load_extension
from fusedpg.optim._bridge import Gradient
from fusedpg.optim._ddp import unsynchronised
from fusedpg.optim._ending import end_all
from fusedpg.optim._gradients import ShardedGrad

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer


def start(
    optimizer: FusedOptimizer,
    gradients: list[Gradient],
    used: torch.Tensor | None,
    shadow: bool,
) -> None:
    """Starts the reduction of some gradients, whatever they are."""
    optimizer._check_layouts([gradient.param for gradient in gradients])
    work: Any = optimizer._backend.reduce_shards_(
        [gradient.local for gradient in gradients],
        [gradient.output for gradient in gradients],
        used=used,
        async_op=True,
        **optimizer._reduction(shadow),
    )
    follow(optimizer, gradients, used, work)


def follow(
    optimizer: FusedOptimizer, gradients: list[Gradient], used: torch.Tensor | None, work: Any
) -> None:
    """Has a reduction end in ``p.grad``: when it is done, ``output`` has it, of this rank's slice
    at least, and ``used`` whether any rank has used a parameter."""
    # DDP must find None to leave p.grad alone. What an earlier backward has reduced stays.
    reduced = []
    for param, _, output, earlier, _ in gradients:
        reduced.append((param, optimizer._owned(output, param), earlier))
        param.grad = None
    del gradients  # the work holds them until it is done

    def finish() -> None:
        work.wait()
        flags = [True] * len(reduced) if used is None else used.tolist()
        for (param, local, before), flag in zip(reduced, flags, strict=True):
            if before is not None:
                before.add_reduced(local if flag else None)
                param.grad = before if flag or before.is_reduced() else None
            elif flag:
                param.grad = ShardedGrad(param, optimizer._context, reduced=local)
            else:
                param.grad = None

    optimizer._in_flight.append(finish)


def all_slices(optimizer: FusedOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters with a gradient, and its slices."""
    extension = load_extension()
    everything = optimizer._all_parameters()
    quickly = extension.gradients_of(everything, ShardedGrad)
    if quickly is not None and extension.have_gradients(everything, quickly):
        found = extension.reduced_slices(quickly, ShardedGrad)
        if found is not None:
            return everything, found[0]
    params, slices = [], []
    for name, param in optimizer._named_parameters():
        grad = param.grad
        if grad is None:
            continue
        if not isinstance(grad, ShardedGrad) or not grad.is_reduced():
            optimizer._check_known(param)
            raise RuntimeError(unsynchronised(name))
        optimizer._check_same_layout(name, param, grad)
        params.append(param)
        slices.append(grad.local())
    return params, slices


def step(
    optimizer: FusedOptimizer,
    params: list[torch.Tensor],
    slices: list[torch.Tensor],
    scale: Any,
    found_inf: Any,
) -> None:
    """Update and all-gather."""
    if not params:
        return
    # Tensors, so that a GPU need not be waited for.
    factor: Any = None if scale is None else scale.detach().double().reshape(())
    if optimizer._max_grad_norm is not None:
        norm = optimizer._context.total_norm(2.0)
        norm = norm if factor is None else norm / factor
        clip = ((norm + 1e-6) / optimizer._max_grad_norm).clamp(min=1.0)
        factor = clip if factor is None else factor * clip
    double = [factor is not None and param.dtype == torch.float64 for param in params]
    for wide in sorted(set(double)):
        mine = [i for i, one in enumerate(double) if one == wide]
        works = optimizer._fused_step(
            [params[i] for i in mine],
            # The operation's scale is float32, which is too coarse for float64.
            [slices[i] / factor if wide else slices[i] for i in mine],
            reduced=True,
            grad_scale=None if wide else scalar(factor),
            found_inf=scalar(found_inf),
        )
        end_all(work.wait for work in works)


def scalar(value: Any) -> torch.Tensor | None:
    return None if value is None else value.detach().float().reshape(())
