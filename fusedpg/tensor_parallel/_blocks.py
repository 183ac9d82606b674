"""The division of a dimension of rows over ranks, and their messages about it."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsIndex, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# torch 2.13 deprecates the fallback names.
_Collective = Callable[..., dist.Work]
_all_gather: _Collective = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: _Collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_Given = TypeVar("_Given", torch.Tensor, torch.Tensor | None)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some rows of every rank: of each block those from `begin`, or some runs."""

    blocks: Blocks  # that these rows are
    run: int
    begin: int  # in each block
    first: int  # row of the whole
    part: slice  # rows of a rank's part


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Runs of equal blocks of rows, one block for each rank in every run.

    A rank's part is its blocks one behind the other. Of (batch, sequence) divided by sequence each
    entry of the batch is a run; of (sequence, batch) all is one run.
    """

    runs: int
    ranks: int
    rows: int  # of a block

    @staticmethod
    def of(shape: Sequence[int], dim: int, ranks: int) -> Blocks:
        """The blocks of rows of this shape, whose dimension `dim` the ranks divide."""
        rows = shape[dim] // ranks * math.prod(shape[dim + 1 :])
        return Blocks(math.prod(shape[:dim]), ranks, rows)

    @property
    def part_rows(self) -> int:
        return self.runs * self.rows

    @property
    def whole_rows(self) -> int:
        return self.runs * self.ranks * self.rows

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Memory for this rank's rows of a value."""
        return whole.new_empty(self.part_rows, whole.shape[1])

    def by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows in their order as one rank's behind the other's; a copy where that differs."""
        if self.runs == 1 or self.ranks == 1:
            return whole.contiguous()
        features = whole.shape[1]
        divided = whole.reshape(self.runs, self.ranks, self.rows, features)
        return divided.transpose(0, 1).reshape(-1, features)

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_rank`."""
        if self.runs == 1 or self.ranks == 1:
            return rows
        features = rows.shape[1]
        divided = rows.reshape(self.ranks, self.runs, self.rows, features)
        return divided.transpose(0, 1).reshape(-1, features)

    def firsts(self, rank: int, features: int) -> list[int]:
        """The index in the whole value of the first element of each block of a rank."""
        return [(run * self.ranks + rank) * self.rows * features for run in range(self.runs)]

    def pieces(self, most: int) -> Iterator[Piece]:
        """Divided once more, each piece with rows of all ranks."""
        along = self.runs if self.runs > 1 else self.rows
        size = -(-along // most)
        for at in range(0, along, size):
            count = min(size, along - at)
            if self.runs > 1:
                blocks = Blocks(count, self.ranks, self.rows)
                part = slice(at * self.rows, (at + count) * self.rows)
                yield Piece(blocks, at, 0, at * self.ranks * self.rows, part)
            else:
                blocks = Blocks(1, self.ranks, count)
                yield Piece(blocks, 0, at, at, slice(at, at + count))

    def cut(self, whole: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The rows of a piece."""
        count, features = piece.blocks.rows, whole.shape[1]
        divided = whole.reshape(self.runs, self.ranks, self.rows, features)
        rows = divided[piece.run : piece.run + piece.blocks.runs, :, piece.begin :][:, :, :count]
        return rows.reshape(-1, features)


def dimension(title: str, sequence_dim: int, shape: Sequence[int]) -> int:
    """A sequence_dim from 0 on."""
    dim = sequence_dim + len(shape) if sequence_dim < 0 else sequence_dim
    if not 0 <= dim < len(shape) - 1:
        raise ValueError(
            f"{title}: sequence_dim={sequence_dim} of an input of shape {tuple(shape)}: it is one "
            "of the dimensions before the last, which has the features"
        )
    return dim


def landed(tensor: _Given) -> _Given:
    """A tensor with memory: DTensor may give one that waits for a collective when it is used."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def checked(sequence_dim: SupportsIndex | None) -> int | None:
    return None if sequence_dim is None else operator.index(sequence_dim)


class Gathering:
    """All ranks' parts, one behind the other, on their way."""

    def __init__(self, part: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> None:
        self._part = part.contiguous()
        self._rows = ranks * len(part)
        self._whole, self._work = self._part, None
        if ranks > 1:
            self._whole = part.new_empty(self._rows, part.shape[1])
            if part.numel():
                self._work = _all_gather(self._whole, self._part, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._whole


def multiplied(
    gathering: Gathering,
    part: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    own: slice | None,
) -> torch.Tensor:
    """All ranks' rows, by rank, times a matrix.

    Args:
        own: this rank's rows, which are multiplied while the others' arrive; None: all at once.
    """

    def product(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if bias is None:
            return torch.mm(rows, matrix, out=out)
        return torch.addmm(bias, rows, matrix, out=out)

    if own is None:
        return product(gathering.wait())
    result = part.new_empty(gathering._rows, matrix.shape[1])
    product(part, result[own])
    rows = gathering.wait()
    for others in (slice(0, own.start), slice(own.stop, len(rows))):
        if others.start < others.stop:
            product(rows[others], result[others])
    return result


def begin_scatter_sum(
    by_rank: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work | None]:
    """This rank's rows of the sum of all ranks' values, begun; without a Work it has ended."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return by_rank, None
    part = by_rank.new_empty(len(by_rank) // ranks, by_rank.shape[1])
    if not part.numel():
        return part, None
    return part, reduce_scatter(part, by_rank, group=group, async_op=True)
