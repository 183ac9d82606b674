"""Ranks that call a fused function with other numbers or flags: all of them raise."""

from __future__ import annotations

import pytest

import harness
from checks import alike

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("world_size", [2, harness.slow(1), harness.slow(3)])
def test_ranks_differ(world_size: int) -> None:
    harness.pool(world_size).run(alike.differ, timeout=300)


def test_what_may_differ() -> None:
    harness.pool(2).run(alike.unlike_only_in_kind)


def test_arithmetic() -> None:
    alike.arithmetic()
