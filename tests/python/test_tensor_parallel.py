"""fusedpg.tensor_parallel: layers and styles."""

from __future__ import annotations

import pytest
import torch

import harness
from checks import tensor_parallel as checks


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.float32),
        (1, torch.bfloat16),
        *(harness.slow(size, torch.bfloat16) for size in (2, 4)),
        *(harness.slow(size, torch.float32) for size in (1, 4)),
    ],
)
@pytest.mark.parametrize(
    ("shape", "bias", "residual", "norm"),
    [
        ("token", True, True, False),
        ("rows", True, False, False),
        ("rows", False, True, True),
        ("batch", False, False, True),
        ("large", True, True, True),
    ],
)
def test_layers(
    world_size: int, dtype: torch.dtype, shape: str, bias: bool, residual: bool, norm: bool
) -> None:
    harness.pool(world_size).run(checks.layers, shape, dtype, bias, residual, norm)


@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
def test_overlap(world_size: int) -> None:
    for rows in (2, 37, 600):
        harness.pool(world_size).run(checks.overlapped, rows)


@pytest.mark.fused_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_and_large(dtype: torch.dtype) -> None:
    harness.pool(3).run(checks.ways, dtype)


def test_what_does_not_fit() -> None:
    harness.pool(2).run(checks.wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, harness.slow(4)])
def test_styles(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(checks.styles, dtype)


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("world_size", [1, 2])
def test_from_linear_shares_nothing(world_size: int, source: int | None) -> None:
    harness.pool(world_size).run(checks.shares_nothing, source)


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoint(world_size: int) -> None:
    harness.pool(world_size).run(checks.checkpoint)


def test_masks() -> None:
    harness.pool(2).run(checks.masks)


@pytest.mark.parametrize("world_size", [2, harness.slow(1)])
def test_without_gradients(world_size: int) -> None:
    harness.pool(world_size).run(checks.without_gradients)


def test_autocast() -> None:
    harness.pool(2).run(checks.autocast)


@pytest.mark.fused_only
def test_without_a_compiler_on_one_rank() -> None:
    harness.pool(2).run(checks.without_compiler)


@pytest.mark.fused_only
@pytest.mark.parametrize("names", ["two", "two and one"])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names)
    for shape in ("token", "large"):
        workers.run(checks.layers, shape, torch.float32, True, True, False)
