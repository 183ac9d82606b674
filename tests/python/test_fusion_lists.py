"""Lists of tensors as one argument of a fused function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import fusedpg
import harness
from checks.compiled import compiles
from checks.fusion import shard
from checks.refused import refused
from fusedpg.fusion import FuseCollective, Partial, Replicate, Shard, all_gather, reduce_scatter
from fuzz import core
from fuzz.core import Choices, Pair, Tape, done, draw_tape
from harness import Context, on_ranks

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (33, 4), (128,), (2, 3, 17)]


@fusedpg.fuse
def adam(gs: Partial, ws: Replicate, m: Shard, v: Shard, lr: float, most: float):
    """On gradients that are clipped by the norm of all of them."""
    g = reduce_scatter(gs, "mean")
    norm = g.norm()
    g = g * torch.clamp(most / (norm + 1e-6), max=1.0)
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return all_gather(ws - lr * m / (torch.sqrt(v) + 1e-4)), m, v, norm


@fusedpg.fuse
def scaled(gs: Partial, ws: Replicate, lr: float):
    return ws * torch.tanh(ws) + lr * fusedpg.fusion.all_reduce(gs)


def _list(drawn: Choices, shapes: list[tuple[int, ...]], values: Any) -> list[torch.Tensor]:
    """Tensors of these shapes that lie somewhere: by themselves, as views, in other orders."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    kind = drawn.choice(["own", "views", "apart", "gap", "transposed"])
    memory = torch.empty(2 * count + 1 + len(shapes), dtype=torch.float64)
    found, at = [], 0
    for shape, value in zip(shapes, values):
        size = value.numel()
        if kind in ("views", "apart"):
            t = memory[at : at + size].view(shape)
        elif kind == "gap":
            t = memory[at + 1 : at + 1 + 2 * size : 2].as_strided(
                shape, [2 * s for s in torch.empty(shape).stride()], at + 1
            )
        elif kind == "transposed":
            t = torch.empty(shape[::-1], dtype=torch.float64).permute(list(range(len(shape)))[::-1])
        else:
            t = torch.empty(shape, dtype=torch.float64)
        at += 2 * size if kind == "gap" else size + (kind == "apart")
        found.append(t.copy_(value))
    return found


def gradients(context: Context) -> None:
    """Every tensor of a list gets its own."""
    size, rank = context.world_size, context.rank
    draw = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (), (7,)]
    parts = [
        [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes] for _ in range(size)
    ]
    start = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    weight = torch.randn(20, generator=draw, dtype=torch.float64)
    for run in (scaled, scaled.scheduled()):
        with compiles(context):
            gs = [g.clone().requires_grad_() for g in parts[rank]]
            ws = [w.clone().requires_grad_() for w in start]
            (run(gs, ws, lr=0.5) * weight).sum().backward()
        theirs = [w.clone().requires_grad_() for w in start]
        flat = torch.cat([w.reshape(-1) for w in theirs])
        (flat * torch.tanh(flat) * weight).sum().backward()
        at = 0
        for g, w, other in zip(gs, ws, theirs):
            torch.testing.assert_close(w.grad, other.grad)
            own = weight[at : at + w.numel()].reshape(w.shape)
            torch.testing.assert_close(g.grad, 0.5 * own)
            at += w.numel()


pytestmark = pytest.mark.fused_only


