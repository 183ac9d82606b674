"""Reductions of rows inside of a fused collective, where each rank's slice is of whole rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
import harness
from checks import compiled as generated
from checks import fusion as checks
from checks import fusion_autograd as gradients
from checks.fusion import Case
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import (
    FuseCollective,
    FuseCompute,
    IllegalTransformation,
    LocalRowReduction,
    Partial,
    Reorder,
    Split,
    compiled,
    philox,
)
from fusedpg.fusion.schedule import cheapest
from fuzz import functions
from harness import Context, on_ranks

FUSED = (Split(), Reorder(), LocalRowReduction(), FuseCollective())
# The same numbers after an all_reduce: a function of rows on every rank.
AFTER = (FuseCompute(),)


def block(x: fusion.Partial, b: Any, r: Any, w: Any, v: Any, c: Any, seed: int) -> Any:
    """Norms and a softmax of a sum, values of rows, and operands that repeat in several ways."""
    y = r + fusion.dropout(fusion.all_reduce(x, "mean") + b, 0.25, seed)
    length = y.shape[-1]
    weights = torch.exp(y - torch.amax(y, -1, True))
    scale = torch.log(y.norm(dim=-1, keepdim=True) + 1) * c
    return (
        F.rms_norm(y, (length,), w, 1e-5),
        y,
        F.layer_norm(y, (length,), w, v, 1e-5),
        weights / weights.sum(-1, keepdim=True),
        y * scale,
        y.amin(-1),
        y.mean(-1, keepdim=True) * c,
    )


def drawn(context: Context, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """All ranks' contributions, and operands that are alike on all ranks."""
    generator = torch.Generator().manual_seed(math.prod(shape))

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    n = shape[-1]
    v = draw(1).expand(n)  # not contiguous
    return [draw(context.world_size, *shape), draw(n), draw(*shape), draw(n), v, draw(n - 1, 1)[:1]]


