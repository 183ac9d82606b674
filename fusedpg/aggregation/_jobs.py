"""Jobs, and the slices that worker threads do of them."""

from __future__ import annotations

import dataclasses
import enum
import threading
import time

import torch


class JobStatus(enum.Enum):
    INIT = "init"
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Job:
    """One all-reduce that has been submitted.

    Attributes:
        id: counts the context's jobs from 0.
        input: what is added up. It must not change before the job has finished.
        output: where the sum goes; not to be looked at before the job has finished.
        submitted: when, by ``time.monotonic()``.
        finished: when it finished or failed, or None.
    """

    def __init__(
        self,
        number: int,
        input: torch.Tensor,
        output: torch.Tensor,
        refused: Exception | None = None,
    ) -> None:
        """`refused`: why this worker does not do it, which it tells the others in its place."""
        self.id = number
        self.input = input
        self.output = output
        self.submitted = time.monotonic()
        self.finished: float | None = None
        self._status = JobStatus.INIT
        self._slices_left = 0
        self._error: BaseException | None = refused
        self.refused = refused
        self._changed = threading.Condition()

    @property
    def numel(self) -> int:
        return self.input.numel()

    @property
    def status(self) -> JobStatus:
        return self._status

    @property
    def done(self) -> bool:
        return self._status in (JobStatus.FINISHED, JobStatus.FAILED)

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Waits until the job has finished, and returns its output.

        Args:
            timeout: in seconds; None: as long as it takes. The backend "group" ends a job at its
                process group's time limit.

        Raises:
            TimeoutError: it has not finished by then. It goes on.
            RuntimeError: it failed; the cause is the error of the part that failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"job {self.id} has not finished after {timeout} s")
        if self._error is not None:
            raise RuntimeError(f"job {self.id} failed: {self._error}") from self._error
        return self.output

    # --- what the context and schedulers say ---------------------------------------------------

    def queued(self, slices: int) -> None:
        """It has been cut into so many slices, which wait for threads."""
        with self._changed:
            self._slices_left = slices
            self._status = JobStatus.QUEUED

    def running(self) -> None:
        with self._changed:
            if self._status is JobStatus.QUEUED:
                self._status = JobStatus.RUNNING

    def slice_done(self) -> bool:
        """Whether that was the last one."""
        with self._changed:
            self._slices_left -= 1
            if self._slices_left > 0 or self.done:
                return False
            self._end(JobStatus.FINISHED if self._error is None else JobStatus.FAILED)
            return True

    def fail(self, error: BaseException) -> bool:
        """Whether it had not ended before."""
        with self._changed:
            if self.done:
                return False
            self._error = error
            self._end(JobStatus.FAILED)
            return True

    def _end(self, status: JobStatus) -> None:
        self._status = status
        self.finished = time.monotonic()
        self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class JobSlice:
    """A range of a job's elements, which one thread does.

    Attributes:
        input, output: flat views of the job's, of the same length.
    """

    job: Job
    input: torch.Tensor
    output: torch.Tensor

    @property
    def numel(self) -> int:
        return self.input.numel()
