"""Between DistributedDataParallel and the optimizers that take its gradients.

No postponed annotations here: DDP inspects those of its hooks.

DDP's reducer is armed in forward (with gradients enabled and ``require_backward_grad_sync``) and
disarmed when it has finalised the last bucket, at the end of the graph task in which that one was
complete: with re-entrant checkpointing, a nested one. While it is armed the first gradient of each
parameter is what it reduces; whatever autograd accumulates otherwise, it leaves alone. The bridge
follows the same states.
"""

import collections
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from fusedpg._refusal import shared_errors, tell, telling
from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.optim import _torch
from fusedpg.optim._ending import end_all
from fusedpg.optim._gradients import ShardedGrad, SpentGrad
from fusedpg.optim._hooked import (
    Combined,
    CommHook,
    Exchange,
    abandon,
    any_rank,
    check_state,
    takes_gradients,
)
from fusedpg.optim._parameters import add_hook, laid_out

_log = logging.getLogger("fusedpg")

_ATTRIBUTE = "_fusedpg_bridge"
_GETSTATE = "__getstate__"


class Gradient(NamedTuple):
    """What a rank knows of the gradient of a parameter."""

    param: torch.Tensor
    local: torch.Tensor  # this rank's
    output: torch.Tensor  # memory laid out alike that may be overwritten
    earlier: ShardedGrad | None  # reduced by an earlier backward, to be added
    used: bool = True  # by this rank


class Bucket:
    """A bucket all of whose parameters have one optimizer, for passes in which each of them has a
    gradient that was taken: nothing is done parameter by parameter then."""

    def __init__(
        self,
        address: int,
        params: list[torch.Tensor],
        numbers: list[int],
        views: list[torch.Tensor],
        owner: Any,
    ) -> None:
        self.address = address
        self.params, self.numbers, self.views = params, numbers, views
        self.owner = weakref.ref(owner)
        self.slices: list[torch.Tensor] | None = None  # of the views, this rank's
        self.grads: list[ShardedGrad] = []  # what stood in p.grad after the pass before


class _Guard:
    """A callback of a graph task. Autograd calls none of them when the task raises, but drops them,
    before its caller sees the exception."""

    def __init__(self, bridge: "Bridge") -> None:
        self._bridge = weakref.ref(bridge)
        self._ended = False

    def __call__(self) -> None:
        bridge = self._bridge()
        if bridge is not None and not bridge._finalising:
            # A nested backward, of re-entrant checkpointing. If one of those around it raises
            # later, there is no guard.
            self._ended = True
            for optimizer in bridge._optimizers:
                optimizer._mode.nested_done(optimizer)

    @_torch.uncompiled
    def __del__(self) -> None:
        bridge = self._bridge()
        if bridge is not None and not self._ended:
            bridge._end_raised()


