"""Row-parallel layers with a norm behind the sum."""

from __future__ import annotations

import pytest

import harness
from checks import normed
from fuzz import core

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 40))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, "13")])
def test_random_cases(where: str, seed: int) -> None:
    core.search("norms", where, core.seed(seed))


def test_hooks() -> None:
    harness.pool(2).run(normed.hooks)


@pytest.mark.long
def test_norms_behind_the_operation() -> None:
    harness.pool(2).run(normed.behind)


def test_between_hosts() -> None:
    harness.pool_of_hosts("two and one").run(normed.between_hosts)
