"""Generated code for what a rank computes by itself: norms and other reductions of rows."""

from __future__ import annotations

import contextlib
import os
import random
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
from fusedpg import fusion
from fusedpg.fusion.local import sources
from fuzz.functions import run_cases
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only


def random_program(context: Context, case: Case) -> int:
    """Schedules with fused computation, compiled; how many groups ran so."""
    program = generated.Random(context, case)
    found = program.schedules("compute")
    ran = 0
    for schedule in random.Random(case.seed).sample(found, min(1, len(found))):
        text = "\n".join(sources(schedule.program))
        with generated.compiles(context), generated.counted() as done:
            results = program.results(schedule)
        ran += len(done)
        program.compare(schedule, results, text, exact=context.world_size < 3)
    return ran


def random_gradients(context: Context, case: Case) -> int:
    """Forward and backward compiled, against autograd of one process in float64."""
    drawn = checks.tensors(case, context.world_size)
    expected = gradients.reference(case, drawn)
    mine = gradients.own(context, drawn)
    fused = fusedpg.fuse(checks.compiled(case.text, checks.FUSED))
    derived = gradients.derivative(fused, mine, None)
    fuse = fusion.FuseCompute()
    transformations: tuple[Any, ...] = ()
    forward: tuple[Any, ...] = ()
    with contextlib.suppress(fusion.IllegalTransformation):
        fuse.apply(derived.forward)
        forward = (fuse,)
    with contextlib.suppress(fusion.IllegalTransformation):
        fuse.apply(derived.program)
        transformations = (fuse,)
    run = fused.scheduled(*forward, backward=transformations)
    with generated.compiles(context), generated.counted() as done:
        gradients.compare(context, case, run, derived, mine, expected, None, "compiled")
        # By the schedules of calls that say nothing: their groups have slices.
        gradients.compare(context, case, fused, derived, mine, expected, None, "by default")
    return len(done)


@on_ranks(1, 3)
def test_slices(context: Context) -> None:
    """A slice of what was computed is a result, and goes through the same function."""
    body = (
        "r0 = all_reduce(g, 'mean')",
        "m0 = 0.9 * m + r0",
        "v0 = m0 * r0 / (1 + r0 * r0)",
        "v1 = v0 + b",
        "return v1, r0, v0,",
    )
    head = f"def program({checks.ARGUMENTS}) -> (None, Replicate, Replicate,):"
    text = "\n    ".join([head, *body])
    assert random_gradients(context, Case(text, (1001,), torch.float64, True, 1)) > 0


def block(x: fusion.Partial, b: Any, r: Any, w: Any, v: Any, seed: int) -> Any:
    y = r + fusion.dropout(fusion.all_reduce(x) + b, 0.25, seed)
    length = y.shape[-1]
    top = torch.amax(y, -1, True)
    weights = torch.exp(y - top)
    return (
        y,
        F.rms_norm(y, (length,), w, 1e-5),
        F.layer_norm(y, (length,), w, v, 1e-5),
        weights / weights.sum(-1, keepdim=True),
        y.amin(-1),
        y.mean(-1),
        torch.log(y.norm(dim=-1) + 1),
    )


def blocks(context: Context, shape: tuple[int, ...], dtype: torch.dtype, threads: int = 1) -> None:
    """Norms and a softmax of a block's result, forward, against torch's functions in float64."""
    size, rank = context.world_size, context.rank
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, b, r, w, v = draw(size, *shape), draw(shape[-1]), draw(*shape), draw(shape[-1]), draw(1)
    v = v.expand(shape[-1])  # not contiguous
    run = fusedpg.fuse(block).scheduled(fusion.FuseCompute())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with generated.compiles(context), generated.counted() as done:
            got = run(x[rank], b, r, w, v, 5)
    finally:
        torch.set_num_threads(before)
    eager = run(x[rank], b, r, w, v, 5)
    # Casts of weights are a group of their own.
    ran = sum(source.rows is not None for source in done)
    assert ran == (0 if 0 in shape or shape[-1] == 1 else 1), ran
    total = checks.reference_all_reduce(checks.Contributions(list(x)))
    y = r + checks.reference_dropout(total + b, 0.25, 5)
    wide, length = y.double(), shape[-1]
    torch.testing.assert_close(got[0], y, rtol=0, atol=0)
    expected = (
        F.rms_norm(wide, (length,), w.double(), 1e-5),
        F.layer_norm(wide, (length,), w.double(), v.double(), 1e-5),
        torch.softmax(wide, -1),
        wide.amin(-1),
        wide.mean(-1),
        torch.log(wide.norm(dim=-1) + 1),
    )
    bound = generated.BOUNDS[dtype]
    for mine, his, want in zip(got[1:], eager[1:], expected):
        assert mine.dtype == dtype and mine.shape == want.shape
        torch.testing.assert_close(mine.double(), want, rtol=4 * bound, atol=4 * bound)
        torch.testing.assert_close(mine, his, rtol=bound, atol=bound)


