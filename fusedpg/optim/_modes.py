"""Mode-specific behaviour of the fused optimizers.

Manual mode: nobody has told the optimizer of a DistributedDataParallel; ``p.grad`` is this rank's
until somebody asks for it, or for a step. Sharded (``overlap=False``): DDP's buckets are
reduce-scattered in backward and ``step()`` updates. Overlap: backward updates, and ``step()`` finds
what cannot have worked. The mode is chosen where the optimizer is made, by ``attach()`` and by
``detach()``. It knows its optimizer by a ``StepContext``, which does not keep it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusedpg import _agreement
from fusedpg.optim import _torch
from fusedpg.optim._bridge import (
    Bridge,
    Bucket,
    BucketOwner,
    CommHook,
    Exchange,
    Flags,
    Gradient,
    unsynchronised,
)
from fusedpg.optim._context import StepContext
from fusedpg.optim._gradients import Doing, ShardedGrad, SpentGrad, end_all
from fusedpg.optim._parameters import add_hook, laid_out


class Mode:
    """The base of modes, which objects to nothing and has nothing to do."""

    manual = False  # nobody has told the optimizer of a DDP, so it watches gradients itself
    tells = True  # under Join what it does with gradients, as ranks that have joined do it, too

    def __init__(self, context: StepContext) -> None:
        self.context = context

    def add(self, params: list[torch.Tensor]) -> None:
        """Parameters that a group has brought, before they are moved."""

    def watch(self, params: list[torch.Tensor]) -> None:
        """And when they have been."""

    def check(self) -> None:
        """Raises unless gradients can be reduced and steps made."""

    def check_scaling(self) -> None:
        """Raises unless GradScaler works."""

    def prepare_clipping(self) -> None:
        """Has all gradients reduced, or raises."""

    def reduce_asked(self) -> None:
        """Somebody wants to know something of a gradient that is not reduced."""
        self.check()

    def not_reduced(self, name: str) -> str:
        """Says what is wrong with a plain gradient among others that are ours."""
        return (
            f"the gradient of parameter {name} was put in by hand and is not reduced over "
            "ranks, but others are: call optimizer.reduce_gradients() before clipping"
        )

    def operations_ahead(self) -> int:
        """How many operations a rank begins before it waits for one, where this one has raised in
        ``step()`` or in another call of the optimizer's."""
        return 1

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """All of ``step()`` but its closure and its checks."""

    def end_before_loading(self) -> None:
        """State is going to be replaced: ends what backward has begun of a step, or raises."""

    def check_detaching(self) -> None:
        """Raises if backward has begun a step."""

    def leave(self) -> None:
        """Another mode is going to begin: takes off all hooks."""


class Attached(Mode, BucketOwner):
    """With a DDP, whether backward updates or not."""

    bridge: Bridge

    def attach(self, ddp: DistributedDataParallel, comm_hook: CommHook | None) -> None:
        """Takes the gradients of a DDP from now on."""
        self.bridge = self.context.bridge = Bridge.of(ddp, self, comm_hook)

    def add(self, params: list[torch.Tensor]) -> None:
        self.bridge.add(self, params)

    def leave(self) -> None:
        self.bridge.remove(self)
        self.context.bridge = None

    def reduce_asked(self) -> None:
        raise RuntimeError(unsynchronised("asked for"))

    def not_reduced(self, name: str) -> str:
        return unsynchronised(name)


# -------------------------------------------------------------------------------------------------
# Manual


