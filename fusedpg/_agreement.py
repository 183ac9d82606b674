"""Comparison of values between ranks, and what has been found out by it.

All functions but `in_words` and `answer` are small collectives of a group, whose deadline holds.
They return the same on all ranks. So a rank that raises because of it is not alone, and nobody
waits for it; but a rank that raises before it calls them leaves the others waiting.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")


def extremes(
    own: Tensor, group: dist.ProcessGroup | None, has_some: bool = True
) -> tuple[Tensor, Tensor]:
    """The least and the largest of the ranks' elements, each.

    Args:
        own: of a signed type.
        has_some: False: this rank's elements do not count. They are floating-point numbers then.
    """
    both = torch.stack([own, -own])
    if not has_some:
        both.fill_(-torch.inf)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return -both[1], both[0]


def largest(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """The largest of the ranks' numbers, each."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    result: list[float] = found.tolist()
    return result


def largest_of_same(value: object, own: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """The largest of the ranks' elements, each; None where they have different values.

    Args:
        value: what `repr` says of it is compared, by a hash.
        own: integers of 32 or 64 bits.
    """
    code = zlib.crc32(repr(value).encode()) >> (own.dtype == torch.int32)
    whole = torch.cat([own.new_tensor([code, -code]), own])
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    return whole[2:] if whole[:2].tolist() == [code, -code] else None


def same(
    value: object, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> bool:
    """True if all ranks have the same value; a hash of its `repr` is compared."""
    device = device or torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return largest_of_same(value, nothing, group) is not None


def by_rank(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Gathers a value of each rank, in their order: anything that can be pickled."""
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def in_words(facts: Sequence[Sequence[str]], rank: int) -> str:
    """Says how the ranks' facts differ, in the words of this rank's error; no collective.

    Args:
        facts: what `by_rank` gave, texts such as "lr=0.1".
        rank: this one.
    """
    odd = {fact for one in facts for fact in set(one) ^ set(facts[0])}
    shown = [
        f"rank {r} has {', '.join(fact for fact in one if fact in odd)}"
        for r, one in enumerate(facts)
        if r in (0, rank) or one != facts[0]
    ]
    return "; ".join(shown[:8])


@dataclasses.dataclass(slots=True, eq=False)
class Answer:
    """Says if all ranks have a thing. Steps share one object, and so what one of them finds out."""

    all_have_it: bool | None = None  # None: nobody has asked yet


_answers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Answer]] = (
    weakref.WeakKeyDictionary()
)


def answer(group: dist.ProcessGroup, thing: Hashable) -> Answer:
    """The group's answer for a thing, kept as long as the group. No collective.

    Programs come and go on each rank as its other groups need them. A rank that asked again, or had
    forgotten the answer, would be alone.
    """
    return _answers.setdefault(group, {}).setdefault(thing, Answer())
