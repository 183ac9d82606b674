"""What is compressed at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Owner(NamedTuple):
    """A range that is this rank's alone among the ranks of a group."""

    group: Any
    begin: int
    end: int


State = Callable[[str, int, int, tuple[Owner, ...]], torch.Tensor]

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
        shapes: of the parameters, one after the other; empty where the piece is not made of whole
            parameters.
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

    @property
    def own_seed(self) -> int:
        """A seed that no other rank has."""
        return mixed(self.seed, self.rank + 1)

    def state(self, name: str) -> torch.Tensor:
        """A flat tensor of ``numel`` elements, zeros at first, which stays from step to step and
        follows its parameters when they are grouped anew."""
        return self._state(name, 0, self.numel, ())

    def part(
        self, begin: int, end: int, rank: int, world_size: int, name: str = "", group: Any = None
    ) -> Piece:
        """A slice, exchanged by others; without shapes.

        Its state has names that end with ``name``. With a group it is this rank's alone among
        the group's ranks, each of which has another slice.
        """
        mine = () if group is None else (Owner(group, begin, end),)

        def state(key: str, first: int, last: int, inner: tuple[Owner, ...]) -> torch.Tensor:
            moved = tuple(Owner(o.group, begin + o.begin, begin + o.end) for o in inner)
            return self._state(key + name, begin + first, begin + last, moved + mine)

        return dataclasses.replace(
            self,
            name=f"{self.name}[{begin}:{end}]{name}",
            numel=end - begin,
            shapes=(),
            rank=rank,
            world_size=world_size,
            seed=mixed(self.seed, begin),
            _state=state,
        )
