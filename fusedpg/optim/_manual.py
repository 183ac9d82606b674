"""Manual mode: no DDP. ``p.grad`` is this rank's until somebody asks for it, or for a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.optim import _reduced, _torch
from fusedpg.optim._bridge import Gradient
from fusedpg.optim._ending import end_all
from fusedpg.optim._gradients import ShardedGrad
from fusedpg.optim._join import Doing, announce
from fusedpg.optim._modes import Mode
from fusedpg.optim._parameters import laid_out, watch_gradient

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer


class Manual(Mode):
    manual = True

    def __init__(self) -> None:
        self._watches: list[Any] = []  # hooks of parameters

    # --- parameters and their gradients -------------------------------------------------

    def add(self, optimizer: FusedOptimizer, params: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for param in params:
                dist.broadcast(param.data, group=optimizer._group, group_src=0)

    def watch(self, optimizer: FusedOptimizer, params: list[torch.Tensor]) -> None:
        """Has ``p.grad`` know that it is one rank's part of a gradient."""
        for param in params:
            context = optimizer._context
            hook = watch_gradient(param, optimizer, _accumulated, context, ShardedGrad)
            self._watches.append(hook)

    def leave(self, optimizer: FusedOptimizer) -> None:
        for handle in self._watches:
            handle.remove()
        self._watches.clear()

    # --- the step -----------------------------------------------------------------------

    def step(self, optimizer: FusedOptimizer, scale: Any, found_inf: Any) -> None:
        optimizer._check_shared()
        if found_inf is not None:
            if not isinstance(found_inf, torch.Tensor):
                raise RuntimeError(
                    f"rank {optimizer._rank} has no gradient that GradScaler could look at, where "
                    "others may have some: call optimizer.reduce_gradients() before scaler.step()"
                )
            found_inf = _found_anywhere(optimizer, found_inf)
        if optimizer._max_grad_norm is None and _all_local(optimizer):
            _step_on_local(optimizer, scale, found_inf)
            return
        reduce_gradients(optimizer)
        optimizer._wait()
        params, slices = _reduced.all_slices(optimizer)
        _reduced.step(optimizer, params, slices, scale, found_inf)

    def prepare_clipping(self, optimizer: FusedOptimizer) -> None:
        reduce_gradients(optimizer)

    def reduce_asked(self, optimizer: FusedOptimizer) -> None:
        optimizer._check_ready()
        missing = reduce_gradients(optimizer)
        if missing:
            # There the caller has a list of gradients without it.
            number, rank = next(iter(missing.items()))
            name = list(optimizer._named_parameters())[number][0]
            raise RuntimeError(
                f"rank {rank} has no gradient of parameter {name}, and other ranks have: call "
                "optimizer.reduce_gradients() before clipping or unscaling, on all ranks"
            )


class Detached(Mode):
    """An optimizer that was taken off its DDP: it has state and takes no gradients."""

    def check(self) -> None:
        raise RuntimeError("the optimizer was detached: attach(ddp) it again, or make a new one")


def _found_anywhere(optimizer: FusedOptimizer, found_inf: torch.Tensor) -> torch.Tensor:
    """Whether GradScaler has found infinities on any rank. It has looked at this rank's gradients
    alone where they were put in by hand; then the scalers of all ranks have to back off, too."""
    found = found_inf.detach().reshape(())
    most = torch.stack([found, -found])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=optimizer._group)
    flags = _torch.flags_of_scaler()
    for flag in flags:
        flag.copy_(torch.maximum(flag, most[0].to(flag.device)))
    if not flags and not optimizer._shadow and bool(most[0] != -most[1]):
        raise RuntimeError(
            "optimizer.found_inf is set on some ranks and not on others: their gradients were put "
            "in by hand, and looked at before they were reduced. Call "
            "optimizer.reduce_gradients() first, or set it on all ranks"
        )
    return most[0]


def _accumulated(optimizer: FusedOptimizer, param: torch.Tensor) -> None:
    """Autograd's news of a gradient."""
    grad = param.grad
    if not optimizer._mode.manual or type(grad) is not torch.Tensor:
        return
    if grad.layout == torch.strided:
        context = optimizer._context
        param.grad = ShardedGrad(param, context, unreduced=laid_out(grad, param))
        context.changed()


def reduce_gradients(optimizer: FusedOptimizer) -> dict[int, int]:
    """Reduces what has not been reduced, or has changed since.

    Returns:
        Numbers of parameters of which only some ranks had a gradient, and a rank without; the same
        on all ranks.
    """
    announce(optimizer, Doing.REDUCE)
    extension = load_extension()
    usual = _unreduced(optimizer)
    params = optimizer._all_parameters()
    without = [] if usual else extension.without_gradient(params)
    # Whether there is anything to reduce; by parameter, whether a rank has its gradient, and the
    # last rank that has none, counted from 1.
    facts = torch.zeros(1 + 2 * len(params), dtype=torch.int32)
    some, has, lacks = facts[:1], facts[1 : 1 + len(params)], facts[1 + len(params) :]
    some.fill_(usual is not None or _any_unreduced(optimizer))
    has.fill_(1)
    if without:
        has[without] = 0
        if not optimizer._shadow:  # a joined rank does without
            lacks[without] = optimizer._rank + 1
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=optimizer._group)
    anywhere = has.tolist()
    frozen = {p for p, one in zip(params, anywhere, strict=True) if one and not p.requires_grad}
    missing = {i: rank - 1 for i, rank in enumerate(lacks.tolist()) if rank and anywhere[i]}
    if not some:
        return missing
    if usual is not None and len(extension.dtypes_of(usual[0])) == 1 and not usual[0][0].is_cuda:
        optimizer._stepped = False
        _start_all(optimizer, *usual)
    else:
        gradients, used = _local_gradients(optimizer, frozen)
        optimizer._stepped = False
        for dtype in dict.fromkeys(gradient.param.dtype for gradient in gradients):
            members = [i for i, g in enumerate(gradients) if g.param.dtype == dtype]
            flags = _flags(optimizer, [used[i] for i in members])
            mine = [gradients[i] for i in members]
            _reduced.start(optimizer, mine, flags, optimizer._shadow)
            # Where a rank refuses the first of them it does not begin the others.
            optimizer._wait()
    optimizer._wait()
    return missing


