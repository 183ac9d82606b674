"""Rounds in which ranks die, stop, leave or lack something; `make fuzz` runs many more."""

from __future__ import annotations

import dataclasses

import pytest

from fuzz import chaos, core, ranks
from fuzz.rounds import SCENARIOS, Round

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(600)]


def drawn(scenario: str) -> Round:
    return core.drawn("chaos", scenario, 0)[1]


def test_chaos() -> None:
    """Every scenario once, and some at random."""
    for scenario in SCENARIOS:
        chaos.check(drawn(scenario))
    core.search("chaos", "any", 0)
    print(chaos.crew().tally)
    assert chaos.crew().tally.turns > 0


def test_every_scenario_is_drawn() -> None:
    rounds = [one for seed in range(30) for one in core.drawn("chaos", "any", seed)]
    assert {one.scenario for one in rounds} == set(SCENARIOS)


@pytest.mark.parametrize("fault", ["wrong", "leaked", "silent"])
def test_what_chaos_looks_for_is_found(fault: str) -> None:
    """Chaos that cannot fail is worth nothing."""
    one = dataclasses.replace(drawn("fork"), scenario=f"self-test: {fault}")
    with chaos.Crew() as crew:
        crew.play(drawn("fork"))  # leaks count from the second round on
        with pytest.raises(core.Wrong, match=ranks.SELF_TESTS[fault]):
            crew.play(one)
