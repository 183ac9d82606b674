"""Tells the peers of a rank that it has raised before it began an operation of a group.

They may wait in that operation, or come to it later: there they raise, too, with the reason. The
group itself does this for what it checks; here is what Python adds for what it checks before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import TracebackType

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension


def shared_errors() -> int:
    """The number of errors of this thread that all ranks of a group have alike."""
    return int(load_extension()._shared_errors())


def tell(
    group: dist.ProcessGroup | None,
    error: Exception,
    before: int,
    values: Iterable[object] = (),
    times: int = 1,
) -> None:
    """Tells the peers of `error`, unless they have it from an operation themselves.

    Args:
        group: the group of the operation; of another backend nothing is told.
        before: `shared_errors()` before the operation.
        values: the call's arguments; where tensors are on GPUs nothing is told.
        times: how many operations the peers begin before they wait for one.
    """
    if shared_errors() != before or any(map(_on_gpu, values)):
        return
    from fusedpg.functional import _backend

    with contextlib.suppress(Exception):  # there is no such group, or no more
        for _ in range(times):
            _backend(group).refuse(str(error).partition("\n")[0] or type(error).__name__)


def _on_gpu(value: object) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return any(map(_on_gpu, value))
    return isinstance(value, torch.Tensor) and value.is_cuda


class telling:
    """A block that a rank may leave by an exception of its own: `tell` for all in it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *values: object,
        when: Callable[[], bool] = lambda: True,
        times: Callable[[], int] = lambda: 1,
    ) -> None:
        """`when`: whether the peers would wait for this rank, and `times`: how many operations they
        begin before they wait for one; asked when it raises."""
        self._group, self._values, self._when, self._times = group, values, when, times

    def __enter__(self) -> None:
        self._before = shared_errors()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stops = isinstance(error, StopIteration)  # of a generator, which is no error
        if isinstance(error, Exception) and not stops and self._when():
            tell(self._group, error, self._before, self._values, self._times())


__all__ = ["shared_errors", "tell", "telling"]
