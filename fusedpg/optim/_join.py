"""Uneven inputs: torch's ``Join``.

A rank that has joined owns its slice of every gradient, and does not know what the others do with
gradients between backward and ``step()``. So ranks with data say it before they do it, and a
joined rank follows until their step.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from fusedpg import _agreement
from fusedpg.optim._parameters import ParameterGroups

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
NO_SCALE = -1.0  # no scale
_WORDS = 6

# By group: the contexts of its optimizers in the order in which Join was given them, which is the
# same on all ranks.
_contexts: weakref.WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[JoinContext]]] = (
    weakref.WeakKeyDictionary()
)


class JoinContext(ParameterGroups):
    """What an optimizer knows of a Join, which tells ranks that have joined what it does."""

    def __init__(self, optimizer: FusedOptimizer, group: dist.ProcessGroup, *, share: bool) -> None:
        super().__init__(optimizer, group, share=share)
        self.stepped = False  # since gradients were reduced for the last time
        self.shadow = False  # a joined rank, which has no data left
        # Of an iteration: inside of step(), and whether Join has been notified.
        self.in_step = self.notified = False
        # Of a joined rank: whether it has made the others' step, is on the way to it.
        self.followed = self.follows = False
        self._number = -1  # among the optimizers that Join was given

    def joining(self) -> bool:
        """Whether there is a Join that knows the optimizer."""
        found = self._reference()
        return found is not None and bool(found._join_config.enable)

    def enter_join(self) -> None:
        """Join is given the optimizer, in the same order on all ranks."""
        known = _contexts.setdefault(self.group, [])
        self._number = len(known)
        known.append(weakref.ref(self))

    def announce(
        self,
        doing: Doing,
        param: int = EVERY,
        value: float | torch.Tensor = 0.0,
        scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Tells ranks that have joined, if there is a Join, before this rank does it."""
        if self.shadow or self.in_step or not self.joining():
            return
        if self.mode.manual and not self.notified:
            # What the first of a Join's objects owes it before anything else of an iteration.
            Join.notify_join_context(self.optimizer())
            self.notified = True
        factor = NO_SCALE if scale is None else scale
        words = [self._number, doing, param, value, factor, found_inf is not None]
        self._agreed([float(word) for word in words])

    def _agreed(self, words: list[float] | None) -> list[float]:
        """What ranks with data do; None: this rank has none."""
        own = torch.tensor(words or [0.0] * _WORDS, dtype=torch.float64, device=self.device())
        found = _agreement.extremes(own, self.group, has_some=words is not None)
        least, most = (row.tolist() for row in found)
        for one, other in zip(most, least, strict=True):
            if one != other and not (math.isnan(one) and math.isnan(other)):
                names = [Doing(int(words[1])).name.lower() for words in (least, most)]
                raise RuntimeError(
                    "ranks under Join do different things with the gradients of their fused "
                    f"optimizers: {names[0]} ({least}) and {names[1]} ({most})"
                )
        return most

    def follow_step(self) -> None:
        """On a rank that has joined: does what the others do until they have made a step."""
        while not self.followed:
            words = self._agreed(None)
            number = int(words[0])
            known = _contexts[self.group]
            told = known[number]() if 0 <= number < len(known) else None
            if told is None or told._reference() is None:
                raise RuntimeError("Join was given other optimizers on ranks that still have data")
            told.follow(Doing(int(words[1])), int(words[2]), *words[3:])
        self.followed = False

    def follow(
        self, doing: Doing, param: int, value: float, scale: float, found_inf: float
    ) -> None:
        """Does what the others do with their slices, without data."""
        raise NotImplementedError


class StepOnJoin(JoinHook):
    """A rank without data left takes part in the others' steps."""

    def __init__(self, context: JoinContext, step: Callable[[], None]) -> None:
        self._context, self._step = context, step
        context.enter_join()

    def main_hook(self) -> None:
        if self._context.mode.tells:
            self._context.follow_step()
        else:
            self._step()
