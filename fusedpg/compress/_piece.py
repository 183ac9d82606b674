"""What is compressed at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

State = Callable[[str, int, int, tuple[Any, ...]], torch.Tensor]

_WORD = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """A seed of 63 bits that depends on all of the numbers (SplitMix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & _WORD) + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


@dataclasses.dataclass(frozen=True)
class Piece:
    """A flat run of gradients that is compressed at once, as one rank sees it.

    Attributes:
        name: the same on all ranks.
        numel: elements.
        shapes: of the parameters, one after the other, dimensions in the order of memory; empty
            where the piece is not made of whole parameters.
        rank, world_size: of those who exchange it.
        dtype, device: of the gradients.
        seed: of this piece in this step, the same on all ranks.
    """

    name: str
    numel: int
    shapes: tuple[torch.Size, ...]
    rank: int
    world_size: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    _state: State = dataclasses.field(repr=False)
    # A rank's second compression of the same slice: of the sum, for the way back.
    _again: bool = dataclasses.field(default=False, repr=False)

    @property
    def own_seed(self) -> int:
        """A seed that no other rank has, and that of an answer is not that of a gradient:
        rounding what was rounded by the same numbers would not be unbiased."""
        return mixed(self.seed, self.rank + 1 + self._again * self.world_size)

    def state(self, name: str) -> torch.Tensor:
        """A flat tensor of ``numel`` elements, zeros at first, which stays from step to step and
        follows its parameters when they are grouped anew."""
        return self._state(name, 0, self.numel, ())

    def part(
        self, begin: int, end: int, rank: int, world_size: int, name: str = "", group: Any = None
    ) -> Piece:
        """A slice, exchanged by others; without shapes.

        Its state has names that end with ``name``, which makes it one of answers, too. With a
        group it is this rank's alone among the group's ranks, each of which has another slice.
        """
        slices = () if group is None else ((group, 0, end - begin),)

        def state(key: str, first: int, last: int, inner: tuple[Any, ...]) -> torch.Tensor:
            # A slice of a slice belongs to whom the slice belongs to.
            shared = tuple((g, begin + a, begin + b) for g, a, b in inner + slices)
            return self._state(key + name, begin + first, begin + last, shared)

        return dataclasses.replace(
            self,
            name=f"{self.name}[{begin}:{end}]{name}",
            numel=end - begin,
            shapes=(),
            rank=rank,
            world_size=world_size,
            seed=mixed(self.seed, begin),
            _state=state,
            _again=bool(name),
        )