def _start_all(
    optimizer: FusedOptimizer, params: list[torch.Tensor], grads: list[torch.Tensor]
) -> None:
    """As ``_reduced.start``, in the usual case, and without Python for every parameter."""
    extension = load_extension()
    optimizer._check_layouts(params)
    work = optimizer._backend.reduce_shards_(
        grads,
        grads,
        used=_flags(optimizer, [True] * len(params)),
        async_op=True,
        **optimizer._reduction(optimizer._shadow),
    )
    placeholders = extension.gradients_of(params, ShardedGrad)
    assert placeholders is not None
    slices = optimizer._owned_slices(grads)
    extension.set_gradients(params, None)

    def finish() -> None:
        work.wait()
        extension.set_reduced(placeholders, slices)
        extension.set_gradients(params, placeholders)

    optimizer._in_flight.append(finish)


def _any_unreduced(optimizer: FusedOptimizer) -> bool:
    """Whether this rank has anything to reduce."""
    extension, params = load_extension(), optimizer._all_parameters()
    grads = extension.gradients_of(params, ShardedGrad)
    if grads is not None and extension.reduced_slices(grads, ShardedGrad) is not None:
        return False
    return any(
        param.grad.unreduced() is not None
        if isinstance(param.grad, ShardedGrad)
        else param.grad is not None
        for param in params
    )


def _all_local(optimizer: FusedOptimizer) -> bool:
    """Whether nothing that was reduced stands in ``p.grad``."""
    return _unreduced(optimizer) is not None or not any(
        isinstance(param.grad, ShardedGrad) and param.grad.holds_reduced()
        for param in optimizer._all_parameters()
    )


def _unreduced(
    optimizer: FusedOptimizer,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """All parameters and their gradients, if each has one, of this rank alone."""
    params = optimizer._all_parameters()
    grads = load_extension().unreduced_gradients(params, ShardedGrad)
    return (params, grads) if grads else None


def _step_on_local(optimizer: FusedOptimizer, scale: Any, found_inf: Any) -> None:
    """Everything is one operation."""
    params, grads = _unreduced(optimizer) or ([], [])
    used = [True] * len(params)
    if not params:
        gradients, used = _local_gradients(optimizer, _frozen_with_gradient(optimizer))
        params = [gradient.param for gradient in gradients]
        grads = [gradient.local for gradient in gradients]
    if params:
        works = optimizer._fused_step(
            params,
            grads,
            used=_flags(optimizer, used),
            grad_scale=_reduced.scalar(scale),
            found_inf=_reduced.scalar(found_inf),
            **optimizer._reduction(optimizer._shadow),
        )
        end_all(work.wait for work in works)


def _local_gradients(
    optimizer: FusedOptimizer, frozen: set[torch.Tensor]
) -> tuple[list[Gradient], list[bool]]:
    """This rank's gradients, and which of them it has. Of frozen parameters some rank's count."""
    gradients, used = [], []
    for param in optimizer._all_parameters():
        grad: Any = param.grad
        if not param.requires_grad and param not in frozen:
            continue
        earlier = grad if isinstance(grad, ShardedGrad) else None
        if earlier is not None:
            grad = earlier.unreduced()
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError("fused optimizers do not take sparse gradients")
        used.append(grad is not None)
        # A peer may have a gradient where this rank has none.
        grad = torch.zeros_like(param) if grad is None else laid_out(grad, param)
        gradients.append(Gradient(param, grad, grad, earlier))
    return gradients, used


def _frozen_with_gradient(optimizer: FusedOptimizer) -> set[torch.Tensor]:
    """Who freezes a parameter does it on all ranks; a gradient that one has still counts."""
    frozen = [p for p in optimizer._all_parameters() if not p.requires_grad]
    mine = [param.grad is not None for param in frozen]
    if frozen and not _is_captured(optimizer._device()):
        anywhere = torch.tensor(mine, dtype=torch.uint8, device=optimizer._device())
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=optimizer._group)
        mine = anywhere.tolist()
    return {param for param, has in zip(frozen, mine, strict=True) if has}


def _flags(optimizer: FusedOptimizer, used: list[bool]) -> torch.Tensor | None:
    """Whether this rank used parameters, as operations take it."""
    device = optimizer._device()
    if _is_captured(device):
        # A graph does the same at every launch, so all ranks must have all gradients.
        if not all(used):
            raise RuntimeError("a parameter has no gradient: a CUDA graph needs all of them")
        return None
    return torch.tensor(used, dtype=torch.uint8, device=device)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
