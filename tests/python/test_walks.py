"""Calls that users make often pass through few Python frames of the package."""

from __future__ import annotations

import pytest

import harness
from checks import walks

pytestmark = pytest.mark.fused_only


def test_fused_calls() -> None:
    """Limits for the first call, which traces and schedules, and for those that follow."""
    limits = {"step": (5_900, 18, 18, 18), "momentum": (8_450, 18, 18, 18)}
    for counts in harness.pool(2).run(walks.fused_calls):
        for name, limit in limits.items():
            assert all(n <= most for n, most in zip(counts[name], limit)), counts


def test_all_reduce() -> None:
    assert harness.pool(2).run(walks.all_reduce) == [1, 1]
