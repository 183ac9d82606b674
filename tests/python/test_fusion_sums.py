"""Fused collectives with sums over the ranks inside: LAMB, clipping, and random ones."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import fusion as checks
from checks.compiled import compiles, reductions
from checks.compiled import done as operations
from checks.fusion import Case, assert_same, shard
from checks.refused import refused
from fusedpg.fusion import (
    AsShard,
    FuseCollective,
    FuseCompute,
    Partial,
    Reorder,
    Replicate,
    Shard,
    Split,
    all_gather,
    all_reduce,
    compiled,
    reduce_scatter,
)
from fuzz import core
from fuzz.core import Choices, Pair, done
from harness import Context, on_ranks
from test_faults import kill_last, wait_for

_UNARY = [
    "torch.tanh({x})",
    "torch.sqrt(torch.abs({x}))",
    "1.5 - {x}",
    "lr * {x}",
    "{x} + b",
    "torch.relu({x})",
    "dropout({x}, 0.3, seed)",
]
_BINARY = ["{x} + {y}", "{x} - lr * {y}", "{x} * torch.tanh({y})", "torch.maximum({x}, {y})"]
# One number of all elements; of such numbers; and elements by them.
_SUMS = [
    "{x}.norm()",
    "{x}.mean()",
    "({x} * {y}).sum() / 1000",
    "{x}.amax()",
    "torch.abs({x}).amin()",
    "torch.square({x} - {y}).sum().sqrt()",
]
_NUMBERS = ["{s} / (1 + {t} * {t})", "torch.tanh({s})", "torch.maximum({s}, {t})", "lr * {s}"]
_SCALED = [
    "{x} / (1 + torch.abs({s}))",
    "{x} - {s} / 1000",
    "torch.minimum({x}, torch.abs({s}))",
    "{x} * torch.tanh({s})",
]


WHERE = ("2", "3", "1", "4")
EXAMPLES = 11


def draw(drawn: Choices, where: str) -> Case:
    """A program with at least one sum that later elements depend on."""
    whole, numbers = ["r0", "m0"], []
    form = drawn.choice(["reduce_scatter(g, 'mean')", "all_reduce(g, 'mean')"])
    lines = [f"r0 = {form}", "m0 = 0.9 * m + r0"]
    for number in range(drawn.randint(3, 10)):
        kinds = ["unary", "binary", "sum"] + ["number", "scaled"] * bool(numbers)
        kind = "sum" if number == 1 else "scaled" if number == 2 else drawn.choice(kinds)
        texts = {
            "unary": _UNARY,
            "binary": _BINARY,
            "sum": _SUMS,
            "number": _NUMBERS,
            "scaled": _SCALED,
        }[kind]
        picked = {"x": drawn.choice(whole[-3:]), "y": drawn.choice([*whole, "w"])}
        if numbers:
            picked |= {"s": numbers[-1], "t": drawn.choice(numbers)}
        lines.append(f"v{number} = " + drawn.choice(texts).format(**picked))
        (numbers if kind in ("sum", "number") else whole).append(f"v{number}")
    whole = whole[1:]
    results = drawn.sample(whole, min(len(whole), drawn.randint(1, 3)))
    if whole[-1] not in results:
        results.append(whole[-1])
    layouts = ["Replicate" if drawn.random() < 0.6 else "Shard" for _ in results]
    results += drawn.sample(numbers, drawn.randint(0, 1))
    layouts += ["Replicate"] * (len(results) - len(layouts))
    shapes = [(1,), (3,), (33,), (5, 13), (1000,), (4, 1030), (70_001,)]
    dtypes = [torch.float64, torch.float64, torch.float32, torch.bfloat16]
    head = (
        "def program(g: Partial, h: Partial, w: Replicate, m: Shard, b: Replicate, lr: float, "
        f"seed: int) -> ({', '.join(layouts)},):"
    )
    text = "\n    ".join([head, *lines, f"return {', '.join(results)},"])
    return Case(text, drawn.choice(shapes), drawn.choice(dtypes), False, drawn.randint(0, 99))


def _sums(program: Any) -> int:
    """Sums over the ranks within fused collectives."""
    groups = [group for group in program.groups if group.kind == "collective"]
    return sum(node.op == "all_reduce" for group in groups for node in group.nodes)


def _scheduled(
    context: Context, case: Case, fused: Any, schedule: Any, mine: dict[str, Any], expected: Any
) -> bool:
    """Whether it has been generated."""
    size, rank, seed = context.world_size, context.rank, case.seed
    bound = {torch.float64: 1e-10, torch.float32: 1e-4}.get(case.dtype, 8e-2)
    run = fused.scheduled(*schedule.transformations)
    text = "\n".join(compiled.sources(schedule.program))
    what = f"seed {seed}, {case}\n{schedule}\n{text}"

    def call(**more: Any) -> Any:
        return run(**mine, lr=0.25, seed=7, **more)

    ways: list[Any] = [call()]  # operation by operation
    with compiles(context):
        before = operations()
        ways += [call(), call(), call(async_op=True).wait()]
        if "extern" in text:
            assert operations() == before + 3 * reductions(schedule.program), what
        # Over arguments, where one fits.
        given = {key: t.clone() for key, t in mine.items()}
        free = dict(given)
        targets = [torch.empty_like(x) for x in ways[0]]
        for number, x in enumerate(targets):
            fits = [k for k, t in free.items() if t.shape == x.shape and t.dtype == x.dtype]
            if fits and (seed + number) % 3:
                targets[number] = free.pop(fits[(seed + number) % len(fits)])
        ways.append(run.into(tuple(targets), **given, lr=0.25, seed=7))
    for again in ways[2:]:
        for x, y in zip(again, ways[1]):
            torch.testing.assert_close(
                x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{m}\n{what}"
            )
    for results in ways[:2]:
        for node, got, full in zip(schedule.program.outputs, results, expected):
            parted = str(node.layout) == "Shard"
            want = shard(full, size, rank) if parted else full
            torch.testing.assert_close(
                got.double(),
                want,
                rtol=bound,
                atol=bound * max(float(full.abs().max()), 1),
                msg=lambda m, node=node: f"{m}\n{node.name} of {what}",
            )
            if not parted:
                assert_same(context, got)
    return "extern" in text


# --- one operation --------------------------------------------------------------------------------


@fusedpg.fuse
def clipped(g: Partial, w: Replicate, m: Shard, lr: float, most: float):
    """Momentum whose gradient is clipped by the norm of all of it."""
    g = reduce_scatter(g, "mean")
    norm = g.norm()
    m = 0.9 * m + g * torch.clamp(most / (norm + 1e-6), max=1.0)
    return all_gather(w - lr * m), m, norm


def lamb(g: Partial, w: Replicate, m: Replicate, v: Replicate, lr: float) -> Any:
    g = all_reduce(g, "mean")
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * (g * g)
    update = m / (torch.sqrt(v) + 1e-6) + 0.01 * w
    return w - lr * (w.norm() / update.norm()) * update, m, v


LAMB = AsShard("m"), AsShard("v"), Split(), Reorder(), FuseCollective()


@fusedpg.fuse
def late(g: Partial, w: Replicate, m: Shard):
    """`m` and `w` are read again behind the sum, when results may have been written over them."""
    s = reduce_scatter(g)
    first = m + s
    return first, all_gather(w - s), all_gather(w + m * s.norm())


def _again(g: Partial) -> tuple[Replicate, Shard]:
    u = reduce_scatter(g, "mean")
    u = u / (u.norm() + 1)
    p = all_gather(u)
    return p, p * u


def _again_without_sum(g: Partial) -> tuple[Replicate, Shard]:
    u = 2 * reduce_scatter(g, "mean")
    p = all_gather(u)
    return p, p * u


@fusedpg.fuse
def sums_of_sums(g: Partial, w: Replicate):
    """The last sum is over what the whole sum before it leads to."""
    g = reduce_scatter(g, "mean")
    u = g / (w.norm() + g.norm())
    return all_gather(u * all_gather(u).sum())


pytestmark = pytest.mark.fused_only

SIZES = [1, 2, 3, 4]


def run(case: Case, context: Context) -> Iterator[Pair]:
    """A program's schedules with such sums, operation by operation and compiled."""
    size, rank = context.world_size, context.rank
    drawn = checks.tensors(case, size)
    wide = {
        key: checks.Contributions([x.double() for x in t]) if isinstance(t, list) else t.double()
        for key, t in drawn.items()
    }
    expected = checks.compiled(case.text, checks.REFERENCE)(**wide, lr=0.25, seed=7)
    mine = {key: t[rank] if isinstance(t, list) else t for key, t in drawn.items()}
    mine["m"] = shard(drawn["m"], size, rank)
    fused = fusedpg.fuse(checks.compiled(case.text, checks.FUSED))
    found = [s for s in fused.schedules(**mine, lr=0.5, seed=1) if _sums(s.program)]
    for schedule in found[:2]:
        if _scheduled(context, case, fused, schedule, mine, expected):
            yield done("compiled")


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 6))])
@pytest.mark.parametrize("where", ["2", "3", *map(harness.slow, "14")])
def test_random_programs(where: str, seed: int) -> None:
    assert core.search("sums", where, core.seed(seed)) > 8 * int(where)


