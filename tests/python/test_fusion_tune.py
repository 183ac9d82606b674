"""The tuner of fused functions."""

from __future__ import annotations

import pytest

import harness
from checks import tuner

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize(
    ("world_size", "numel"), [(1, 1000), harness.slow(2, 1), (2, 100_003), harness.slow(3, 5000)]
)
def test_choices(world_size: int, numel: int) -> None:
    harness.pool(world_size).run(tuner.choices, numel)


def test_a_schedule_that_raises() -> None:
    harness.pool(2).run(tuner.raising)


def test_limits() -> None:
    harness.pool(2).run(tuner.limits)


def test_gradients() -> None:
    harness.pool(2).run(tuner.gradients)


def test_a_rank_leaves() -> None:
    harness.pool(2).run(tuner.leaving)


def test_with_gloo() -> None:
    harness.pool(2).run(tuner.with_gloo)
