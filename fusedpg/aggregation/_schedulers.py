"""Schedulers say which thread does which slice of which job, and when."""

from __future__ import annotations

import abc
import collections
import itertools
import threading
from collections.abc import Callable

from fusedpg.aggregation._config import Config, named
from fusedpg.aggregation._jobs import Job, JobSlice


class Scheduler(abc.ABC):
    """Cuts jobs into slices and hands them to threads.

    With the backend "group" every rank's thread number n must be handed the same slices in the same
    order, because they are collectives of a process group of that thread: a scheduler may decide by
    what all ranks have in common (sizes, the order of submission), not by what has happened so far.

    Methods are called by several threads.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @abc.abstractmethod
    def enqueue(self, job: Job) -> None:
        """Takes a job. Calls ``job.queued`` with the number of its slices, before any is handed
        out."""

    @abc.abstractmethod
    def get_slice(self, thread: int) -> JobSlice | None:
        """Waits for the next slice of this thread. None: stopped, and nothing is left for it."""

    def slice_done(self, thread: int, part: JobSlice) -> None:  # noqa: B027
        """The thread has done it."""

    @abc.abstractmethod
    def stop(self) -> None:
        """No job comes any more; threads that wait are woken."""


class Fifo(Scheduler):
    """Every job is cut into one slice for each thread; a thread does them in the order of
    submission."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._queues: list[collections.deque[JobSlice]] = [
            collections.deque() for _ in range(config.num_worker_threads)
        ]
        self._changed = threading.Condition()
        self._stopped = False

    def enqueue(self, job: Job) -> None:
        threads = len(self._queues)
        # Whole packets, so that a packet's exponent does not depend on the number of threads.
        packets = -(-job.numel // self.config.packet_numel)
        edges = [
            min(packets * n // threads * self.config.packet_numel, job.numel)
            for n in range(threads + 1)
        ]
        edges[-1] = job.numel
        source, target = job.input.view(-1), job.output.view(-1)
        slices = [JobSlice(job, source[a:b], target[a:b]) for a, b in itertools.pairwise(edges)]
        with self._changed:
            job.queued(threads)
            for queue, part in zip(self._queues, slices):
                queue.append(part)
            self._changed.notify_all()

    def get_slice(self, thread: int) -> JobSlice | None:
        queue = self._queues[thread]
        with self._changed:
            self._changed.wait_for(lambda: queue or self._stopped)
            return queue.popleft() if queue else None

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


_by_name: dict[str, Callable[[Config], Scheduler]] = {"fifo": Fifo}


def register_scheduler(name: str, make: Callable[[Config], Scheduler]) -> None:
    """Makes ``Config(scheduler=name)`` call ``make``; a name that is there already is replaced."""
    _by_name[name] = make


def scheduler(config: Config) -> Scheduler:
    return named("scheduler", _by_name, config.scheduler)(config)
