"""Ranks that call a fused function with other numbers or flags: all of them raise."""

from __future__ import annotations

import pytest

import harness
from checks import alike

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize(
    ("world_size", "every"), [(2, False), *(harness.slow(size, True) for size in (1, 2, 3))]
)
def test_ranks_differ(world_size: int, every: bool) -> None:
    harness.pool(world_size).run(alike.differ, every, timeout=300)


def test_what_may_differ() -> None:
    harness.pool(2).run(alike.unlike_only_in_kind)


def test_arithmetic() -> None:
    alike.arithmetic()
