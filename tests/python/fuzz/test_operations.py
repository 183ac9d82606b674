"""Random programs against a model in one process; `make fuzz` runs them for longer."""

from __future__ import annotations

import pytest

from fuzz import execute, operations
from fuzz.programs import KINDS, draw_program

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(600)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_programs(world: int) -> None:
    tally = operations.Tally()
    for seed in range(4 if world > 1 else 2):
        operations.run_one(seed, world, "one host", tally)
    print(tally)


@pytest.mark.parametrize("world", [2, 3])
def test_random_programs_between_hosts(world: int) -> None:
    tally = operations.Tally()
    for seed in range(2):
        operations.run_one(seed, world, "hosts", tally)
    print(tally)


def test_programs_come_from_the_seed_alone() -> None:
    assert draw_program(5, 3) == draw_program(5, 3)
    assert draw_program(5, 3) != draw_program(6, 3)
    drawn = {step.kind for seed in range(30) for one in draw_program(seed, 3).lanes for step in one}
    assert drawn == set(KINDS)


@pytest.mark.parametrize("number", [0, 3])
def test_a_flipped_bit_is_noticed(number: int) -> None:
    """A fuzzer that cannot fail is worth nothing."""
    plain = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all_single"]
    seed, step = next(
        (seed, step)
        for seed in range(1000)
        for step in draw_program(seed, 2, steps=5).lanes[0]
        if step.kind == plain[number]
        and len(draw_program(seed, 2, steps=5).groups[step.group].ranks) == 2
        and "(0" not in str(step.args)
    )
    workers = operations.workers_for(2, "one host")
    answers = workers.run(execute.run_program, seed, False, 5, step.number)
    workers.close()
    wrong = [text for one, _, _ in answers for text in one]
    assert wrong and all(f"#{step.number} " in text for text in wrong), wrong
