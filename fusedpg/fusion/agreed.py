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


def agreed(group: dist.ProcessGroup, code: Hashable) -> bool | None:
    """Whether all ranks have it; None where nobody has asked yet."""
    return _known.get(group, {}).get(code)


def agree(group: dist.ProcessGroup, code: Hashable, all_have_it: bool) -> None:
    _known.setdefault(group, {})[code] = all_have_it


__all__ = ["agree", "agreed"]
