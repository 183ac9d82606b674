"""Fused functions inside of functions under torch.compile."""

from __future__ import annotations

import pytest

import harness
from checks import fusion_compile, fusion_compile_dynamic

pytestmark = pytest.mark.fused_only


@pytest.mark.long
@pytest.mark.parametrize("world_size", [harness.slow(1), 2])
def test_one_graph(world_size: int) -> None:
    # torch compiles, which takes a minute where others do, too.
    harness.pool(world_size).run(fusion_compile.without_breaks, "aot_eager", timeout=200)


@pytest.mark.slow
def test_one_graph_of_inductor() -> None:
    harness.pool(2).run(fusion_compile.without_breaks, "inductor")


@pytest.mark.long
def test_groups_and_breaks() -> None:
    harness.pool(2).run(fusion_compile.groups)


def test_rules() -> None:
    harness.pool(2).run(fusion_compile.checked)


def test_functions_that_the_same_lines_call() -> None:
    harness.pool(1).run(fusion_compile_dynamic.instances)


def test_numbers_that_change() -> None:
    harness.pool(1).run(fusion_compile_dynamic.many_numbers)


def test_numbers_that_change_before_backward() -> None:
    harness.pool(1).run(fusion_compile_dynamic.changes_before_backward)
