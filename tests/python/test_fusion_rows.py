"""Generated code for what a rank computes by itself: norms and other reductions of rows."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch

import harness
import test_fusion_random as random_programs
from checks import rows

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


def run_random(world_size: int, examples: int, check: Any, **drawn: Any) -> int:
    """How many groups of rows have run. The same programs each time: there are some among them."""
    seen = 0

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(random_programs.programs(**drawn))
    def each(case: rows.Case) -> None:
        nonlocal seen
        counts = harness.pool(world_size).run(check, case, timeout=300)
        assert len(set(counts)) == 1
        seen += counts[0]

    each()
    return seen


def test_random_programs() -> None:
    assert run_random(2, 6, rows.random_program) > 0


def test_random_gradients() -> None:
    assert run_random(2, 4, rows.random_gradients, smooth=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_random(world_size, 60, rows.random_program) > 20
    assert run_random(world_size, 40, rows.random_gradients, smooth=True) > 20