def one_operation(context: Context) -> None:
    """In place, without memory of its own where the caller's does, at any size."""
    size, rank = context.world_size, context.rank
    step = fusedpg.fuse(lamb).scheduled(*LAMB)
    for numel in (2, 3, 1023, 5000, 300_001):
        draw = torch.Generator().manual_seed(numel)
        gradients, w = torch.randn(size, numel, generator=draw), torch.randn(numel, generator=draw)
        m, v = (torch.rand(numel, generator=draw) for _ in range(2))
        mine = w.clone(), shard(m, size, rank), shard(v, size, rank)
        with compiles(context):
            new = step(gradients[rank], *mine, lr=0.1)
            before = operations()
            got = step.into(mine, gradients[rank], *mine, lr=0.1)
            assert operations() == before + 1
        assert all(x is y and torch.equal(x, z) for x, y, z in zip(got, mine, new))
        g = gradients.double().mean(0)
        m, v = 0.9 * m.double() + 0.1 * g, 0.999 * v.double() + 0.001 * g * g
        update = m / (v.sqrt() + 1e-6) + 0.01 * w.double()
        w = w.double() - 0.1 * (w.double().norm() / update.norm()) * update
        for x, full in (
            (mine[0], w),
            (mine[1], shard(m, size, rank)),
            (mine[2], shard(v, size, rank)),
        ):
            torch.testing.assert_close(x.double(), full, rtol=1e-4, atol=1e-5)
        assert_same(context, mine[0])


