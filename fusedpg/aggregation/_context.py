"""A context: takes jobs, and has threads that do them."""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from types import TracebackType

import torch
from torch.distributed import ProcessGroup

from fusedpg.aggregation import _backends, _processors, _schedulers
from fusedpg.aggregation._config import Config
from fusedpg.aggregation._jobs import Job, JobSlice


class ContextState(enum.Enum):
    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True)
class Stats:
    """The counters of a context.

    Attributes:
        jobs_submitted, jobs_finished, jobs_failed: numbers of jobs.
        numel_submitted, numel_finished: elements of their tensors.
        messages: batches of packets exchanged, by thread.
        bytes_sent: bytes of what was added up and of exponents, by thread; with "udp" of packets.
        counters: what the backend counts, by thread. "udp": packets_sent, bytes_sent,
            retransmissions (of both), packets_received, repeated, wrong.
    """

    jobs_submitted: int
    jobs_finished: int
    jobs_failed: int
    numel_submitted: int
    numel_finished: int
    messages: list[int]
    bytes_sent: list[int]
    counters: list[dict[str, int]]


class Context:
    """Does all-reduces that are submitted as jobs.

    All workers submit jobs of the same sizes in the same order; any number may be outstanding. With
    the backend "group" starting and stopping are collectives, too.

    Args:
        config: default: ``Config()``. ``Config.load()`` reads ``switchml.cfg``.
        group: the process group whose ranks are the workers; default: the default group. Not used
            by the backend "dummy".

    Example: see docs/guides/aggregation.md.
    """

    def __init__(self, config: Config | None = None, group: ProcessGroup | None = None) -> None:
        self._config = Config() if config is None else config
        self._group = group
        self._state = ContextState.CREATED
        self._lock = threading.Condition()
        self._unfinished: dict[int, Job] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._submitted = self._finished = self._failed = 0
        self._numel_submitted = self._numel_finished = 0
        self._messages = [0] * self._config.num_worker_threads
        self._bytes = [0] * self._config.num_worker_threads

    @property
    def state(self) -> ContextState:
        return self._state

    @property
    def config(self) -> Config:
        return self._config

    @property
    def num_workers(self) -> int:
        """The number of workers; the context has to be started."""
        return self._backend.num_workers

    def start(self) -> Context:
        """Starts the worker threads, and returns the context itself.

        Raises:
            ValueError: the configuration names what is not there or does not fit the group.
            RuntimeError: the context was started before.
        """
        with self._lock:
            if self._state is not ContextState.CREATED:
                raise RuntimeError(f"aggregation: this context is {self._state.value} already")
            self._state = ContextState.STARTING
        threads = range(self._config.num_worker_threads)
        ready = 0
        try:
            self._make = _processors.prepostprocessor(self._config)
            self._scheduler = _schedulers.scheduler(self._config)
            self._backend = _backends.backend(self._config, self._group)
            for n in threads:
                self._backend.setup_worker(n)
                ready += 1
        except BaseException:
            for n in range(ready):
                self._backend.cleanup_worker(n)
            self._state = ContextState.STOPPED
            raise
        self._threads = [
            threading.Thread(
                target=self._work, args=(n,), name=f"fusedpg-aggregation-{n}", daemon=True
            )
            for n in threads
        ]
        for thread in self._threads:
            thread.start()
        self._state = ContextState.RUNNING
        return self

    def all_reduce_async(self, input: torch.Tensor, output: torch.Tensor | None = None) -> Job:
        """Submits the sum of ``input`` over all workers.

        Args:
            input: contiguous. It must not change before the job has finished.
            output: where the sum goes, of the same shape and type; default: ``input`` itself.

        Raises:
            ValueError: a tensor that is not contiguous, or an output that does not fit.
            RuntimeError: the context is not running, or has failed.
        """
        output = input if output is None else output
        try:
            _check(input, output)
        except Exception as error:
            self._refuse(input, error)
            raise
        with self._lock:
            if self._state is not ContextState.RUNNING:
                raise RuntimeError(
                    f"aggregation: this context is {self._state.value}; jobs are for running ones"
                )
            if self._error is not None:
                raise RuntimeError(
                    "aggregation: this context has failed: make another one"
                ) from self._error
            job = Job(self._submitted, input, output)
            self._submitted += 1
            self._numel_submitted += job.numel
            self._unfinished[job.id] = job
            # In the order of ids.
            if self._config.instant_job_completion or job.numel == 0:
                job.queued(1)
                job.slice_done()
                self._ended(job)
            else:
                try:
                    self._scheduler.enqueue(job)
                except BaseException as error:
                    self._fail(error)
                    raise
        return job

    def _refuse(self, input: torch.Tensor, error: Exception) -> None:
        """Takes the place of a job that the other workers may have submitted, and tells them."""
        if not isinstance(input, torch.Tensor) or not input.numel():
            return
        nothing = torch.zeros(()).expand(input.numel())
        with self._lock:
            running = self._state is ContextState.RUNNING and self._error is None
            if running and not self._config.instant_job_completion:
                self._scheduler.enqueue(Job(self._submitted, nothing, nothing, error))
                self._submitted += 1
                self._numel_submitted += input.numel()

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """The same, and waits for it. Returns the output."""
        return self.all_reduce_async(input, output).wait()

    def wait_for_all_jobs(self, timeout: float | None = None) -> None:
        """Waits until every job that was submitted has ended.

        Raises:
            TimeoutError: some have not after ``timeout`` seconds.
            RuntimeError: one that this call has waited for has failed.
        """
        with self._lock:
            jobs = list(self._unfinished.values())
        ends = None if timeout is None else time.monotonic() + timeout
        for job in jobs:
            job.wait(None if ends is None else max(0.0, ends - time.monotonic()))

    def stats(self) -> Stats:
        with self._lock:
            return Stats(
                self._submitted,
                self._finished,
                self._failed,
                self._numel_submitted,
                self._numel_finished,
                list(self._messages),
                list(self._bytes),
                [self._backend.counters(n) for n in range(len(self._threads))],
            )

    def stop(self) -> None:
        """Waits for the jobs that were submitted, and ends the threads. A failed job raises from
        its own ``wait`` only."""
        with self._lock:
            if self._state in (ContextState.STOPPING, ContextState.STOPPED):
                return
            started = self._state is ContextState.RUNNING
            self._state = ContextState.STOPPING if started else ContextState.STOPPED
        if not started:
            return
        self._scheduler.stop()
        for thread in self._threads:
            thread.join()
        for n in range(len(self._threads)):
            self._backend.cleanup_worker(n)
        self._state = ContextState.STOPPED

    def __enter__(self) -> Context:
        return self.start() if self._state is ContextState.CREATED else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # the others would wait for jobs that this worker does not submit
            self._fail(error)
        self.stop()

    # --- the threads ---------------------------------------------------------------------------

    def _work(self, thread: int) -> None:
        try:
            while (part := self._scheduler.get_slice(thread)) is not None:
                part.job.running()
                if self._error is None and part.job.refused is not None:
                    if part.numel or not self._backend.processes_packets:  # else nobody waits
                        self._backend.refuse(thread, part.job.refused)
                elif self._error is None:
                    with torch.inference_mode(part.output.is_inference()), torch.no_grad():
                        self._do(thread, part)
                self._scheduler.slice_done(thread, part)
                if part.job.slice_done():
                    self._ended(part.job)
        except BaseException as error:  # whatever a program's own part raises
            self._fail(error)

    def _do(self, thread: int, part: JobSlice) -> None:
        if self._backend.does_slices:
            self._bytes[thread] += self._backend.do_slice(thread, part)
            self._messages[thread] += 1
            return
        if not self._backend.processes_packets:
            self._exchange(thread, _processors.Message(part.output))
            return
        processor = self._make(part, self._config, self._backend.num_workers)
        for batch in range(processor.batches):
            message = processor.preprocess(batch)
            self._exchange(thread, message)
            processor.postprocess(batch, message)

    def _exchange(self, thread: int, message: _processors.Message) -> None:
        self._backend.exchange(thread, message)
        self._messages[thread] += 1
        for part in (message.entries, message.extra):
            self._bytes[thread] += 0 if part is None else part.nbytes

    def _fail(self, error: BaseException) -> None:
        """No job after this one can be right: threads of other workers have got out of step."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            jobs = list(self._unfinished.values())
        self._backend.abort()
        for job in jobs:
            if job.fail(error):
                self._ended(job)

    def _ended(self, job: Job) -> None:
        with self._lock:
            self._unfinished.pop(job.id, None)
            if job._error is None:
                self._finished += 1
                self._numel_finished += job.numel
            else:
                self._failed += 1


def _check(input: torch.Tensor, output: torch.Tensor) -> None:
    for name, tensor in (("input", input), ("output", output)):
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"aggregation: {name} must be a contiguous dense tensor")
    if input.shape != output.shape or input.dtype != output.dtype:
        raise ValueError(
            f"aggregation: output is {tuple(output.shape)} {output.dtype}, "
            f"but input {tuple(input.shape)} {input.dtype}"
        )
    begin, other = input.data_ptr(), output.data_ptr()
    if begin != other and abs(begin - other) < input.nbytes and input.device == output.device:
        raise ValueError("aggregation: input and output overlap without being the same")