class Manual(Mode):
    manual = True

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._watches: list[RemovableHandle] = []  # of parameters

    # --- parameters and their gradients -------------------------------------------------

    def add(self, params: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for param in params:
                dist.broadcast(param.data, group=self.context.group, group_src=0)

    def watch(self, params: list[torch.Tensor]) -> None:
        """Has ``p.grad`` know that it is one rank's part of a gradient.

        The extension adds a gradient to the ``ShardedGrad`` that stood there before, if nobody has
        kept that one, and otherwise asks Python. Frozen parameters may be unfrozen later.
        """
        this, gradients = weakref.ref(self.context), self.context.gradients

        @_torch.uncompiled
        def accumulated(param: torch.Tensor) -> None:
            context, grad = this(), param.grad
            if context is None or not context.mode.manual or type(grad) is not torch.Tensor:
                return
            if grad.layout == torch.strided:
                param.grad = ShardedGrad(param, gradients, unreduced=laid_out(grad, param))
                gradients.changed()

        for param in params:
            watch = self.context.extension.LocalWatch(
                ShardedGrad, this, accumulated, gradients.norms_known, gradients.changed
            )
            self._watches.append(add_hook(param, watch))

    def leave(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._watches.clear()

    # --- the step -----------------------------------------------------------------------

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        if found_inf is not None:
            if not isinstance(found_inf, torch.Tensor):
                raise RuntimeError(
                    f"rank {self.context.rank} has no gradient that GradScaler could look at, "
                    "where others may have some: call optimizer.reduce_gradients() before "
                    "scaler.step()"
                )
            found_inf = _found_anywhere(self.context, found_inf)
        if self.context.max_grad_norm is None:
            usual = _unreduced(self.context)
            if usual is not None or _all_local(self.context):
                _step_on_local(self.context, usual, scale, found_inf)
                return
        reduce_gradients(self.context)
        self.context.wait()
        params, slices = all_slices(self.context)
        step_on_slices(self.context, params, slices, scale, found_inf)

    def prepare_clipping(self) -> None:
        reduce_gradients(self.context)

    def reduce_asked(self) -> None:
        self.context.optimizer()._check_ready()
        missing = reduce_gradients(self.context)
        if missing:
            # There the caller has a list of gradients without it.
            number, rank = next(iter(missing.items()))
            name = list(self.context.named_parameters())[number][0]
            raise RuntimeError(
                f"rank {rank} has no gradient of parameter {name}, and other ranks have: call "
                "optimizer.reduce_gradients() before clipping or unscaling, on all ranks"
            )


class Detached(Mode):
    """An optimizer that was taken off its DDP: it has state and takes no gradients."""

    def check(self) -> None:
        raise RuntimeError("the optimizer was detached: attach(ddp) it again, or make a new one")


def _found_anywhere(context: StepContext, found_inf: torch.Tensor) -> torch.Tensor:
    """Whether GradScaler has found infinities on any rank. It has looked at this rank's gradients
    alone where they were put in by hand; then the scalers of all ranks have to back off, too."""
    least, most = _agreement.extremes(found_inf.detach().reshape(()), context.group)
    flags = _torch.flags_of_scaler()
    for flag in flags:
        flag.copy_(torch.maximum(flag, most.to(flag.device)))
    if not flags and not context.shadow and bool(least != most):
        raise RuntimeError(
            "optimizer.found_inf is set on some ranks and not on others: their gradients were put "
            "in by hand, and looked at before they were reduced. Call "
            "optimizer.reduce_gradients() first, or set it on all ranks"
        )
    return most


def reduce_gradients(context: StepContext) -> dict[int, int]:
    """Reduces what has not been reduced, or has changed since.

    Returns:
        Numbers of parameters of which only some ranks had a gradient, and a rank without; the same
        on all ranks.
    """
    context.announce(Doing.REDUCE)
    extension = context.extension
    usual = _unreduced(context)
    params = context.parameters()
    without = [] if usual else extension.without_gradient(params)
    # Whether there is anything to reduce; by parameter, whether a rank has its gradient, and the
    # last rank that has none, counted from 1.
    facts = torch.zeros(1 + 2 * len(params), dtype=torch.int32)
    some, has, lacks = facts[:1], facts[1 : 1 + len(params)], facts[1 + len(params) :]
    some.fill_(usual is not None or _any_unreduced(context))
    has.fill_(1)
    if without:
        has[without] = 0
        if not context.shadow:  # a joined rank does without
            lacks[without] = context.rank + 1
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=context.group)
    anywhere = has.tolist()
    frozen = {p for p, one in zip(params, anywhere, strict=True) if one and not p.requires_grad}
    missing = {i: rank - 1 for i, rank in enumerate(lacks.tolist()) if rank and anywhere[i]}
    if not some:
        return missing
    if usual is not None and len(extension.dtypes_of(usual[0])) == 1 and not usual[0][0].is_cuda:
        context.stepped = False
        _start_all(context, *usual)
    else:
        gradients, used = _local_gradients(context, frozen)
        context.stepped = False
        for dtype in dict.fromkeys(gradient.param.dtype for gradient in gradients):
            members = [i for i, g in enumerate(gradients) if g.param.dtype == dtype]
            flags = _flags(context, [used[i] for i in members])
            mine = [gradients[i] for i in members]
            start_reduction(context, mine, flags, context.shadow)
            # A rank that refuses the first of them does not begin the others.
            context.wait()
    context.wait()
    return missing


def _start_all(context: StepContext, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """As ``start_reduction``, in the usual case, and without Python for every parameter."""
    extension = context.extension
    context.check_layouts(params)
    work = context.backend.reduce_shards_(
        grads,
        grads,
        used=_flags(context, [True] * len(params)),
        async_op=True,
        **context.reduction(context.shadow),
    )
    placeholders = extension.gradients_of(params, ShardedGrad)
    assert placeholders is not None
    slices = context.owned_slices(grads)
    extension.set_gradients(params, None)

    def finish() -> None:
        work.wait()
        extension.set_reduced(placeholders, slices)
        extension.set_gradients(params, placeholders)

    context.in_flight.append(finish)


def _any_unreduced(context: StepContext) -> bool:
    """Whether this rank has anything to reduce."""
    extension, params = context.extension, context.parameters()
    grads = extension.gradients_of(params, ShardedGrad)
    if grads is not None and extension.reduced_slices(grads, ShardedGrad) is not None:
        return False
    return any(
        param.grad.unreduced() is not None
        if isinstance(param.grad, ShardedGrad)
        else param.grad is not None
        for param in params
    )


def _all_local(context: StepContext) -> bool:
    """Whether nothing that was reduced stands in ``p.grad``."""
    return not any(
        isinstance(param.grad, ShardedGrad) and param.grad.holds_reduced()
        for param in context.parameters()
    )


def _unreduced(
    context: StepContext,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """All parameters and their gradients, if each has one, of this rank alone."""
    params = context.parameters()
    grads = context.extension.unreduced_gradients(params, ShardedGrad)
    return (params, grads) if grads else None


def _step_on_local(
    context: StepContext,
    usual: tuple[list[torch.Tensor], list[torch.Tensor]] | None,
    scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Everything is one operation. ``usual``: see `_unreduced`."""
    params, grads = usual or ([], [])
    used = [True] * len(params)
    if usual is None:
        gradients, used = _local_gradients(context, _frozen_with_gradient(context))
        params = [gradient.param for gradient in gradients]
        grads = [gradient.local for gradient in gradients]
    if params:
        works = context.fused_step(
            params,
            grads,
            used=_flags(context, used),
            grad_scale=None if scale is None else _scalar(scale),
            found_inf=None if found_inf is None else _scalar(found_inf),
            **context.reduction(context.shadow),
        )
        end_all(works)


def _local_gradients(
    context: StepContext, frozen: set[torch.Tensor]
) -> tuple[list[Gradient], list[bool]]:
    """This rank's gradients, and which of them it has. Of frozen parameters some rank's count."""
    gradients, used = [], []
    for param in context.parameters():
        grad = param.grad
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


def _frozen_with_gradient(context: StepContext) -> set[torch.Tensor]:
    """Frozen parameters, on all ranks, of which some rank still has a gradient, which counts."""
    frozen = [p for p in context.parameters() if not p.requires_grad]
    mine = [param.grad is not None for param in frozen]
    if frozen and not _is_captured(context.device()):
        anywhere = torch.tensor(mine, dtype=torch.uint8, device=context.device())
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=context.group)
        mine = anywhere.tolist()
    return {param for param, has in zip(frozen, mine, strict=True) if has}


def _flags(context: StepContext, used: list[bool]) -> torch.Tensor | None:
    """Whether this rank used parameters, as operations take it."""
    device = context.device()
    if _is_captured(device):
        # A graph does the same at every launch, so all ranks must have all gradients.
        if not all(used):
            raise RuntimeError("a parameter has no gradient: a CUDA graph needs all of them")
        return None
    return torch.tensor(used, dtype=torch.uint8, device=device)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# -------------------------------------------------------------------------------------------------
# Gradients that are reduced to slices: manual and sharded mode


def start_reduction(
    context: StepContext, gradients: list[Gradient], used: Flags, shadow: bool
) -> None:
    """Starts the reduction of some gradients, whatever they are."""
    context.check_layouts([gradient.param for gradient in gradients])
    work = context.backend.reduce_shards_(
        [gradient.local for gradient in gradients],
        [gradient.output for gradient in gradients],
        used=used,
        async_op=True,
        **context.reduction(shadow),
    )
    follow_reduction(context, gradients, used, [] if work is None else [work])


def follow_reduction(
    context: StepContext,
    gradients: list[Gradient],
    used: Flags,
    works: Sequence[dist.Work | Exchange],
) -> None:
    """Has a reduction end in ``p.grad``: when its works are done, ``output`` has at least this
    rank's slice of it, and ``used`` says whether any rank has used a parameter."""
    # DDP must find None to leave p.grad alone. What an earlier backward has reduced stays.
    reduced = []
    for param, _, output, earlier, _ in gradients:
        reduced.append((param, context.owned(output, param), earlier))
        param.grad = None
    del gradients  # the work holds them until it is done

    def finish() -> None:
        for work in works:
            work.wait()
        flags = [True] * len(reduced) if used is None else used.tolist()
        for (param, local, before), flag in zip(reduced, flags, strict=True):
            if before is not None:
                before.add_reduced(local if flag else None)
                param.grad = before if flag or before.is_reduced() else None
            elif flag:
                param.grad = ShardedGrad(param, context.gradients, reduced=local)
            else:
                param.grad = None

    context.in_flight.append(finish)


def all_slices(context: StepContext) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters with a gradient, and its slices."""
    extension = context.extension
    everything = context.parameters()
    quickly = extension.gradients_of(everything, ShardedGrad)
    if quickly is not None and extension.have_gradients(everything, quickly):
        found = extension.reduced_slices(quickly, ShardedGrad)
        if found is not None:
            return everything, found[0]
    params, slices = [], []
    for name, param in context.named_parameters():
        grad = param.grad
        if grad is None:
            continue
        if not isinstance(grad, ShardedGrad) or not grad.is_reduced():
            context.check_known(param)
            raise RuntimeError(unsynchronised(name))
        context.check_same_layout(name, param, grad)
        params.append(param)
        slices.append(grad.local())
    return params, slices


def step_on_slices(
    context: StepContext,
    params: list[torch.Tensor],
    slices: list[torch.Tensor],
    scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Update and all-gather."""
    if not params:
        return
    # Tensors, so that a GPU need not be waited for.
    factor = None if scale is None else scale.detach().double().reshape(())
    if context.max_grad_norm is not None:
        norm = context.gradients.total_norm(2.0)
        norm = norm if factor is None else norm / factor
        clip = ((norm + 1e-6) / context.max_grad_norm).clamp(min=1.0)
        factor = clip if factor is None else factor * clip
    double = [factor is not None and param.dtype == torch.float64 for param in params]
    for wide in sorted(set(double)):
        mine = [i for i, one in enumerate(double) if one == wide]
        works = context.fused_step(
            [params[i] for i in mine],
            # The operation's scale is float32, which is too coarse for float64.
            [slices[i] / factor if wide and factor is not None else slices[i] for i in mine],
            reduced=True,
            grad_scale=None if wide or factor is None else _scalar(factor),
            found_inf=None if found_inf is None else _scalar(found_inf),
        )
        end_all(works)


def _scalar(value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().reshape(())


class Sharded(Attached):
    # --- in backward: the bridge's calls ------------------------------------------------

    def bucket_ready(self, bucket: Bucket, grads: list[torch.Tensor], used: Flags) -> None:
        context = self.context
        context.stepped = False
        extension = context.extension
        if bucket.slices is None:
            context.check_layouts(bucket.params)
            bucket.slices = context.owned_slices(bucket.views)
        slices = bucket.slices
        work = context.backend.reduce_shards_(
            grads, bucket.views, used=used, async_op=True, **context.reduction(shadow=False)
        )
        extension.set_gradients(bucket.params, None)

        def finish() -> None:
            work.wait()
            if used is None or bool(used.all()):
                extension.set_gradients(bucket.params, _placeholders(context, bucket, slices))
                return
            flags = used.tolist()
            for param, local, flag in zip(bucket.params, slices, flags, strict=True):
                grad = ShardedGrad(param, context.gradients, reduced=local) if flag else None
                param.grad = grad

        context.in_flight.append(finish)

    def gradients_ready(self, gradients: list[Gradient], used: Flags, shadow: bool) -> None:
        self.context.stepped = False
        start_reduction(self.context, gradients, used, shadow)

    def combined(
        self, gradients: list[Gradient], used: Flags, works: Sequence[dist.Work | Exchange]
    ) -> None:
        self.context.stepped = False
        self.context.check_layouts([gradient.param for gradient in gradients])
        follow_reduction(self.context, gradients, used, works)

    def backward_done(self) -> None:
        self.context.end_operations()

    # --- after it -----------------------------------------------------------------------

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        self.context.wait()
        self.bridge.check_finished(self.context.named_parameters)
        params, slices = all_slices(self.context)
        step_on_slices(self.context, params, slices, scale, found_inf)


def _placeholders(
    context: StepContext, bucket: Bucket, slices: list[torch.Tensor]
) -> list[ShardedGrad]:
    """The objects in ``p.grad`` when a bucket is reduced: those of the pass before, unless
    somebody has kept or changed one. Otherwise there would be Python for every parameter."""
    extension, known = context.extension, bucket.grads
    found = extension.reduced_slices(known, ShardedGrad) if extension.only_here(known) else None
    if found is None or not extension.same_objects(found[0], slices):
        grads, pairs = context.gradients, zip(bucket.params, slices, strict=True)
        bucket.grads = [ShardedGrad(param, grads, reduced=local) for param, local in pairs]
    return bucket.grads


# -------------------------------------------------------------------------------------------------
# Overlap


class Overlap(Attached):
    tells = False  # all is done in backward

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.updated: set[torch.Tensor] = set()  # in backward, since the last step
        self.applied: dict[int, dict[str, object]] = {}  # hyperparameters of that, by group
        self._idle: set[torch.Tensor] = set()  # of the updated, those that this rank did not use
        self._half_updated = False  # the backward that does it has not ended
        self._spent: dict[torch.Tensor, SpentGrad] = {}
        self._recompute = RecomputeGuard(self.updated)

    # --- the bridge's calls -------------------------------------------------------------

    def armed(self) -> None:
        # A backward that has raised left this half done. Inside of a backward (checkpointing of
        # the module itself) it is that backward's own.
        if self._half_updated and not _torch.in_backward():
            self._end_update()

    def bucket_ready(self, bucket: Bucket, grads: list[torch.Tensor], used: Flags) -> None:
        self._update(bucket.params, grads, used, shadow=False)

    def gradients_ready(self, gradients: list[Gradient], used: Flags, shadow: bool) -> None:
        params = [gradient.param for gradient in gradients]
        self._update(params, [gradient.local for gradient in gradients], used, shadow)
        if used is not None:
            self._idle.update(gradient.param for gradient in gradients if not gradient.used)

    def _update(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], used: Flags, shadow: bool
    ) -> None:
        """Starts the step of some parameters."""
        self.context.stepped = False
        self.context.check_shared(params)
        if self.updated and not self.updated.isdisjoint(params):
            SpentGrad.refuse_accumulation()
        self.updated.update(params)
        self._half_updated = True
        self._recompute.start()
        group_of = self.context.number_groups()
        alone = len(self.context.optimizer().param_groups) == 1
        numbers = {0} if alone else {group_of[param] for param in params}
        for number in numbers - self.applied.keys():
            self.applied[number] = _hyperparameters(self.context, number)
        works = self.context.fused_step(params, grads, used=used, **self.context.reduction(shadow))
        self.context.in_flight += works
        self.context.extension.set_gradients(params, None)

    def nested_done(self) -> None:
        self.context.end_operations()

    def shadow_done(self) -> None:
        super().shadow_done()
        self._end_update()  # with ``ddp.join()`` alone nobody calls step()

    def backward_done(self) -> None:
        self.context.wait()
        self._half_updated = False
        self._recompute.stop()
        for param in self.context.extension.place_spent(list(self.updated), self._spent):
            param.grad = self._spent[param] = SpentGrad(param, self.context.gradients)

    # --- after it -----------------------------------------------------------------------

    def operations_ahead(self) -> int:
        # A step is local: the next are those of a backward.
        return self.bridge.buckets_left()

    def step(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        if scale is not None or found_inf is not None:
            raise RuntimeError("GradScaler needs overlap=False")
        updated, idle, applied = self._end_update()
        self.context.wait()
        self.bridge.check_finished(self.context.named_parameters)
        _check_unedited(self.context, updated, idle)
        everything = self.context.parameters()
        shadow = self.context.shadow
        quickly = not shadow and self.context.extension.all_spent(everything, updated, SpentGrad)
        for name, param in () if quickly else self.context.named_parameters():
            if param.grad is not None and not isinstance(param.grad, SpentGrad):
                self.context.check_known(param)
                raise RuntimeError(unsynchronised(name))
            if param.grad is not None and param not in updated and not shadow:
                raise RuntimeError(
                    f"overlap=True: the gradient of parameter {name} was applied by an earlier "
                    "backward and is gone, so step() cannot apply it again: call step() once and "
                    "zero_grad() after every synchronised backward, or use overlap=False"
                )
            if param in updated and param.grad is None and not shadow:
                raise RuntimeError(
                    f"overlap=True: the gradient of parameter {name} was dropped between backward, "
                    "which has updated it, and step(), or DDP still waits for others"
                )
        for number, used in applied.items():
            for key, value in _hyperparameters(self.context, number).items():
                if value != used[key]:
                    raise RuntimeError(
                        f"overlap=True: {key} of parameter group {number} was changed between "
                        f"backward and step() from {used[key]} to {value}, but backward has "
                        "updated the parameters already. Change it after step(), or use "
                        "overlap=False"
                    )
        # The others' stays what it is, so that a forgotten zero_grad() is seen.
        for param in idle:
            param.grad = None

    def _end_update(
        self,
    ) -> tuple[set[torch.Tensor], set[torch.Tensor], dict[int, dict[str, object]]]:
        """Returns what backward has done of the step; the next one begins anew in any case."""
        self._recompute.stop()
        done = set(self.updated), set(self._idle), self.applied
        self.updated.clear()
        self._idle.clear()
        self.applied = {}
        self._half_updated = False
        return done

    def prepare_clipping(self) -> None:
        raise RuntimeError("clipping needs overlap=False")

    def check_scaling(self) -> None:
        raise RuntimeError(
            "GradScaler needs overlap=False: see fusedpg's docs/guides/optimizers.md"
        )

    def end_before_loading(self) -> None:
        if self.updated and not self._half_updated:
            raise RuntimeError(
                "overlap=True: load_state_dict() between backward, which has updated parameters "
                "and state, and step(): call step() first. (After a step(), or a backward, that "
                "has raised, state can be loaded.)"
            )
        self._end_update()

    def check_detaching(self) -> None:
        if self.updated:
            raise RuntimeError(
                "detach() between backward, which has updated parameters (overlap=True), and "
                "step(): call step() first (also when backward has raised)"
            )

    def leave(self) -> None:
        super().leave()
        self._recompute.stop()


def _check_unedited(
    context: StepContext, updated: set[torch.Tensor], idle: set[torch.Tensor]
) -> None:
    """Backward has taken groups and state as they were."""
    group_of = context.number_groups()
    gone = updated - group_of.keys()
    optimizer = context.optimizer()
    slices = [optimizer._state_keys(group) for group in optimizer.param_groups]
    without = updated - idle - optimizer.state.keys() - gone
    cleared = [p for p in without if optimizer._missing(p, slices[group_of[p]])]
    if gone or cleared:
        shape = tuple(next(iter(gone or cleared)).shape)
        raise RuntimeError(
            f"overlap=True: a parameter of shape {shape} was taken out of param_groups, or its "
            "state was cleared, between backward and step(), but backward has updated it "
            "already. Do that after step(), or use overlap=False"
        )


def _hyperparameters(context: StepContext, number: int) -> dict[str, object]:
    """The hyperparameters of a group; for tensors, identity and version: comparing values
    would wait for a GPU."""
    optimizer = context.optimizer()
    return {
        key: f"tensor {id(value):#x} version {value._version}"
        if isinstance(value, torch.Tensor)
        else value
        for key, value in optimizer._hyper(optimizer.param_groups[number]).items()
    }


class RecomputeGuard:
    """Sees modules that run again in backward (checkpointing) after ``overlap=True`` has updated
    their parameters.

    Where a parameter's gradient passes through the module, it cannot be complete before that. So
    this is a use without gradient, such as ``weight.detach()``, which autograd's version counters
    do not see in a recomputation. Costs nothing outside backward.
    """

    def __init__(self, updated: set[torch.Tensor]) -> None:
        self._updated = updated
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        if self._handle is not None:
            return
        this = weakref.ref(self)  # after a backward that has raised nobody calls stop()

        def check(module: nn.Module, inputs: object) -> None:
            guard = this()
            if guard is not None:
                guard._check(module)

        self._handle = register_module_forward_pre_hook(check)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        self.stop()

    def _check(self, module: nn.Module) -> None:
        if not _torch.in_backward():
            return
        for name, param in module.named_parameters(recurse=False):
            if param in self._updated:
                raise RuntimeError(
                    f"overlap=True: {type(module).__name__} is recomputed (checkpointing) after "
                    f"its parameter {name} was updated: it is used there without a gradient, and "
                    "the recomputed values would be other ones; use overlap=False"
                )