def disagreements(context: Context) -> None:
    """Other numbers, sizes or programs raise on all ranks, and the group goes on."""
    rank, numel = context.rank, 100
    run = clipped.scheduled(FuseCollective())
    m = torch.ones(fusedpg.shard_range(numel, context.world_size, rank)[1])
    x = torch.ones(numel)

    @fusedpg.fuse
    def other(g: Partial, w: Replicate, m: Shard, lr: float, most: float):
        g = reduce_scatter(g, "mean")
        norm = g.amax()
        m = 0.9 * m + g * torch.clamp(most / (norm + 1e-6), max=1.0)
        return all_gather(w - lr * m), m, norm

    wrong = other.scheduled(FuseCollective())
    with compiles(context):
        for call, word in [
            (lambda: run(x, x, m, lr=0.1, most=1.0 + rank), "numbers that the program takes"),
            (lambda: (wrong if rank else run)(x, x, m, lr=0.1, most=1.0), "the programs differ"),
        ]:
            with refused(word, dist.DistBackendError):
                call()
        assert float(run(x, x, m, lr=0.1, most=1.0)[2]) == 10


@pytest.mark.parametrize("hosts", ["three", "two and one"])
def test_between_hosts(hosts: str) -> None:
    core.search("sums", hosts, core.seed(0))
    workers = harness.pool_of_hosts(hosts)
    workers.run(one_operation)
    workers.run(disagreements)


