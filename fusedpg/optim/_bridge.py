"""Between DistributedDataParallel and the optimizers that take its gradients.

No postponed annotations here: DDP inspects those of its hooks.

DDP's reducer is armed in forward (with gradients enabled and ``require_backward_grad_sync``) and
disarmed when it has finalised the last bucket, at the end of the graph task in which that one was
complete: with re-entrant checkpointing, a nested one. While it is armed the first gradient of each
parameter is what it reduces; whatever autograd accumulates otherwise, it leaves alone. The bridge
follows the same states.
"""

import collections
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusedpg import _agreement
from fusedpg._refusal import shared_errors, tell
from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.optim import _torch
from fusedpg.optim._context import StepContext
from fusedpg.optim._gradients import ShardedGrad, SpentGrad, end_all
from fusedpg.optim._parameters import Numbers, add_hook, laid_out

_log = logging.getLogger("fusedpg")

Flags = torch.Tensor | None  # by parameter, whether this rank used it; None: all of them
CommHook = tuple[Any, Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]]

_ATTRIBUTE = "_fusedpg_bridge"
_GETSTATE = "__getstate__"


class Gradient(NamedTuple):
    """The facts that a rank has about the gradient of a parameter."""

    param: torch.Tensor
    local: torch.Tensor  # this rank's
    output: torch.Tensor  # memory laid out alike that may be overwritten
    earlier: ShardedGrad | None  # reduced by an earlier backward, to be added
    used: bool = True  # by this rank


_OfDdp = tuple[torch.Tensor, torch.Tensor]
"""A parameter of no optimizer of ours, and its gradient's memory in DDP's bucket."""


class Bucket:
    """A bucket all of whose parameters have one optimizer, for passes in which each of them has a
    gradient that was taken: nothing is done parameter by parameter then."""

    def __init__(
        self,
        address: int,
        params: list[torch.Tensor],
        numbers: list[int],
        views: list[torch.Tensor],
        owner: "BucketOwner",
    ) -> None:
        self.address = address
        self.params, self.numbers, self.views = params, numbers, views
        self.owner = weakref.ref(owner)
        self.slices: list[torch.Tensor] | None = None  # of the views, this rank's
        self.grads: list[ShardedGrad] = []  # what stood in p.grad after the pass before


def check_hook(comm_hook: object, overlap: bool, reduce: str) -> None:
    """Raises for what is no hook, and for options that do not go with one."""
    if not (isinstance(comm_hook, tuple) and len(comm_hook) == 2 and callable(comm_hook[1])):
        raise TypeError(
            "comm_hook must be a tuple (state, hook), the two arguments of register_comm_hook(); "
            f"got {comm_hook!r}"
        )
    if overlap:
        raise ValueError(
            "overlap=True cannot be used with a comm_hook: it updates parameters in the operation "
            "that reduces their gradients, and the comm_hook replaces that operation. Use "
            "overlap=False"
        )
    if reduce != "mean":
        raise ValueError(
            f'a comm_hook gives the mean of the gradients, got reduce={reduce!r}: use reduce="mean"'
        )


def takes_gradients(comm_hook: CommHook | None) -> bool:
    """Whether the state takes gradients where autograd has left them (fusedpg.compress.State)."""
    return comm_hook is not None and getattr(comm_hook[1], "takes_gradients", False)


def _tell_state(comm_hook: CommHook | None, method: str, *arguments: object) -> None:
    """Calls a method of the hook's state, if it has it (fusedpg.compress.State)."""
    function = None if comm_hook is None else getattr(comm_hook[0], method, None)
    if function is not None:
        function(*arguments)


def check_hook_group(
    group: dist.ProcessGroup, modules: dist.ProcessGroup, device: torch.device
) -> None:
    """A hook's mean is the same on all of the module's ranks, so each may share its optimizer's
    state with some of them. Norms are the same bits everywhere if all groups are of one size.

    Collective. Raises ValueError on all ranks.
    """
    size = dist.get_world_size(group)
    ranks = set(dist.get_process_group_ranks(modules))
    strangers = not ranks.issuperset(dist.get_process_group_ranks(group))
    own = torch.tensor([size, int(strangers)], device=device)
    (least, _), (most, strange) = (row.tolist() for row in _agreement.extremes(own, modules))
    if least != most or strange:
        raise ValueError(
            f"the optimizer's process_group has {size} ranks here, and {least} to {most} on the "
            f"module's ranks{', and some ranks of other modules' if strange else ''}: with a "
            "comm_hook, split the module's ranks into process groups of one size"
        )


