"""Training that goes on when ranks are lost or join: ``fusedpg.hvd.elastic``.

::

    hvd.init()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            for state.batch in range(state.batch, 100):
                step(state)
                if state.batch % 10 == 9:
                    state.commit()
            state.batch = 0

    train(state)

``fusedpg-run --min-np`` starts such a program. The processes that survive keep running: they
return to their last commit, meet the others in a new generation of the job and take over the
state of its rank 0, which is a rank that has the state.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fusedpg import hvd
from fusedpg.hvd import _membership
from fusedpg.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "JobEnded", "ObjectState", "State", "TorchState", "run"]

Result = TypeVar("Result")
_log = logging.getLogger("fusedpg")
JobEnded = _membership.JobEnded


class State:
    """Values that all ranks must have in common; `save`, `restore` and `sync` say how."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Has functions called whenever the ranks have changed, for example to scale a rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `run` when the ranks have changed, before `sync`."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Saves a copy to return to after a failure, and looks whether ranks were added or removed.

        A collective: all ranks call it alike.

        Raises:
            HostsUpdatedInterrupt: on all ranks, when the driver has told any of them.
            HorovodInternalError: a rank is lost.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """The second half of `commit`."""
        membership = _membership.current()
        if membership is None:
            return
        # The driver may have told some ranks and not others yet: all must leave together.
        seen = torch.tensor(membership.changes(), dtype=torch.int64)
        added, removed = hvd.allreduce(seen, op=hvd.Max, name="elastic.host_updates").tolist()
        if added or removed:
            self._hold()
            raise HostsUpdatedInterrupt(skip_sync=not added)

    def save(self) -> None:
        """Copies the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes over the state of rank 0, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to a new number of ranks."""

    def _hold(self) -> None:
        """Called on all ranks before some leave: keeps what those alone have."""


class _Handler:
    """How one kind of value is saved, restored and sent."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        self.value.load_state_dict(hvd.broadcast_object(self.value.state_dict(), root_rank=0))

    def reset(self) -> None:
        pass

    def _hold(self) -> None:
        pass


class _ModelHandler(_Handler):
    def restore(self) -> None:
        self.value.load_state_dict(self.saved)

    def sync(self) -> None:
        hvd.broadcast_parameters(self.value.state_dict(), root_rank=0)


class _FusedHandler(_Handler):
    """Handles an optimizer with ``fused=True``. Each rank has a slice of its state, so that every
    rank keeps the whole state of the last commit; the first one is that of `sync`."""

    def __init__(self, value: object) -> None:
        self.value, self.saved = value, None

    def save(self) -> None:
        self.saved = self.value._hvd_copy()

    def restore(self) -> None:
        if self.saved is not None:
            self.value._hvd_restore(self.saved)

    def sync(self) -> None:
        self.value._hvd_broadcast_state(0)

    def reset(self) -> None:
        self.value._hvd_rebind()

    def _hold(self) -> None:
        self.value._hvd_hold()


class _SamplerHandler(_Handler):
    def reset(self) -> None:
        self.value.reset()


class _ObjectHandler(_Handler):
    """Handles an attribute that is no object of torch, by deep copies, and by pickle to send it."""

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        self.value = copy.deepcopy(self.saved)

    def sync(self) -> None:
        self.value = hvd.broadcast_object(self.value, root_rank=0)


class ObjectState(State):
    """Attributes that all ranks have in common, given by name.

    A commit copies them deeply: a list that is changed afterwards is what it was after a
    failure. Attributes that are set later and were not given here belong to the rank.
    """

    def __init__(self, **kwargs: object) -> None:
        self.__dict__["_handlers"] = {
            name: self._kind(value)(value) for name, value in kwargs.items()
        }
        super().__init__()

    def _kind(self, value: object) -> type[_Handler]:
        return _ObjectHandler

    def __getattr__(self, name: str) -> Any:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            return handlers[name].value
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._handlers:
            super().__setattr__(name, value)
        elif self._kind(value) is type(self._handlers[name]) is _ObjectHandler:
            self._handlers[name].value = value
        else:  # another model, for example: what was committed is not of it
            self._handlers[name] = self._kind(value)(value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        self.save()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def _hold(self) -> None:
        for handler in self._handlers.values():
            handler._hold()


class TorchState(ObjectState):
    """A model, an optimizer, and whatever else the training loop needs to go on.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None; also a `DistributedOptimizer`.
        kwargs: further modules, optimizers, learning rate schedulers and `ElasticSampler`, and
            any objects that pickle can send, such as the epoch.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def _kind(self, value: object) -> type[_Handler]:
        if isinstance(value, torch.nn.Module):
            return _ModelHandler
        if isinstance(value, ElasticSampler):
            return _SamplerHandler
        if hasattr(value, "_hvd_broadcast_state"):
            return _FusedHandler
        # An optimizer's state is sent as an object: a rank that joins has none to receive into.
        if isinstance(value, torch.optim.Optimizer | LRScheduler | ReduceLROnPlateau):
            return _Handler
        return _ObjectHandler


class ElasticSampler(torch.utils.data.Sampler):
    """Divides a dataset among the ranks, and what is left of an epoch after a change of ranks.

    Give it to the `TorchState`, call `record_batch` after each batch, before the commit, and
    `set_epoch` at the end of an epoch.

    Args:
        dataset: of a constant size.
        shuffle: another order in each epoch.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: no sample of it has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of this size as processed on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left among the ranks that there are now."""
        self.rank, self.num_replicas = hvd.rank(), hvd.size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        # All ranks get as many: the first samples come again, more than once if they are few.
        places = range(self.rank, self.total_size, self.num_replicas)
        return iter([left[place % len(left)] for place in places])

    def __len__(self) -> int:
        return self.num_samples


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Makes a function whose first parameter is a `State` go on when ranks are lost or join.

    It is called again after each change of ranks, with the state of the last commit (ranks lost)
    or as it is (ranks added or removed at a commit), the same on all ranks.

    Raises:
        HorovodInternalError: an operation failed and no elastic `fusedpg-run` started the process.
        JobEnded: `fusedpg-run` forms no further generation of the job.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: object, **kwargs: object) -> Result:
        changed = skip_sync = False
        while True:
            try:
                if changed:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                membership = _membership.current()
                if membership is not None:
                    membership.mark_synced()
                return func(state, *args, **kwargs)
            except (HorovodInternalError, dist.DistBackendError) as error:
                if _membership.current() is None:
                    raise
                _log.warning("a rank returns to its last commit: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            changed = True
            _meet_again()

    return wrapper


def _meet_again() -> None:
    """A place in the next generation of the job; one that cannot begin is followed by another."""
    while True:
        hvd.shutdown()
        try:
            hvd.init()
            return
        except JobEnded:
            raise
        except RuntimeError as error:  # a rank was lost while the others met
            _log.warning("the ranks could not meet, and try it again: %s", error)
