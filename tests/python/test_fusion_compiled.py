"""Generated code: the bits of the eager path, and what happens where it cannot be had."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import fusion as checks
from checks import shortcuts
from checks.compiled import compiles, done, environment, forget, no_compiler, random_program
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import codegen_collective, compile, compiled
from fuzz.functions import run_cases
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only
_FUSED = (fusion.Split(), fusion.AsShard(), fusion.Reorder(), fusion.FuseCollective())


def momentum(g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float) -> Any:
    m = 0.9 * m + fusion.all_reduce(g, "mean")
    return w - lr * m, m


def sizes(context: Context, numel: int, dtype: torch.dtype) -> None:
    """In place, asynchronously and into new tensors, the bits of eager."""
    size, rank = context.world_size, context.rank
    generator = torch.Generator().manual_seed(numel)
    g = torch.randn(size, numel, generator=generator).to(dtype)[rank]
    w = torch.randn(numel, generator=generator).to(dtype)
    m = checks.shard(torch.randn(numel, generator=generator).to(dtype), size, rank)
    run = fusedpg.fuse(momentum).scheduled(*_FUSED)
    eager = run(g, w, m, lr=0.1)
    before = done()
    calls = 0
    with compiles(context):
        for place in (None, w):
            for async_op in (False, True):
                mine = (g.clone(), w.clone(), m.clone())
                if place is None:
                    got = run(*mine, lr=0.1, async_op=async_op)
                else:
                    got = run.into(mine[1:], *mine, lr=0.1, async_op=async_op)
                got = got.wait() if async_op else got
                calls += numel > 0
                for x, y in zip(got, eager):
                    assert torch.equal(x, y)
                assert torch.equal(mine[0], g)
                if place is None:
                    assert torch.equal(mine[1], w) and torch.equal(mine[2], m)
                else:
                    assert all(x is y for x, y in zip(got, mine[1:]))
        # Into what others still read, or read at other places: as if through a copy.
        if numel > 1:
            base = torch.cat([w, w[:1]])
            shifted, mine = base[1:], (g.clone(), base[:-1], m.clone())
            expected = run(g, base[:-1].clone(), m, lr=0.1)
            run.into((shifted, mine[2]), *mine, lr=0.1)
            assert torch.equal(shifted, expected[0]) and torch.equal(mine[2], expected[1])
            into = g.clone()
            run.into((into, m.clone()), into, w, m, lr=0.1)
            assert torch.equal(into, eager[0])
            calls += 3
    assert done() == before + calls
    dist.barrier(group=context.oracle)


@on_ranks(2)
def test_disagreements_raise_everywhere(context: Context) -> None:
    """What ranks say differently raises on all of them, and the group goes on."""
    n, rank = 100, context.rank
    m = torch.ones(fusedpg.shard_range(n, context.world_size, rank)[1])
    run = fusedpg.fuse(momentum).scheduled(*_FUSED)

    def other(g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float) -> Any:
        m = 0.9 * m - fusion.all_reduce(g, "mean")
        return w - lr * m, m

    wrong = fusedpg.fuse(other).scheduled(*_FUSED)
    x = torch.ones(n)
    with compiles(context):
        run(x, x, m, lr=0.1)
        for call, word in [
            (lambda: run(x, x, m, lr=0.1 + rank), "numbers that the program takes"),
            (lambda: (wrong if rank else run)(x, x, m, lr=0.1), "the programs differ"),
            (
                lambda: run(x[: n - rank], x[: n - rank], m[: len(m) - rank], lr=0.1),
                "number of elements",
            ),
        ]:
            with refused(word, dist.DistBackendError):
                call()
        w = run(x, x, m, lr=0.1)[0]
    torch.testing.assert_close(w, torch.full((n,), 1 - 0.1 * 1.9))


@on_ranks(2)
def test_without_a_compiler_on_one_rank(context: Context) -> None:
    """Where one rank has no compiler all run the eager path."""

    def step(g: fusion.Partial, w: fusion.Replicate) -> Any:
        return w - 0.25 * fusion.all_reduce(g, "mean")

    run = fusedpg.fuse(step).scheduled(fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
    x = torch.arange(50.0)
    before = done()
    with no_compiler(context.rank == context.world_size - 1):
        for _ in range(2):
            assert torch.equal(run(x, x), x - 0.25 * x)
    assert done() == before


@on_ranks(3)
def test_answers_of_groups(context: Context) -> None:
    """A rank without a compiler is in one group and not in another, which runs generated code."""

    def step(g: fusion.Partial, w: fusion.Replicate) -> Any:
        return w - 0.125 * fusion.all_reduce(g)

    run = fusedpg.fuse(step).scheduled(fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
    x, last = torch.arange(64.0), context.world_size - 1
    others = dist.new_group(list(range(last)))
    with no_compiler(context.rank == last):
        assert torch.equal(run(x, x), x - 0.125 * context.world_size * x)
        if context.rank != last:
            assert torch.equal(run(x, x, group=others), x - 0.125 * last * x)
            assert fusedpg.stats(others)["fused_program"]["calls"] == 1
    dist.barrier(group=context.oracle)


@on_ranks(3)
def test_operands(context: Context) -> None:
    """Rows, columns and what is neither; masks and several gathered results; dropout."""
    size, rank = context.world_size, context.rank
    drawn = torch.Generator().manual_seed(3)
    g = torch.randn(size, 6, 5, 7, generator=drawn)
    operands = [
        torch.randn(shape, generator=drawn)
        for shape in [(7,), (5, 7), (6, 1, 1), (6, 5, 1), (5, 1), (1,), ()]
    ]

    def step(
        g: fusion.Partial, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, h: Any, seed: int
    ) -> Any:
        x = fusion.all_reduce(g, "max")
        y = ((x + a) * b - c) * d + e * f - h
        return fusion.dropout(y, 0.3, seed), y > x, x / y

    fused = fusedpg.fuse(step)
    arguments = (g[rank], *operands, 2**63 + 5)
    run = fused.scheduled(fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
    expected = run(*arguments)
    before = done()
    with compiles(context):
        got = run(*arguments)
    assert done() == before + 1
    for x, y in zip(got, expected):
        assert torch.equal(x, y)


@on_ranks(2)
def test_nothing_stays_behind(context: Context) -> None:
    """Neither a destroyed group nor a dropped function stays behind, with what was made of them."""
    group = dist.new_group(backend=context.backend)

    def step(g: fusion.Partial, w: fusion.Replicate) -> Any:
        return w - 0.5 * fusion.all_reduce(g)

    fused = fusedpg.fuse(step)
    run = fused.scheduled(fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
    x = torch.ones(40)
    before = done()
    with compiles(context):
        run(x, x, group=group)
        run(x, x)
    assert done() == before + 1
    program = run.schedule(x, x).program
    (unit,) = [(g, nodes) for g, nodes in program.units if g is not None]
    kernel = compiled.kernel(*unit, program)
    assert compiled.kernel(*unit, program) is kernel
    # Another program of the same group returns something else.
    other = dataclasses.replace(program, outputs=(*program.outputs, unit[1][-1].operands[0]))
    assert compiled.kernel(*unit, other) is not kernel
    backend = weakref.ref(group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert backend() is None
    dropped = [weakref.ref(one) for one in (run, program, unit[0], kernel)]
    del run, fused, step, program, unit, kernel, other
    gc.collect()
    assert [one() for one in dropped] == [None] * len(dropped)


_ONE = (fusion.Split(), fusion.Reorder(), fusion.FuseCollective())


def _scaled(g: fusion.Partial, w: fusion.Replicate) -> Any:
    return w - 0.25 * fusion.all_reduce(g, "mean")


def _normed(g: fusion.Partial, w: fusion.Replicate) -> Any:
    x = fusion.all_reduce(g, "mean") + w
    return x / (1 + x.sum(-1, keepdim=True))


@pytest.mark.long
@pytest.mark.parametrize(("rows", "missing"), [(True, False), (False, True)])
@on_ranks(2)
def test_forgotten_on_one_rank(context: Context, rows: bool, missing: bool) -> None:
    """A rank that has forgotten a program does not ask again what all have agreed on."""
    fused = fusedpg.fuse(_normed if rows else _scaled)
    steps = (fusion.FuseCompute(),) if rows else _ONE
    run = fused.scheduled(*steps)
    x = torch.ones(4, 8)
    want = _normed_here(x) if rows else x - 0.25 * x
    last = context.rank == context.world_size - 1
    alone = dist.new_group([context.world_size - 1])
    absent = {"CXX": "/nowhere/c++"} if missing and last else {}
    with tempfile.TemporaryDirectory() as empty, compiles(context):
        if missing:
            compile._functions.clear()
            absent["FUSEDPG_CACHE_DIR"] = empty
        with environment(**absent):
            torch.testing.assert_close(run(x, x), want)
            if last:
                for n in range(140):  # more than are kept
                    run(torch.ones(2, n + 1), torch.ones(2, n + 1), group=alone)
            torch.testing.assert_close(run(x, x), want)
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == context.world_size
    forget()


def _normed_here(x: torch.Tensor) -> torch.Tensor:
    return 2 * x / (1 + (2 * x).sum(-1, keepdim=True))


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "latin", *map(harness.slow, ["missing", "full"])])
@on_ranks(2)
def test_compiler_that_returns(context: Context, how: str) -> None:
    """A rank that could not compile does not try again: ranks agree, and in a later group, too."""
    run = fusedpg.fuse(_scaled).scheduled(*_ONE)
    x, first = torch.arange(50.0), context.rank == 0
    before = done()
    with tempfile.TemporaryDirectory() as empty, compiles(context):
        script = Path(empty) / "c++"
        script.write_text(_COMPILERS[how])
        script.chmod(0o755)
        forget()
        absent = {"CXX": str(script)} if first else {}
        with environment(FUSEDPG_CACHE_DIR=empty, **absent):
            assert torch.equal(run(x, x), x - 0.25 * x)
        with environment(FUSEDPG_CACHE_DIR=empty):  # it works now
            for _ in range(2):
                assert torch.equal(run(x, x), x - 0.25 * x)
            group = dist.new_group(list(range(context.world_size)))
            assert torch.equal(run(x, x, group=group), x - 0.25 * x)
            dist.destroy_process_group(group)
            assert done() == before
            # Another process, or code that has not failed here, is compiled.
            other = fusedpg.fuse(_halved).scheduled(*_ONE)
            assert torch.equal(other(x, x), x - 0.5 * x)
            assert done() == before + 1
            assert not list(Path(empty).glob("**/*.tmp")), list(Path(empty).glob("**/*"))
    forget()


@on_ranks(2)
def test_operands_that_do_not_fit(context: Context) -> None:
    """An operand that a function would read beyond its end is found before, and all ranks hear."""

    def step(g: fusion.Partial, row: Any, scale: Any) -> Any:
        return (fusion.all_reduce(g) + row) * scale

    run = fusedpg.fuse(step).scheduled(*_ONE)
    g, row, scale = torch.ones(40, 7), torch.ones(7), torch.tensor(2.0)
    program = run.schedule(g, row, scale).program
    group, nodes = next((group, nodes) for group, nodes in program.units if group is not None)
    source = compiled.kernel(group, nodes, program).source
    assert source is not None and set(source.reads) == {7, 1}
    backend = fusedpg.functional._backend(dist.distributed_c10d._get_default_group())
    last = context.rank == context.world_size - 1
    with compiles(context):
        function = compile.function(source.text, "step")
        assert function

    def call(operands: list[torch.Tensor], kind: int = codegen_collective.AS_IS) -> None:
        result, done = torch.empty(40, 7), torch.zeros(1, dtype=torch.uint8)
        given = (operands, [kind] * 2, source.reads, [result], [True], [], list(source.periods))
        backend.fused_program_(function, source.key, "sum", g, *given, done)
        torch.testing.assert_close(result, torch.full((40, 7), 2.0 * (context.world_size + 1)))

    right = [row if n == 7 else scale for n in source.reads]
    call(right)
    for wrong in (torch.ones(3), torch.ones(8), torch.ones(0)):
        short = [wrong if last and n == 7 else t for n, t in zip(source.reads, right)]
        found = f"{wrong.numel()} elements, expected 7"
        try:
            call(short)
        except (ValueError, dist.DistBackendError) as error:
            assert isinstance(error, ValueError) == last, error
            for word in ("fused_program(", "sequence number", f"rank {context.rank}", found):
                assert word in str(error), error
        else:
            raise AssertionError("nothing raised")
        call(right)
    try:
        call(right, 4)
    except ValueError as error:
        assert "kind 4" in str(error), error
    else:
        raise AssertionError("nothing raised")


def _halved(g: fusion.Partial, w: fusion.Replicate) -> Any:
    return w - fusion.all_reduce(g, "mean") * 0.5


_COMPILERS = {
    "missing": "#!/bin/sh\nexit 127\n",
    "killed": '#!/bin/sh\n[ "$1" = --version ] && echo c++ 1 && exit 0\nkill -9 $$\n',
    "full": '#!/bin/sh\n[ "$1" = --version ] && echo c++ 1 && exit 0\n'
    'while [ "$1" != -o ]; do shift; done\nprintf half > "$2"\nexit 0\n',
    "latin": '#!/bin/sh\n[ "$1" = --version ] && printf "c++ \\351" && exit 0\n'
    'printf "\\351"\nexit 1\n',
}


@pytest.mark.long
def test_random_programs() -> None:
    assert run_cases(lambda: harness.pool(2), random_program, 6) > 3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs(world_size: int) -> None:
    assert run_cases(lambda: harness.pool(world_size), random_program, 60) > 20


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sizes(world_size: int) -> None:
    workers = harness.pool(world_size)
    for numel in (0, 1, 31, 1_000_003):
        workers.run(sizes, numel, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_types(dtype: torch.dtype) -> None:
    harness.pool(2).run(sizes, 70_001, dtype)


@pytest.mark.long
@pytest.mark.parametrize("names", ["three", "two and one"])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names)
    for dtype in (torch.float32, torch.bfloat16):
        workers.run(sizes, 70_001, dtype)


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


def test_a_function_is_lost() -> None:
    harness.pool(2).run(shortcuts.without_function)


def test_other_places_on_one_rank() -> None:
    harness.pool(2).run(shortcuts.beside_others)


@pytest.mark.long
def test_shortcuts_go_with_their_group() -> None:
    harness.pool(2).run(shortcuts.groups_that_go)
