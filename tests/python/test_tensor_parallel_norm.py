"""Row-parallel layers with a norm behind the sum."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

import harness
from checks import normed

pytestmark = pytest.mark.fused_only


def seeds() -> list[Any]:
    """Some, then many slow ones; `SEED=` runs one."""
    if "SEED" in os.environ:
        return [(int(os.environ["SEED"]),)]
    return [(1, 5), *(harness.slow(range(at, at + 20)) for at in range(0, 160, 20))]


@pytest.mark.parametrize("world_size", [2, *(harness.slow(size) for size in (1, 3))])
@pytest.mark.parametrize("some", seeds(), ids=str)
def test_random_cases(world_size: int, some: Iterable[int]) -> None:
    for seed in some:
        harness.pool(world_size).run(normed.drawn, seed)


def test_hooks() -> None:
    harness.pool(2).run(normed.hooks)


@pytest.mark.long
def test_norms_behind_the_operation() -> None:
    harness.pool(2).run(normed.behind)


def test_between_hosts() -> None:
    harness.pool_of_hosts("two and one").run(normed.between_hosts)
