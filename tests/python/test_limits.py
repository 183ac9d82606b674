"""What a process is not allowed, or is allowed for ever, and memory that is not there."""

from __future__ import annotations

import itertools

import pytest

import harness
from checks import limits

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

MIB = limits.MIB
numbers = itertools.count()


@pytest.mark.parametrize(
    ("kind", "left", "most"),
    [
        ("v", [2000 * MIB, 2000 * MIB], 512 * MIB),
        ("v", [None, 2000 * MIB], 512 * MIB),
        ("f", [20 * MIB, None], 16 * MIB),
        ("f", [8 * MIB, 8 * MIB], 4 * MIB),
    ],
)
@pytest.mark.parametrize("served", [False, True], ids=["fused", "served"])
def test_arena_takes_what_fits(kind: str, left: list[int | None], most: int, served: bool) -> None:
    workers = harness.pool(2, init=False, oracle=False)
    sizes = workers.run(limits.train, f"limit{next(numbers)}", kind, left, served)
    assert sizes[0] == sizes[1], "ranks agree"
    assert sizes[0] <= most


def test_nothing_fits() -> None:
    """ "fused" says what to do; served, all ranks have Gloo's group."""
    workers = harness.pool(2, init=False, oracle=False)
    left = [None, MIB]
    served = workers.run(limits.train, f"limit{next(numbers)}", "f", left, True)
    assert served == ["Gloo's", "Gloo's"]
    errors = workers.errors(limits.train, f"limit{next(numbers)}", "f", left, False)
    for error in errors:
        assert "ulimit -f" in error.text
        assert "raise that limit" in error.text


def test_timeouts_without_end() -> None:
    harness.pool(2).run(limits.endless)


def test_callbacks_that_block_have_a_bounded_number_of_threads() -> None:
    most = max(harness.pool(2).run(limits.blocked_callbacks, 200, False))
    assert 10 < most <= 80, most
    harness.pool(2).run(limits.blocked_callbacks, 67, True)


def test_memory_that_was_freed() -> None:
    for found in harness.pool(2).run(limits.freed):
        for name, error in found.items():
            assert "storage" in error, (name, error)