WHERE = ("2", "1", "3", "4", "two and one")
EXAMPLES = 14


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 10, 60)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    """Steps in place and into new tensors, against torch's Adam-like formula a tensor at a time."""
    drawn = program.choices()
    size, rank = context.world_size, context.rank
    shapes = [drawn.choice(SHAPES) for _ in range(drawn.randint(1, 6))] + [(5,)]
    generator = torch.Generator().manual_seed(drawn.getrandbits(32))

    def values() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    start, parts = values(), [values() for _ in range(size)]
    step = drawn.choice([adam, adam.scheduled(), adam.scheduled(FuseCollective())])
    most = drawn.choice([0.5, 1e6])
    mean = [torch.stack(ts).mean(0) for ts in zip(*parts)]
    norm = torch.cat([g.reshape(-1) for g in mean]).norm()
    new, moments = [], []
    for g, w in zip(mean, start):
        g = g * torch.clamp(most / (norm + 1e-6), max=1.0)
        m, v = 0.1 * g, 0.01 * g * g
        new.append(w - 0.1 * m / (v.sqrt() + 1e-4))
        moments.append((m, v))
    flat_m = shard(torch.cat([m.reshape(-1) for m, _ in moments]), size, rank)
    count = len(flat_m)
    with compiles(context):
        gs = _list(drawn, shapes, parts[rank])
        ws = _list(drawn, shapes, start)
        zero = torch.zeros(count, dtype=torch.float64)
        whole, m, _, total = step(
            gs, tuple(ws), zero, [zero[: count // 2], zero[count // 2 :]], 0.1, most
        )
        torch.testing.assert_close(total, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(m, flat_m, rtol=1e-11, atol=1e-14)
        expected = torch.cat([w.reshape(-1) for w in new])
        torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-13)
        again = step(torch.cat([g.reshape(-1) for g in gs]), ws, zero, zero, lr=0.1, most=most)
        assert torch.equal(again[0], whole) and torch.equal(again[1], m)
        for async_op in (False, True):
            mine = _list(drawn, shapes, start) if async_op else ws
            ms, v = [zero[: count // 3].clone(), zero[count // 3 :].clone()], zero.clone()
            targets = (mine, ms, v, torch.empty((), dtype=torch.float64))
            got = step.into(targets, gs, mine, ms, v, lr=0.1, most=most, async_op=async_op)
            got = got.wait() if async_op else got
            assert all(x is y for x, y in zip(got, targets))
            assert torch.equal(torch.cat([w.reshape(-1) for w in mine]), whole)
            assert torch.equal(torch.cat(ms), m) and torch.equal(got[3], total)
        # Into other tensors the arguments stay.
        other = _list(drawn, shapes, start)
        before = [w.clone() for w in ws]
        step.into((other, torch.empty(count, dtype=v.dtype), v, total), gs, ws, m, v, 0.1, most)
        assert all(torch.equal(x, y) for x, y in zip(ws, before))
        assert not torch.equal(other[-1], ws[-1])
    yield done("steps")


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 10))])
@pytest.mark.parametrize("where", ["2", "1", "3", harness.slow("4")])
def test_random_lists(where: str, seed: int) -> None:
    core.search("lists", where, core.seed(seed))


def test_random_lists_between_hosts() -> None:
    core.search("lists", "two and one", core.seed(0))


@on_ranks(2)
def test_repeated_calls(context: Context) -> None:
    """A later call returns what the first one did, in one storage as elsewhere."""
    memory, gradients = torch.zeros(10), torch.ones(10)
    adjacent, apart = [memory[:4], memory[4:].view(2, 3)], [torch.zeros(4), torch.zeros(2, 3)]
    gs = [gradients[:4], gradients[4:].view(2, 3)]
    alias = memory.detach()
    with compiles(context):
        for _ in range(3):
            assert scaled.into(alias, gs=gradients, ws=memory, lr=0.0) is alias
    for ws in (adjacent, apart):
        with compiles(context):
            for _ in range(4):
                assert scaled.into((ws,), gs, ws, lr=0.0) is ws
            assert scaled.into((ws,), gs, ws, lr=0.0, async_op=True).wait() is ws


