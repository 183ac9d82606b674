"""Between DistributedDataParallel and the optimizers that take its gradients.

No postponed annotations here: DDP inspects those of its hooks.
"""

import collections
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from fusedpg.functional import _backend
from fusedpg.optim._gradients import ShardedGrad

_ATTRIBUTE = "_fusedpg_bridge"


class Gradient(NamedTuple):
    """What a rank knows of the gradient of a parameter."""

    param: torch.Tensor
    local: torch.Tensor  # this rank's
    output: torch.Tensor  # memory laid out alike that may be overwritten
    earlier: ShardedGrad | None  # reduced by an earlier backward, to be added


class Bridge:
    """The one communication hook of a DDP; serves any number of optimizers."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # DDP refers to the bridge.
        self._ddp = weakref.ref(ddp)
        self._owners: dict[torch.Tensor, Any] = {}
        self._task = -1  # the backward that the callback was queued for
        self._used: set[torch.Tensor] = set()
        # Otherwise DDP itself insists that every parameter is used.
        self._tracks_used = bool(ddp.find_unused_parameters or ddp.static_graph)
        # DDP would copy every gradient into its bucket, which is most of what it costs. We take
        # gradients where autograd has left them, unless backward may come back for more.
        # Where GPUs read each other's buckets, that is where gradients have to be.
        info = _backend(ddp.process_group).info()
        self._takes = not ddp.static_graph and info["cuda_arena"] == 0
        self._as_view = bool(ddp.gradient_as_bucket_view)
        self._taken: dict[torch.Tensor, torch.Tensor] = {}
        self._unsynced: dict[torch.Tensor, torch.Tensor] = {}  # gradients under no_sync()
        self._earlier: dict[torch.Tensor, ShardedGrad] = {}
        self._views: dict[torch.Tensor, torch.Tensor] = {}  # into the buckets
        # Gradients in whose place DDP has put memory of a new bucket.
        self._rebound: dict[torch.Tensor, tuple[ShardedGrad, torch.Tensor]] = {}

    @staticmethod
    def of(ddp: DistributedDataParallel) -> "Bridge":
        """The bridge of a DDP; registers its hook at the first call."""
        bridge = getattr(ddp, _ATTRIBUTE, None)
        if bridge is None:
            if ddp._comm_hooks:
                raise RuntimeError(
                    "this DistributedDataParallel already has a communication hook; a fused "
                    "optimizer needs to register its own"
                )
            bridge = Bridge(ddp)
            ddp.register_comm_hook(bridge, _hook)
            # DDP then leaves alone the gradients that the hook has taken.
            ddp.reducer._set_optimizer_in_backward()  # type: ignore[attr-defined]
            setattr(ddp, _ATTRIBUTE, bridge)
        return bridge

    def add(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        ddp = self._ddp()
        assert ddp is not None
        known = set(ddp.module.parameters())
        for param in params:
            if param not in known:
                raise ValueError(
                    "a parameter of the optimizer does not belong to the "
                    "DistributedDataParallel module"
                )
            if self._owner(param) not in (None, optimizer):
                raise ValueError("a parameter belongs to two optimizers")
            if param not in self._owners and param.requires_grad:
                # Runs before DDP's own hook, and unlike DDP's map of used parameters in time.
                param.register_post_accumulate_grad_hook(self._accumulated)
            self._owners[param] = weakref.ref(optimizer)

    def _owner(self, param: torch.Tensor) -> Any:
        """The optimizer of a parameter, if there is one (still)."""
        owner = self._owners.get(param)
        return None if owner is None else owner()

    def weighted_by_joining(self) -> bool:
        """Whether DDP was told to divide by the number of ranks that still have data."""
        ddp = self._ddp()
        return ddp is not None and not getattr(ddp, "_divide_by_initial_world_size", True)

    def _accumulated(self, param: torch.Tensor) -> None:
        """Autograd's news of a gradient."""
        if self._tracks_used:
            self._used.add(param)
        ddp, grad = self._ddp(), param.grad
        if ddp is None or grad is None or self._owner(param) is None:
            return
        if not ddp.require_backward_grad_sync:
            self._unsynced[param] = grad
            return
        # Whether it lies in memory of its own, for sure: a rebuild of the buckets copies
        # gradients that are there already, and lets p.grad point into the new bucket.
        own = self._unsynced.pop(param, grad) is grad
        earlier = self._replaced(param)
        if earlier is not None:
            own = False
        elif isinstance(grad, ShardedGrad):
            # A further backward before step(): only what it has added is to be reduced.
            earlier, grad = grad, grad.unreduced()
            assert grad is not None
        if earlier is not None:
            self._earlier[param] = earlier
        plain = type(grad) is torch.Tensor and grad.layout == torch.strided
        if not plain or grad.stride() != param.stride() or grad.dtype != param.dtype:
            return
        if self._takes:
            self._taken[param] = grad
            if own:
                # DDP copies nothing when the gradient is its own bucket's memory, and where it
                # does not want that, fills the bucket with zeros, which is cheaper than copying.
                param.grad = self._views.get(param, grad) if self._as_view else None

    def rebound(self, grad: ShardedGrad, memory: torch.Tensor) -> None:
        """DDP is about to let ``p.grad`` point to ``memory``, which holds zeros."""
        for param in self._owners:
            if param.grad is grad:
                self._rebound[param] = grad, memory

    def _replaced(self, param: torch.Tensor) -> ShardedGrad | None:
        """The gradient that DDP has replaced by bucket memory, unless it was dropped since."""
        grad, memory = self._rebound.pop(param, (None, None))
        if grad is None or memory is None or param.grad is None:
            return None
        return grad if param.grad.data_ptr() == memory.data_ptr() else None

    def restore(self, params: list[torch.Tensor]) -> None:
        """Undoes what :meth:`rebound` announced, where no backward has followed."""
        for param in params:
            grad = self._replaced(param)
            if grad is not None:
                param.grad = grad

    def reduce(self, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise RuntimeError("fused optimizers do not take sparse gradients; use sparse=False")
        shadow = torch._C._current_graph_task_id() == -1  # a joined rank, which has no backward
        mine: dict[Any, list[Gradient]] = collections.defaultdict(list)
        others = []
        offset = 0
        for param in bucket.parameters():
            # bucket.gradients() has the wrong strides for channels_last: the buffer is laid out
            # as the parameter is.
            grad = buffer.as_strided(param.shape, param.stride(), buffer.storage_offset() + offset)
            offset += param.numel()
            owner = self._owner(param)
            if owner is None:
                others.append((param, grad))
            else:
                local = self._taken.pop(param, grad)
                mine[owner].append(Gradient(param, local, grad, self._earlier.pop(param, None)))
                self._views[param] = grad
        assert offset == buffer.numel(), "DDP has changed the layout of its buckets"
        ddp = self._ddp()
        assert ddp is not None
        if others:
            self._all_reduce(others, shadow, ddp.process_group)
        for owner, gradients in mine.items():
            used = None
            if self._tracks_used:
                flags = [gradient.param in self._used for gradient in gradients]
                used = torch.tensor(flags, dtype=torch.uint8, device=buffer.device)
            owner._gradients_ready(gradients, used, shadow)
        if not shadow:
            self._call_when_done()
        on_gpu = buffer.device.type != "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if on_gpu else None
        )
        future.set_result(buffer)
        return future

    def _all_reduce(
        self,
        gradients: list[tuple[torch.Tensor, torch.Tensor]],
        shadow: bool,
        group: dist.ProcessGroup,
    ) -> None:
        """What DDP does without a hook, for parameters of no optimizer of ours."""
        # DDP has to be told less than this when it does it itself: which are used, and how many
        # ranks have data.
        facts = torch.tensor([float(not shadow), *(p.grad is not None for p, _ in gradients)])
        dist.all_reduce(facts, group=group)
        divisor = facts[0].item() if self.weighted_by_joining() else dist.get_world_size(group)
        for (param, grad), used in zip(gradients, facts[1:].tolist(), strict=True):
            dist.all_reduce(grad, group=group)
            grad.div_(divisor)
            if not used or shadow:
                continue
            if param.grad is None:
                param.grad = grad.clone()
            elif param.grad.data_ptr() != grad.data_ptr():
                param.grad.copy_(grad)

    def _call_when_done(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        engine = torch.autograd.Variable._execution_engine
        # Queued by a callback it runs behind DDP's own, which sets gradients.
        engine.queue_callback(lambda: engine.queue_callback(self._done))

    def _done(self) -> None:
        self._task = -1
        self._used.clear()
        self._taken.clear()
        self._earlier.clear()
        self._unsynced.clear()
        for owner in {ref() for ref in self._owners.values()} - {None}:
            owner._backward_done()


def _hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
