"""Lists of tensors as one argument of a fused function."""

from __future__ import annotations

import os

import pytest

import harness
from checks import fusion_lists

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_lists(world_size: int) -> None:
    """A failure names its seed, which `SEED=` runs again, alone."""
    seeds = [int(os.environ["SEED"])] if "SEED" in os.environ else range(15)
    for seed in seeds:
        harness.pool(world_size).run(fusion_lists.randomly, seed)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_many_random_lists(world_size: int) -> None:
    for seed in range(100, 250):
        harness.pool(world_size).run(fusion_lists.randomly, seed)


def test_random_lists_between_hosts() -> None:
    for seed in range(6):
        harness.pool_of_hosts("two and one").run(fusion_lists.randomly, seed)


def test_repeated_calls() -> None:
    harness.pool(2).run(fusion_lists.repeated)


@pytest.mark.parametrize("world_size", [1, 2])
def test_derivatives(world_size: int) -> None:
    harness.pool(world_size).run(fusion_lists.derivatives)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients(world_size: int) -> None:
    harness.pool(world_size).run(fusion_lists.gradients)


def test_other_uses() -> None:
    harness.pool(2).run(fusion_lists.other_uses)


@pytest.mark.parametrize("world_size", [2, 3])
def test_refusals(world_size: int) -> None:
    harness.pool(world_size).run(fusion_lists.refusals)