def derivatives(context: Context) -> None:
    """Autograd sees what is written in place, and a tangent is refused in any element."""
    memory = torch.zeros(10)
    adjacent = [memory[:4], memory.data[4:].view(2, 3)]
    gs = [torch.ones(4), torch.ones(2, 3)]
    for ws in (adjacent, [torch.zeros(4), torch.zeros(2, 3)]):
        before = [t._version for t in ws]
        with compiles(context):
            scaled.into((ws,), gs, ws, lr=0.5)
        assert all(t._version > version for t, version in zip(ws, before))
    with torch.inference_mode(), compiles(context):
        inner = torch.zeros(10)
        views = [inner[:4], inner[4:]]
        scaled.into((views,), gs, views, lr=0.5)
        assert float(inner[9]) == 0.5 * context.world_size
    # Two storages in one memory, of which the first one is shorter, are not one.
    buffer = bytearray(40)
    shared = [torch.frombuffer(buffer, dtype=torch.float32, count=4)]
    shared.append(torch.frombuffer(buffer, dtype=torch.float32)[4:].view(2, 3))
    with compiles(context):
        scaled.into((shared,), gs, shared, lr=0.5)
    expected = torch.full((10,), 0.5 * context.world_size)
    assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32), expected)
    with forward_ad.dual_level():
        dual = [memory[:4], forward_ad.make_dual(memory[4:], torch.ones(6))]
        with refused("`ws` has a tangent", NotImplementedError):
            scaled(gs, dual, lr=0.5)
        with refused("`ws` has a tangent", NotImplementedError):
            scaled.into((adjacent,), gs, dual, lr=0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_derivatives(world_size: int) -> None:
    harness.pool(world_size).run(derivatives)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients(world_size: int) -> None:
    harness.pool(world_size).run(gradients)


@on_ranks(2)
def test_other_uses(context: Context) -> None:
    """Schedules, the generated text and the tuner take lists, and torch.compile does."""
    gs, ws = [torch.ones(40), torch.ones(3, 4)], [torch.zeros(40), torch.ones(3, 4)]
    fused = fusedpg.fuse(scaled.__wrapped__)
    titles = [found.title for found in fused.schedules(gs, ws, lr=0.5)]
    assert "Split(), Reorder(), FuseCollective()" in titles
    assert "f32[52]" in str(fused.schedule(gs, ws, lr=0.5)) + str(fused.program(gs, ws, 0.5))
    run = fused.scheduled(fusedpg.fusion.Split(), fusedpg.fusion.Reorder(), FuseCollective())
    with compiles(context):
        assert 'extern "C"' in run.generated(gs, ws, lr=0.5)
        assert "FuseCollective" in str(fused.tune(gs, ws, lr=0.5, into=(t for t in (ws,))))
        assert float(ws[1][0, 0]) == 1
        expected = run(gs, ws, lr=0.5)

        def model(gs: list[torch.Tensor], ws: list[torch.Tensor]) -> torch.Tensor:
            return fused(gs, ws, lr=0.5) + 1

        compiled = torch.compile(model, backend="eager", fullgraph=True)(gs, ws)
        torch.testing.assert_close(compiled, expected + 1)
        with refused("too many arguments", Exception):
            torch.compile(lambda: fused(gs, ws, 0.5, [gs[0]]), backend="eager", fullgraph=True)()
        run.into((ws,), gs, ws, lr=0.5)
        # One that is on its way may be given, and not be written.
        coming = AsyncCollectiveTensor(ws[1])
        assert torch.equal(run(gs, [ws[0], coming], lr=0.0), run(gs, ws, lr=0.0))
        with refused("`target 0[1]` is a AsyncCollectiveTensor", TypeError):
            run.into(([ws[0], coming],), gs, ws, lr=0.5)
    torch.testing.assert_close(torch.cat([w.reshape(-1) for w in ws]), expected)


def refusals(context: Context) -> None:
    """With the parameter's name, on all ranks, and the group can be used."""
    x = torch.ones(4)
    half = torch.ones(4, dtype=torch.bfloat16)
    last = context.rank == context.world_size - 1

    def refused_here(call: Any, kind: type[Exception], text: str) -> None:
        """By the last rank; the others hear of it."""
        with refused(text, kind if last else dist.DistBackendError):
            call()
        dist.barrier(group=context.oracle)  # a rank that is ahead says what comes next

    bad: list[tuple[list[Any], type[Exception], str]] = [
        ([], TypeError, "`ws` is a list of tensors, which are one long tensor: an empty one"),
        ([x, half], TypeError, "`ws` is a list of tensors, which are one long tensor: element 1"),
        ([x, 2.0], TypeError, "element 1 is a float"),
        ([x, x.to_sparse()], TypeError, "`ws[1]` is a Tensor of layout"),
    ]
    for ws, kind, text in bad:
        if context.world_size > 1:
            refused_here(lambda ws=ws: scaled([x, x], ws if last else [x, x], lr=0.5), kind, text)
        targets = ([torch.ones(4), torch.ones(4)],)
        refused_here(
            lambda ws=ws, targets=targets: scaled.into(
                targets, [x, x], ws if last else [x, x], lr=0.5
            ),
            kind,
            text,
        )
    for target, text in [
        ([x, x], "same memory"),
        ([torch.ones(4), torch.ones(5)], "target 0 is torch.float32 of shape [9]"),
    ]:
        with refused(text, ValueError):
            scaled.into((target,), [x, x], [x, x], lr=0.5)
    with refused("requires grad", RuntimeError):
        grown = [torch.ones(4, requires_grad=True), torch.ones(4)]
        scaled.into((grown,), [x, x], [x, x], lr=0.5)

    @fusedpg.fuse
    def product(x: fusedpg.fusion.Shard(1), w: fusedpg.fusion.Shard(0)):
        return fusedpg.fusion.all_reduce(x @ w)

    with refused("`x` is Shard(1) and a list", TypeError):
        product([x], x)
    assert float(scaled([x], [0 * x], lr=1.0)[0]) == context.world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_refusals(world_size: int) -> None:
    harness.pool(world_size).run(refusals)
