"""A piece of the gradients that is compressed at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from fusedpg._by_parameter import Kept
from fusedpg.compress import _kernels as kernels


class Parts:
    """A gradient in several tensors, for what reads and writes it parameter by parameter: where it
    lies, and where the result goes. Neither is copied into one tensor for a piece."""

    def __init__(self, sources: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.sources, self.outputs = sources, outputs

    @functools.cached_property
    def _places(self) -> dict[tuple[int, int], int]:
        places, begin = {}, 0
        for n, output in enumerate(self.outputs):
            places[begin, begin + output.numel()] = n
            begin += output.numel()
        return places

    def source(self, begin: int, end: int) -> torch.Tensor:
        return self.sources[self._places[begin, end]]

    def __getitem__(self, elements: slice) -> torch.Tensor:
        return self.outputs[self._places[elements.start, elements.stop]]


Shared = tuple[dist.ProcessGroup, int, int]
"""A group whose ranks share out a tensor, and where this rank's slice of it begins and ends."""
StateReader = Callable[[str, int, int, tuple[Shared, ...]], torch.Tensor]

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
class Run:
    """Consecutive elements of one parameter, in the order of memory.

    Attributes:
        name: of the parameter, or what stands for it.
        key: a number of the parameter that outlives checkpoints and buckets.
        begin, numel: which of its elements.
        shape: of the parameter, dimensions in the order of memory.
    """

    name: str
    key: int
    begin: int
    numel: int
    shape: torch.Size

    @property
    def whole(self) -> bool:
        return self.numel == self.shape.numel()

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.begin}:{self.begin + self.numel}]"


class Runs(tuple[Run, ...]):
    """Runs side by side, and what kernels want to know of them: by run, or of nothing if there is
    none."""

    @functools.cached_property
    def numels(self) -> list[int]:
        return [run.numel for run in self] or [0]

    @functools.cached_property
    def _identities(self) -> tuple[list[int], list[int]]:
        return [run.key for run in self] or [0], [run.begin for run in self] or [0]

    def seeds(self, seed: int, own: int | None = None) -> list[int]:
        """``Piece.seed`` of each run's piece; with ``own``, its ``Piece.own_seed``."""
        found: list[int] = kernels.extension().seeds(seed, *self._identities, own)
        return found


@dataclasses.dataclass(frozen=True)
class Piece:
    """A flat run of gradients that is exchanged at once, as one rank sees it.

    Attributes:
        name: the same on all ranks.
        numel: elements.
        runs: the parameters that it is made of, one after the other.
        rank, world_size: of those who exchange it.
        seed: of this piece in this step, the same on all ranks. It depends on the parameters and
            the step, not on what else is exchanged at once.
        dtype, device: of the gradients.
        cache: for what a compressor works out of this piece more than once.
    """

    name: str
    numel: int
    runs: Runs
    rank: int
    world_size: int
    seed: int
    dtype: torch.dtype
    device: torch.device
    _state: StateReader = dataclasses.field(repr=False)
    # A rank's second compression of the same slice: of the sum, for the way back.
    _again: bool = dataclasses.field(default=False, repr=False)
    cache: dict[str, tuple[list[int], torch.Tensor]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    # The same as state(), unsettled, where that is of this piece alone.
    kept: Callable[[str], Kept] | None = dataclasses.field(default=None, repr=False)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The parameters' shapes; empty where the piece is not made of whole parameters."""
        return tuple(run.shape for run in self.runs) if all(r.whole for r in self.runs) else ()

    @property
    def own_seed(self) -> int:
        """A seed that no other rank has, and that of an answer is not that of a gradient:
        rounding what was rounded by the same numbers would not be unbiased."""
        return mixed(self.seed, self._who)

    @property
    def _who(self) -> int:
        return self.rank + 1 + self._again * self.world_size

    def seeds(self) -> list[int]:
        """The seed of each parameter's piece."""
        return self.runs.seeds(self.seed)

    def own_seeds(self) -> list[int]:
        """A seed of each parameter's piece that no other rank has."""
        return self.runs.seeds(self.seed, self._who)

    def state(self, name: str) -> torch.Tensor:
        """A flat tensor of ``numel`` elements, zeros at first, which stays from step to step and
        follows its parameters when they are grouped anew."""
        return self._state(name, 0, self.numel, ())

    def each(self) -> list[tuple[int, Piece]]:
        """The parameters' pieces, and where they begin; one that is empty if there is nothing."""
        if not self.runs:
            return [(0, self)]
        found, begin = [], 0
        for run in self.runs:
            found.append((begin, self._of(begin, run)))
            begin += run.numel
        return found

    def _of(self, begin: int, run: Run) -> Piece:
        def state(key: str, first: int, last: int, inner: tuple[Shared, ...]) -> torch.Tensor:
            return self._state(key, begin + first, begin + last, inner)

        return dataclasses.replace(
            self,
            name=f"{run}{'@server' * self._again}",
            numel=run.numel,
            runs=Runs((run,)),
            seed=mixed(self.seed, run.key, run.begin),
            _state=state,
            cache={},
            kept=None,
        )

    def part(
        self,
        begin: int,
        end: int,
        rank: int,
        world_size: int,
        name: str = "",
        group: dist.ProcessGroup | None = None,
    ) -> Piece:
        """A slice, exchanged by others.

        Its state has names that end with ``name``, which makes it one of answers, too. With a
        group it is this rank's alone among the group's ranks, each of which has another slice.
        """
        slices = () if group is None else ((group, 0, end - begin),)

        def state(key: str, first: int, last: int, inner: tuple[Shared, ...]) -> torch.Tensor:
            # A slice of a slice belongs to whom the slice belongs to.
            shared = tuple((g, begin + a, begin + b) for g, a, b in inner + slices)
            return self._state(key + name, begin + first, begin + last, shared)

        return dataclasses.replace(
            self,
            name=f"{self.name}[{begin}:{end}]{name}",
            numel=end - begin,
            runs=Runs(_cut(self.runs, begin, end)),
            rank=rank,
            world_size=world_size,
            _state=state,
            _again=bool(name),
            cache={},
            kept=None,
        )


def _cut(runs: tuple[Run, ...], begin: int, end: int) -> Iterator[Run]:
    """The parts of runs between two positions."""
    at = 0
    for run in runs:
        first, last = max(begin, at), min(end, at + run.numel)
        if first < last:
            yield dataclasses.replace(run, begin=run.begin + first - at, numel=last - first)
        at += run.numel