class Exchange:
    """A bucket that the hook was called with."""

    def __init__(
        self,
        hook: CommHook,
        bucket: GradBucket,
        buffer: torch.Tensor,
        gradients: dict[torch.Tensor, torch.Tensor],
    ) -> None:
        """``gradients`` are those not in the bucket, for hooks that take them."""
        state, function = hook
        self._buffer = buffer
        self._future = state.take(bucket, gradients) if gradients else function(state, bucket)

    def wait(self) -> None:
        """Then the bucket has what the hook gives."""
        if self._future is None:
            return
        result = self._future.wait()
        self._future = None
        if isinstance(result, (list, tuple)):
            (result,) = result
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view_as(self._buffer))


class BucketOwner:
    """A mode of an optimizer that takes gradients of a DDP: what the bridge calls."""

    context: StepContext

    def armed(self) -> None:
        """A forward has armed DDP: the next backward reduces."""

    def bucket_ready(self, bucket: Bucket, grads: list[torch.Tensor], used: Flags) -> None:
        """A bucket in the usual case: plain gradients of this rank."""
        raise NotImplementedError

    def gradients_ready(self, gradients: list[Gradient], used: Flags, shadow: bool) -> None:
        """A bucket in any other case."""
        raise NotImplementedError

    def combined(
        self, gradients: list[Gradient], used: Flags, works: Sequence[dist.Work | Exchange]
    ) -> None:
        """A bucket that a hook of the user's combines; it is there when these works are done."""
        raise NotImplementedError

    def nested_done(self) -> None:
        """A backward inside of another one has ended, and there are further buckets."""

    def backward_done(self) -> None:
        """DDP has finalised the last bucket."""
        raise NotImplementedError

    def shadow_done(self) -> None:
        """A joined rank has taken part in a backward of the others."""
        self.context.wait()


class _Guard:
    """A callback of a graph task, for its end. Autograd calls none of them when the task raises,
    but drops them, before its caller sees the exception."""

    def __init__(self, bridge: "Bridge") -> None:
        self._bridge = weakref.ref(bridge)
        self._finalised = self.ended = False

    @_torch.uncompiled
    def __call__(self) -> None:
        bridge = self._bridge()
        if bridge is None:
            return
        if self._finalised:
            self.ended = True
            if bridge.finalising:  # not if this task had another guard
                bridge.finish()
        elif bridge.finalising:
            # DDP has queued its own callback, which sets gradients: what is queued now is behind.
            self._finalised = True
            _torch.at_the_end(self)
        else:
            # A nested backward, of re-entrant checkpointing. If one of those around it raises
            # later, there is no guard.
            self.ended = True
            bridge.end_nested()

    @_torch.uncompiled
    def _raised(self) -> None:
        bridge = self._bridge()
        if bridge is not None:
            bridge.end_raised()

    def __del__(self) -> None:
        if not self.ended:
            self._raised()


