"""The interface of an optimizer to modes, gradients and the bridge; and torch's ``Join``.

Under Join, for uneven inputs, a rank that has joined owns its slice of every gradient, and does not
know what the others do with gradients between backward and ``step()``. So ranks with data say it
before they do it, and a joined rank follows until their step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from fusedpg import _agreement
from fusedpg._refusal import telling
from fusedpg.optim._gradients import (
    EVERY,
    NO_SCALE,
    Doing,
    GradContext,
    ShardedGrad,
    change,
    end_all,
    norms,
    unscale_,
)
from fusedpg.optim._parameters import ParameterGroups

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fusedpg.optim._base import FusedOptimizer

_WORDS = 6

# By group: the contexts of its optimizers in the order in which Join was given them, which is the
# same on all ranks.
_contexts: weakref.WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[StepContext]]] = (
    weakref.WeakKeyDictionary()
)


class Reduction(TypedDict):
    """How operations combine the ranks' gradients."""

    mean: bool
    weight: float | None  # of this rank's gradients; None: all ranks count alike


class StepOptions(TypedDict, total=False):
    """Arguments of a step besides parameters and gradients."""

    reduced: bool  # gradients are slices that were reduced before; else it reduces them
    mean: bool  # as in `Reduction`
    weight: float | None
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None


class StepContext(ParameterGroups):
    """The interface of an optimizer to its mode, its gradients and the bridge to a DDP."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        group: dist.ProcessGroup,
        *,
        share: bool,
        mean: bool,
        max_grad_norm: float | None,
    ) -> None:
        super().__init__(optimizer, group, share=share)
        self.mean = mean
        self.max_grad_norm = max_grad_norm
        self.weight: float | None = None  # of this rank's gradients in the mean
        self.in_flight: list[Callable[[], None]] = []  # what ends operations under way
        self.gradients = GradContext(self)
        self.stepped = False  # since gradients were reduced for the last time
        self.shadow = False  # a joined rank, which has no data left
        # In an iteration: inside of step(), and whether Join has been notified.
        self.in_step = self.notified = False
        # On a joined rank: whether it has made the others' step, is on the way to it.
        self.followed = self.follows = False
        self.join_number = -1  # among the optimizers that Join was given

    # --- operations under way -------------------------------------------------------------

    def telling(self) -> telling:
        """For a block in which the other ranks communicate: they hear of what this one raises."""
        return telling(
            self.group,
            when=lambda: self.device().type == "cpu",
            times=lambda: self.mode.operations_ahead(),
        )

    def wait(self) -> None:
        """For work under way that changes gradients, parameters or state."""
        try:
            if self.in_flight:
                self.end_operations()
        finally:
            if self.bridge is not None and self.bridge.replaced:
                self.bridge.restore()

    def end_operations(self) -> None:
        in_flight, self.in_flight = self.in_flight, []
        if in_flight:
            # Before they end: known norms hold gradients, which could not be reused.
            self.gradients.changed()
            end_all(in_flight)

    def reduction(self, shadow: bool) -> Reduction:
        """How the next operation combines the ranks' gradients."""
        weight, bridge = self.weight, self.bridge
        if weight is None and bridge is not None and bridge.weighted_by_joining():
            weight = 1.0
        if weight is not None and shadow:
            weight = 0.0
        return {"mean": self.mean, "weight": weight}

    def fused_step(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        used: torch.Tensor | None = None,
        **options: Unpack[StepOptions],
    ) -> list[Callable[[], None]]:
        """Starts the step of some parameters. Returns what ends its operations."""
        optimizer = self._reference() or self.optimizer()  # which raises
        return optimizer._fused_step(params, grads, used=used, **options)

    def drop_gradients(self) -> None:
        self.extension.set_gradients(self.parameters(), None)

    def joined(self) -> None:
        """This rank has no data left, and nobody calls ``zero_grad()`` after its last step."""
        if self.stepped:
            self.drop_gradients()

    def reduce(self) -> None:
        """Everything that is not reduced yet."""
        with self.telling():
            self.mode.reduce_asked()

    # --- Join: uneven inputs ---------------------------------------------------------------

    def joining(self) -> bool:
        """Whether there is a Join that knows the optimizer."""
        found = self._reference()
        return found is not None and bool(found._join_config.enable)

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
            # The first of a Join's objects has to notify it before anything else in an iteration.
            Join.notify_join_context(self.optimizer())
            self.notified = True
        factor = NO_SCALE if scale is None else scale
        words = [self.join_number, doing, param, value, factor, found_inf is not None]
        self._agreed([float(word) for word in words])

    def _agreed(self, words: list[float] | None) -> list[float]:
        """Asks what ranks with data do; None: this rank has no data."""
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

    def number_of(self, gradient: ShardedGrad) -> int:
        param = gradient.param()
        return next(i for i, p in enumerate(self.parameters()) if p is param)

    def follow(
        self, doing: Doing, param: int, value: float, scale: float, found_inf: float
    ) -> None:
        if self.mode.manual and not self.follows:
            self.drop_gradients()  # of its own last step
        self.follows = True
        if doing is Doing.STEP:
            self.optimizer()._shadow_step(None if scale == NO_SCALE else scale, bool(found_inf))
            self.followed, self.follows = True, False
            return
        self.shadow = True
        try:
            self._follow_change(doing, param, value)
        finally:
            self.shadow = False

    def _follow_change(self, doing: Doing, param: int, value: float) -> None:
        if doing is Doing.REDUCE:
            self.optimizer().reduce_gradients()
        elif doing is Doing.NORMS:
            norms([gradient.local() for gradient in self.gradients.gradients()], value, self.group)
        elif doing is Doing.UNSCALE:
            dtype = self.parameters()[param].dtype
            grads = [gradient for gradient in self.gradients.gradients() if gradient.dtype == dtype]
            device = self.device()
            unscale_(grads, torch.zeros(1, device=device), torch.tensor(value, device=device))
        elif param == EVERY:
            self.gradients.multiply(value)
        else:
            grad = self.parameters()[param].grad
            assert grad is not None
            change(grad, doing, value)


class StepOnJoin(JoinHook):
    """A rank without data left takes part in the others' steps."""

    def __init__(self, context: StepContext, step: Callable[[], None]) -> None:
        self._context, self._step = context, step
        known = _contexts.setdefault(context.group, [])
        context.join_number = len(known)
        known.append(weakref.ref(context))

    def main_hook(self) -> None:
        bridge = self._context.bridge
        if bridge is not None and bridge.others_accumulate():
            return
        if self._context.mode.tells:
            self._context.follow_step()
        else:
            self._step()
