"""Ending operations that are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def end_all(finishers: Iterable[Callable[[], None]]) -> None:
    """Calls all of them, and raises the first error: an operation that failed does not end those
    behind it, which go on writing to parameters and gradients."""
    first: BaseException | None = None
    for finish in finishers:
        try:
            finish()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
