"""Schedules: a program and the transformations that are applied to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from fusedpg.fusion.errors import IllegalTransformation
from fusedpg.fusion.estimate import seconds
from fusedpg.fusion.ir import SHARD, Program, carried
from fusedpg.fusion.local_rows import LocalRowReduction
from fusedpg.fusion.transformations import (
    AsShard,
    FuseCollective,
    FuseCompute,
    FuseSend,
    Overlap,
    Reorder,
    Split,
    Transformation,
)

# Of more all_reduces than these, all or none are split.
_SUBSETS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """How a program is carried out: printed, it is the program after its transformations."""

    source: Program
    transformations: tuple[Transformation, ...] = ()

    @functools.cached_property
    def program(self) -> Program:
        """The program after the transformations.

        Raises:
            IllegalTransformation: by the first that does not fit.
        """
        program = self.source
        for last in (False, True):  # what an overlap is of is decided by all others
            for transformation in self.transformations:
                if isinstance(transformation, Overlap) is last:
                    program = transformation.apply(program)
        return program

    def then(self, *transformations: Transformation) -> Schedule:
        """The schedule that goes on with these; raises as `program` does."""
        following = Schedule(self.source, (*self.transformations, *transformations))
        _ = following.program
        return following

    @property
    def title(self) -> str:
        return ", ".join(map(str, self.transformations)) or "as written"

    def __str__(self) -> str:
        sent = f"{self.program.bytes()} bytes sent by each of {self.program.world_size} ranks"
        if self.program.messages:
            sent += f", {self.program.crossing()} between stages"
        return f"# {self.title}: {sent}\n{self.program}"


def schedules(program: Program) -> list[Schedule]:
    """The legal schedules that differ, the program as written first. Calls stay what they are."""
    found: dict[tuple[object, ...], Schedule] = {}

    def add(schedule: Schedule) -> Schedule:
        return found.setdefault(schedule.program.structure, schedule)

    for schedule in _shapes(Schedule(program)):
        add(schedule)
        for fused in _maybe(schedule, FuseCollective()):
            for more in _maybe(fused, FuseCompute()):
                for last in _maybe(more, Overlap()):
                    add(last)
    return list(found.values())


def cheapest(program: Program, one_host: bool = True) -> Schedule:
    """The schedule that sends slices between stages, if there are any; of these on one host the one
    that takes the least time, between hosts the one that sends the least in its group, and then
    takes the least time. The time is that of a model, not a measurement.
    """
    return ordered(program, one_host)[0]


def ordered(program: Program, one_host: bool = True) -> list[Schedule]:
    """The legal schedules, the cheapest by that model first."""

    def cost(schedule: Schedule) -> tuple[float, ...]:
        changed = schedule.program
        # Before all, by nothing that another stage does not know: both have to choose alike.
        whole = sum(value.layout != SHARD for value in map(carried, changed.messages))
        # A sum of single numbers takes the time of a message, whatever its bytes.
        sent, time = changed.bytes(least=2), seconds(changed)
        rest = (time, sent) if one_host else (sent, time)
        return whole, *rest, len(schedule.transformations)

    return sorted(schedules(program), key=cost)


def _maybe(schedule: Schedule, transformation: Transformation) -> Iterator[Schedule]:
    """The schedule without, and with the transformation where it is legal."""
    yield schedule
    with contextlib.suppress(IllegalTransformation):
        yield schedule.then(transformation)


def _shapes(start: Schedule) -> Iterator[Schedule]:
    """What is gathered where: splits, reorders and slices."""
    for splits in _splits(start.source):
        with contextlib.suppress(IllegalTransformation):
            for sent in _maybe(start.then(*splits), FuseSend()):
                for sliced in _maybe(sent, AsShard()):
                    for moved in _maybe(sliced, Reorder()):
                        # What Reorder slices may be computed on slices in turn.
                        for again in _maybe(moved, AsShard()):
                            # With rows of its own a rank sends less, and computes the same.
                            yield list(_maybe(again, LocalRowReduction()))[-1]


def _splits(program: Program) -> Iterator[Sequence[Transformation]]:
    names = [
        node.name
        for node in program.nodes
        if node.op == "all_reduce" and node.shape and not node.operands[0].op.startswith("local_")
    ]
    if len(names) <= 1 or len(names) > _SUBSETS:
        yield ()
        if names:
            yield (Split(),)
        return
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            yield (Split(),) if len(chosen) == len(names) else [Split(name) for name in chosen]
