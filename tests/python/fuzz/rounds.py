"""Rounds of chaos: what is drawn."""

from __future__ import annotations

import dataclasses
import os

from fuzz.core import Choices

CREW = 4
TRAFFIC = ("sums", "async", "gather", "exchange", "messages", "steps", "mixed")
# What goes wrong, and how often it is drawn.
SCENARIOS = {
    "kill": 6,
    "stop": 2,
    "abort": 4,
    "leave": 4,
    "abort and leave": 3,
    "exit": 3,
    "descriptors": 2,
    "address space": 1,
    "small arena": 2,
    "resize": 2,
    "fork": 2,
    "writers": 4,
    "shared parameters": 3,
    "kill in creation": 3,
    "kill behind messages": 2,
}
LEFT_OUT = set(os.environ.get("FUZZ_WITHOUT", "").split(","))


@dataclasses.dataclass(frozen=True)
class Round:
    """One group's life and what ends it."""

    scenario: str
    members: tuple[int, ...]
    victim: int
    traffic: str
    numel: int
    arena: bool
    delay: float  # seconds from the first traffic to the fault
    timeout: float  # of the group
    ending: str  # how survivors leave the group: destroy, abort
    variant: int  # of the scenario
    number: int = 0  # among those that a crew has played

    def __str__(self) -> str:
        return (
            f"round {self.number}: {self.scenario}/{self.variant} of rank "
            f"{self.victim} in {self.members}, {self.traffic} of {self.numel} elements"
            f"{' in the arena' if self.arena else ''}, after {self.delay * 1e3:.1f} ms, "
            f"timeout {self.timeout} s, then {self.ending}"
        )

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank != self.victim)

    @property
    def short(self) -> bool:
        """Whether the group's own timeout is what ends the round."""
        return self.scenario in ("stop", "descriptors", "address space", "kill in creation")


def draw_round(choose: Choices, scenario: str) -> Round:
    size = choose.choice([3, 2, 3, 4])
    if scenario in ("writers", "resize", "kill behind messages"):
        size = 3
    members = tuple(sorted(choose.sample(range(CREW), size)))
    victim = members[0] if scenario == "shared parameters" else choose.choice(members)
    one = Round(
        scenario,
        members,
        victim,
        choose.choice(TRAFFIC),
        choose.choice([1, 100, 5000, 300_000, 1_500_000]),
        choose.random() < 0.6,
        choose.choice([0.0, 0.001, 0.005, 0.02]) * choose.random(),
        20.0,
        choose.choice(["destroy", "destroy", "abort"]),
        choose.randrange(100),
    )
    return dataclasses.replace(one, timeout=1.5) if one.short else one
