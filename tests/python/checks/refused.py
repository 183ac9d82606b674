"""What a check expects to be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused(text: str, *kinds: type[Exception]) -> Iterator[None]:
    """The block raises an exception that says a text."""
    expected = kinds or (RuntimeError,)
    try:
        yield
    except expected as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing raised; expected {text!r}")
