"""Backends add up messages over all workers."""

from __future__ import annotations

import abc
import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fusedpg import _agreement, _own_group
from fusedpg._refusal import shared_errors, tell
from fusedpg._registration import BACKEND, load_extension
from fusedpg.aggregation._config import Config, named
from fusedpg.aggregation._jobs import JobSlice
from fusedpg.aggregation._processors import Message


class Backend(abc.ABC):
    """Carries messages of several threads.

    Args:
        config: of the context.
        group: the process group that the context was given, or None.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
        self.config = config
        self.group = group

    @property
    def num_workers(self) -> int:
        """The number of workers that add up."""
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

    def refuse(self, thread: int, error: Exception) -> None:  # noqa: B027
        """This worker's arguments were wrong: the others are to hear of it where they exchange."""

    @property
    def does_slices(self) -> bool:
        """Whether it pre- and postprocesses by itself: ``do_slice`` is called, not ``exchange``."""
        return False

    def do_slice(self, thread: int, part: JobSlice) -> int:
        """Puts the sum of ``part.input`` into ``part.output``; returns the bytes it has sent."""
        raise NotImplementedError

    def counters(self, thread: int) -> dict[str, int]:
        """A thread's counters, if the backend has some."""
        return {}

    def cleanup_worker(self, thread: int) -> None:  # noqa: B027
        """Called once the thread has ended, by the one that stops the context."""

    def abort(self) -> None:  # noqa: B027
        """Something has failed here: what waits for this worker, here and elsewhere, need not."""


class _OfGroup(Backend):
    """A backend whose workers are the ranks of a process group."""

    group: dist.ProcessGroup

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
        if group is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    f'aggregation: the backend "{config.backend}" needs torch.distributed: call '
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

    @property
    def num_workers(self) -> int:
        return self._size


class Group(_OfGroup):
    """Collectives of a process group, each thread's of a group of its own.

    With a group that uses aggregators, they go by these.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
        super().__init__(config, group)
        self._groups: list[dist.ProcessGroup] = []

    def setup_worker(self, thread: int) -> None:
        self._groups.append(_own_group.make(self.group, f"fusedpg.aggregation/{thread}"))

    def exchange(self, thread: int, message: Message) -> None:
        group = self._groups[thread]
        if message.entries is not None:
            dist.all_reduce(message.entries, group=group)
        if message.extra is not None:
            dist.all_reduce(message.extra, dist.ReduceOp.MAX, group=group)

    def refuse(self, thread: int, error: Exception) -> None:
        tell(self._groups[thread], error, shared_errors())

    def cleanup_worker(self, thread: int) -> None:
        # One that the program has destroyed meanwhile is gone.
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group(self._groups[thread])

    def abort(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RuntimeError, ValueError):
                if dist.get_backend(group) == BACKEND:
                    group.abort()


class Udp(_OfGroup):
    """SwitchML's protocol: packets over UDP to aggregators that add integers up.

    Each thread has a session of its own, at ``config.aggregators`` in turn. The process group
    serves to begin it, and says how long a job may wait.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
        super().__init__(config, group)
        self._places = [place.strip() for place in config.aggregators.split(",") if place.strip()]
        if not self._places:
            raise ValueError('aggregation: the backend "udp" needs Config(aggregators="host:port")')
        if config.prepostprocessor not in ("bypass", "cpu_exponent_quantizer"):
            raise ValueError(
                'aggregation: the backend "udp" has processors of its own, "bypass" and '
                f'"cpu_exponent_quantizer", found {config.prepostprocessor!r}'
            )
        self._workers: list[Any] = []
        self._counters: list[dict[str, int]] = []
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout
        self._deadline_ms = max(1, int(timeout.total_seconds() * 1000))

    def setup_worker(self, thread: int) -> None:
        group = _own_group.make(self.group, f"fusedpg.aggregation.udp/{thread}")
        worker, why = None, ""
        try:
            session = [secrets.token_hex(16)]
            dist.broadcast_object_list(session, group=group, group_src=0)
            try:
                worker = load_extension().UdpWorker(
                    self._places[thread % len(self._places)],
                    session[0],
                    rank=dist.get_rank(group),
                    workers=self._size,
                    packet_numel=self.config.packet_numel,
                    slots=self.config.batch_packets,
                    timeout_ms=self.config.timeout,
                    with_seal=self.config.seal,
                    deadline_ms=min(self._deadline_ms // 2 + 1, 10_000),
                )
            except (RuntimeError, ValueError) as error:
                why = f"aggregation: {error}"
            answers = _agreement.by_rank(why, group)
        except BaseException:
            if worker is not None:
                worker.end()
            raise
        finally:
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)
        if any(answers):
            if worker is not None:
                worker.end()
            raise RuntimeError(why or next(filter(None, answers)))
        self._workers.append(worker)
        self._counters.append(worker.stats() if worker is not None else {})

    @property
    def does_slices(self) -> bool:
        return True

    def do_slice(self, thread: int, part: JobSlice) -> int:
        quantizes = self.config.prepostprocessor == "cpu_exponent_quantizer"
        kinds = (torch.float32, torch.int32) if quantizes else (torch.int32,)
        if part.input.dtype not in kinds or not part.input.is_cpu:
            raise TypeError(
                'aggregation: the backend "udp" takes int32, and with "cpu_exponent_quantizer" '
                f"float32, on the CPU; found {part.input.dtype} on {part.input.device}"
            )
        if part.input.data_ptr() != part.output.data_ptr():
            part.output.copy_(part.input)
        before = self._counters[thread]["bytes_sent"]
        worker = self._workers[thread]
        try:
            worker.all_reduce(part.output, self._deadline_ms)
        finally:
            self._counters[thread] = worker.stats()
        return int(self._counters[thread]["bytes_sent"] - before)

    def counters(self, thread: int) -> dict[str, int]:
        return dict(self._counters[thread])

    def exchange(self, thread: int, message: Message) -> None:
        raise NotImplementedError  # it does slices

    def cleanup_worker(self, thread: int) -> None:
        self._workers[thread].end()

    def abort(self) -> None:
        for worker in self._workers:
            worker.end()


class Dummy(Backend):
    """No network: sleeps as long as a link would take, and adds this worker's own values up as
    often as there are workers.

    All threads share the link, whose rate is ``dummy_bandwidth``; a packet costs its bytes alone.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
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


Make = Callable[[Config, dist.ProcessGroup | None], Backend]
_by_name: dict[str, Make] = {"group": Group, "udp": Udp, "dummy": Dummy}


def register_backend(name: str, make: Make) -> None:
    """Makes ``Config(backend=name)`` call ``make(config, group)``; a name that is there already is
    replaced."""
    _by_name[name] = make


def backend(config: Config, group: dist.ProcessGroup | None) -> Backend:
    return named("backend", _by_name, config.backend)(config, group)
