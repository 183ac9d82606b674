"""What the ranks of a group know of each other: whether all have the function of a generated code.

It is kept as long as the group, by the code. Programs come and go on each rank as its other groups
need them, and a rank that asked again, or had forgotten the answer, would be alone with that.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch.distributed as dist

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, bool]] = (
    weakref.WeakKeyDictionary()
)
_refusals = 0


def agreed(group: dist.ProcessGroup, code: Hashable) -> bool | None:
    """Whether all ranks have it; None where nobody has asked yet."""
    return _known.get(group, {}).get(code)


def agree(group: dist.ProcessGroup, code: Hashable, all_have_it: bool) -> None:
    global _refusals
    _known.setdefault(group, {})[code] = all_have_it
    _refusals += not all_have_it


def refusals() -> int:
    """Counts the answers "no": who has asked since the last one need not ask again."""
    return _refusals


__all__ = ["agree", "agreed", "refusals"]
