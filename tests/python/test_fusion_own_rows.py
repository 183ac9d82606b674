"""Reductions of rows inside of a fused collective, where each rank's slice is of whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusedpg
import harness
from checks import own_rows, rows
from fusedpg import fusion
from fusedpg.fusion import FuseCollective, IllegalTransformation, OwnRows, Partial, Reorder, Split
from fusedpg.fusion.schedule import cheapest
from fuzz import functions

pytestmark = pytest.mark.fused_only


def step(x: Partial, w: fusion.Replicate, m: fusion.Shard) -> Any:
    y = m + fusion.all_reduce(x)
    return F.rms_norm(y, (y.shape[-1],), w, 1e-5)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def traced(shape: tuple[int, ...], world_size: int, **more: Any) -> fusion.Program:
    function = fusedpg.fuse(step)
    part = fusedpg.shard_range(meta(*shape).numel(), world_size, 0)[1]
    given = (meta(*shape, **more), meta(shape[-1], **more), meta(part, **more))
    return function.program(*given, world_size=world_size)


@pytest.mark.parametrize(
    "shape, world_size, reason",
    [
        ((4, 33), 2, "slices of 96 elements are not whole rows of 33"),
        ((4, 64), 3, "slices of 96 elements are not whole rows of 64"),
        ((2, 1 << 15), 2, "rows of 131072 bytes are longer than 65536"),
        ((64, 1), 2, "2 to 65,536 elements"),
    ],
)
def test_refused(shape: tuple[int, ...], world_size: int, reason: str) -> None:
    program = traced(shape, world_size)
    with pytest.raises(IllegalTransformation, match=reason) as raised:
        OwnRows("rms_norm_mean_sum").apply(program)
    assert "`rms_norm_mean_sum = all_reduce" in str(raised.value)
    with pytest.raises(IllegalTransformation, match="no reduction of slices of whole rows"):
        OwnRows().apply(program)


def test_refused_for_other_nodes() -> None:
    program = traced((4, 64), 2)
    with pytest.raises(IllegalTransformation, match="it combines no reductions of slices"):
        OwnRows("all_reduce").apply(program)
    with pytest.raises(IllegalTransformation, match="it is about all_reduce"):
        OwnRows("add").apply(program)
    with pytest.raises(IllegalTransformation, match="one number for each row") as raised:
        fusion.FuseCompute("rms_norm_mean_1", "rms_norm").apply(OwnRows().apply(program))
    assert "`rms_norm_mean_1 = div" in str(raised.value)
    with pytest.raises(IllegalTransformation, match="fused groups are fixed"):
        OwnRows().apply(fusion.FuseCompute().apply(program))

    def several(x: Partial, m: fusion.Shard) -> Any:
        y = m + fusion.reduce_scatter(x)
        return y - y.mean(-1, True), y * y.amax((1, 2), True), y.sum(0), y.sum()

    def two(x: Partial) -> Any:
        y = fusion.reduce_scatter(x)
        return y - y.mean(-1, True), y * y.amax((1, 2), True)

    given = (meta(4, 2, 32), meta(128))
    program = fusedpg.fuse(several).program(*given, world_size=2)
    names = [node.name for node in program.nodes if node.op == "all_reduce"]
    refused = []
    for name in names:
        try:
            OwnRows(name).apply(program)
        except IllegalTransformation as error:
            refused.append(str(error))
    assert len(names) == 4 and len(refused) == 2
    assert "not over the last dimensions" in refused[0]
    assert "over all dimensions" in refused[1]
    with pytest.raises(IllegalTransformation, match="of other rows than others in the group"):
        FuseCollective().apply(OwnRows().apply(fusedpg.fuse(two).program(given[0], world_size=2)))


def test_what_comes_after_keeps_the_rows_apart() -> None:
    """A number of each row of a slice is no slice of these numbers, whatever the order."""

    def sums(x: Partial, c: Any) -> Any:
        y = fusion.reduce_scatter(x)
        s, t = y.sum(-1) * c, y.amax(-1) * 2
        return fusion.send(s), t + s, t

    program = OwnRows().apply(fusedpg.fuse(sums).program(meta(4, 64), meta(4), world_size=2))
    names = [node.name for node in program.nodes if node.op == "all_gather"]
    assert len(names) == 2
    for transformation in (*map(fusion.Reorder, names), *map(fusion.AsShard, names)):
        with pytest.raises(IllegalTransformation):
            transformation.apply(program)
    for transformation in (fusion.Reorder(), fusion.AsShard()):
        with pytest.raises(IllegalTransformation):
            transformation.apply(program)
    sent = fusion.FuseSend().apply(program)
    (message,) = sent.messages
    assert message.operands[0].layout == fusion.ir.SHARD and message.operands[0].op == "slice"

    # One after the other is as all at once.
    def block(x: Partial, c: Any) -> Any:
        y = fusion.all_reduce(x)
        scale = y.sum(-1, True) * c
        return y * scale + y.amax(-1, True) * scale

    moved = Reorder().apply(Split().apply(fusedpg.fuse(block).program(*given(), world_size=2)))
    at_once, one = OwnRows().apply(moved), moved
    for name in [n.name for n in moved.nodes if n.op == "all_reduce"]:
        one = OwnRows(name).apply(one)
    assert one.bytes() == at_once.bytes()
    assert sum(n.op == "all_gather" for n in one.nodes) == 1


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return meta(4, 64), meta(4, 1)


def test_bytes_and_layouts() -> None:
    program = traced((4, 64), 2)
    sliced = OwnRows().apply(fusion.AsShard().apply(program))
    # As written the slices' sums are added over the ranks; then nobody is asked for them.
    assert fusion.AsShard().apply(program).bytes() - sliced.bytes() == 4 * 4
    text = str(sliced)
    assert "sum(rms_norm_mean, dims=(1,), keepdim=True)" in text and "Rows(64) f32[4, 1]" in text
    assert "local_" not in text and "expand(" in text

    def mean(x: Partial) -> Any:
        return fusion.reduce_scatter(x).mean(-1) * 2

    gathered = OwnRows().apply(fusedpg.fuse(mean).program(meta(4, 64), world_size=2))
    # Half of what an all_reduce of a number a row sends.
    assert gathered.bytes() == (4 * 64 + 4) * 4 // 2
    assert "Replicate f32[4]" in str(gathered)


def test_cheapest_takes_them_where_they_are_worth_it() -> None:
    def norm(x: Partial, w: Any) -> Any:
        y = fusion.all_reduce(x)
        return F.rms_norm(y, (y.shape[-1],), w, 1e-5)

    def both(x: Partial, w: Any) -> Any:
        y = fusion.all_reduce(x)
        return F.rms_norm(y, (y.shape[-1],), w, 1e-5), y

    given = (meta(64, 64), meta(64))
    one = fusedpg.fuse(norm).schedule(*given, world_size=2)
    assert OwnRows() in one.transformations and FuseCollective() in one.transformations
    # Gathering both results sends more than a norm on every rank: it pays on one host alone.
    program = fusedpg.fuse(both).program(*given, world_size=2)
    assert OwnRows() in cheapest(program).transformations
    assert OwnRows() not in cheapest(program, one_host=False).transformations


def test_results_of_long_rows_are_not_generated() -> None:
    def norm(x: Partial) -> Any:
        y = fusion.all_reduce(x)
        return (y / y.sum(-1, keepdim=True)).double()

    run = fusedpg.fuse(norm).scheduled(Split(), Reorder(), OwnRows(), FuseCollective())
    assert "kFolded" in run.generated(meta(2, 8192), world_size=2)
    assert "a row of more than 65536 bytes is not" in run.generated(meta(2, 8224), world_size=2)


def test_no_kernel_for_gpus() -> None:
    run = fusedpg.fuse(own_rows.block).scheduled(*own_rows.FUSED)
    given = (meta(4, 64), meta(64), meta(4, 64), meta(64), meta(64), meta(4, 1), 3)
    assert "not generated for GPUs" in run.generated(*given, world_size=2, device="cuda")


@pytest.mark.long
@pytest.mark.parametrize(
    "world_size, dtype", [(2, torch.float32), harness.slow(3, torch.bfloat16)], ids=str
)
def test_bits_of_rows_after_the_collective(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(own_rows.many, dtype, False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", rows.BOUNDS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_bits_of_many_shapes(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(own_rows.many, dtype, True, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize("threads", [3, harness.slow(1)])
@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
def test_large(world_size: int, threads: int) -> None:
    harness.pool(world_size, options={"threads": threads}).run(own_rows.large, timeout=300)


@pytest.mark.parametrize("world_size", [2, harness.slow(1), harness.slow(3)])
def test_slices(world_size: int) -> None:
    harness.pool(world_size).run(own_rows.slices)


@pytest.mark.parametrize("world_size", [2, harness.slow(1)])
def test_engine_refuses_parts_of_rows(world_size: int) -> None:
    harness.pool(world_size).run(own_rows.cut_rows)


def test_dropout_of_one_number_a_row() -> None:
    harness.pool(2).run(own_rows.dropped_rows)


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["two and one", harness.slow("three"), harness.slow("crossed")])
def test_between_hosts(hosts: str) -> None:
    harness.pool_of_hosts(hosts).run(own_rows.large, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["two and one", "three", "crossed"])
def test_bits_between_hosts(hosts: str) -> None:
    # The reference adds in rank order, which is that of "two and one" by hosts, too.
    order = "hosts" if hosts == "two and one" else "flat"
    for dtype in (torch.bfloat16, torch.float64):
        pool = harness.pool_of_hosts(hosts, FUSEDPG_ORDER=order)
        pool.run(own_rows.many, dtype, True, timeout=300)


def run_random(world_size: int, examples: int, check: Any, **drawn: Any) -> int:
    """How many have had rows of a rank's own. The same programs each time."""
    shapes = [(2 * world_size, 32), (3 * world_size, 64), (world_size, 2, 96)]
    more = {"shapes": shapes, "reduces": True, **drawn}
    return functions.run_cases(lambda: harness.pool(world_size), check, examples, **more)


@pytest.mark.long
def test_random_programs() -> None:
    assert run_random(2, 8, own_rows.random_program) > 0


@pytest.mark.long
def test_random_gradients() -> None:
    assert run_random(2, 5, own_rows.random_gradients, smooth=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_random(world_size, 160, own_rows.random_program) > 20
    assert run_random(world_size, 120, own_rows.random_gradients, smooth=True) > 20
