"""Random programs against aggregators, and what many operations leave behind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import harness
from checks import aggregators_foe as checks
from test_aggregators import KEY, Aggregator, on_hosts, workers

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def two() -> Iterator[list[Aggregator]]:
    with Aggregator() as first, Aggregator() as second:
        yield [first, second]


@pytest.fixture
def ranks() -> Any:
    return harness.pool(3, env=on_hosts(3), oracle=False, one_host=False)


def places(two: list[Aggregator]) -> str:
    return ",".join(one.place for one in two)


def held(one: Aggregator) -> tuple[int, int]:
    pid = str(one.process.pid)
    return len(list(Path("/proc", pid, "fd").iterdir())), checks.memory(pid)


@pytest.mark.parametrize("number", range(int(os.environ.get("FUSEDPG_TEST_ROUNDS", "2"))))
def test_programs(ranks: Any, two: list[Aggregator], number: int) -> None:
    seed = random.SystemRandom().getrandbits(24)
    print(f"seed {seed}")
    ranks.run(checks.program, places(two), seed, 60)


def test_beside_the_ranks(ranks: Any) -> None:
    seed = random.SystemRandom().getrandbits(24)
    print(f"seed {seed}")
    ranks.run(checks.beside_the_ranks, KEY, seed, 40)


def test_ends_beside_the_ranks() -> None:
    """All raise, and name it."""
    with workers(3) as found:
        for text in found.run(checks.ends_beside_the_ranks, KEY):
            assert "aggregator 0 (127.0.0.1:" in text, text


def test_nothing_is_left(ranks: Any, two: list[Aggregator]) -> None:
    """After 1000 operations: no descriptors, no memory."""
    ranks.run(checks.many, places(two), 0)
    before = [held(one) for one in two]
    for descriptors, memory in ranks.run(checks.many, places(two), 1000):
        assert descriptors == 0
        assert memory < 4 << 20
    for one, (descriptors, memory) in zip(two, before):
        assert held(one)[0] <= descriptors + 1  # a job's end may take a moment
        assert held(one)[1] - memory < 8 << 20