@pytest.mark.parametrize("more", [False, harness.slow(True)])
@pytest.mark.parametrize("dtype", generated.BOUNDS, ids=str)
@on_ranks(2, timeout=300)
def test_norms_of_all_lengths(context: Context, dtype: torch.dtype, more: bool) -> None:
    shapes = [(3, 2), (4, 64), (2, 3, 33), (1, 10007)]
    for shape in [*shapes, (5, 31), (7, 1000), (2, 4097)] if more else shapes:
        blocks(context, shape, dtype)
    if dtype == torch.float32:
        for shape in [(0, 5), (4, 1), (1, 1)]:
            blocks(context, shape, dtype)
    dist.barrier(group=context.oracle)


@on_ranks(2)
def test_threads(context: Context) -> None:
    """Rows are shared by threads; a row's bits do not depend on how many there are."""
    blocks(context, (300, 1021), torch.float32, threads=3)
    w = torch.randn(64, 4099, generator=torch.Generator().manual_seed(1))
    run = fusedpg.fuse(lambda w: (w - w.mean(-1, True)) * w).scheduled(fusion.FuseCompute())
    before = torch.get_num_threads()
    results = []
    with generated.compiles(context), generated.counted() as done:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(w))
    torch.set_num_threads(before)
    assert len(done) == 3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@on_ranks(1)
def test_specials(context: Context) -> None:
    """NaN and infinities, as torch has them."""

    def step(w: Any) -> Any:
        return (
            w.amax(-1),
            w.amin(-1, True),
            w.sum(-1),
            w.clamp(-1, 1) + torch.amax(w, -1, True),
            w - w.mean(-1, True),
        )

    inf, nan = torch.inf, torch.nan
    for length in (2, 33, 100):
        for dtype in generated.BOUNDS:
            w = torch.zeros(10, length, dtype=dtype)
            for row, value in enumerate((inf, -inf, nan, -1.0, 1.0)):
                w[row, length - 1] = value
                w[row + 5, 0] = value
            w[2, 0] = inf
            w[3, 0] = -inf
            w[8] = -inf
            run = fusedpg.fuse(step).scheduled(fusion.FuseCompute())
            with generated.compiles(context), generated.counted() as done:
                got = run(w)
            assert len(done) == 1
            for mine, want in zip(got, step(w)):
                torch.testing.assert_close(mine, want, equal_nan=True)