class Bridge:
    """The one communication hook of a DDP; serves any number of optimizers."""

    def __init__(self, ddp: DistributedDataParallel, comm_hook: CommHook | None = None) -> None:
        # DDP refers to the bridge.
        self._ddp = weakref.ref(ddp)
        self._owners: dict[torch.Tensor, Any] = {}
        # Its optimizers, and their parameters as they were when the bridge looked.
        self._optimizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._watches: dict[torch.Tensor, Any] = {}  # hooks of parameters
        self._forward_hooks: list[Any] = []
        # Sees every gradient: csrc/c10d/gradients.cpp (`accumulated`). It counts parameters.
        self._watch = load_extension().GradientWatch()
        self._params: list[torch.Tensor] = []
        self._number: dict[torch.Tensor, int] = {}
        self._buckets: dict[int, Bucket] = {}
        # DDP would copy every gradient into its bucket, which is most of what it costs. Where it
        # makes no difference we take gradients where autograd has left them. Where GPUs read
        # each other's buckets, that is where gradients have to be.
        # Where a hook of the user's combines gradients, it is given buckets, unless it takes
        # gradients as well.
        self._comm_hook = comm_hook
        if comm_hook is None:
            self._in_bucket = _backend(ddp.process_group).info()["cuda_arena"] != 0
        else:
            self._in_bucket = not takes_gradients(comm_hook) or ddp.device_type != "cpu"
        self._others: list[Callable[[], None]] = []  # what is left to do for DDP's parameters
        self._guarded = -1  # the graph task that has a guard
        self._begun = 0  # buckets of this backward
        self._told = False  # that it has raised
        self._finalising = False  # DDP will finalise the last bucket
        self._may_take = False
        self._as_view = bool(ddp.gradient_as_bucket_view)
        self._watch.as_view = self._as_view
        # Gradients of ours in whose place DDP has put memory of a bucket.
        self._replaced: dict[torch.Tensor, tuple[ShardedGrad | SpentGrad, torch.Tensor]] = {}

    @staticmethod
    def of(ddp: DistributedDataParallel, optimizer: Any, params: list[torch.Tensor]) -> "Bridge":
        """The bridge of a DDP, with an optimizer more. The first one registers its hook."""
        bridge: Bridge | None = getattr(ddp, _ATTRIBUTE, None)
        comm_hook = optimizer._comm_hook
        if bridge is not None:
            if not _same_hook(comm_hook, bridge._comm_hook):
                raise ValueError(
                    "another fused optimizer of this DistributedDataParallel has another "
                    "comm_hook: give all of them the same (state, hook)"
                )
            bridge.add(optimizer, params)
            return bridge
        _torch.check(ddp)
        check_state(comm_hook, ddp.process_group)
        bridge = Bridge(ddp, comm_hook)
        bridge._check(optimizer, params)
        try:
            ddp.register_comm_hook(bridge, _hook)
        except RuntimeError as error:
            raise RuntimeError(
                "this DistributedDataParallel already has a communication hook; a fused "
                "optimizer needs to register its own, and takes yours as comm_hook=(state, hook)"
            ) from error
        bridge._may_take = _torch.keep_gradients(ddp) and not bridge._in_bucket
        bridge._forward_hooks = [
            ddp.register_forward_pre_hook(bridge._before_forward),
            ddp.register_forward_hook(bridge._after_forward),
        ]
        setattr(ddp, _ATTRIBUTE, bridge)
        # What copy and pickle ask for. Of a class they would ask, too, but it is torch's.
        setattr(ddp, _GETSTATE, bridge._state_of_module)
        bridge.add(optimizer, params)
        return bridge

    def _state_of_module(self) -> dict[str, Any]:
        """The module's state for a copy of it, which has a reducer of its own: without us."""
        ddp = self._ddp()
        assert ddp is not None
        state: dict[str, Any] = type(ddp).__getstate__(ddp)
        for name in (_ATTRIBUTE, _GETSTATE):
            del state[name]
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            state[name] = type(state[name])(
                (number, hook)
                for number, hook in state[name].items()
                if getattr(hook, "__self__", None) is not self
            )
        state["_comm_hooks"] = [entry for entry in ddp._comm_hooks if entry[1] is not self]
        return state

    def _check(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        ddp = self._ddp()
        assert ddp is not None
        known = set(ddp.module.parameters())
        for param in params:
            if param not in known:
                raise ValueError(
                    f"a parameter of the optimizer, of shape {tuple(param.shape)}, does not belong "
                    "to the DistributedDataParallel module. Make one optimizer for each "
                    "DistributedDataParallel, with its parameters, or put the modules into one "
                    "nn.ModuleDict and that into one DistributedDataParallel"
                )
            if self._owner(param) not in (None, optimizer):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} belongs to two optimizers of one "
                    "DistributedDataParallel: detach() the other one first, or give each "
                    "parameters of its own"
                )

    def add(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        self._follow()
        self._check(optimizer, params)
        self._optimizers.setdefault(optimizer)
        for param in params:
            if param not in self._number:
                self._number[param] = len(self._params)
                self._params.append(param)
                # Runs before DDP's own hook, and unlike DDP's map of used parameters in time.
                self._watches[param] = add_hook(param, self._watch.add())
            self._owners[param] = weakref.ref(optimizer)
            self._watch.own(self._number[param], True)
        self._buckets.clear()

    def serves(self, ddp: DistributedDataParallel) -> bool:
        return self._ddp() is ddp

    def remove(self, optimizer: Any) -> None:
        """Gives an optimizer's parameters back to DDP."""
        ddp = self._ddp()
        last = set(self._optimizers) <= {optimizer}
        if last and ddp is not None and not _torch.can_remove_hook(ddp):
            raise RuntimeError(
                f"torch {torch.__version__} cannot take the communication hook off this "
                "DistributedDataParallel: make a new one, DistributedDataParallel(ddp.module)"
            )
        self._optimizers.pop(optimizer, None)
        self._release(p for p, owner in self._owners.items() if owner() in (None, optimizer))
        if not self._owners:
            self._unwatch()

    def _release(self, params: Iterable[torch.Tensor]) -> None:
        for param in list(params):
            self._return_taken(param)
            # The hook stays as long as the bridge; there may be another optimizer.
            self._watch.forget(self._number[param])
            self._replaced.pop(param, None)
            del self._owners[param]
        self._buckets.clear()

    def _unwatch(self) -> None:
        for handle in self._watches.values():
            handle.remove()
        self._watches.clear()
        self._number.clear()
        self._params.clear()
        before, self._watch = self._watch, load_extension().GradientWatch()
        self._watch.as_view, self._watch.takes = before.as_view, before.takes
        self._watch.armed = before.armed

    def _follow(self) -> None:
        """Parameters may have been taken out of ``param_groups``, and put back, by hand. Those that
        are in no group are DDP's."""
        edited = []
        for optimizer, seen in list(self._optimizers.items()):
            now = optimizer._number_groups()
            if now is not seen:
                self._optimizers[optimizer] = now
                edited.append(optimizer)
        for optimizer in edited:
            mine = self._optimizers[optimizer]
            owned = [p for p, owner in self._owners.items() if owner() is optimizer]
            self._release(p for p in owned if p not in mine)
        for optimizer in edited:
            mine = self._optimizers[optimizer]
            self.add(optimizer, [p for p in mine if self._owner(p) is not optimizer])

    def _owner(self, param: torch.Tensor) -> Any:
        """The optimizer of a parameter, if there is one (still)."""
        owner = self._owners.get(param)
        return None if owner is None else owner()

    def weighted_by_joining(self) -> bool:
        """Whether DDP was told to divide by the number of ranks that still have data."""
        ddp = self._ddp()
        return ddp is not None and _torch.divides_by_active(ddp)

    def buckets_left(self) -> int:
        """Of a backward that is under way, or else of the next one."""
        ddp = self._ddp()
        every = 0 if ddp is None else len(_torch.buckets(ddp))
        return every - self._begun if self._watch.armed else every

    def check_finished(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises for one whose gradient DDP has not reduced yet, because it waits for others."""
        waiting = {self._params[number] for number in self._watch.unfinished()}
        for name, param in params if waiting else ():
            if param in waiting:
                self.check_types()
                raise RuntimeError(
                    f"the gradient of parameter {name} was never reduced over ranks: DDP still "
                    "waits for those of other parameters. Unused parameters need "
                    "find_unused_parameters=True"
                )

    def check_types(self) -> None:
        """Raises if the module was converted: autograd has dropped DDP's hooks then."""
        ddp = self._ddp()
        for bucket in () if ddp is None else _torch.buckets(ddp):
            for param in bucket.parameters():
                self._check_type(param, bucket.buffer())

    def _check_type(self, param: torch.Tensor, memory: torch.Tensor) -> None:
        if self._owner(param) is not None and param.dtype != memory.dtype:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} has type {param.dtype} and had "
                f"{memory.dtype} when its DistributedDataParallel was made, which does not reduce "
                "its gradients any more: convert the model (double(), half(), to()) before"
            )

    # --- DDP's states -------------------------------------------------------------------

    @_torch.uncompiled
    def _before_forward(self, ddp: DistributedDataParallel, *_: Any) -> None:
        """Without an optimizer DDP gets a reducer without us. Not before a forward that arms it:
        the backward of an earlier one, which nobody may have seen, is still to be reduced."""
        if self._optimizers or self._watch.armed or not _arms(ddp):
            return
        if _torch.can_remove_hook(ddp):
            _torch.remove_hook(ddp, self)
            self._unwatch()
            for handle in self._forward_hooks:
                handle.remove()
            for name in (_ATTRIBUTE, _GETSTATE):
                delattr(ddp, name)

    @_torch.uncompiled
    def _after_forward(self, ddp: DistributedDataParallel, *_: Any) -> None:
        """Forward has ended: DDP has armed its reducer, or not.

        A forward past this hook (``ddp.forward(x)``) leaves us disarmed; then no gradient is
        taken, and DDP copies all of them.
        """
        # Forward may have rebuilt the buckets.
        self.restore()
        if not _arms(ddp):
            return
        watch = self._watch
        watch.armed = True
        self._begun, self._told = 0, False
        watch.drop_taken()
        self._others.clear()  # of a backward that has raised
        # With a static graph the hooks may run more than once.
        watch.takes = self._may_take and not ddp.static_graph
        # With gradient_as_bucket_view p.grad may lie in a bucket that DDP is about to fill: those
        # that are there now, but for those that autograd made.
        if self._as_view and watch.takes:
            watch.look(self._params)

    def _done(self) -> None:
        """DDP has finalised the last bucket and disarmed its reducer."""
        self._watch.armed = self._finalising = False
        self._watch.finish()
        others, self._others = self._others, []
        done = [
            functools.partial(optimizer._mode.backward_done, optimizer)
            for optimizer in self._optimizers
        ]
        end_all([*others, *done])

    def _end_raised(self) -> None:
        """A backward has ended, or raised: what it has started ends before its caller can look."""
        self._finalising = False
        if self._watch.armed and not self._told:
            # Peers begin with all of its buckets, whatever becomes of one of them.
            self._told = True
            ddp, left = self._ddp(), self.buckets_left()
            error = RuntimeError("a backward has raised; this rank's own error says why")
            if ddp is not None and left:
                tell(ddp.process_group, error, shared_errors(), self._params, left)
        abandon(self._comm_hook)
        others, self._others = self._others, []
        try:
            end_all([*others, *(optimizer._wait for optimizer in self._optimizers)])
        except Exception as error:
            _log.warning("fused: an operation of a backward that has raised failed: %s", error)

    # --- gradients in whose place DDP has put memory of a bucket ----------------------------

    def rebound(
        self, param: torch.Tensor, grad: ShardedGrad | SpentGrad, memory: torch.Tensor
    ) -> None:
        """DDP has copied a gradient of ours, and may let ``p.grad`` point to the copy."""
        self._replaced[param] = grad, memory
        this = weakref.ref(self)

        @_torch.uncompiled
        def absorb(param: torch.Tensor) -> None:
            bridge = this()
            if bridge is not None:
                bridge._absorb(param)

        # Before the watch looks at the gradient.
        self._watch.before = absorb

    def _earlier(self, param: torch.Tensor) -> ShardedGrad | SpentGrad | None:
        """The gradient that DDP has replaced by bucket memory, unless it was dropped since."""
        grad, memory = self._replaced.pop(param, (None, None))
        if memory is None or type(param.grad) is not torch.Tensor:
            return None
        return grad if param.grad.data_ptr() == memory.data_ptr() else None

    def _absorb(self, param: torch.Tensor) -> None:
        """Autograd has accumulated into the memory that DDP has put there."""
        grad, earlier = param.grad, self._earlier(param)
        if earlier is None or grad is None:
            return
        if isinstance(earlier, SpentGrad):
            earlier.refuse_accumulation()
        else:
            earlier.set_unreduced(grad.clone())
        param.grad = earlier

    def restore(self) -> None:
        """Undoes DDP's replacements, where no backward has followed."""
        for param in list(self._replaced):
            grad = self._earlier(param)
            if grad is not None:
                param.grad = grad
        self._watch.before = None

    # --- one bucket -----------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        buffer = bucket.buffer()
        ddp = self._ddp()
        assert ddp is not None
        task = _torch.graph_task()
        shadow = task is None  # a joined rank, which has no backward
        if task is not None and task != self._guarded:
            self._guarded = task
            _torch.at_the_end(_Guard(self))
        params = bucket.parameters()
        self._follow()
        result: torch.futures.Future[torch.Tensor] | None = None
        if buffer.layout != torch.strided:
            result = self._reduce_sparse(bucket, buffer, params, ddp)
        elif shadow or not self._reduce_taken(bucket, buffer, params, ddp):
            self._reduce_each(bucket, buffer, params, shadow, ddp)
        if bucket.is_last() and shadow:
            end_all(
                functools.partial(optimizer._mode.shadow_done, optimizer)
                for optimizer in self._optimizers
            )
        elif bucket.is_last():
            self._finalising = True
            _torch.after_finalisation(self._done)
        if result is not None:
            return result
        on_gpu = buffer.device.type != "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if on_gpu else None
        )
        future.set_result(buffer)
        return future

    def _reduce_sparse(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        params: list[torch.Tensor],
        ddp: DistributedDataParallel,
    ) -> "torch.futures.Future[torch.Tensor] | None":
        """What DDP does, with a sparse gradient that is no optimizer's of ours."""
        if any(self._owner(param) is not None for param in params):
            raise RuntimeError("fused optimizers do not take sparse gradients; use sparse=False")
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            return hook(state, bucket)
        group = ddp.process_group
        dist.all_reduce(buffer, group=group)
        ranks = dist.get_world_size(group)
        if self.weighted_by_joining():
            active = torch.tensor(float(_torch.in_backward()), device=buffer.device)
            dist.all_reduce(active, group=group)
            ranks = int(active)
        buffer.div_(ranks)
        return None

    def _reduce_taken(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        params: list[torch.Tensor],
        ddp: DistributedDataParallel,
    ) -> bool:
        """The usual case: all gradients of the bucket were taken."""
        known = self._buckets.get(bucket.index())
        if (
            known is None
            or known.address != buffer.data_ptr()
            or not load_extension().same_objects(known.params, params)
        ):
            return False
        owner = known.owner()
        if owner is None:
            return False
        taken = self._watch.take_all(known.numbers, params)
        if taken is None:
            return False
        used = None
        if ddp.find_unused_parameters or ddp.static_graph:
            used = torch.ones(len(params), dtype=torch.uint8, device=buffer.device)
        owner._mode.bucket_ready(owner, known, taken, used)
        return True

    def _reduce_each(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        params: list[torch.Tensor],
        shadow: bool,
        ddp: DistributedDataParallel,
    ) -> None:
        mine: dict[Any, list[Gradient]] = collections.defaultdict(list)
        others = []
        offset = 0
        views, numbers = [], []
        flat = buffer
        if params[0].is_complex() and not buffer.is_complex():
            flat = torch.view_as_complex(buffer.view(-1, 2))
        for param in params:
            # Only memory: DDP may have laid out its views when the parameter had other strides.
            memory = flat.as_strided(param.shape, param.stride(), flat.storage_offset() + offset)
            offset += param.numel()
            owner = self._owner(param)
            if owner is None:
                self._return_taken(param)
                others.append((param, memory))
            else:
                self._check_type(param, memory)
                if shadow:
                    owner._joined()
                else:
                    number = self._number[param]
                    self._watch.set_view(number, memory)
                    views.append(memory)
                    numbers.append(number)
                mine[owner].append(self._gradient(param, memory, shadow))
        assert offset == flat.numel(), "DDP has changed the layout of its buckets"
        if self._comm_hook is not None:
            self._combine(bucket, mine, others, shadow, ddp)
        else:
            self._all_reduce(others, shadow, ddp.process_group)
            for owner, gradients in mine.items():
                used = _used(gradients, ddp, buffer.device)
                owner._mode.gradients_ready(owner, gradients, used, shadow)
        # There may be fewer buckets now.
        last = bucket.index() if bucket.is_last() else len(self._params)
        for index in [i for i in self._buckets if i == bucket.index() or i > last]:
            del self._buckets[index]
        # A hook has to be asked for each bucket, however its gradients have come.
        if self._comm_hook is None and len(mine) == 1 and len(views) == len(params):
            known = Bucket(buffer.data_ptr(), params, numbers, views, next(iter(mine)))
            self._buckets[bucket.index()] = known

    def _return_taken(self, param: torch.Tensor) -> None:
        """Of a parameter that has no optimizer any more."""
        number = self._number.get(param)
        taken = None if number is None else self._watch.take(number)
        if taken is not None:
            param.grad = taken

    def _gradient(self, param: torch.Tensor, memory: torch.Tensor, shadow: bool) -> Gradient:
        """The gradient of a parameter of ours that DDP has declared ready."""
        number = self._number[param]
        taken = self._watch.take(number)
        if taken is not None:
            return Gradient(param, taken, memory, None)
        used = self._watch.used(number) and not shadow
        grad = param.grad
        earlier = self._earlier(param)
        if isinstance(grad, ShardedGrad):
            # Another backward before step(): only what it has added is to be reduced.
            earlier, grad = grad, grad.unreduced()
        elif earlier is not None:
            # As above, and what it has added is in DDP's memory.
            grad = earlier.unreduced() if isinstance(earlier, ShardedGrad) else None
        if earlier is not None:
            assert isinstance(earlier, ShardedGrad)
            earlier.keep()
        if shadow or type(grad) is not torch.Tensor:
            # DDP has filled it with zeros.
            return Gradient(param, memory, memory, earlier, used)
        # The same that DDP has copied into the bucket. Where autograd had nothing to add it was
        # there before, and counts.
        local = laid_out(grad.detach(), param)
        if self._in_bucket and not param.is_contiguous():
            local = memory.copy_(local)
        elif self._in_bucket:
            local = memory
        return Gradient(param, local, memory, earlier, used or earlier is None)

    def _facts(
        self, gradients: list[tuple[torch.Tensor, torch.Tensor]], shadow: bool, group: Any
    ) -> list[float]:
        """Of parameters of no optimizer of ours: how many ranks have data, and for each parameter
        how many use it. DDP has to be told less when it does it itself."""
        for param, _ in gradients:
            if not isinstance(param.grad, (ShardedGrad, SpentGrad)):
                continue
            if param in self._number:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} was taken out of the groups of its "
                    "fused optimizer, or that is gone, and its gradient of an earlier backward "
                    "was not dropped: call zero_grad() of the model before the next backward"
                )
            else:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} belongs to two "
                    "DistributedDataParallel modules, and the fused optimizer of one of them has "
                    "its gradient: put both modules into one DistributedDataParallel"
                )
        facts = torch.tensor([float(not shadow), *(p.grad is not None for p, _ in gradients)])
        dist.all_reduce(facts, group=group)
        return facts.tolist()

    def _all_reduce(
        self,
        gradients: list[tuple[torch.Tensor, torch.Tensor]],
        shadow: bool,
        group: dist.ProcessGroup,
    ) -> None:
        """What DDP does without a hook, for parameters of no optimizer of ours."""
        if not gradients:
            return
        ranks, *uses = self._facts(gradients, shadow, group)
        divisor = ranks if self.weighted_by_joining() else dist.get_world_size(group)
        for (param, memory), used in zip(gradients, uses, strict=True):
            # Without a gradient DDP has filled the bucket with zeros.
            grad = memory if param.grad is None or shadow else laid_out(param.grad.detach(), param)
            dist.all_reduce(grad, group=group)
            grad.div_(divisor)
            if used and not shadow:
                _place(param, grad)

    def _combine(
        self,
        bucket: GradBucket,
        mine: dict[Any, list[Gradient]],
        others: list[tuple[torch.Tensor, torch.Tensor]],
        shadow: bool,
        ddp: DistributedDataParallel,
    ) -> None:
        """Has the user's hook combine a bucket."""
        assert self._comm_hook is not None
        if self.weighted_by_joining() or any(owner._weight is not None for owner in mine):
            raise RuntimeError(
                "a comm_hook averages the gradients of all ranks equally: do not use it with "
                "set_local_batch_size(), or with divide_by_initial_world_size=False"
            )
        buffer, group = bucket.buffer(), ddp.process_group
        taken: dict[torch.Tensor, torch.Tensor] = {}
        for gradient in itertools.chain.from_iterable(mine.values()):
            local, output = gradient.local, gradient.output
            if local.data_ptr() == output.data_ptr():
                continue
            alike = local.dtype == output.dtype and local.is_contiguous()
            if not self._in_bucket and alike and gradient.param.is_contiguous():
                taken[gradient.param] = local
            else:
                output.copy_(local)
        # Before the hook, which may start collectives of this group when it likes.
        uses = self._facts(others, shadow, group)[1:] if others else []
        flags = {owner: _used(gradients, ddp, buffer.device) for owner, gradients in mine.items()}
        asked = {owner: any_rank(used, group) for owner, used in flags.items()}
        exchange = Exchange(self._comm_hook, bucket, buffer, taken)
        for owner, gradients in mine.items():
            work = Combined(exchange, asked[owner])
            owner._mode.combined(owner, gradients, flags[owner], work)
        if not shadow:
            there = [pair for pair, used in zip(others, uses, strict=True) if used]

            def finish() -> None:
                exchange.wait()
                for param, grad in there:
                    _place(param, grad)

            self._others.append(finish)


def _arms(ddp: DistributedDataParallel) -> bool:
    """Whether a forward arms the reducer now."""
    return torch.is_grad_enabled() and ddp.require_backward_grad_sync


def _same_hook(one: CommHook | None, other: CommHook | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def _used(gradients: list[Gradient], ddp: DistributedDataParallel, device: Any) -> Any:
    """Which this rank uses. Otherwise DDP itself insists that every parameter is used."""
    if not (ddp.find_unused_parameters or ddp.static_graph):
        return None
    flags = [gradient.used for gradient in gradients]
    return torch.tensor(flags, dtype=torch.uint8, device=device)


def _place(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Of a parameter of DDP's, which was told to leave ``p.grad`` alone."""
    if param.grad is None:
        param.grad = grad.clone()
    elif param.grad.data_ptr() != grad.data_ptr():
        param.grad.copy_(grad)


@_torch.uncompiled
def _hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    ddp = state._ddp()
    state._begun += 1
    with telling(ddp.process_group, bucket.buffer()):
        return state.reduce(bucket)
