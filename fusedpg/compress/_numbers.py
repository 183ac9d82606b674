"""Which numbers parameters of compressors and memories may be: checked here and nowhere else."""

from __future__ import annotations

import math
import operator
from typing import Any

# Kernels work with float32: a larger number would be an infinity there, and a smaller one 0.
_LARGEST = (2 - 2.0**-23) * 2.0**127
_SMALLEST = 2.0**-126


def real(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """The value as a float.

    Raises:
        ValueError: which names the parameter, if the value is not finite (in float32, too), is no
            number, or is out of bounds.
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    fits = number == 0 or _SMALLEST <= abs(number) <= _LARGEST
    fits &= at_least is None or number >= at_least
    fits &= above is None or number > above
    fits &= below is None or number < below
    fits &= at_most is None or number <= at_most
    if fits:
        return number
    bounds = {"at least": at_least, "above": above, "below": below, "at most": at_most}
    raise ValueError(f"{name} is a finite float32 number, {_in_words(bounds)}, got {value!r}")


def _in_words(bounds: dict[str, float | None]) -> str:
    # Large integers in full.
    texts = [
        f"{text} {bound if isinstance(bound, int) else format(bound, 'g')}"
        for text, bound in bounds.items()
        if bound is not None
    ]
    return " and ".join(texts) or "any"


def whole(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """The value as an integer.

    Raises:
        ValueError: which names the parameter, if the value is no integer or is out of bounds.
    """
    try:
        integral = isinstance(value, float) and value.is_integer()
        number = int(value) if integral else operator.index(value)
        fits = not isinstance(value, bool)
    except (TypeError, ValueError):
        number, fits = 0, False
    fits &= at_least is None or number >= at_least
    fits &= at_most is None or number <= at_most
    if fits:
        return number
    wanted = _in_words({"at least": at_least, "at most": at_most})
    raise ValueError(f"{name} is an integer, {wanted}, got {value!r}")


class Real:
    """An attribute that is such a number, whenever it is set. Its class may have a default."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __set_name__(self, owner: type[object], name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: object = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__[self._name]

    def __set__(self, instance: object, value: object) -> None:
        instance.__dict__[self._name] = real(self._name, value, **self._bounds)


class Whole(Real):
    """The same of integers."""

    def __set__(self, instance: object, value: object) -> None:
        instance.__dict__[self._name] = whole(self._name, value, **self._bounds)  # type: ignore[arg-type]
