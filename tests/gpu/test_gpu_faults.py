"""Ranks on a GPU that die, disagree or are late."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

import harness
from gpu_checks import faults
from ranks import fresh

pytestmark = pytest.mark.timeout(600)

# From a peer's end to the other ranks' errors: NCCL notices a closed socket, and at the latest
# the watchdog a deadline.
TIMEOUT = 8.0


@pytest.fixture
def two() -> Iterator[harness.Workers]:
    with fresh(2) as workers:
        yield workers


@pytest.mark.parametrize("what", ["learning rate", "order", "operation"])
def test_mismatch_raises_everywhere(two: harness.Workers, what: str) -> None:
    for text in two.run(faults.mismatch, what, timeout=200):
        assert text.startswith("fused:"), text
        assert "disagree" in text, text
        assert "rank 0" in text and "rank 1" in text, text


def test_killed_peer() -> None:
    with fresh(3) as workers:
        workers.start(faults.loop, TIMEOUT)
        deadline = time.monotonic() + 90
        while not all((workers.scratch / f"running{rank}").exists() for rank in range(3)):
            assert time.monotonic() < deadline, [workers.log(rank)[-2000:] for rank in range(3)]
            time.sleep(0.05)
        killed = time.monotonic()
        workers.signal(2, signal.SIGKILL)
        for text, when in workers.collect(60, ranks=[0, 1]):
            assert when - killed < TIMEOUT + 5, (when - killed, text)
            assert text.startswith("fused:"), text
        workers.start(faults.survivors, [0, 1], ranks=[0, 1])
        assert workers.collect(200, ranks=[0, 1]) == [None, None]


def test_absent_peer_is_a_timeout(two: harness.Workers) -> None:
    (text, seconds), (late, _) = two.run(faults.absent, 4.0, timeout=300)
    assert "did not finish within" in text, text
    assert 3.5 < seconds < 12, seconds
    assert late.startswith("fused:"), late


def test_abort(two: harness.Workers) -> None:
    texts = two.run(faults.aborted, timeout=300)
    assert "abort" in texts[0], texts


def test_destroyed_with_work_under_way(two: harness.Workers) -> None:
    two.run(faults.torn_down_under_way, timeout=300)


@pytest.mark.real_gpu
def test_out_of_memory(two: harness.Workers) -> None:
    two.run(faults.out_of_memory, timeout=300)
