"""fusedpg.tensor_parallel with sequence_dim: layers and styles."""

from __future__ import annotations

import pytest
import torch

import harness
from checks import sequence as checks

SIZES = [1, 2, harness.slow(3)]


@pytest.mark.parametrize("world_size", [*SIZES, harness.slow(4)])
@pytest.mark.parametrize("first", [0, *(harness.slow(n) for n in range(40, 400, 40))])
def test_random_cases(world_size: int, first: int) -> None:
    for seed in range(first, first + (10 if world_size == 1 else 40)):
        harness.pool(world_size).run(checks.drawn, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", SIZES)
def test_masks(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(checks.masks, dtype)


@pytest.mark.parametrize("world_size", SIZES)
def test_norms(world_size: int) -> None:
    harness.pool(world_size).run(checks.norms)


@pytest.mark.parametrize("world_size", SIZES)
def test_styles(world_size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        harness.pool(world_size).run(checks.styles, dtype)


def test_what_does_not_fit() -> None:
    harness.pool(2).run(checks.wrong)


def test_residuals_on_their_way() -> None:
    harness.pool(2).run(checks.on_their_way)


def test_autocast() -> None:
    harness.pool(2).run(checks.autocast)


@pytest.mark.slow
def test_under_compile() -> None:
    harness.pool(2).run(checks.under_compile, timeout=120)


@pytest.mark.fused_only
@pytest.mark.parametrize("names", ["two", "two and one"])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names, "gloo")
    workers.run(checks.masks, torch.float32)
    workers.run(checks.norms)
