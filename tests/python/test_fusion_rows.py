"""Generated code for what a rank computes by itself: norms and other reductions of rows."""

from __future__ import annotations

import hypothesis
import pytest
import torch

import harness
import test_fusion_random as random_programs
from checks import rows

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("dtype", rows.BOUNDS, ids=str)
def test_norms_of_all_lengths(dtype: torch.dtype) -> None:
    harness.pool(2).run(rows.many_blocks, dtype, timeout=300)  # compiles; seconds each


def test_threads() -> None:
    harness.pool(2).run(rows.in_threads)


def test_after_fork() -> None:
    harness.pool(1).run(rows.forked)


def test_specials() -> None:
    harness.pool(1).run(rows.specials)


def test_shapes() -> None:
    harness.pool(1).run(rows.shapes)


def test_without_a_compiler_on_one_rank() -> None:
    harness.pool(2).run(rows.without_compiler)


def run_random(world_size: int, examples: int) -> int:
    seen = 0

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(random_programs.programs())
    def check(case: rows.Case) -> None:
        nonlocal seen
        counts = harness.pool(world_size).run(rows.random_program, case, timeout=300)
        assert len(set(counts)) == 1
        seen += counts[0]

    check()
    return seen


def run_random_gradients(world_size: int, examples: int) -> int:
    seen = 0

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(random_programs.programs(smooth=True))
    def check(case: rows.Case) -> None:
        nonlocal seen
        counts = harness.pool(world_size).run(rows.random_gradients, case, timeout=300)
        assert len(set(counts)) == 1
        seen += counts[0]

    check()
    return seen


def test_random_programs() -> None:
    # How many have rows to reduce is drawn, too: the slow test counts them.
    run_random(2, 6)


def test_random_gradients() -> None:
    run_random_gradients(2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_random(world_size, 60) > 20
    assert run_random_gradients(world_size, 40) > 20
