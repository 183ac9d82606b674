"""Fused optimizers with a compressing communication hook, in random ways."""

from __future__ import annotations

import pytest

import harness
from fuzz import core, hooked

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 8))])
@pytest.mark.parametrize("where", hooked.WHERE)
def test_training_as_in_one_process(where: str, seed: int) -> None:
    core.search("hooked", where, core.seed(seed))
