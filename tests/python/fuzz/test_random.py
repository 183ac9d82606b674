"""Random programs of collectives, and what holds for every subject; `make fuzz` runs them all."""

from __future__ import annotations

import pytest

from fuzz import core
from fuzz.programs import KINDS, Program, draw

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(600)]


@pytest.mark.parametrize("where", core.subject("collectives").WHERE)
def test_collectives(where: str) -> None:
    """SEED=... runs that seed's programs."""
    print(core.search("collectives", where, core.seed(0)), "seen")


@pytest.mark.parametrize("name", core.SUBJECTS)
def test_programs_come_from_the_seed_alone(name: str) -> None:
    where = core.subject(name).WHERE[0]
    first, again, other = (core.drawn(name, where, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_every_kind_of_step_is_drawn() -> None:
    drawn = {
        step.kind
        for seed in range(10)
        for program in core.drawn("collectives", "3", seed)
        for lane in program.lanes
        for step in lane
    }
    assert drawn == set(KINDS)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_a_flipped_bit_is_noticed(kind: str) -> None:
    """A fuzzer that cannot fail is worth nothing."""
    program, step = next(
        (program, step)
        for seed in range(1000)
        for program in core.drawn("collectives", "2", seed)
        for step in program.lanes[0]
        if step.kind == kind
        and len(program.groups[step.group].ranks) == 2
        and "(0" not in str(step.args)
    )
    with pytest.raises(core.Wrong, match=f"#{step.number} "):
        core.check("collectives", "2", program, step.number)


def test_what_fails_is_made_small() -> None:
    seen: list[Program] = []

    def body(program: Program) -> None:
        seen.append(program)
        assert not any(step.kind == "barrier" for lane in program.lanes for step in lane)

    with pytest.raises(AssertionError):
        core.each(lambda choose: draw(choose, "2", most=4), 0, 30, body, shrink=True)
    [lane] = seen[-1].lanes
    assert [step.kind for step in lane].count("barrier") == 1
