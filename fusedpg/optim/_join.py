"""Uneven inputs: torch's ``Join``.

A rank that has joined owns its slice of every gradient, and does not know what the others do with
gradients between backward and ``step()``. So ranks with data say it before they do it, and a
joined rank follows until their step.
"""

from __future__ import annotations

import enum
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer


class Doing(enum.IntEnum):
    """What a rank with data is about to do with an optimizer's gradients."""

    STEP = enum.auto()
    REDUCE = enum.auto()
    NORMS = enum.auto()  # value: their order
    UNSCALE = enum.auto()  # value: the factor; of gradients of the type of one parameter's
    MULTIPLY = enum.auto()
    DIVIDE = enum.auto()
    ZERO = enum.auto()


EVERY = -1  # in place of a parameter's number
_NONE = -1.0  # no scale
_WORDS = 6

# By group: its optimizers in the order in which Join was given them, the same on all ranks.
_optimizers: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class StepOnJoin(JoinHook):
    """A rank without data left takes part in the others' steps."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        known = _optimizers.setdefault(optimizer._group, [])
        optimizer._join_number = len(known)
        known.append(weakref.ref(optimizer))

    def main_hook(self) -> None:
        optimizer = self._optimizer
        if not optimizer._mode.tells:
            optimizer._shadow_step()
            return
        while not optimizer._followed:
            _follow(optimizer, _agreed(optimizer, None))
        optimizer._followed = False


def announce(
    optimizer: FusedOptimizer,
    doing: Doing,
    param: int = EVERY,
    value: Any = 0.0,
    scale: Any = None,
    found_inf: Any = None,
) -> None:
    """Tells ranks that have joined, if there is a Join, before this rank does it."""
    if not optimizer._join_config.enable or optimizer._shadow or optimizer._in_step:
        return
    if optimizer._mode.manual and not optimizer._notified:
        # What the first of a Join's objects owes it before anything else of an iteration.
        Join.notify_join_context(optimizer)
        optimizer._notified = True
    factor = _NONE if scale is None else scale
    words = [optimizer._join_number, doing, param, value, factor, found_inf is not None]
    _agreed(optimizer, [float(word) for word in words])


def announce_change(gradient: Any, doing: Doing, value: Any = 0.0) -> None:
    """Of one gradient, if others have slices of it and it is still to be applied."""
    optimizer = gradient._context.joining()
    if optimizer is not None and gradient.holds_reduced() and not optimizer._stepped:
        announce(optimizer, doing, number_of(optimizer, gradient), value)


def number_of(optimizer: FusedOptimizer, gradient: Any) -> int:
    param = gradient._param()
    return next(i for i, p in enumerate(optimizer._all_parameters()) if p is param)


def _agreed(optimizer: FusedOptimizer, words: list[float] | None) -> list[float]:
    """What ranks with data do; None: this rank has none."""
    both = torch.full((2, _WORDS), -math.inf, dtype=torch.float64, device=optimizer._device())
    if words is not None:
        both[0] = torch.tensor(words)
        both[1] = -both[0]
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=optimizer._group)
    most, least = both[0].tolist(), (-both[1]).tolist()
    for one, other in zip(most, least, strict=True):
        if one != other and not (math.isnan(one) and math.isnan(other)):
            names = [Doing(int(words[1])).name.lower() for words in (least, most)]
            raise RuntimeError(
                "ranks under Join do different things with the gradients of their fused "
                f"optimizers: {names[0]} ({least}) and {names[1]} ({most})"
            )
    return most


def _follow(optimizer: FusedOptimizer, words: list[float]) -> None:
    """Does what the others do with an optimizer of this group, without data."""
    number = int(words[0])
    known = _optimizers[optimizer._group]
    told = known[number]() if 0 <= number < len(known) else None
    if told is None:
        raise RuntimeError("Join was given other optimizers on ranks that still have data")
    doing, param, value = Doing(int(words[1])), int(words[2]), words[3]
    if told._mode.manual and not told._follows:
        told._drop_gradients()  # of its own last step
    told._follows = True
    if doing is Doing.STEP:
        told._shadow_step(None if words[4] == _NONE else words[4], bool(words[5]))
        told._followed, told._follows = True, False
        return
    told._shadow = True
    try:
        told._context.follow(doing, param, value)
    finally:
        told._shadow = False
