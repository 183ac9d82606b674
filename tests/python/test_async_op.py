"""Asynchronous operations: who runs them, when their futures are complete."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness
from checks import async_op

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "check",
    [
        async_op.future_is_complete,
        async_op.waits_in_callbacks,
        async_op.order_of_waits,
        async_op.modes,
        async_op.time_limit,
        async_op.needs_no_wait,
    ],
    ids=lambda check: check.__name__,
)
def test_async(check: Callable[[harness.Context], None]) -> None:
    for size in (2, 3):
        harness.pool(size).run(check)


@pytest.mark.fused_only
def test_forked_child(pair: harness.Workers) -> None:
    pair.run(async_op.forked_child_raises)
