"""Generated code for what a rank computes by itself: norms and other reductions of rows."""

from __future__ import annotations

import pytest
import torch

import harness
from checks import rows
from fuzz.functions import run_cases

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("more", [False, harness.slow(True)])
@pytest.mark.parametrize("dtype", rows.BOUNDS, ids=str)
def test_norms_of_all_lengths(dtype: torch.dtype, more: bool) -> None:
    harness.pool(2).run(rows.many_blocks, dtype, more, timeout=300)  # compiles; seconds each


def test_threads() -> None:
    harness.pool(2).run(rows.in_threads)


def test_after_fork() -> None:
    harness.pool(1).run(rows.forked)


def test_specials() -> None:
    harness.pool(1).run(rows.specials)


def test_shapes() -> None:
    harness.pool(1).run(rows.shapes)


def test_numbers() -> None:
    harness.pool(1).run(rows.numbers)


def test_without_a_compiler_on_one_rank() -> None:
    harness.pool(2).run(rows.without_compiler)


@pytest.mark.parametrize("world_size", [1, 3])
def test_slices(world_size: int) -> None:
    harness.pool(world_size).run(rows.slices)


def test_random_programs() -> None:
    assert run_cases(lambda: harness.pool(2), rows.random_program, 6) > 0


def test_random_gradients() -> None:
    assert run_cases(lambda: harness.pool(2), rows.random_gradients, 4, smooth=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_cases(lambda: harness.pool(world_size), rows.random_program, 60) > 20
    assert run_cases(lambda: harness.pool(world_size), rows.random_gradients, 40, smooth=True) > 20