class Bridge:
    """The one communication hook of a DDP; serves any number of optimizers."""

    def __init__(self, ddp: DistributedDataParallel, comm_hook: CommHook | None = None) -> None:
        # DDP refers to the bridge.
        self._ddp = weakref.ref(ddp)
        self._owners: dict[torch.Tensor, weakref.ref[BucketOwner]] = {}
        # Its optimizers' modes, and their parameters as they were when the bridge looked.
        self._modes: weakref.WeakKeyDictionary[BucketOwner, Numbers] = weakref.WeakKeyDictionary()
        self._watches: dict[torch.Tensor, RemovableHandle] = {}
        self._forward_hooks: list[RemovableHandle] = []
        # Sees every gradient: csrc/c10d/gradients.cpp (`accumulated`). It counts parameters.
        self._extension = load_extension()
        self._watch = self._extension.GradientWatch()
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
        self.finalising = False  # DDP will finalise the last bucket
        self._may_take = False
        self._as_view = bool(ddp.gradient_as_bucket_view)
        self._watch.as_view = self._as_view
        # Gradients of ours in whose place DDP has put memory of a bucket.
        self.replaced: dict[torch.Tensor, tuple[ShardedGrad | SpentGrad, torch.Tensor]] = {}

    @staticmethod
    def of(ddp: DistributedDataParallel, mode: BucketOwner, comm_hook: CommHook | None) -> "Bridge":
        """The bridge of a DDP, with an optimizer more. The first one registers its hook."""
        bridge: Bridge | None = getattr(ddp, _ATTRIBUTE, None)
        params = mode.context.parameters()
        if bridge is not None:
            if not _same_hook(comm_hook, bridge._comm_hook):
                raise ValueError(
                    "two fused optimizers of one DistributedDataParallel have different "
                    "comm_hooks: give all of them the same (state, hook)"
                )
            bridge.add(mode, params)
            return bridge
        _torch.check(ddp)
        _tell_state(comm_hook, "check_module", ddp.process_group)
        bridge = Bridge(ddp, comm_hook)
        bridge._check(mode, params)
        try:
            ddp.register_comm_hook(bridge, _HOOK)
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
        # Copy and pickle ask for it. They would ask the class, too, but that is torch's.
        setattr(ddp, _GETSTATE, bridge._state_of_module)
        bridge.add(mode, params)
        return bridge

    def _state_of_module(self) -> dict[str, object]:
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

    def _check(self, mode: BucketOwner, params: list[torch.Tensor]) -> None:
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
            if self._owner(param) not in (None, mode):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} belongs to two optimizers of one "
                    "DistributedDataParallel: detach() the other one first, or give each "
                    "parameters of its own"
                )

    def add(self, mode: BucketOwner, params: list[torch.Tensor]) -> None:
        self._follow()
        self._check(mode, params)
        self._modes.setdefault(mode, Numbers())
        for param in params:
            if param not in self._number:
                self._number[param] = len(self._params)
                self._params.append(param)
                # Runs before DDP's own hook, and unlike DDP's map of used parameters in time.
                self._watches[param] = add_hook(param, self._watch.add())
            self._owners[param] = weakref.ref(mode)
            self._watch.own(self._number[param], True)
        self._buckets.clear()

    def serves(self, ddp: DistributedDataParallel) -> bool:
        return self._ddp() is ddp

    def remove(self, mode: BucketOwner) -> None:
        """Gives an optimizer's parameters back to DDP."""
        ddp = self._ddp()
        last = set(self._modes) <= {mode}
        if last and ddp is not None and not _torch.can_remove_hook(ddp):
            raise RuntimeError(
                f"torch {torch.__version__} cannot take the communication hook off this "
                "DistributedDataParallel: make a new one, DistributedDataParallel(ddp.module)"
            )
        self._modes.pop(mode, None)
        self._release(p for p, owner in self._owners.items() if owner() in (None, mode))
        if not self._owners:
            self._unwatch()

    def _release(self, params: Iterable[torch.Tensor]) -> None:
        for param in list(params):
            self._return_taken(param)
            # The hook stays as long as the bridge; there may be another optimizer.
            self._watch.forget(self._number[param])
            self.replaced.pop(param, None)
            del self._owners[param]
        self._buckets.clear()

    def _unwatch(self) -> None:
        for handle in self._watches.values():
            handle.remove()
        self._watches.clear()
        self._number.clear()
        self._params.clear()
        before, self._watch = self._watch, self._extension.GradientWatch()
        self._watch.as_view, self._watch.takes = before.as_view, before.takes
        self._watch.armed = before.armed

    def _follow(self) -> None:
        """Parameters may have been taken out of ``param_groups``, and put back, by hand. Those that
        are in no group are DDP's."""
        edited = []
        for mode, seen in list(self._modes.items()):
            now = mode.context.number_groups()
            if now is not seen:
                self._modes[mode] = now
                edited.append(mode)
        for mode in edited:
            owned = [p for p, owner in self._owners.items() if owner() is mode]
            self._release(p for p in owned if p not in self._modes[mode])
        for mode in edited:
            self.add(mode, [p for p in self._modes[mode] if self._owner(p) is not mode])

    def _owner(self, param: torch.Tensor) -> BucketOwner | None:
        """The mode of a parameter's optimizer, if there is one (still)."""
        owner = self._owners.get(param)
        return None if owner is None else owner()

    def others_accumulate(self) -> bool:
        """True if ranks with data are in a no_sync(); DDP's hook of Join has found it out."""
        ddp = self._ddp()
        return ddp is not None and not ddp.require_forward_param_sync

    def weighted_by_joining(self) -> bool:
        """Whether DDP was told to divide by the number of ranks that still have data."""
        ddp = self._ddp()
        return ddp is not None and _torch.divides_by_active(ddp)

    def buckets_left(self) -> int:
        """The buckets left in a backward that is under way, or else those of the next one."""
        ddp = self._ddp()
        every = 0 if ddp is None else len(_torch.buckets(ddp))
        return every - self._begun if self._watch.armed and not self._told else every

    def check_finished(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Raises for one whose gradient DDP has not reduced yet, because it waits for others."""
        waiting = {self._params[number] for number in self._watch.unfinished()}
        for name, param in named() if waiting else ():
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
                f"a parameter of shape {tuple(param.shape)} has type {param.dtype}, but had "
                f"{memory.dtype} when its DistributedDataParallel was made, which does not reduce "
                "its gradients any more: convert the model (double(), half(), to()) before you "
                "make the DistributedDataParallel"
            )

    # --- DDP's states -------------------------------------------------------------------

    @_torch.uncompiled
    def _before_forward(self, ddp: DistributedDataParallel, *_: object) -> None:
        """Without an optimizer DDP gets a reducer without us. Not before a forward that arms it:
        the backward of an earlier one, which nobody may have seen, is still to be reduced."""
        if self._modes or self._watch.armed or not _arms(ddp):
            return
        if _torch.can_remove_hook(ddp):
            _torch.remove_hook(ddp, self)
            self._unwatch()
            for handle in self._forward_hooks:
                handle.remove()
            for name in (_ATTRIBUTE, _GETSTATE):
                delattr(ddp, name)

    @_torch.uncompiled
    def _after_forward(self, ddp: DistributedDataParallel, *_: object) -> None:
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
        for mode in self._modes:
            mode.armed()
        # With a static graph the hooks may run more than once.
        watch.takes = self._may_take and not ddp.static_graph
        # With gradient_as_bucket_view p.grad may lie in a bucket that DDP is about to fill: those
        # that are there now, but for those that autograd made.
        if self._as_view and watch.takes:
            watch.look(self._params)

    def finish(self) -> None:
        """DDP has finalised the last bucket and disarmed its reducer."""
        self._watch.armed = self.finalising = False
        self._begun = 0
        self._watch.finish()
        others, self._others = self._others, []
        try:
            end_all([*others, *[mode.backward_done for mode in self._modes]])
        finally:
            if self.replaced:
                self.restore()

    def end_nested(self) -> None:
        """A backward inside of another one has ended, and there are further buckets."""
        for mode in self._modes:
            mode.nested_done()

    def end_raised(self) -> None:
        """A backward has raised: what it has started ends before its caller can look."""
        self.finalising = False
        if self._watch.armed and not self._told:
            # Peers begin with all of its buckets, whatever becomes of one of them.
            ddp, left = self._ddp(), self.buckets_left()
            self._told = True
            error = RuntimeError("a backward has raised; this rank's own error says why")
            if ddp is not None and left:
                tell(ddp.process_group, error, shared_errors(), self._params, left)
        # Buckets that the state holds back for others would be waited for in vain.
        _tell_state(self._comm_hook, "abandon")
        others, self._others = self._others, []
        try:
            end_all([*others, *[mode.context.wait for mode in self._modes]])
        except Exception as error:
            _log.warning("fused: an operation of a backward that has raised failed: %s", error)

    # --- gradients in whose place DDP has put memory of a bucket ----------------------------

    def rebound(
        self, param: torch.Tensor, grad: ShardedGrad | SpentGrad, memory: torch.Tensor
    ) -> None:
        """DDP has copied a gradient of ours, and may let ``p.grad`` point to the copy."""
        self.replaced[param] = grad, memory
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
        grad, memory = self.replaced.pop(param, (None, None))
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
        for param in list(self.replaced):
            grad = self._earlier(param)
            if grad is not None:
                param.grad = grad
        self._watch.before = None

    # --- one bucket -----------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP calls it. Peers hear of what this rank raises before it begins an operation."""
        ddp, buffer = self._ddp(), bucket.buffer()
        assert ddp is not None
        self._begun += 1
        before = self._extension._shared_errors()
        try:
            task = _torch.graph_task()
            if task not in (_torch.NO_TASK, self._guarded):
                self._guarded = task
                _torch.at_the_end(_Guard(self))
            shadow = task == _torch.NO_TASK  # a joined rank, which has no backward
            params = bucket.parameters()
            for mode, seen in self._modes.items():
                if mode.context.number_groups() is not seen:
                    self._follow()
                    break
            result: torch.futures.Future[torch.Tensor] | None = None
            if buffer.layout != torch.strided:
                result = self._reduce_sparse(bucket, params, ddp)
            elif shadow or not self._reduce_taken(bucket, params, ddp):
                self._reduce_each(bucket, params, shadow, ddp)
            # In a static graph's first backward DDP numbers all buckets 0, and calls none last.
            last = bucket.is_last() or (not shadow and bucket.index() + 1 < self._begun)
            if last and shadow:
                end_all([mode.shadow_done for mode in self._modes])
            elif last:
                self.finalising = True
        except Exception as error:
            tell(ddp.process_group, error, before, [buffer])
            raise
        if result is not None:
            return result
        on_gpu = buffer.device.type != "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if on_gpu else None
        )
        future.set_result(buffer)
        return future

    def _reduce_sparse(
        self, bucket: GradBucket, params: list[torch.Tensor], ddp: DistributedDataParallel
    ) -> "torch.futures.Future[torch.Tensor] | None":
        """Reduces a sparse gradient that is no optimizer's of ours, as DDP does."""
        buffer = bucket.buffer()
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
        self, bucket: GradBucket, params: list[torch.Tensor], ddp: DistributedDataParallel
    ) -> bool:
        """The usual case: all gradients of the bucket were taken."""
        known, buffer = self._buckets.get(bucket.index()), bucket.buffer()
        if (
            known is None
            or known.address != buffer.data_ptr()
            or not self._extension.same_objects(known.params, params)
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
        owner.bucket_ready(known, taken, used)
        return True

    def _reduce_each(
        self,
        bucket: GradBucket,
        params: list[torch.Tensor],
        shadow: bool,
        ddp: DistributedDataParallel,
    ) -> None:
        buffer = bucket.buffer()
        mine: dict[BucketOwner, list[Gradient]] = collections.defaultdict(list)
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
                    owner.context.joined()
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
                owner.gradients_ready(gradients, used, shadow)
        # There may be fewer buckets now.
        last = bucket.index() if bucket.is_last() else len(self._params)
        for index in [i for i in self._buckets if i == bucket.index() or i > last]:
            del self._buckets[index]
        # A hook has to be asked for each bucket, however its gradients have come.
        if self._comm_hook is None and len(mine) == 1 and len(views) == len(params):
            known = Bucket(buffer.data_ptr(), params, numbers, views, next(iter(mine)))
            self._buckets[bucket.index()] = known

    def _return_taken(self, param: torch.Tensor) -> None:
        """Gives back the gradient of a parameter that has no optimizer any more."""
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
        self, gradients: list[_OfDdp], shadow: bool, group: dist.ProcessGroup
    ) -> list[float]:
        """For parameters of no optimizer of ours: how many ranks have data, and for each parameter
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
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} belongs to two "
                "DistributedDataParallel modules, and the fused optimizer of one of them has its "
                "gradient: put both modules into one DistributedDataParallel"
            )
        facts = torch.tensor([float(not shadow), *(p.grad is not None for p, _ in gradients)])
        dist.all_reduce(facts, group=group)
        return facts.tolist()

    def _all_reduce(self, gradients: list[_OfDdp], shadow: bool, group: dist.ProcessGroup) -> None:
        """Reduces parameters of no optimizer of ours, as DDP does without a hook."""
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
        mine: dict[BucketOwner, list[Gradient]],
        others: list[_OfDdp],
        shadow: bool,
        ddp: DistributedDataParallel,
    ) -> None:
        """Has the user's hook combine a bucket."""
        assert self._comm_hook is not None
        if self.weighted_by_joining() or any(owner.context.weight is not None for owner in mine):
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
        # Flags become whether any rank has used a parameter.
        asked = {
            owner: dist.all_reduce(used, dist.ReduceOp.MAX, group, async_op=True)
            for owner, used in flags.items()
            if used is not None
        }
        exchange = Exchange(self._comm_hook, bucket, buffer, taken)
        for owner, gradients in mine.items():
            works = [asked[owner], exchange] if owner in asked else [exchange]
            owner.combined(gradients, flags[owner], works)
        if not shadow:
            there = [pair for pair, used in zip(others, uses, strict=True) if used]

            def finish() -> None:
                exchange.wait()
                for param, grad in there:
                    _place(param, grad)

            self._others.append(finish)


