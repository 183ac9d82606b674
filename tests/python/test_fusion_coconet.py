"""CoCoNet's examples, with the collectives that they write out, against torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
import harness
from checks.compiled import compiles, done, no_compiler
from checks.fusion import assert_same, shard
from fusedpg import fusion
from fusedpg.fusion import (
    FuseCollective,
    IllegalProgram,
    Overlap,
    Partial,
    Reorder,
    Replicate,
    Shard,
    Split,
    all_gather,
    all_reduce,
    dropout,
    reduce_scatter,
)
from harness import Context, on_ranks

B1, B2, EPS, DECAY = 0.9, 0.99, 1e-6, 0.01
SIZES = [1, 2, 3, 4]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = ((1,), (33,), (5, 13), (1000,))
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@fusedpg.fuse
def sgd(g: Partial, w: Replicate, lr: float):
    return all_gather(w - lr * reduce_scatter(g))


@fusedpg.fuse
def adam(g: Partial, w: Replicate, m: Shard, v: Shard, lr: float, c1: float, c2: float):
    g = reduce_scatter(g, "mean")
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * g * g
    return all_gather(w - lr * (m / c1) / (torch.sqrt(v / c2) + EPS)), m, v


@fusedpg.fuse
def lamb(g: Partial, w: Replicate, m: Shard, v: Shard, lr: float, c1: float, c2: float):
    g = reduce_scatter(g, "mean")
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * g * g
    update = (m / c1) / (torch.sqrt(v / c2) + EPS) + DECAY * w
    return all_gather(w - lr * (w.norm() / update.norm()) * update), m, v


def lamb_of_one_process(w: Any, g: Any, m: Any, v: Any, lr: float, t: int) -> Any:
    """The paper's formula, in place."""
    m.mul_(B1).add_((1 - B1) * g)
    v.mul_(B2).add_((1 - B2) * g * g)
    update = (m / (1 - B1**t)) / ((v / (1 - B2**t)).sqrt() + EPS) + DECAY * w
    w.sub_(lr * (w.norm() / update.norm()) * update)


def both(context: Context, check: Callable[..., Any], *args: Any) -> Any:
    """A check operation by operation, and with generated code."""
    check(context, *args)
    return generated(context, check, *args)


def generated(context: Context, check: Callable[..., Any], *args: Any) -> Any:
    with compiles(context):
        return check(context, *args)


def draws(seed: int) -> Callable[..., torch.Tensor]:
    """Numbers that are alike on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def close(got: torch.Tensor, expected: torch.Tensor, what: Any, bound: float = 0.0) -> None:
    bound = bound or BOUNDS[got.dtype]
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    torch.testing.assert_close(
        got.double(), expected, rtol=bound, atol=bound * scale, msg=lambda m: f"{m}\n{what}"
    )


def of_schedules(step: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The function by each of its schedules, and how it is called without one."""
    titles = step.schedules(*args, **kwargs)
    return [step, *(step.scheduled(*found.transformations) for found in titles)]


