"""Fused collectives with sums over the ranks inside: LAMB, clipping, and random ones."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusedpg
import harness
from checks import faults
from checks.compiled import compiles, random_program
from checks.compiled import done as operations
from checks.fusion import Case, assert_same, shard
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
    reduce_scatter,
)
from fuzz import core, functions
from fuzz.core import Choices, Pair, done
from harness import Context, on_ranks
from test_faults import kill_last, stop_second

WHERE = ("2", "3", "1", "4")
EXAMPLES = 11
SHAPES = [(1,), (3,), (33,), (5, 13), (1000,), (4, 1030), (70_001,)]


def draw(choose: Choices, where: str) -> Case:
    return functions.draw_case(choose, shapes=SHAPES, sums=True)


def has_sums(schedule: Any) -> bool:
    """Sums over the ranks within fused collectives."""
    groups = [group for group in schedule.program.groups if group.kind == "collective"]
    return any(node.op == "all_reduce" for group in groups for node in group.nodes)


def run(case: Case, context: Context) -> Iterator[Pair]:
    """A program's schedules with such sums, operation by operation and compiled."""
    for _ in range(random_program(context, case, has_sums)):
        yield done("compiled")


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


@pytest.mark.parametrize("hosts", ["three", "two and one"])
def test_between_hosts(hosts: str) -> None:
    core.search("sums", hosts, core.seed(0))
    workers = harness.pool_of_hosts(hosts)
    workers.run(one_operation)


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


def loop(context: Context) -> tuple[str, float]:
    """Calls one until it fails; the error and when it came."""
    step = fusedpg.fuse(lamb).scheduled(*LAMB)
    numel = 100_003
    part = torch.ones(fusedpg.shard_range(numel, context.world_size, context.rank)[1])
    x = torch.ones(numel)

    def call() -> None:
        before = operations()
        step(x, x, part, part, lr=0.1)
        assert operations() == before + 1

    with compiles(context):
        return faults.until_failure(context, call)


def test_killed_peer() -> None:
    with harness.Workers(3, oracle=False) as workers:
        workers.start(loop)
        kill_last(workers, "fused_program")


def test_stopped_peer() -> None:
    """The group's deadline ends the wait for one that does not come."""
    with harness.Workers(3, timeout=3, oracle=False) as workers:
        workers.start(loop)
        try:
            stop_second(workers, "fused_program")
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