def same_bits(context: Context, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The fused collective has the bits of an all_reduce and a function of rows."""
    x, b, r, w, v, c = drawn(context, shape, dtype)
    c = torch.rand(*shape[:-1], 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = (x[context.rank], b, r, w, v, c, 5)
    run = fusedpg.fuse(block).scheduled(*FUSED)
    text = run.generated(*given)
    assert "sum_of" in text and "kFolded" in text, text
    before = generated.done()
    with generated.compiles(context):
        got = run(*given)
        assert generated.done() == before + 1
        with generated.counted() as done:
            want = fusedpg.fuse(block).scheduled(*AFTER)(*given)
        assert any(source.rows is not None for source in done)
    eager = run(*given)
    total = checks.reference_all_reduce(checks.Contributions(list(x)), "mean")
    y = r + checks.reference_dropout(total + b, 0.25, 5)
    torch.testing.assert_close(got[1], y, rtol=0, atol=0)
    bound = 4 * generated.BOUNDS[dtype]
    for number, (mine, his, other) in enumerate(zip(got, want, eager, strict=True)):
        assert torch.equal(mine, his), (shape, dtype, number, (mine - his).abs().max())
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)
    wide = y.double()
    expected = F.layer_norm(wide, (shape[-1],), w.double(), v.double(), 1e-5)
    torch.testing.assert_close(got[2].double(), expected, rtol=bound, atol=bound)
    dist.barrier(group=context.oracle)


def whole_rows(world_size: int, more: bool) -> list[tuple[int, ...]]:
    """Shapes whose slices are whole rows: also where ranks have different numbers of them, or
    none."""
    shapes = [(2 * world_size, 32), (2 * world_size + 1, 64), (2, world_size, 96)]
    if more:
        shapes += [(1, 64), (32 * world_size, 33), (64 * world_size, 7), (3 * world_size, 4128)]
        shapes += [(4, world_size, 2, 160), (300 * world_size, 992)]
    return shapes


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
        LocalRowReduction("rms_norm_mean_sum").apply(program)
    assert "`rms_norm_mean_sum = all_reduce" in str(raised.value)
    with pytest.raises(IllegalTransformation, match="no reduction of slices of whole rows"):
        LocalRowReduction().apply(program)


def test_refused_for_other_nodes() -> None:
    program = traced((4, 64), 2)
    with pytest.raises(IllegalTransformation, match="it combines no reductions of slices"):
        LocalRowReduction("all_reduce").apply(program)
    with pytest.raises(IllegalTransformation, match="it is about all_reduce"):
        LocalRowReduction("add").apply(program)
    with pytest.raises(IllegalTransformation, match="one number for each row") as raised:
        fusion.FuseCompute("rms_norm_mean_1", "rms_norm").apply(LocalRowReduction().apply(program))
    assert "`rms_norm_mean_1 = div" in str(raised.value)
    with pytest.raises(IllegalTransformation, match="fused groups are fixed"):
        LocalRowReduction().apply(fusion.FuseCompute().apply(program))

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
            LocalRowReduction(name).apply(program)
        except IllegalTransformation as error:
            refused.append(str(error))
    assert len(names) == 4 and len(refused) == 2
    assert "not over the last dimensions" in refused[0]
    assert "over all dimensions" in refused[1]
    with pytest.raises(IllegalTransformation, match="of other rows than others in the group"):
        FuseCollective().apply(
            LocalRowReduction().apply(fusedpg.fuse(two).program(given[0], world_size=2))
        )


def test_what_comes_after_keeps_the_rows_apart() -> None:
    """A number of each row of a slice is no slice of these numbers, whatever the order."""

    def sums(x: Partial, c: Any) -> Any:
        y = fusion.reduce_scatter(x)
        s, t = y.sum(-1) * c, y.amax(-1) * 2
        return fusion.send(s), t + s, t

    program = LocalRowReduction().apply(
        fusedpg.fuse(sums).program(meta(4, 64), meta(4), world_size=2)
    )
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
    at_once, one = LocalRowReduction().apply(moved), moved
    for name in [n.name for n in moved.nodes if n.op == "all_reduce"]:
        one = LocalRowReduction(name).apply(one)
    assert one.bytes() == at_once.bytes()
    assert sum(n.op == "all_gather" for n in one.nodes) == 1


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return meta(4, 64), meta(4, 1)


def test_bytes_and_layouts() -> None:
    program = traced((4, 64), 2)
    sliced = LocalRowReduction().apply(fusion.AsShard().apply(program))
    # As written the slices' sums are added over the ranks; then nobody is asked for them.
    assert fusion.AsShard().apply(program).bytes() - sliced.bytes() == 4 * 4
    text = str(sliced)
    assert "sum(rms_norm_mean, dims=(1,), keepdim=True)" in text and "Rows(64) f32[4, 1]" in text
    assert "local_" not in text and "expand(" in text

    def mean(x: Partial) -> Any:
        return fusion.reduce_scatter(x).mean(-1) * 2

    gathered = LocalRowReduction().apply(fusedpg.fuse(mean).program(meta(4, 64), world_size=2))
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
    assert LocalRowReduction() in one.transformations and FuseCollective() in one.transformations
    # Gathering both results sends more than a norm on every rank: it pays on one host alone.
    program = fusedpg.fuse(both).program(*given, world_size=2)
    assert LocalRowReduction() in cheapest(program).transformations
    assert LocalRowReduction() not in cheapest(program, one_host=False).transformations


def test_results_of_long_rows_are_not_generated() -> None:
    def norm(x: Partial) -> Any:
        y = fusion.all_reduce(x)
        return (y / y.sum(-1, keepdim=True)).double()

    run = fusedpg.fuse(norm).scheduled(Split(), Reorder(), LocalRowReduction(), FuseCollective())
    assert "kFolded" in run.generated(meta(2, 8192), world_size=2)
    assert "a row of more than 65536 bytes is not" in run.generated(meta(2, 8224), world_size=2)


def test_no_kernel_for_gpus() -> None:
    run = fusedpg.fuse(block).scheduled(*FUSED)
    given = (meta(4, 64), meta(64), meta(4, 64), meta(64), meta(64), meta(4, 1), 3)
    assert "not generated for GPUs" in run.generated(*given, world_size=2, device="cuda")


def test_no_kernel_for_gpus_where_rows_are_outside() -> None:
    """The fused collective reads a number for each row that the function returns, too."""

    def scaled(x: Partial, m: fusion.Shard) -> Any:
        y = fusion.all_reduce(x) + m
        norm = y.sum(-1, keepdim=True)
        return y * norm, norm

    run = fusedpg.fuse(scaled).scheduled(*FUSED)
    text = run.generated(meta(4, 32), meta(64), world_size=2, device="cuda")
    assert "not generated for GPUs" in text, text


def many(context: Context, dtype: torch.dtype, more: bool) -> None:
    for shape in whole_rows(context.world_size, more):
        if fusion.rows.Rows(shape, 1).whole(context.world_size):
            same_bits(context, shape, dtype)
    dist.barrier(group=context.oracle)


@pytest.mark.long
@pytest.mark.parametrize(
    "world_size, dtype", [(2, torch.float32), harness.slow(3, torch.bfloat16)], ids=str
)
def test_bits_of_rows_after_the_collective(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(many, dtype, False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", generated.BOUNDS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_bits_of_many_shapes(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(many, dtype, True, timeout=300)


def large(context: Context) -> None:
    """Chunk by chunk, from memory that peers read and from memory that is copied, by threads."""

    def step(x: fusion.Partial, r: Any, w: Any) -> Any:
        y = r + fusion.all_reduce(x)
        return F.rms_norm(y, (y.shape[-1],), w, 1e-5), y, y.mean(-1)

    shared = context.world_size > 1 and context.one_host
    for shape in [(400 * context.world_size, 992), (2 * context.world_size, 16384)]:
        x, _, r, w, _, _ = drawn(context, shape, torch.float32)
        run = fusedpg.fuse(step).scheduled(*FUSED)
        results = []
        with generated.compiles(context):
            want = fusedpg.fuse(step).scheduled(*AFTER)(x[context.rank], r, w)
            for arena in (False, True)[: 1 + shared]:
                mine = fusedpg.empty(shape) if arena else torch.empty(shape)
                mine.copy_(x[context.rank])
                before = generated.done()
                results.append(run(mine, r, w))
                into = tuple(torch.empty_like(t) for t in want)
                run.into(into, mine, r, w)
                results.append(into)
                # Onto what the ranks add, and onto an operand that a later pass reads again.
                residual = r.clone()
                run.into((mine, residual, into[2]), mine, residual, w)
                results.append((mine, residual, into[2]))
                assert generated.done() == before + 3
        for got in results:
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
    dist.barrier(group=context.oracle)


@pytest.mark.long
@pytest.mark.parametrize("threads", [3, harness.slow(1)])
@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
def test_large(world_size: int, threads: int) -> None:
    harness.pool(world_size, options={"threads": threads}).run(large, timeout=300)


def slices(context: Context) -> None:
    """Operands and results that are slices, and reductions of other values than the sum."""

    def step(
        x: fusion.Partial, m: fusion.Shard, q: Any, e: Any
    ) -> tuple[fusion.Shard, None, fusion.Replicate, fusion.Shard]:
        y = m + fusion.reduce_scatter(x)
        size = m.norm(dim=-1, keepdim=True)
        z = y / (size + e) + q * y.amax(-1, True)
        return z, m.sum(-1), z * (y.sum(-1, keepdim=True) + size), y

    shape = (2, 3 * context.world_size, 64)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(context.world_size, *shape, generator=generator, dtype=torch.float64)
    m, q = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    q, e = q[0, :, :1], torch.rand(1, generator=generator, dtype=torch.float64)
    own = checks.shard(m, context.world_size, context.rank)
    y = m + sum(x)
    size = m.norm(dim=-1, keepdim=True)
    z = y / (size + e) + q * y.amax(-1, True)
    full = (z, m.sum(-1), z * (y.sum(-1, keepdim=True) + size), y)
    fused = fusedpg.fuse(step)
    ran = 0
    for schedule in fused.schedules(x[0], own, q, e):
        run = fused.scheduled(*schedule.transformations)
        before = generated.done()
        with generated.compiles(context):
            results = run(x[context.rank], own, q, e)
        results_eager = run(x[context.rank], own, q, e)
        whole = generated.done() - before == generated.reductions(schedule.program)
        ran += whole and "extern" in "".join(compiled.sources(schedule.program))
        for node, got, eager, want in zip(schedule.program.outputs, results, results_eager, full):
            if str(node.layout) == "Shard":
                want = checks.shard(want, context.world_size, context.rank)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(eager, want, rtol=1e-12, atol=1e-12)
    assert ran
    run = fused.scheduled(LocalRowReduction(), FuseCollective())
    assert "extern" in run.generated(x[0], own, q, e), run.generated(x[0], own, q, e)


@pytest.mark.parametrize("world_size", [2, harness.slow(1), harness.slow(3)])
def test_slices(world_size: int) -> None:
    harness.pool(world_size).run(slices)


def cut_rows(context: Context) -> None:
    """The engine takes no function of rows for slices that are none."""
    step = fusedpg.fuse(lambda x: (y := fusion.all_reduce(x)) - y.mean(-1, True)).scheduled(*FUSED)
    x = torch.ones(4 * context.world_size, 32)
    with generated.compiles(context):
        torch.testing.assert_close(step(x), torch.zeros_like(x))
    program = step.schedule(x).program
    group, nodes = next(unit for unit in program.units if unit[0] is not None)
    found = compiled.kernel(group, nodes, program)
    assert found.source is not None and found.source.row == 32
    backend = fusedpg.functional._backend(dist.group.WORLD)
    size, (key, scratch) = context.world_size, (found.source.key, found.source.scratch)
    cases = [((4, 31), 0, 0, 32), ((4 * size, 32), 7, 0, 32), ((size, 16), 0, 1, 32)]
    cases += [((size, 48), 0, 0, 48)] * (size > 1) + [((4 * size, 32), 0, 0, 0)]
    for shape, first, runs, row in cases:
        x, done = torch.ones(shape), torch.zeros(1, dtype=torch.uint8)
        given = (
            found.function(),
            key,
            "sum",
            x,
            [],
            [],
            [],
            [x.clone()],
            [not runs],
            [],
            [row],
            done,
        )
        with refused("whole rows", ValueError):
            backend.fused_program_(*given, False, (first, runs, 0, row, scratch))


@pytest.mark.parametrize("world_size", [2, harness.slow(1)])
def test_engine_refuses_parts_of_rows(world_size: int) -> None:
    harness.pool(world_size).run(cut_rows)


@on_ranks(2)
def test_dropout_of_one_number_a_row(context: Context) -> None:
    """Which rows are kept depends on their index in the full tensor, under all schedules."""
    x = torch.rand(32 * context.world_size, 64, generator=torch.Generator().manual_seed(2)) + 1
    masked = fusedpg.fuse(
        lambda x, seed: (
            (y := fusion.all_reduce(x, "mean")) * fusion.dropout(torch.amax(y, -1, True), 0.5, seed)
        )
    )
    keep = philox.kept(0.5, 9, 0, len(x), x.device).reshape(-1, 1)
    want = x * torch.where(keep, x.amax(-1, True) * 2, 0.0)
    seen = 0
    for schedule in masked.schedules(x, 9):
        seen += "LocalRowReduction" in schedule.title
        got = masked.scheduled(*schedule.transformations)(x, 9)
        torch.testing.assert_close(got, want)
    assert seen


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["two and one", harness.slow("three"), harness.slow("crossed")])
def test_between_hosts(hosts: str) -> None:
    harness.pool_of_hosts(hosts).run(large, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["two and one", "three", "crossed"])
def test_bits_between_hosts(hosts: str) -> None:
    # The reference adds in rank order, which is that of "two and one" by hosts, too.
    order = "hosts" if hosts == "two and one" else "flat"
    for dtype in (torch.bfloat16, torch.float64):
        pool = harness.pool_of_hosts(hosts, FUSEDPG_ORDER=order)
        pool.run(many, dtype, True, timeout=300)


def run_random(world_size: int, examples: int, check: Any, **drawn: Any) -> int:
    """How many have had rows of a rank's own. The same programs each time."""
    shapes = [(2 * world_size, 32), (3 * world_size, 64), (world_size, 2, 96)]
    more = {"shapes": shapes, "reduces": True, **drawn}
    return functions.run_cases(lambda: harness.pool(world_size), check, examples, **more)


def parts_rows(schedule: Any) -> bool:
    """Rows of a rank's own."""
    return LocalRowReduction() in schedule.transformations


def random_program(context: Context, case: Case) -> int:
    return generated.random_program(context, case, parts_rows)


@pytest.mark.long
def test_random_programs() -> None:
    assert run_random(2, 8, random_program) > 0


def random_gradients(context: Context, case: Case) -> int:
    """Backward programs with rows of a rank's own; in how many there are some."""
    values = checks.tensors(case, context.world_size)
    expected = gradients.reference(case, values)
    mine = gradients.own(context, values)
    fused = fusedpg.fuse(checks.compiled(case.text, checks.FUSED))
    derived = gradients.derivative(fused, mine, None)
    backwards = [
        s for s in fusion.schedules(derived.program) if LocalRowReduction() in s.transformations
    ]
    forwards = [
        s for s in fusion.schedules(derived.forward) if LocalRowReduction() in s.transformations
    ]
    for forward, backward in [*((s, None) for s in forwards[-1:]), *((None, s) for s in backwards)]:
        run = fused.scheduled(
            *(forward.transformations if forward else ()),
            backward=backward.transformations if backward else (),
        )
        for code in (False, True):
            with generated.environment(FUSEDPG_FUSION="compiled" if code else "eager"):
                with generated.compiles(context) if code else generated.environment():
                    what = f"{forward}\n{backward}"
                    gradients.compare(context, case, run, derived, mine, expected, None, what)
    dist.barrier(group=context.oracle)
    return len(backwards)


@pytest.mark.long
def test_random_gradients() -> None:
    assert run_random(2, 5, random_gradients, smooth=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_random(world_size, 160, random_program) > 20
    assert run_random(world_size, 120, random_gradients, smooth=True) > 20