def moments_steps(context: Context, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Adam and LAMB, three steps, in place and into new tensors, by all schedules."""
    size, rank = context.world_size, context.rank
    draw = draws(2)
    step = {"adam": adam, "lamb": lamb}[name]
    start = draw(*shape).to(dtype)
    parts = [[draw(*shape).to(dtype) for _ in range(size)] for _ in range(3)]
    count = fusedpg.shard_range(start.numel(), size, rank)[1]
    zero = torch.zeros(count, dtype=dtype)
    runs = of_schedules(step, parts[0][rank], start, zero, zero, lr=0.1, c1=0.1, c2=0.1)
    state = [(start.clone(), zero.clone(), zero.clone()) for _ in runs]
    expected, m, v = start.double(), *(torch.zeros(2, *shape, dtype=torch.float64))
    theirs = torch.optim.Adam([expected], lr=0.1, betas=(B1, B2), eps=EPS)
    for t, gradients in enumerate(parts, 1):
        mean = torch.stack(gradients).double().mean(0)
        if name == "adam":
            expected.grad = mean
            theirs.step()
            m, v = (theirs.state[expected][key] for key in ("exp_avg", "exp_avg_sq"))
        else:
            lamb_of_one_process(expected, mean, m, v, 0.1, t)
        numbers = {"lr": 0.1, "c1": 1 - B1**t, "c2": 1 - B2**t}
        for run, mine in zip(runs, state):
            new = run(gradients[rank], *mine, **numbers)
            run.into(mine, gradients[rank], *mine, **numbers)
            for got, again in zip(mine, new):
                assert torch.equal(got, again), (name, run, shape)
            close(mine[0], expected, (name, run, shape, t))
            close(mine[1], shard(m, size, rank), (name, run, shape, t))
            close(mine[2], shard(v, size, rank), (name, run, shape, t))
            assert_same(context, mine[0])
    return len(runs)


@fusedpg.fuse
def layer(x: fusion.Shard(2), w: fusion.Shard(0), b, r, p: float, seed: int):
    return all_gather(dropout(reduce_scatter(x @ w) + b, p, seed) + r)


def model_parallel(context: Context, rows: int, dtype: torch.dtype) -> None:
    """A product of blocks, and behind its sum bias, dropout and the residual."""
    size, rank = context.world_size, context.rank
    draw = draws(4)
    x, w = draw(2, rows, 8 * size).to(dtype), (draw(8 * size, 24) / 8).to(dtype)
    b, r = draw(24).to(dtype), draw(2, rows, 24).to(dtype)
    mine = x.chunk(size, 2)[rank].contiguous(), w.chunk(size, 0)[rank].contiguous()
    total = x.double() @ w.double() + b.double()
    masks = []
    for p in (0.0, 0.5):
        for run in of_schedules(layer, *mine, b, r, p, 7):
            y = run(*mine, b, r, p, 7)
            kept = y != r if p else torch.ones_like(y, dtype=torch.bool)
            expected = torch.where(kept, total / (1 - p), 0.0) + r.double()
            bound = 1e-5 if dtype == torch.float32 else 6e-2
            close(y, expected, (run, rows, p), bound)
            assert_same(context, y)
            if p:
                masks.append(kept)
    if rows > 10 and dtype == torch.float32:
        assert 0.4 < float(masks[0].float().mean()) < 0.6
        assert all(torch.equal(mask, masks[0]) for mask in masks)


@fusedpg.fuse
def larger(g: Partial, w: Replicate):
    return all_gather(w - reduce_scatter(g))


@fusedpg.fuse
def of_whole_values(g: Partial, w: Replicate):
    return all_gather(w.sum() * (w - 2 * w)) + reduce_scatter(g)


@fusedpg.fuse
def of_a_row(g: Partial, w: Replicate, b: Replicate):
    return all_gather(w + (b - reduce_scatter(g)))


def refused_alike(context: Context) -> None:
    """All ranks raise, with what to write, and the group can be used."""
    full, row = torch.ones(6, 5), torch.ones(5)
    cases: Sequence[tuple[Any, tuple[Any, ...], str]] = [
        (larger, (row, full), "all_gather it first"),
        (of_whole_values, (full, full), "leave it out, or reduce_scatter first"),
        (of_a_row, (row, full, row), "leave it out, or reduce_scatter first"),
    ]
    for function, given, reason in cases:
        try:
            function(*given)
        except IllegalProgram as error:
            assert reason in str(error) and "coconet.py:" in str(error), error
        else:
            raise AssertionError(reason)
    assert float(sgd(full, full, lr=0.0).sum()) == 30


@on_ranks(2)
def test_one_operation(context: Context) -> None:
    """The first two forms are one operation of the group as written, by its name alone."""
    g, size = torch.ones(64, 64), context.world_size
    part = torch.ones(fusedpg.shard_range(4096, 2, 0)[1])
    moments = {"m": part, "v": part, "lr": 0.1, "c1": 1.0, "c2": 1.0}
    for step, numbers in ((sgd, {"lr": 0.1}), (adam, moments)):
        written = step.scheduled().schedule(g, g, **numbers, world_size=2).program
        fused = step.scheduled(FuseCollective()).schedule(g, g, **numbers, world_size=2).program
        chosen = step.schedule(g, g, **numbers, world_size=2).program
        assert sum(node.op == "all_gather" for node in written.nodes) == 1
        assert written.bytes() == fused.bytes() == chosen.bytes() == 2 * 4 * 4096 // 2
        for program in (fused, chosen):
            (group,) = program.groups
            assert group.kind == "collective"
            assert {node.op for node in set(program.nodes) - group.nodes} <= {"input", "constant"}
    assert size >= 1


# --- a product, and the fused collective behind it, chunk by chunk --------------------------------


@fusedpg.fuse
def block(x: fusion.Shard(2), w: fusion.Shard(0), b, r, p: float, seed: int):
    return r + dropout(all_reduce(x @ w) + b, p, seed)


def orders(chunks: int) -> list[Any]:
    """The same schedule with Overlap at each place, of both forms of the layer."""
    ways = [[Split(), Reorder(), FuseCollective()] for _ in range(4)]
    for place, way in enumerate(ways):
        way.insert(place, Overlap(chunks=chunks))
    ways[0][0] = Overlap("all_reduce", chunks=chunks)
    found = [block.scheduled(*way) for way in ways]
    found.append(layer.scheduled(FuseCollective(), Overlap(chunks=chunks)))
    found.append(layer.scheduled(Overlap(chunks=chunks), FuseCollective()))
    return found


def overlapped(context: Context, rows: int, chunks: int, dtype: torch.dtype) -> None:
    """Against one process, and the mask against the layer in one piece."""
    size, rank = context.world_size, context.rank
    draw = draws(7)
    x, w = draw(2, rows, 8 * size).to(dtype), (draw(8 * size, 24) / 8).to(dtype)
    b, r = draw(24).to(dtype), draw(2, rows, 24).to(dtype)
    mine = x.chunk(size, 2)[rank].contiguous(), w.chunk(size, 0)[rank].contiguous()
    total = x.double() @ w.double() + b.double()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 6e-2)
    kept = block.scheduled()(*mine, b, r, 0.5, 7) != r
    for run in orders(chunks):
        assert f"overlap in {chunks} chunks:" in str(run.schedule(*mine, b, r, 0.5, 7))
        for p in (0.0, 0.5):
            mask = kept if p else torch.ones_like(kept)
            before = done()
            y = run(*mine, b, r, p, 7)
            assert done() == before + chunks
            if dtype != torch.bfloat16:
                assert torch.equal(y != r, mask)
            expected = torch.where(mask, total / (1 - p), 0.0) + r.double()
            close(y, expected, (run, rows, chunks, p), bound)
            assert_same(context, y)
        pending = run(*mine, b, r, 0.5, 7, async_op=True)
        assert torch.equal(pending.wait(), y)
        target = r.clone()
        run.into((target,), *mine, b, target, 0.5, 7)
        assert torch.equal(target, y)
        again = run(*mine, b, r, 0.5, 7, group=context.oracle)  # without chunks
        close(again, expected, (run, "gloo"), bound)


@fusedpg.fuse
def many_shapes(x: fusion.Shard(2), w: fusion.Shard(0), o: Replicate, scale: float):
    """`o` is broadcast to the product."""
    y = reduce_scatter(x @ w, "mean")
    return all_gather(torch.where(y > o, y * o, scale - o)), all_gather(y - o)


def overlapped_shapes(context: Context) -> None:
    """Operands of all shapes that can be broadcast, in chunks of unequal numbers of rows."""
    size, rank = context.world_size, context.rank
    draw = draws(8)
    x, w = draw(3, 5, 4 * size), draw(4 * size, 6) / 4
    mine = x.chunk(size, 2)[rank].contiguous(), w.chunk(size, 0)[rank].contiguous()
    y = x @ w / size
    shapes = [(), (1,), (6,), (1, 1), (5, 1), (5, 6), (1, 6), (1, 1, 1), (3, 1, 1), (1, 5, 1)]
    shapes += [(1, 1, 6), (3, 5, 1), (3, 1, 6), (1, 5, 6), (3, 5, 6)]
    for shape in shapes:
        o = draw(*shape)
        for chunks in (2, 4, 15):
            run = many_shapes.scheduled(FuseCollective(), Overlap(chunks=chunks))
            before = done()
            first, second = run(*mine, o, 0.5)
            assert done() == before + chunks, shape
            close(first, torch.where(y > o, y * o, 0.5 - o), (shape, chunks))
            close(second, y - o, (shape, chunks))
        strided = o.transpose(0, -1).contiguous().transpose(0, -1) if o.dim() else o
        run = many_shapes.scheduled(FuseCollective(), Overlap(chunks=4))
        close(run(*mine, strided, 0.5)[1], y - o, shape)


def overlapped_gradients(context: Context) -> None:
    """The backward of a layer that runs in chunks."""
    size, rank = context.world_size, context.rank
    draw = draws(9)
    x, w = draw(2, 6, 4 * size), draw(4 * size, 5)
    b, r, seen = draw(5), draw(2, 6, 5), draw(2, 6, 5)
    whole = [t.clone().requires_grad_() for t in (x, w, b, r)]
    (((whole[0] @ whole[1]) + whole[2] + whole[3]) * seen).sum().backward()
    mine = [x.chunk(size, 2)[rank].clone(), w.chunk(size, 0)[rank].clone(), b.clone(), r.clone()]
    for t in mine:
        t.requires_grad_()
    run = block.scheduled(Split(), Reorder(), FuseCollective(), Overlap(chunks=3))
    (run(*mine, 0.0, 7) * seen).sum().backward()
    wanted = [t.grad for t in whole]
    wanted[:2] = [wanted[0].chunk(size, 2)[rank], wanted[1].chunk(size, 0)[rank]]
    for got, want in zip(mine, wanted):
        close(got.grad, want, "gradient")
    # The backward reads a slice of the sum, which chunks do not have: the forward has none then.
    run = curved.scheduled(FuseCollective(), Overlap(chunks=3))
    with torch.no_grad():
        before = done()
        y = run(*mine)
        assert done() == before + 3
    for t in (*whole, *mine):
        t.grad = None
    (F.gelu((whole[0] @ whole[1]) + whole[2]) + whole[3]).mul(seen).sum().backward()
    result = run(*mine)
    close(result, y, "forward")
    (result * seen).sum().backward()
    wanted = [t.grad for t in whole]
    wanted[:2] = [wanted[0].chunk(size, 2)[rank], wanted[1].chunk(size, 0)[rank]]
    for got, want in zip(mine, wanted):
        close(got.grad, want, "gradient of a slice that is kept")


@fusedpg.fuse
def curved(x: fusion.Shard(2), w: fusion.Shard(0), b, r):
    return all_gather(r + F.gelu(reduce_scatter(x @ w) + b))


def overlapped_empty(context: Context) -> None:
    """A rank without features adds zeros, in chunks and in one piece."""
    size, rank = context.world_size, context.rank
    draw = draws(10)
    features = max(1, size - 1)
    x, w, b, r = draw(2, 6, features), draw(features, 5), draw(5), draw(2, 6, 5)
    mine = x.tensor_split(size, 2)[rank].contiguous(), w.tensor_split(size, 0)[rank].contiguous()
    for way in ([], [Overlap(chunks=3)], [Split(), Reorder(), FuseCollective(), Overlap(chunks=3)]):
        close(block.scheduled(*way)(*mine, b, r, 0.0, 7), x @ w + b + r, way)


@fusedpg.fuse
def one_value(g: Partial, w: Replicate, lr: float):
    new = w - lr * reduce_scatter(g)
    return new, all_gather(new), all_gather(new)


def results_of_one_value(context: Context) -> None:
    """Results are tensors of their own, whatever they are computed as."""
    w, g = torch.ones(100), torch.ones(100)
    expected = 1 - 0.5 * context.world_size
    for _ in range(3):
        first, *others = one_value(g, w, 0.5)
        first.fill_(7)
        for other in others:
            close(other, torch.full((100,), expected, dtype=torch.float64), "result")


@fusedpg.fuse
def beside(x: fusion.Shard(2), w: fusion.Shard(0), b, number: float):
    return all_gather(reduce_scatter(x @ w) + b), number * b


def overlapped_differently(context: Context) -> None:
    """Ranks with other numbers, or another schedule: all raise, and go on."""
    size, rank = context.world_size, context.rank
    x, w, b, r = torch.ones(2, 6, 4), torch.ones(4, 5), torch.ones(5), torch.ones(2, 6, 5)
    run = block.scheduled(Split(), Reorder(), FuseCollective(), Overlap(chunks=3))
    expected = run(x, w, b, r, 0.5, 7)
    odd = rank == size - 1
    other = block.scheduled(Split(), Reorder(), FuseCollective(), Overlap(chunks=4))
    for wrong, numbers in ((run, (0.5, 8) if odd else (0.5, 7)), (other if odd else run, (0.5, 7))):
        try:
            wrong(x, w, b, r, *numbers)
        except dist.DistBackendError as error:
            assert "ranks disagree" in str(error), error
        else:
            assert size == 1
        assert torch.equal(run(x, w, b, r, 0.5, 7), expected)
    # A number that chunks do not take.
    run = beside.scheduled(FuseCollective(), Overlap(chunks=3))
    for wrong in (False, True, False):
        raised = False
        try:
            run(x, w, b, 3.0 if wrong and odd else 2.0)
        except dist.DistBackendError:
            raised = True
        assert raised == (wrong and size > 1)


def overlapped_without_a_compiler(context: Context) -> None:
    """On one rank: all compute operation by operation, then and later."""
    size, rank = context.world_size, context.rank
    x, w, b, r = torch.ones(2, 6, 4), torch.ones(4, 5), torch.ones(5), torch.ones(2, 6, 5)
    run = block.scheduled(Split(), Reorder(), FuseCollective(), Overlap(chunks=3))
    with no_compiler(rank == size - 1):
        before = done()
        for _ in range(2):
            y = run(x, w, b, r, 0.5, 7)
            assert torch.equal(y, torch.where(y != r, 2.0 * (4 * size + 1) + 1, 1.0))
        assert done() == before


def overlapped_tuned(context: Context) -> None:
    """It is among the schedules that a tuner times, and is never what a model chooses."""
    x, w, b, r = torch.ones(2, 6, 4), torch.ones(4, 5), torch.ones(5), torch.ones(2, 6, 5)
    fused = fusedpg.fuse(block.__wrapped__)
    titles = [found.title for found in fused.schedules(x, w, b, r, 0.5, 7)]
    both = [title for title in titles if "FuseCollective" in title and "Overlap" in title]
    assert both and "Overlap" not in fused.schedule(x, w, b, r, 0.5, 7).title
    table = str(fused.tune(x, w, b, r, 0.5, 7))
    assert all(title in table for title in both), table


# --- tests ---------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", ["adam", "lamb"])
@on_ranks(*SIZES)
def test_moments(context: Context, name: str, dtype: torch.dtype) -> list[int]:
    counts = [both(context, moments_steps, name, shape, dtype) for shape in SHAPES]
    assert min(counts) > 3
    return counts


@DTYPES
@pytest.mark.parametrize("rows", [1, 20])
@on_ranks(*SIZES)
def test_model_parallel(context: Context, rows: int, dtype: torch.dtype) -> None:
    both(context, model_parallel, rows, dtype)


@on_ranks(1, 2, 4)
def test_refused_on_all_ranks(context: Context) -> None:
    both(context, refused_alike)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@on_ranks(*SIZES)
def test_overlapped(context: Context, dtype: torch.dtype) -> None:
    for rows, chunks in ((7, 4), (1, 2), (20, 3)):
        generated(context, overlapped, rows, chunks, dtype)


@pytest.mark.parametrize(
    "check",
    [
        overlapped_shapes,
        overlapped_gradients,
        overlapped_differently,
        overlapped_without_a_compiler,
        overlapped_tuned,
        overlapped_empty,
    ],
)
@on_ranks(1, 2, 3)
def test_overlapped_calls(context: Context, check: Callable[[Context], None]) -> None:
    generated(context, check)


@on_ranks(1, 2, 3)
def test_results_of_one_value(context: Context) -> None:
    both(context, results_of_one_value)


@pytest.mark.parametrize("hosts", ["three", "two and one"])
def test_overlapped_between_hosts(hosts: str) -> None:
    pool = harness.pool_of_hosts(hosts)
    pool.run(generated, overlapped, 7, 4, torch.float32)
    pool.run(generated, overlapped_shapes)
    pool.run(generated, overlapped_differently)


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
