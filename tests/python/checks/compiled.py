"""What each rank does in the tests of generated code."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks import fusion as checks
from checks.fusion import Case
from checks.refused import refused
from fusedpg import _agreement, fusion
from fusedpg.fusion import codegen_collective, compiled
from fusedpg.fusion import compile as compiling
from fusedpg.fusion.ir import Program
from harness import Context

_FUSED = (fusion.Split(), fusion.AsShard(), fusion.Reorder(), fusion.FuseCollective())
CALLS = 4  # of a random program
_cache = os.environ.get("FUSEDPG_CACHE_DIR") or tempfile.gettempdir()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def compiles(context: Context) -> contextlib.AbstractContextManager[None]:
    return environment(FUSEDPG_FUSION="compiled", FUSEDPG_CACHE_DIR=context.scratch or _cache)


def done() -> int:
    """How many programs have run as generated code."""
    return int(fusedpg.stats().get("fused_program", {}).get("calls", 0))


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """The same elements in another order in memory, where there are several dimensions."""
    return x.clone() if x.dim() < 2 else x.transpose(0, -1).contiguous().transpose(0, -1)


def forget_answers() -> None:
    """As if this rank had never asked; plans keep the answers, too."""
    for of_group in _agreement._answers.values():
        for answer in of_group.values():
            answer.all_have_it = None


def forget() -> None:
    """What is known of functions: who has compiled them, on all ranks at once."""
    compiling._functions.clear()
    forget_answers()


def reductions(program: Program) -> int:
    """The collectives that run as generated code: fused ones, and those with nothing around."""
    inside = {
        node
        for group, nodes in program.units
        if group is not None and group.kind == "collective"
        if compiled.kernel(group, nodes, program).source is not None
        for node in nodes
        if node.op == "all_reduce"
    }
    sums = (node for node in program.nodes if node.op in ("all_reduce", "reduce_scatter"))
    return sum(node not in inside for node in sums)


class Random:
    """A random program, what this rank gives it, and what torch makes of it in one process."""

    def __init__(self, context: Context, case: Case) -> None:
        self.case = case
        self.rank, self.size = context.rank, context.world_size
        self.drawn = checks.tensors(case, self.size)
        function = checks.compiled(case.text, checks.REFERENCE)
        with torch.no_grad():
            whole = {
                key: checks.Contributions(value) if isinstance(value, list) else value
                for key, value in self.drawn.items()
            }
            self._expected = function(**whole, lr=0.25, seed=7)
        self._mine = {
            key: value[self.rank] if isinstance(value, list) else value
            for key, value in self.drawn.items()
        }
        self._mine["m"] = checks.shard(self.drawn["m"], self.size, self.rank)
        self._fused = fusedpg.fuse(checks.compiled(case.text, checks.FUSED))

    def schedules(self, kind: str) -> list[Any]:
        """Those that have a group of a kind."""
        return [
            schedule
            for schedule in self._fused.schedules(**self._mine, lr=0.5, seed=1)
            if any(group.kind == kind for group in schedule.program.groups)
        ]

    def results(self, schedule: Any) -> Any:
        """Of the last of CALLS calls, which have the same bits; the third takes a shortcut.

        In the last one they are for other ranks: this one's tensors have other strides.
        """
        run = self._fused.scheduled(*schedule.transformations)
        first = run(**self._mine, lr=0.25, seed=7)
        for _ in range(CALLS - 2):
            again = run(**self._mine, lr=0.25, seed=7)
            torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
        given = dict(self._mine)
        if self.rank == 0:
            given = {key: _transposed(value) for key, value in given.items()}
        return run(**given, lr=0.25, seed=7)

    def compare(self, schedule: Any, results: Any, text: str, exact: bool) -> None:
        """``text``: the generated source. ``exact``: bit by bit, where its mathematics allows."""
        case = self.case
        # Of 16-bit elements that fill no vector torch rounds the root, too.
        rounds = "rsqrt" in case.text and case.dtype.itemsize == 2
        exact = exact and case.exact and "<ATen/" not in text and not rounds
        for node, got, full in zip(schedule.program.outputs, results, self._expected):
            shard = str(node.layout) == "Shard"
            want = checks.shard(full, self.size, self.rank) if shard else full
            # Here and there a rounding of a transcendental function turns a comparison.
            checks.agree(got, want, case, exact, f"{case}\n{node.name}\n{schedule}\n{text}")


def random_program(context: Context, case: Case) -> int:
    """Schedules with fused collectives, compiled; how many ran so."""
    program = Random(context, case)
    ran = 0
    for schedule in program.schedules("collective"):
        if ran >= 2:
            break
        text = "\n".join(compiled.sources(schedule.program))
        before = done()
        with compiles(context):
            results = program.results(schedule)
        # Sums over elements have no kernel on a GPU.
        kernel = "= local_" not in text or "FUSEDPG_CUDA_LIB" not in os.environ
        if "extern" in text and kernel and program.drawn["w"].numel():
            assert done() == before + CALLS * reductions(schedule.program), text
            ran += 1
        program.compare(schedule, results, text, exact=True)
    return ran


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


def disagreements(context: Context) -> None:
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


def without_compiler(context: Context) -> None:
    """Where one rank has no compiler all run the eager path."""

    def step(g: fusion.Partial, w: fusion.Replicate) -> Any:
        return w - 0.25 * fusion.all_reduce(g, "mean")

    run = fusedpg.fuse(step).scheduled(fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
    x = torch.arange(50.0)
    forget()
    before = done()
    missing = {"CXX": "/nowhere/c++"} if context.rank == context.world_size - 1 else {}
    with tempfile.TemporaryDirectory() as empty, compiles(context):
        with environment(FUSEDPG_CACHE_DIR=empty, **missing):
            for _ in range(2):
                assert torch.equal(run(x, x), x - 0.25 * x)
    assert done() == before
    forget()


def answers_of_groups(context: Context) -> None:
    """A rank without a compiler is in one group and not in another, which runs generated code."""

    def step(g: fusion.Partial, w: fusion.Replicate) -> Any:
        return w - 0.125 * fusion.all_reduce(g)

    run = fusedpg.fuse(step).scheduled(fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
    x, last = torch.arange(64.0), context.world_size - 1
    others = dist.new_group(list(range(last)))
    forget()
    missing = {"CXX": "/nowhere/c++"} if context.rank == last else {}
    with tempfile.TemporaryDirectory() as empty, compiles(context):
        with environment(FUSEDPG_CACHE_DIR=empty, **missing):
            assert torch.equal(run(x, x), x - 0.125 * context.world_size * x)
            if context.rank != last:
                assert torch.equal(run(x, x, group=others), x - 0.125 * last * x)
                assert fusedpg.stats(others)["fused_program"]["calls"] == 1
    dist.barrier(group=context.oracle)
    forget()


def broadcasts(context: Context) -> None:
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


def collected(context: Context) -> None:
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


def forgotten(context: Context, rows: bool, missing: bool) -> None:
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
            compiling._functions.clear()
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


def compiler_returns(context: Context, how: str) -> None:
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


def operands_that_do_not_fit(context: Context) -> None:
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
        function = compiling.function(source.text, "step")
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
