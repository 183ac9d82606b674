"""CoCoNet's examples, with the collectives that they write out."""

from __future__ import annotations

import pytest
import torch

import fusedpg
import harness
from checks import coconet
from fusedpg.fusion import Partial, Replicate, Shard, all_gather, reduce_scatter

SIZES = [1, 2, 3, 4]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = ((1,), (33,), (5, 13), (1000,))


@DTYPES
@pytest.mark.parametrize("world_size", SIZES)
def test_sgd(world_size: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        counts = harness.pool(world_size).run(coconet.both, "sgd_steps", shape, dtype)
        assert len(set(counts)) == 1 and counts[0] > 2


@DTYPES
@pytest.mark.parametrize("name", ["adam", "lamb"])
@pytest.mark.parametrize("world_size", SIZES)
def test_moments(world_size: int, name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        counts = harness.pool(world_size).run(coconet.both, "moments_steps", name, shape, dtype)
        assert len(set(counts)) == 1 and counts[0] > 3


@pytest.mark.parametrize("world_size", SIZES)
def test_whole_moments(world_size: int) -> None:
    for shape in ((33,), (5, 13)):
        harness.pool(world_size).run(coconet.both, "whole_state", shape)


@DTYPES
@pytest.mark.parametrize("world_size", SIZES)
def test_model_parallel(world_size: int, dtype: torch.dtype) -> None:
    for rows in (1, 20):
        harness.pool(world_size).run(coconet.both, "model_parallel", rows, dtype)


@pytest.mark.parametrize("world_size", SIZES)
def test_results_over_arguments(world_size: int) -> None:
    for numel in (33, 1000):
        assert min(harness.pool(world_size).run(coconet.both, "written_over", numel)) > 6


@pytest.mark.parametrize("world_size", SIZES)
def test_operands_of_other_shapes(world_size: int) -> None:
    for shape in ((1, 7), (5, 13), (8, 32)):
        harness.pool(world_size).run(coconet.both, "other_shapes", shape)


@pytest.mark.parametrize("world_size", SIZES)
def test_used_after_it_was_gathered(world_size: int) -> None:
    for shape in ((1,), (33,), (5, 13)):
        harness.pool(world_size).run(coconet.both, "gathered_before", shape)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_refused_on_all_ranks(world_size: int) -> None:
    harness.pool(world_size).run(coconet.both, "refused_alike")


def test_one_operation() -> None:
    harness.pool(2).run(coconet.one_operation)


def test_gathered_once() -> None:
    """Also where the value is needed as a whole before, or returned by another name."""

    @fusedpg.fuse
    def twice(g: Partial, w: Replicate, k: Replicate):
        new = w - reduce_scatter(g)
        return new @ k, all_gather(new), 2 * new, all_gather(new)

    square = torch.ones(32, 32)
    program = twice.program(square, square, square, world_size=2)
    assert sum(node.op == "all_gather" for node in program.nodes) == 2  # of `new` and `2 * new`
    assert program.outputs[1] is program.outputs[3]
    text = str(program)
    assert "all_gather(sub)" in text and "all_gather(mul)" in text

    @fusedpg.fuse
    def on_slices(g: Partial, w: Replicate, m: Shard):
        new = all_gather(w - reduce_scatter(g))
        return new, new * m

    part = torch.ones(512)
    program = on_slices.program(square, square, part, world_size=2)
    assert [node.op for node in program.nodes].count("slice") == 1  # of `w`
    assert [node.op for node in program.nodes].count("all_gather") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", SIZES)
def test_overlapped(world_size: int, dtype: torch.dtype) -> None:
    for rows, chunks in ((7, 4), (1, 2), (20, 3)):
        harness.pool(world_size).run(coconet.generated, "overlapped", rows, chunks, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_overlapped_shapes(world_size: int) -> None:
    harness.pool(world_size).run(coconet.generated, "overlapped_shapes")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "check", ["gradients", "differently", "without_a_compiler", "tuned", "empty"], ids=str
)
def test_overlapped_calls(world_size: int, check: str) -> None:
    harness.pool(world_size).run(coconet.generated, f"overlapped_{check}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_of_one_value(world_size: int) -> None:
    harness.pool(world_size).run(coconet.both, "results_of_one_value")


@pytest.mark.parametrize("hosts", ["three", "two and one"])
def test_overlapped_between_hosts(hosts: str) -> None:
    pool = harness.pool_of_hosts(hosts)
    pool.run(coconet.generated, "overlapped", 7, 4, torch.float32)
    pool.run(coconet.generated, "overlapped_shapes")
    pool.run(coconet.generated, "overlapped_differently")
