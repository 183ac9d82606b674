"""Whether all ranks of a group have the function of a generated code.

The answer is kept as long as the group, by the code. Programs come and go on each rank as its
other groups need them, and a rank that asked again, or had forgotten the answer, would be alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch.distributed as dist


class Answer:
    """Steps of plans keep it: what one of them finds out all of them see."""

    __slots__ = ("all_have_it",)

    def __init__(self) -> None:
        self.all_have_it: bool | None = None  # None: nobody has asked yet


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Answer]] = (
    weakref.WeakKeyDictionary()
)


def answer(group: dist.ProcessGroup, code: Hashable) -> Answer:
    """The group's answer for a code."""
    return _known.setdefault(group, {}).setdefault(code, Answer())


__all__ = ["Answer", "answer"]