@pytest.mark.parametrize("world_size", SIZES)
def test_one_operation(world_size: int) -> None:
    harness.pool(world_size).run(one_operation)


def read_later(context: Context) -> None:
    size, rank, numel = context.world_size, context.rank, 5000
    draw = torch.Generator().manual_seed(9)
    gradients, w = torch.randn(size, numel, generator=draw), torch.randn(numel, generator=draw)
    m = shard(torch.randn(numel, generator=draw), size, rank)
    run = late.scheduled(FuseCollective())
    with compiles(context):
        expected = run(gradients[rank], w, m)
        other = torch.empty_like(w)
        before = operations()
        run.into((m, w, other), gradients[rank], w, m)
        assert operations() == before + 1
    for got, wanted in zip((m, w, other), expected):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_operands_that_are_read_later(world_size: int) -> None:
    harness.pool(world_size).run(read_later)


def gathered_again(context: Context) -> None:
    """A slice of what the collective gathers is what it gathers, in every schedule."""
    size, rank = context.world_size, context.rank
    parts = torch.randn(size, 50, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for function in (_again, _again_without_sum):
        fused = fusedpg.fuse(function)
        u = parts.mean(0)
        u = 2 * u if function is _again_without_sum else u / (u.norm() + 1)
        titles = set()
        for schedule in fused.schedules(parts[rank]):
            titles.add(schedule.title)
            with compiles(context):
                whole, part = fused.scheduled(*schedule.transformations)(parts[rank])
            torch.testing.assert_close(whole, u, rtol=1e-12, atol=0)
            torch.testing.assert_close(part, shard(u * u, size, rank), rtol=1e-12, atol=0)
        assert "AsShard(), FuseCollective()" in titles
        with compiles(context):
            run = fused.scheduled(AsShard(), FuseCollective())
            before = operations()
            run(parts[rank])
            assert operations() == before + 1
            # A group is fixed before the slice is seen.
            run = fused.scheduled(AsShard(), FuseCompute(), FuseCollective())
            torch.testing.assert_close(run(parts[rank])[0], u, rtol=1e-12, atol=0)
            fused(parts[rank])


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_again(world_size: int) -> None:
    harness.pool(world_size).run(gathered_again)


def whole_sums(context: Context) -> None:
    """Whole sums of which one depends on another become those of slices, all in one operation."""
    size, rank = context.world_size, context.rank
    draw = torch.Generator().manual_seed(6)
    parts = torch.randn(size, 50, generator=draw, dtype=torch.float64)
    w = torch.randn(50, generator=draw, dtype=torch.float64)
    u = parts.mean(0) / (w.norm() + parts.mean(0).norm())
    with compiles(context):
        before = operations()
        got = sums_of_sums.scheduled(FuseCollective())(parts[rank], w)
        assert operations() == before + 1
    torch.testing.assert_close(got, u * u.sum(), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_sums(world_size: int) -> None:
    harness.pool(world_size).run(whole_sums)


@on_ranks(1)
def test_number_over_a_slice(context: Context) -> None:
    """A number is not written into an operand that the same phase still reads."""
    g, w, m = torch.full((1,), 3.0), torch.ones(1), torch.full((1,), 10.0)
    run = clipped.scheduled(FuseCollective())
    with compiles(context):
        new, moment, norm = run(g, w, m, lr=0.5, most=1e6)
        before = operations()
        given, target = w.clone(), torch.empty(1)
        run.into((given, target, m.view(())), g, given, m, lr=0.5, most=1e6)
        assert operations() == before + 1
    assert torch.equal(given, new) and torch.equal(target, moment) and float(m) == float(norm)


def clipping(context: Context) -> None:
    """Against torch's clip_grad_norm_ and SGD with momentum."""
    size, rank, numel = context.world_size, context.rank, 1003
    draw = torch.Generator().manual_seed(3)
    gradients = torch.randn(3, size, numel, generator=draw, dtype=torch.float64)
    start = torch.randn(numel, generator=draw, dtype=torch.float64)
    for run in (clipped.scheduled(), clipped.scheduled(FuseCollective()), clipped):
        for most in (1.0, 1e6):
            parameter = torch.nn.Parameter(start.clone())
            theirs = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            w, m = start.clone(), torch.zeros_like(shard(start, size, rank))
            with compiles(context):
                for parts in gradients:
                    norm = run.into(
                        (w, m, torch.empty((), dtype=w.dtype)), parts[rank], w, m, lr=0.1, most=most
                    )[2]
                    parameter.grad = parts.mean(0)
                    total = torch.nn.utils.clip_grad_norm_([parameter], most)
                    theirs.step()
                    torch.testing.assert_close(norm, total, rtol=1e-12, atol=0)
            torch.testing.assert_close(w, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", SIZES)
def test_clipping(world_size: int) -> None:
    harness.pool(world_size).run(clipping)


@pytest.mark.parametrize("world_size", [2, 3])
def test_disagreements_raise_everywhere(world_size: int) -> None:
    harness.pool(world_size).run(disagreements)


def loop(context: Context) -> tuple[str, float]:
    """Calls one until it fails; the error and when it came."""
    from checks.faults import mark

    step = fusedpg.fuse(lamb).scheduled(*LAMB)
    numel = 100_003
    part = torch.ones(fusedpg.shard_range(numel, context.world_size, context.rank)[1])
    x = torch.ones(numel)
    calls = 0
    with compiles(context):
        try:
            while True:
                before = operations()
                step(x, x, part, part, lr=0.1)
                assert operations() == before + 1
                calls += 1
                if calls == 3:
                    mark(context, "running")
        except dist.DistBackendError as error:
            return str(error), time.monotonic()


def test_killed_peer() -> None:
    with harness.Workers(3, oracle=False) as workers:
        workers.start(loop)
        kill_last(workers, "fused_program")


def test_stopped_peer() -> None:
    """The group's deadline ends the wait for one that does not come."""
    with harness.Workers(3, timeout=3, oracle=False) as workers:
        workers.start(loop)
        wait_for(workers, "running", [0, 1, 2])
        stopped = time.monotonic()
        workers.signal(1, signal.SIGSTOP)
        try:
            for text, when in workers.collect(20, ranks=[0, 2]):
                assert 2 < when - stopped < 7, when - stopped
                assert "time" in text, text
        finally:
            workers.signal(1, signal.SIGCONT)
        workers.collect(20, ranks=[1])


def not_on_gpus(context: Context) -> None:
    """There it runs operation by operation."""
    size, rank = context.world_size, context.rank
    run = clipped.scheduled(FuseCollective())
    m = torch.ones(fusedpg.shard_range(100, size, rank)[1])
    x = torch.ones(100)
    with compiles(context):
        w, _, norm = run(x, x, m, lr=0.1, most=1e6)
    assert float(norm) == 10
    torch.testing.assert_close(w, torch.full((100,), 1 - 0.19))
    assert "not generated for GPUs" in run.generated(x, x, m, lr=0.1, most=1.0, device="cuda")


def test_not_on_gpus() -> None:
    harness.pool(2, **harness.fake_gpu()).run(not_on_gpus)
