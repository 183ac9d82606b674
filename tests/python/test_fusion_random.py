"""Random programs of fused functions: under all schedules, over rows, while they are tuned, in
stages of a pipeline, and into tensors that overlap.

Everything is compared with plain torch in one process.
"""

from __future__ import annotations

import pytest

import harness
from fuzz import core, functions, targets

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(600)]
SEEDS = [0, *map(harness.slow, range(1, 8))]


def search(name: str, where: str, seed: int) -> int:
    return core.search(name, where, core.seed(seed))


@pytest.mark.parametrize("where", [*functions.WHERE[:2], *map(harness.slow, functions.WHERE[2:])])
def test_random_programs_under_all_schedules(where: str) -> None:
    assert search("functions", where, 0) > 50


@pytest.mark.parametrize("seed", SEEDS)
def test_functions_of_rows(seed: int) -> None:
    assert search("rows", "1", seed) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_tuner(seed: int) -> None:
    search("tuning", "3", seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_messages(seed: int) -> None:
    search("pipelines", "4", seed)


@pytest.mark.parametrize("where", ["two of two", "crossed", harness.slow("three and one")])
def test_messages_between_hosts(where: str) -> None:
    search("pipelines", where, 1)


@pytest.mark.parametrize("where", ["2", *map(harness.slow, "13")])
@pytest.mark.parametrize("seed", SEEDS)
def test_places_of_tensors(where: str, seed: int) -> None:
    search("targets", where, seed)


@pytest.mark.parametrize("world_size", [1, 2])
def test_kinds_of_tensors(world_size: int) -> None:
    harness.pool(world_size).run(targets.kinds)
