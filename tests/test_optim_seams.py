"""Seams between the parts of the fused optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness
from checks import optim_seams


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "check",
    [
        optim_seams.accumulated_in_a_bucket,
        optim_seams.swapped_groups,
        optim_seams.norms_are_fresh,
        optim_seams.masters_into_float32,
        optim_seams.blank_state,
    ],
)
def test_seams(check: Callable[[harness.Context], None], world_size: int) -> None:
    harness.pool(world_size).run(check)


@pytest.mark.parametrize("view", [False, True])
def test_hooks_of_users(view: bool) -> None:
    harness.pool(2).run(optim_seams.hooks_of_users, view)