def check_ddp(ddp: object) -> None:
    """Raises TypeError, saying what to write, unless ``ddp`` is a DistributedDataParallel."""
    if isinstance(ddp, DistributedDataParallel):
        return
    found = f"ddp= takes a DistributedDataParallel, got {type(ddp).__name__}"
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise TypeError(
            f"{found}: with model = torch.compile(DistributedDataParallel(...)) pass the inner one "
            "(ddp=model._orig_mod)"
        )
    if isinstance(ddp, (list, tuple)):
        raise TypeError(
            f"{found}: make one optimizer for each, with its parameters, or put the modules into "
            "one nn.ModuleDict and that into one DistributedDataParallel"
        )
    if any("FSDP" in base.__name__ or "FullySharded" in base.__name__ for base in type(ddp).mro()):
        raise TypeError(
            f"{found}: FSDP has sharded its parameters already. Wrap the model by "
            "ddp = DistributedDataParallel(model) instead of fully_shard(model), or keep FSDP and "
            "torch's optimizer"
        )
    if isinstance(ddp, nn.Module):
        raise TypeError(
            f"{found}: write ddp = DistributedDataParallel(model), call ddp(x) in training and "
            "pass ddp=ddp; or leave ddp= out to train the bare module without DDP"
        )
    raise TypeError(found)