@on_ranks(1)
def test_shapes(context: Context) -> None:
    """Rows of several dimensions, broadcast operands, and values of rows and of columns."""
    generator = torch.Generator().manual_seed(2)

    def step(w: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        y = (w + a) * b - c * d + e
        s = torch.sum(y, (1, 2), keepdim=True)
        return y * s + a, y.amax((1, 2)) * 2 + e, F.layer_norm(y, y.shape[1:], b * a, None, 1e-3)

    def square(w: Any, a: Any) -> Any:  # one shape for rows, columns and reductions
        s = w.sum(-1)
        return w * s + a, s * a, w.mean(-1, True) * w, a * 2 + w

    def sums(w: Any, a: Any) -> Any:  # columns and the whole stay torch's
        y = w * a
        return (y * y.mean(-1, True)).sum(0), y.sum(), y / y.norm(), y.amax(-1, True) + y.amin(0)

    def bare(w: Any, a: Any, b: Any, c: Any) -> Any:  # other operands of one number a row
        s = w.sum(-1)
        return s * a, s - b, torch.maximum(s, c), w.mean(-1, True) * w

    def both(w: Any, a: Any) -> Any:  # the same operand is of other rows with and without the last
        return w.sum(-1) * a, w.sum(-1, True) * a

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cases: list[tuple[Any, list[torch.Tensor]]] = [
        (step, [draw(6, 5, 7), draw(7), draw(5, 7), draw(6, 1, 1), draw(5, 1), draw(1)]),
        (step, [draw(1, 5, 7), draw(7), draw(5, 7), draw(1, 1, 1), draw(5, 1), draw(1)]),
        (square, [draw(5, 5), draw(5)]),
        (sums, [draw(5, 9), draw(9)]),
        (bare, [draw(5, 5, 7), draw(5), draw(5, 1), draw(1, 5)]),
        (both, [draw(5, 5, 7), draw(5, 1)]),
    ]
    for function, arguments in cases:
        for schedule in fusedpg.fuse(function).schedules(*arguments):
            run = fusedpg.fuse(function).scheduled(*schedule.transformations)
            with generated.compiles(context), generated.counted() as done:
                got = run(*arguments)
            assert function is both or bool(done) == bool(schedule.program.groups), schedule
            for mine, want in zip(got, function(*arguments)):
                torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_numbers(context: Context) -> None:
    """Numbers that a type does not hold take it, or do not, as in torch's own functions."""

    def step(x: Any, a: float, n: int) -> Any:
        return (
            *(x + 257, x - 257, 257 - x, 1 / 3 + x, x - 1 / 3, x + a, x - a, a - x, x + n, n - x),
            *(x * a, x / a, a / x, n * x, x / n, torch.where(x > a, x, a), x.clamp(-a, a)),
            torch.where(x <= n, n, x),
        )

    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(3000, generator=generator) * torch.randn(3000, generator=generator).exp2()
    run = fusedpg.fuse(step).scheduled(fusion.FuseCompute())
    for dtype in (torch.bfloat16, torch.float16):
        x = wide.to(dtype)
        for a, n in ((0.1, 2049), (100.03, 3), (1 + 2**-12, 17)):
            with generated.compiles(context), generated.counted() as done:
                got = run(x, a, n)
            assert len(done) == 1
            for number, (mine, want) in enumerate(zip(got, step(x, a, n))):
                assert torch.equal(mine, want), (dtype, a, n, number)


@on_ranks(2)
def test_without_a_compiler_on_one_rank(context: Context) -> None:
    """Where one rank has no compiler all compute operation by operation."""

    # Each with code of its own, in a group of its own: what ranks know of each other's is not asked
    # again, and another test may have had the same.
    def first(w: Any) -> Any:
        return w / w.sum(-1, keepdim=True)

    def second(w: Any) -> Any:
        return w * 0.5 / w.sum(-1, keepdim=True)

    w = torch.rand(3, 50)
    last = context.rank == context.world_size - 1
    group = dist.new_group()
    for step, without in ((first, {}), (second, {"FUSEDPG_FUSION": "eager"})):
        run = fusedpg.fuse(step).scheduled(fusion.FuseCompute("sum_1", "truediv"))
        with generated.no_compiler(last, **without), generated.counted() as done:
            for _ in range(2):
                assert torch.equal(run(w, group=group), step(w))
        assert not done
    dist.destroy_process_group(group)


@on_ranks(1)
def test_after_fork(context: Context) -> None:
    """A child of fork computes with threads of its own."""
    w = torch.rand(4096, 64)
    run = fusedpg.fuse(lambda w: w - w.mean(-1, True)).scheduled(fusion.FuseCompute())
    torch.set_num_threads(2)
    try:
        with generated.compiles(context):
            expected = run(w)
            child = os.fork()
            if child == 0:
                got = run(w)
                torch.set_num_threads(1)  # OpenMP's threads do not survive
                os._exit(0 if torch.equal(got, expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(1)


def test_random_programs() -> None:
    assert run_cases(lambda: harness.pool(2), random_program, 6) > 0


def test_random_gradients() -> None:
    assert run_cases(lambda: harness.pool(2), random_gradients, 4, smooth=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_cases(lambda: harness.pool(world_size), random_program, 60) > 20
    assert run_cases(lambda: harness.pool(world_size), random_gradients, 40, smooth=True) > 20
