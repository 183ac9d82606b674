"""Fused collectives with sums over the ranks inside: LAMB, clipping, and random ones."""

from __future__ import annotations

import os
import signal
import time

import pytest

import harness
from checks import fusion_sums
from test_faults import kill_last, wait_for

pytestmark = pytest.mark.fused_only

SIZES = [1, 2, 3, 4]


def seeds(few: int, more: int = 0) -> list[object]:
    """`SEED=` runs one again, alone."""
    if "SEED" in os.environ:
        return [int(os.environ["SEED"])]
    return [*range(few), *(harness.slow(seed) for seed in range(few, more))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_programs(world_size: int) -> None:
    workers = harness.pool(world_size)
    ran = 0
    for seed in seeds(12):
        ran += workers.run(fusion_sums.randomly, seed)[0]
    assert ran > 8 or "SEED" in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("seed", seeds(0, 60))
def test_many_random_programs(world_size: int, seed: int) -> None:
    harness.pool(world_size).run(fusion_sums.randomly, seed)


@pytest.mark.parametrize("hosts", ["three", "two and one"])
def test_between_hosts(hosts: str) -> None:
    workers = harness.pool_of_hosts(hosts)
    for seed in seeds(4):
        workers.run(fusion_sums.randomly, seed)
    workers.run(fusion_sums.one_operation)
    workers.run(fusion_sums.disagreements)


@pytest.mark.parametrize("world_size", SIZES)
def test_one_operation(world_size: int) -> None:
    harness.pool(world_size).run(fusion_sums.one_operation)


@pytest.mark.parametrize("world_size", [1, 2])
def test_operands_that_are_read_later(world_size: int) -> None:
    harness.pool(world_size).run(fusion_sums.read_later)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_again(world_size: int) -> None:
    harness.pool(world_size).run(fusion_sums.gathered_again)


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_sums(world_size: int) -> None:
    harness.pool(world_size).run(fusion_sums.whole_sums)


def test_number_over_a_slice() -> None:
    harness.pool(1).run(fusion_sums.number_over_a_slice)


@pytest.mark.parametrize("world_size", SIZES)
def test_clipping(world_size: int) -> None:
    harness.pool(world_size).run(fusion_sums.clipping)


@pytest.mark.parametrize("world_size", [2, 3])
def test_disagreements_raise_everywhere(world_size: int) -> None:
    harness.pool(world_size).run(fusion_sums.disagreements)


def test_killed_peer() -> None:
    with harness.Workers(3, oracle=False) as workers:
        workers.start(fusion_sums.loop)
        kill_last(workers, "fused_program")


def test_stopped_peer() -> None:
    """The group's deadline ends the wait for one that does not come."""
    with harness.Workers(3, timeout=3, oracle=False) as workers:
        workers.start(fusion_sums.loop)
        wait_for(workers, "running", [0, 1, 2])
        stopped = time.monotonic()
        workers.signal(1, signal.SIGSTOP)
        try:
            for text, when in workers.collect(20, ranks=[0, 2]):
                assert 2 < when - stopped < 7, when - stopped
                assert "time" in text, text
        finally:
            workers.signal(1, signal.SIGCONT)
        workers.collect(20, ranks=[1])


def test_not_on_gpus() -> None:
    harness.pool(2, **harness.fake_gpu()).run(fusion_sums.not_on_gpus)
