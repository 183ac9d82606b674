"""What each rank does in the tests of fused collectives with reductions of their own rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
from checks import compiled as generated
from checks import fusion as checks
from checks import fusion_autograd as gradients
from checks import rows
from checks.fusion import Case
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import FuseCollective, FuseCompute, OwnRows, Reorder, Split, compiled, philox
from harness import Context

FUSED = (Split(), Reorder(), OwnRows(), FuseCollective())
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
        with rows.counted() as done:
            want = fusedpg.fuse(block).scheduled(*AFTER)(*given)
        assert any(source.rows is not None for source in done)
    eager = run(*given)
    total = checks.reference_all_reduce(checks.Contributions(list(x)), "mean")
    y = r + checks.reference_dropout(total + b, 0.25, 5)
    torch.testing.assert_close(got[1], y, rtol=0, atol=0)
    bound = 4 * rows.BOUNDS[dtype]
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


def many(context: Context, dtype: torch.dtype, more: bool) -> None:
    for shape in whole_rows(context.world_size, more):
        if fusion.rows.Rows(shape, 1).whole(context.world_size):
            same_bits(context, shape, dtype)
    dist.barrier(group=context.oracle)


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
        ran += whole and "extern" in compiled.generated(schedule.program)
        for node, got, eager, want in zip(schedule.program.outputs, results, results_eager, full):
            if str(node.layout) == "Shard":
                want = checks.shard(want, context.world_size, context.rank)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(eager, want, rtol=1e-12, atol=1e-12)
    assert ran
    run = fused.scheduled(OwnRows(), FuseCollective())
    assert "extern" in run.generated(x[0], own, q, e), run.generated(x[0], own, q, e)


def random_program(context: Context, case: Case) -> int:
    """Schedules with rows of a rank's own, compiled and not; how many ran as generated code."""
    program = generated.Random(context, case)
    found = [s for s in program.schedules("collective") if OwnRows() in s.transformations]
    ran = 0
    for schedule in found[:3]:
        text = compiled.generated(schedule.program)
        before = generated.done()
        program.compare(schedule, program.results(schedule), text, exact=False)
        with generated.compiles(context):
            results = program.results(schedule)
        count = generated.CALLS * generated.reductions(schedule.program)
        ran += "extern" in text and generated.done() - before == count
        program.compare(schedule, results, text, exact=False)
    dist.barrier(group=context.oracle)
    return ran


def random_gradients(context: Context, case: Case) -> int:
    """Backward programs with rows of a rank's own; in how many there are some."""
    values = checks.tensors(case, context.world_size)
    expected = gradients.reference(case, values)
    mine = gradients.own(context, values)
    fused = fusedpg.fuse(checks.compiled(case.text, checks.FUSED))
    derived = gradients.derivative(fused, mine, None)
    backwards = [s for s in fusion.schedules(derived.program) if OwnRows() in s.transformations]
    forwards = [s for s in fusion.schedules(derived.forward) if OwnRows() in s.transformations]
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


def dropped_rows(context: Context) -> None:
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
        seen += "OwnRows" in schedule.title
        got = masked.scheduled(*schedule.transformations)(x, 9)
        torch.testing.assert_close(got, want)
    assert seen
