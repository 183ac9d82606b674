"""What adds up a message over all workers."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fusedpg import _own_group
from fusedpg._registration import BACKEND
from fusedpg.aggregation._config import Config
from fusedpg.aggregation._processors import Message


class Backend(abc.ABC):
    """Carries messages of several threads.

    Args:
        config: of the context.
        group: the process group that the context was given, or None.
    """

    def __init__(self, config: Config, group: Any) -> None:
        self.config = config
        self.group = group

    @property
    def num_workers(self) -> int:
        """How many add up."""
        return self.config.num_workers or 1

    @property
    def processes_packets(self) -> bool:
        """Without that, slices are not pre- and postprocessed; ``exchange`` gets their output."""
        return True

    def setup_worker(self, thread: int) -> None:  # noqa: B027
        """Called by the thread that starts the context, for each worker thread in order."""

    @abc.abstractmethod
    def exchange(self, thread: int, message: Message) -> None:
        """Puts sums in the place of ``message.entries``, and maxima in that of ``extra``."""

    def cleanup_worker(self, thread: int) -> None:  # noqa: B027
        """Called once the thread has ended, by the one that stops the context."""

    def abort(self) -> None:  # noqa: B027
        """Something has failed here: what waits for this worker, here and elsewhere, need not."""


class Group(Backend):
    """Collectives of a process group, each thread's of a group of its own.

    With a group that uses aggregators, they go by these.
    """

    def __init__(self, config: Config, group: Any) -> None:
        if group is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    'aggregation: the backend "group" needs torch.distributed: call '
                    'init_process_group first, or use Config(backend="dummy")'
                )
            group = dist.group.WORLD
        super().__init__(config, group)
        size = dist.get_world_size(group)
        if config.num_workers not in (None, size):
            raise ValueError(
                f"aggregation: num_workers is {config.num_workers}, but the process group has "
                f"{size} ranks"
            )
        self._size = size
        self._groups: list[Any] = []

    @property
    def num_workers(self) -> int:
        return self._size

    def setup_worker(self, thread: int) -> None:
        self._groups.append(_own_group.make(self.group, f"fusedpg.aggregation/{thread}"))

    def exchange(self, thread: int, message: Message) -> None:
        group = self._groups[thread]
        if message.entries is not None:
            dist.all_reduce(message.entries, group=group)
        if message.extra is not None:
            dist.all_reduce(message.extra, dist.ReduceOp.MAX, group=group)

    def cleanup_worker(self, thread: int) -> None:
        # One that the program has destroyed meanwhile is gone.
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group(self._groups[thread])

    def abort(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RuntimeError, ValueError):
                if dist.get_backend(group) == BACKEND:
                    group.abort()


class Dummy(Backend):
    """No network: sleeps as long as a link would take, and adds this worker's own values up as
    often as there are workers.

    All threads share the link, whose rate is ``dummy_bandwidth``; a packet costs its bytes alone.
    """

    def __init__(self, config: Config, group: Any) -> None:
        super().__init__(config, group)
        self._lock = threading.Lock()
        self._free = time.monotonic()  # when the link has carried what it was given

    @property
    def processes_packets(self) -> bool:
        return self.config.dummy_process_packets

    def exchange(self, thread: int, message: Message) -> None:
        parts = [part for part in (message.entries, message.extra) if part is not None]
        seconds = sum(part.nbytes for part in parts) * 8 / (self.config.dummy_bandwidth * 1e6)
        with self._lock:
            ends = self._free = max(self._free, time.monotonic()) + seconds
        time.sleep(max(0.0, ends - time.monotonic()))
        if message.entries is not None and self.processes_packets and self.num_workers > 1:
            message.entries.mul_(self.num_workers)


Make = Callable[[Config, Any], Backend]
_by_name: dict[str, Make] = {"group": Group, "dummy": Dummy}


def register_backend(name: str, make: Make) -> None:
    """Makes ``Config(backend=name)`` call ``make(config, group)``; a name that is there already is
    replaced."""
    _by_name[name] = make


def backend(config: Config, group: Any) -> Backend:
    if config.backend not in _by_name:
        raise ValueError(f"no backend {config.backend!r}; there are {sorted(_by_name)}")
    return _by_name[config.backend](config, group)
