"""Rounds in which ranks die, stop, leave or lack something; `make fuzz` runs many more."""

from __future__ import annotations

import pytest

from fuzz import chaos, ranks
from fuzz.rounds import SCENARIOS, draw_round

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(600)]


def test_chaos() -> None:
    """Every scenario once, and some at random."""
    with chaos.Crew() as crew:
        for number, scenario in enumerate(SCENARIOS):
            crew.play(draw_round(0, number, scenario))
        for number in range(len(SCENARIOS), len(SCENARIOS) + 10):
            crew.play(draw_round(0, number))
        print(crew.tally)
        assert crew.tally.turns > 0


def test_rounds_come_from_the_seed_alone() -> None:
    assert draw_round(3, 4) == draw_round(3, 4)
    assert {draw_round(0, number).scenario for number in range(300)} == set(SCENARIOS)


@pytest.mark.parametrize("fault", ["wrong", "leaked", "silent"])
def test_what_chaos_looks_for_is_found(fault: str) -> None:
    """Chaos that cannot fail is worth nothing."""
    one = draw_round(0, 0, f"self-test: {fault}")
    with chaos.Crew() as crew:
        crew.play(draw_round(0, 0, "fork"))  # leaks count from the second round on
        with pytest.raises(chaos.Failure, match=ranks.SELF_TESTS[fault]):
            crew.play(one)
