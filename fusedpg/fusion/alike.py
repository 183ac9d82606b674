"""Whether all ranks call alike: the same program with the same numbers.

A rank's call has a mark, a hash of both. It travels with the call's first reduction, as a few
elements behind the tensor's: by sums of small whole numbers and of their squares, which are exact,
every rank finds out alike whether all are equal.

An asynchronous call does what is left when it is waited for. It has a number, which ranks compare
in each of its operations, or they would mix two calls that they wait for in another order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from fusedpg import _agreement
from fusedpg.functional import _backend
from fusedpg.fusion.ir import SHARD, Program

_BITS = 64
_EXACT = 24  # bits of a whole number that float32 holds
_numbers_of_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = (
    weakref.WeakKeyDictionary()
)


def _described(program: Program) -> str:
    """What is computed, as far as it is the same on all ranks."""
    numbers = {node: number for number, node in enumerate(program.nodes)}
    lines = []
    for node in program.nodes:
        # Sizes of a block may differ, and those of a slice that is combined with nothing whole: its
        # shape is the rank's own. Whether a number is an int is its value's matter.
        own = node.layout.dim is not None or (node.layout == SHARD and len(node.shape) == 1)
        shape = () if own else node.shape
        attributes = () if node.op == "input" else node.attributes
        operands = [numbers[operand] for operand in node.operands]
        lines.append(f"{node.op} {operands} {node.layout} {shape} {node.dtype} {attributes}")
    return "\n".join(lines)


def _program(program: Program) -> bytes:
    def digest() -> bytes:
        return hashlib.blake2b(_described(program).encode(), digest_size=8).digest()

    return program.once("alike", digest)


def _numbers(program: Program, arguments: Mapping[str, Any]) -> list[str]:
    """Those that are used; 1 is 1.0."""
    found = []
    for node in program.inputs:
        if node.scalar and program.users[node]:
            value = arguments[node.name]
            exact = isinstance(value, int) and abs(value) < 1 << 53
            found.append(f"{node.name}={float(value) if exact else value!r}")
    return found


class Mark(NamedTuple):
    """Of a call: what is computed, and with which numbers; of 64 bits each."""

    program: int
    numbers: int


NO_MARK = Mark(0, 0)  # of a call whose first operation says all of it


def mark(program: Program, arguments: Mapping[str, object]) -> Mark:
    text = "\n".join(_numbers(program, arguments)).encode()
    digests = _program(program), hashlib.blake2b(text, digest_size=8).digest()
    return Mark(*(int.from_bytes(digest, "little") for digest in digests))


def words(marked: Mark, world_size: int, op: str) -> list[float]:
    """A mark as elements of a reduction."""
    value = marked.program ^ marked.numbers
    bits = max((_EXACT - math.ceil(math.log2(world_size))) // 2, 1)
    parts = [float(value >> at & ((1 << bits) - 1)) for at in range(0, _BITS, bits)]
    return parts + [(-x if op in ("max", "min") else x * x) for x in parts]


def equal(reduced: list[float], world_size: int, op: str) -> bool:
    """Whether the marks were, from the reduction of their words."""
    half = len(reduced) // 2
    pairs = zip(reduced[:half], reduced[half:], strict=True)
    if op in ("max", "min"):
        return all(x == -y for x, y in pairs)
    return all(x * x == world_size * y for x, y in pairs)


def difference(
    program: Program, arguments: Mapping[str, object], group: dist.ProcessGroup
) -> dist.DistBackendError:
    """What is raised on all ranks, which ask each other how they differ."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = _program(program), _numbers(program, arguments)
    programs, numbers = zip(*_agreement.by_rank(mine, group))
    text = "their programs differ (flags, shapes, types, or what they read from outside)"
    if len(set(programs)) == 1:
        text = _agreement.in_words(numbers, rank)
    return dist.DistBackendError(
        f"fused: the ranks of a group called `{program.name}` with different arguments: {text}. "
        f"This is rank {rank} of {size}; pass the same numbers and flags on all ranks"
    )


class AsyncCall(contextlib.AbstractContextManager[None]):
    """A part of an asynchronous call on a group, which is numbered when it is made.

    Ranks make them in one order, also for calls that are refused. Other backends compare nothing.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._number = next(_numbers_of_calls.setdefault(group, itertools.count(1)))
        self._backend: Any = None
        with contextlib.suppress(ValueError):
            self._backend = _backend(group)

    def __enter__(self) -> None:
        if self._backend is not None:
            self._backend.set_async_call(self._number)

    def __exit__(self, *_: object) -> None:
        if self._backend is not None:
            self._backend.set_async_call(0)
