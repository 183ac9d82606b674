"""Generated code: the bits of the eager path, and what happens where it cannot be had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedpg
import harness
from checks import compiled, shortcuts
from fusedpg import fusion
from fusedpg.fusion import compile
from fuzz import core
from fuzz.functions import run_cases

pytestmark = pytest.mark.fused_only


@pytest.mark.long
def test_random_programs() -> None:
    assert run_cases(lambda: harness.pool(2), compiled.random_program, 6) > 3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_cases(lambda: harness.pool(world_size), compiled.random_program, 60) > 20


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sizes(world_size: int) -> None:
    workers = harness.pool(world_size)
    for numel in (0, 1, 31, 1_000_003):
        workers.run(compiled.sizes, numel, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_types(dtype: torch.dtype) -> None:
    harness.pool(2).run(compiled.sizes, 70_001, dtype)


def test_operands() -> None:
    harness.pool(3).run(compiled.broadcasts)


def test_disagreements_raise_everywhere() -> None:
    harness.pool(2).run(compiled.disagreements)


def test_without_a_compiler_on_one_rank() -> None:
    harness.pool(2).run(compiled.without_compiler)


def test_answers_of_groups() -> None:
    harness.pool(3).run(compiled.answers_of_groups)


def test_operands_that_do_not_fit() -> None:
    harness.pool(2).run(compiled.operands_that_do_not_fit)


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "latin", *map(harness.slow, ["missing", "full"])])
def test_compiler_that_returns(how: str) -> None:
    harness.pool(2).run(compiled.compiler_returns, how)


@pytest.mark.long
@pytest.mark.parametrize(("rows", "missing"), [(True, False), (False, True)])
def test_forgotten_on_one_rank(rows: bool, missing: bool) -> None:
    harness.pool(2).run(compiled.forgotten, rows, missing)


@pytest.mark.long
@pytest.mark.parametrize("names", ["three", "two and one"])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names)
    for dtype in (torch.float32, torch.bfloat16):
        workers.run(compiled.sizes, 70_001, dtype)


def test_nothing_stays_behind() -> None:
    harness.pool(2).run(compiled.collected)


def maxima(g: fusion.Partial, w: fusion.Replicate) -> fusion.Shard:
    x = fusion.all_reduce(g, "mean")
    y = torch.maximum(x / (x * x + 1), x)
    return torch.minimum(torch.maximum(x, y), w)


def conditions(g: fusion.Partial, w: fusion.Replicate) -> fusion.Shard:
    x = torch.maximum(fusion.all_reduce(g) + w, w)
    y = torch.where(x > 0, x, 0.5)
    return torch.relu(y.clamp(-0.5, 1.0)) * torch.sign(x)


def extremes(g: fusion.Partial, w: fusion.Replicate) -> fusion.Shard:
    return torch.maximum(fusion.all_reduce(g, "max"), w).clamp(min=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [maxima, conditions, extremes])
def test_loops_are_vectorised(
    function: Callable[..., Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """A loop with branches takes 20 times as long."""
    command, version = compile._compiler(os.environ.get("CXX", ""))
    if "Free Software Foundation" not in version:
        pytest.skip("another compiler than GCC says otherwise what it has vectorised")
    x = torch.zeros(4096, dtype=dtype)
    text = fusedpg.fuse(function).generated(x, x, world_size=2)
    (tmp_path / "program.cpp").write_text(text)
    flags = [*compile._flags(text), "-fopt-info-vec-optimized", "-o", "/dev/null"]
    ran = subprocess.run(
        [*command, *flags, "program.cpp"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loops = [n for n, line in enumerate(text.split("\n"), 1) if "; i < n; ++i) {" in line]
    vectorised = set(map(int, re.findall(r":(\d+):\d+: optimized: loop vectorized", ran.stderr)))
    assert loops and vectorised.issuperset(loops), ran.stderr


@pytest.mark.long
def test_compiling_at_once(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "compile_at_once.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 10))])
def test_calls_like_earlier_ones(seed: int) -> None:
    core.search("shortcuts", "2", core.seed(seed))


def test_a_function_is_lost() -> None:
    harness.pool(2).run(shortcuts.without_function)


def test_other_places_on_one_rank() -> None:
    harness.pool(2).run(shortcuts.beside_others)


@pytest.mark.long
def test_shortcuts_go_with_their_group() -> None:
    harness.pool(2).run(shortcuts.groups_that_go)
