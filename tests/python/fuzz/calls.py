"""What a step is on one rank: the call, its tensors and what must be in them afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from checks.cases import digest
from fuzz.core import Wrong
from fuzz.programs import GroupSpec, Step
from fuzz.slots import Slot, contents, dense


class Env:
    """One step as one member sees it."""

    def __init__(self, step: Step, spec: GroupSpec, group: Any, rank: int, hosts: bool) -> None:
        self.step, self.spec, self.group, self.hosts = step, spec, group, hosts
        self.args = step.args
        self.size = spec.size
        self.me = spec.ranks.index(rank)
        self.rng = random.Random(f"{step.seed}/{self.me}")
        self.dtype: torch.dtype = step.args.get("dtype", torch.float32)
        self.slots: list[tuple[Slot, Callable[[], torch.Tensor | None], bool]] = []

    def arena(self, *size: int, dtype: torch.dtype, group: Any) -> torch.Tensor:
        import fusedpg

        with contextlib.suppress(torch.OutOfMemoryError):
            return fusedpg.empty(*size, dtype=dtype, group=group)
        return torch.empty(*size, dtype=dtype)

    def contents(self, index: int, label: object, shape: Sequence[int]) -> torch.Tensor:
        """What member `index` has put into its tensor of this name."""
        data = self.args.get("data", "exact")
        return contents(self.step.seed, index, label, shape, self.dtype, data)

    def everybody(self, label: object, shape: Sequence[int]) -> list[torch.Tensor]:
        return [self.contents(index, label, shape) for index in range(self.size)]

    def _slot(self, values: torch.Tensor, **options: Any) -> Slot:
        return Slot(values, self.rng, arena=self.arena, group=self.group, **options)

    def given(self, label: object, shape: Sequence[int], **options: Any) -> torch.Tensor:
        """An input, which nobody may write."""
        values = self.contents(self.me, label, shape)
        if options.get("dense"):
            values = values.contiguous()
        slot = self._slot(values, only_input=True, **options)
        self.slots.append((slot, lambda: None, False))
        return slot.tensor

    def result(
        self,
        shape: Sequence[int],
        expected: Callable[[], torch.Tensor | None],
        *,
        start: torch.Tensor | None = None,
        equal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """A tensor to be written; `equal` on all members."""
        values = torch.empty(tuple(shape), dtype=self.dtype) if start is None else start
        if start is None:
            values.view(-1).view(torch.uint8).fill_(1)
        slot = self._slot(values, **options)
        self.slots.append((slot, expected, equal))
        return slot.tensor

    def root(self) -> int:
        """The root's global rank."""
        return self.spec.ranks[self.args["root"]]

    def flip(self) -> None:
        """Turns one bit of a result over: what comes after must notice."""
        for slot, expected, _ in self.slots:
            if slot.tensor.numel() and expected() is not None:
                place = slot.memory.view(torch.uint8)
                at = slot.offset() * slot.memory.element_size()
                place[at] ^= 4
                return

    def verify(self) -> list[str]:
        """What is wrong after the call."""
        found = [slot.wrong(expected()) for slot, expected, _ in self.slots]
        return [text for text in found if text is not None]

    def digest(self) -> str:
        """Of what all members must have alike."""
        return digest(dense(slot.tensor) for slot, _, equal in self.slots if equal)


@dataclasses.dataclass
class Call:
    """`start(async_op)` gives a list of Works; `check` looks at more than tensors."""

    start: Callable[[bool], Any]
    check: Callable[[], None] = lambda: None
    again: Callable[[], Any] | None = None  # a further collective, in a callback


__all__ = ["Call", "Env", "Wrong", "builder"]
Builder = Callable[[Env], Call]
BUILDERS: dict[str, Builder] = {}


def builder(function: Builder) -> Builder:
    """Registers how a kind of step is called."""
    BUILDERS[function.__name__] = function
    return function


def works_of(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(result) if isinstance(result, list | tuple) else [result]


def manager(env: Env, async_op: bool, body: Callable[[], None]) -> list[Any]:
    """Calls that torch hands over together."""
    with dist._coalescing_manager(group=env.group, async_ops=async_op) as held:
        body()
    return list(held.works) if async_op else []
