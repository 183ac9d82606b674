"""Fused optimizers on many parameters: lists instead of one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness
from checks import optim_many


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "check",
    [
        optim_many.clipped_at_once,
        optim_many.clipped_with_others,
        optim_many.gradients_again,
        optim_many.gradients_again_clipped,
        optim_many.gradients_that_are_kept,
        optim_many.groups_of_several_kinds,
    ],
)
def test_many(check: Callable[[harness.Context], None], world_size: int) -> None:
    harness.pool(world_size).run(check)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduced_at_once(world_size: int) -> None:
    harness.pool(world_size).run(optim_many.reduced_at_once)


@pytest.mark.parametrize("mode", ["ddp", "overlap", "manual"])
def test_edited_state(mode: str) -> None:
    harness.pool(2).run(optim_many.edited_state, mode)
