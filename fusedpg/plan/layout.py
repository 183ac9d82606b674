"""The parts of a tensor on each device, and the messages when these change.

Everything here is a pure function of the plan, so that all ranks compute the same messages without
asking each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from fusedpg.plan.config import PlanError

Box = tuple[tuple[int, int], ...]
"""A block of a tensor: for each dimension where it begins and ends."""


@dataclass(frozen=True)
class Layout:
    """The division over a stage's devices of a tensor whose dimension 0 is the micro-batch.

    Device ``d * tp + t`` of `devices` holds part `d` of `dp` of dimension 0 and, if there is a
    `split`, part `t` of `tp` of that dimension. Without a split all `tp` devices hold the same.
    A gradient has the layout of its value: where a value is the same on several devices, so is
    its gradient, which is why moving either never adds anything up.

    Args:
        devices: their numbers, which are ranks of the default group.
        tp: tensor-parallel degree.
        dp: data-parallel degree.
        split: the dimension that the tensor-parallel ranks share, never 0; None: none.
    """

    devices: tuple[int, ...]
    tp: int
    dp: int
    split: int | None = None

    def __post_init__(self) -> None:
        if self.tp * self.dp != len(self.devices):
            raise PlanError(f"tp {self.tp} * dp {self.dp} on {len(self.devices)} devices")
        if self.split == 0:
            raise PlanError("dimension 0 is the micro-batch: tensor parallelism cannot split it")

    def box(self, index: int, shape: Sequence[int]) -> Box:
        """The block of a tensor of this (whole) shape that ``devices[index]`` holds."""
        d, t = divmod(index, self.tp)
        ranges = [(0, size) for size in shape]
        ranges[0] = _part(shape[0], self.dp, d, 0)
        if self.split is not None:
            ranges[self.split] = _part(shape[self.split], self.tp, t, self.split)
        return tuple(ranges)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each device's block of a tensor of this shape."""
        return tuple(end - begin for begin, end in self.box(0, shape))


@dataclass(frozen=True)
class Piece:
    """A block that one device has and another one needs; both may be the same device."""

    source: int
    target: int
    box: Box


@functools.lru_cache(maxsize=4096)
def reshard(shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[Piece, ...]:
    """The pieces that make the blocks of `target` out of those of `source`.

    Every element of every block of `target` is in exactly one piece for its device. A device that
    has a piece itself takes its own; where several others have it, targets are spread over them.
    Between two devices there is at most one piece.
    """
    pieces = []
    for index, device in enumerate(target.devices):
        wanted = target.box(index, shape)
        # Source devices that hold the same block.
        holders: dict[Box, list[int]] = {}
        for other, holder in enumerate(source.devices):
            common = _intersection(source.box(other, shape), wanted)
            if common is not None:
                holders.setdefault(common, []).append(holder)
        for box, devices in holders.items():
            chosen = device if device in devices else devices[index % len(devices)]
            pieces.append(Piece(chosen, device, box))
    return tuple(pieces)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of a block in a tensor that is the block `outer`."""
    return tuple(slice(b - ob, e - ob) for (b, e), (ob, _) in zip(box, outer))


def _part(size: int, parts: int, number: int, dim: int) -> tuple[int, int]:
    if size % parts:
        raise PlanError(
            f"dimension {dim} has size {size}, which is not divisible by {parts} devices: split "
            "another dimension, or over fewer devices"
        )
    length = size // parts
    return number * length, (number + 1) * length


def _intersection(a: Box, b: Box) -> Box | None:
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b))
    return common if all(begin < end for begin, end in common) else None