def unsynchronised(name: str) -> str:
    return (
        f"the gradient of parameter {name} was never reduced over ranks. DDP reduces in the first "
        "backward after a forward of the DistributedDataParallel module outside no_sync(). What "
        "another backward accumulates (under no_sync(), through ddp.module, over a retained graph) "
        "is reduced with the next one; parameters that were frozen when DDP was made, that it was "
        "told to ignore, or that belong to two DistributedDataParallel modules never are"
    )


def _arms(ddp: DistributedDataParallel) -> bool:
    """Whether a forward arms the reducer now."""
    return torch.is_grad_enabled() and ddp.require_backward_grad_sync


def _same_hook(one: CommHook | None, other: CommHook | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1]


def _used(gradients: list[Gradient], ddp: DistributedDataParallel, device: torch.device) -> Flags:
    """Which this rank uses. Otherwise DDP itself insists that every parameter is used."""
    if not (ddp.find_unused_parameters or ddp.static_graph):
        return None
    flags = [gradient.used for gradient in gradients]
    return torch.tensor(flags, dtype=torch.uint8, device=device)


def _place(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Sets the gradient of a parameter of DDP's, which was told to leave ``p.grad`` alone."""
    if param.grad is None:
        param.grad = grad.clone()
    elif param.grad.data_ptr() != grad.data_ptr():
        param.grad.copy_(grad)


# A hook of DDP's is a function of its state and a bucket.
_HOOK = _torch.uncompiled(Bridge.reduce)
