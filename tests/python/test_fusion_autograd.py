"""Gradients through fused functions."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad

import fusedpg
import harness
from checks.fusion import (
    ARGUMENTS,
    FUSED,
    Case,
    compiled,
    reference_dropout,
    tensors,
)
from checks.fusion_autograd import compare, derivative, leaf, own, reference, weights
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import IllegalProgram, Partial, Replicate, Shard, all_reduce, broadcast
from fuzz.functions import BINARY, REDUCING, SMOOTH, UNARY, run_cases
from harness import Context, on_ranks


def random_gradients(context: Context, case: Case) -> int:
    """Every schedule, forward or backward, gives the gradients of one process; how many."""
    drawn = tensors(case, context.world_size)
    expected = reference(case, drawn)
    mine = own(context, drawn)
    fused = fusedpg.fuse(compiled(case.text, FUSED))
    count = 0
    for group in (None, context.oracle):
        derived = derivative(fused, mine, group)
        forwards = fusion.schedules(derived.forward)
        backwards = fusion.schedules(derived.program)
        chosen = random.Random(case.seed)
        pairs = [(s, backwards[0]) for s in chosen.sample(forwards, min(4, len(forwards)))]
        pairs += [(forwards[0], s) for s in chosen.sample(backwards, min(4, len(backwards)))]
        runs = [
            (f"{s}\n{t}", fused.scheduled(*s.transformations, backward=t.transformations))
            for s, t in pairs
        ]
        runs += [("the cheapest", fused)] * (group is None)
        for text, run in runs:
            compare(context, case, run, derived, mine, expected, group, text)
            count += 1
    dist.barrier(group=context.oracle)
    return count


def block(
    x: fusion.Shard(-1), w: fusion.Shard(1), b, r, n, p: float, seed: int
) -> tuple[fusion.Replicate, fusion.Replicate]:
    """The row-parallel half of a transformer's layer."""
    h = fusion.dropout(fusion.all_reduce(F.linear(x, w)) + b, p, seed) + r
    return F.rms_norm(h, (h.shape[-1],), n, 1e-5), h


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@on_ranks(1, 2, 3)
def test_products(context: Context, dtype: torch.dtype) -> None:
    """Blocks of a product, bias, dropout, residual and RMSNorm; against one process in float64."""
    size, rank = context.world_size, context.rank
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 7, 6 * size), (5, 6 * size), (5,), (3, 7, 5), (5,)]
    drawn = [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    x, w, b, r, n = full = [leaf(t.double()) for t in drawn]
    h = reference_dropout(F.linear(x, w) + b, 0.3, 5) + r
    expected = F.rms_norm(h, (5,), n, 1e-5), h
    sum((y * weights(y.shape, y.dtype, k)).sum() for k, y in enumerate(expected)).backward()
    mine = slice(6 * rank, 6 * rank + 6)
    bound = 1e-10 if dtype == torch.float64 else 0.15
    fused = fusedpg.fuse(block)
    for group in (None, context.oracle):
        parts = [t[..., mine] if k < 2 else t for k, t in enumerate(drawn)]
        derived = fused.derivative(*parts, 0.3, 5, group=group)
        # The gradient of a block needs no other rank's.
        assert "all_reduce" not in str(derived.program), derived.program
        for schedule in (None, *fusion.schedules(derived.program)[:3]):
            steps = None if schedule is None else schedule.transformations
            run = fused.scheduled(backward=steps) if schedule else fused
            given = [leaf(part) for part in parts]
            results = run(*given, p=0.3, seed=5, group=group)
            for got, want in zip(results, expected):
                torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
            sum((y * weights(y.shape, dtype, k)).sum() for k, y in enumerate(results)).backward()
            for k, (got, want) in enumerate(zip(given, full)):
                grad = want.grad[..., mine] if k < 2 else want.grad
                error = (got.grad.double() - grad).norm() / grad.norm()
                assert error <= bound / 5, (k, float(error), schedule)


@on_ranks(1, 2, 3)
def test_calls(context: Context) -> None:
    """async_op, parts that need no gradient, results that are arguments or flags, twice."""
    size, rank = context.world_size, context.rank

    def step(g: fusion.Partial, w, lr: float):
        y = fusion.all_reduce(g) * w
        return y, w, y > 0, lr * w, y

    fused = fusedpg.fuse(step)
    g, w = torch.full((5,), rank + 1.0, requires_grad=True), torch.arange(5.0, requires_grad=True)
    total = size * (size + 1) / 2
    pending = fused(g, w, lr=3.0, async_op=True)
    y, same, flags, scaled, again = pending.wait()
    assert not flags.requires_grad and y.requires_grad and same is not w
    (y.sum() + 10 * again.sum() + same.sum() + scaled.sum()).backward()
    assert torch.equal(g.grad, 11 * w.detach())
    assert torch.equal(w.grad, torch.full((5,), 11 * total + 1 + 3))

    y, *_, scaled, _ = fused(g.detach(), w, lr=2.0)
    (only,) = torch.autograd.grad(scaled.sum(), w)
    assert only.tolist() == [2.0] * 5
    y, same, _, scaled, _ = fused(g, w.detach(), lr=2.0)
    assert y.requires_grad and not scaled.requires_grad
    with torch.no_grad():
        assert not fused(g, w, lr=1.0)[0].requires_grad

    try:
        torch.autograd.grad(fused(g, w, lr=1.0)[0].sum(), w, create_graph=True)
    except RuntimeError as error:
        assert "differentiated once" in str(error)
    else:
        raise AssertionError("a second derivative")

    kept = fusedpg.fuse(lambda x, w: torch.tanh(fusion.all_reduce(x)) * w)
    w = torch.ones(5, requires_grad=True)
    y = kept(g, w)
    with torch.no_grad():
        w.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("an argument that has changed")
    dist.barrier(group=context.oracle)


@on_ranks(1, 2)
def test_kinks(context: Context) -> None:
    """Ties, zeros and bounds have torch's gradients, NaNs and infinities where it has them."""
    values = torch.tensor([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    x, y = (part.flatten() for part in torch.meshgrid(values, values, indexing="ij"))
    functions: list[Callable[[Any, Any], Any]] = [
        lambda x, y: torch.maximum(x, y) * 3,
        lambda x, y: torch.minimum(x, y) * 3,
        lambda x, y: x**y,
        lambda x, y: 2.0**y * x,
        lambda x, y: x**0.0 + x**1.0 + x**2.0 + x**3.0 + y,
        lambda x, y: torch.abs(x) + torch.relu(y),
        lambda x, y: torch.clamp(x, -1.0, 1.0) * torch.clamp(y, min=0.0),
        lambda x, y: torch.where(x > y, x, y) * torch.sign(x),
        lambda x, y: torch.amax(x) * y + torch.amin(y) * x,
    ]
    for number, function in enumerate(functions):
        fused = fusedpg.fuse(function)
        found = []
        for run in (function, fused):
            given = leaf(x), leaf(y)
            run(*given).backward(torch.linspace(1, 2, x.numel(), dtype=torch.float64))
            found.append([t.grad for t in given])
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, msg=f"function {number}")


@on_ranks(1, 2)
def test_results_of_their_own(context: Context) -> None:
    """A result is an argument, or shares no memory with one."""

    def slices(w: Replicate, v: Replicate) -> tuple[Shard, Replicate]:
        return w, v * 1.0

    fused = fusedpg.fuse(slices)
    w, v = torch.arange(64.0), torch.ones(64)
    part, _ = fused(w, v)
    begin, length = fusedpg.shard_range(64, context.world_size, context.rank)
    assert torch.equal(part, w[begin : begin + length])
    part.zero_()
    assert torch.equal(w, torch.arange(64.0))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_gradients_under_all_schedules(world_size: int) -> None:
    seen = run_cases(lambda: harness.pool(world_size), random_gradients, 5, smooth=True)
    assert seen > 15


@on_ranks(2)
def test_tangents_are_refused(context: Context) -> None:
    """Forward-mode derivatives, on the first call and on those that take a shortcut."""

    @fusedpg.fuse
    def step(g: Partial, w):
        return 3.0 * w - all_reduce(g, "mean")

    g, w = torch.ones(64), torch.ones(64)
    for _ in range(3):
        with forward_ad.dual_level(), refused("has a tangent", NotImplementedError):
            step(g, forward_ad.make_dual(w, w))
        with forward_ad.dual_level():
            assert torch.equal(step(g, w), torch.full((64,), 2.0))  # a level alone changes nothing
        assert torch.equal(step(g, w), torch.full((64,), 2.0))
    with refused("torch.func", TypeError):
        torch.func.jvp(functools.partial(step, g), (w,), (w,))


@on_ranks(2)
def test_each_rule(context: Context) -> None:
    """Of whole values, of slices, and of rows that are broadcast."""
    for text in UNARY + SMOOTH + BINARY + REDUCING:
        lines = [
            f"def program({ARGUMENTS}) -> (None, Shard):",
            "x = all_reduce(g) + 0.5 * w",
            "y = reduce_scatter(h) - m",
            f"return {text.format(x='x', y='(w * b)')}, {text.format(x='y', y='all_reduce(g)')},",
        ]
        case = Case("\n    ".join(lines), (4, 9), torch.float64, False, 3)
        drawn = tensors(case, context.world_size)
        mine = own(context, drawn)
        fused = fusedpg.fuse(compiled(case.text, FUSED)).scheduled(backward=())
        derived = derivative(fused, mine, None)
        compare(context, case, fused, derived, mine, reference(case, drawn), None, "as written")


def peak(g: Partial):
    return 2 * all_reduce(g, "max")


def one_ranks(g: Partial):
    return broadcast(g, 0)


def bounded(g: Partial, w):
    return torch.clamp(all_reduce(g), w, None)


def powered(g: Partial, n: float):
    return all_reduce(g) ** n


@pytest.mark.parametrize(
    ("function", "node"),
    [(peak, "all_reduce"), (one_ranks, "broadcast"), (bounded, "clamp"), (powered, "pow")],
)
def test_what_has_no_derivative(function: object, node: str) -> None:
    arguments = [torch.ones(3)] * (2 if function is bounded else 1)
    arguments += [2.0] * (function is powered)  # type: ignore[list-item]
    with pytest.raises(IllegalProgram, match=rf"test_fusion_autograd.py:\d+: .*`{node}"):
        fusedpg.fuse(function).derivative(*arguments, world_size=2)


def test_printed() -> None:
    """The backward of an all_reduce is none, and needs nothing kept: the mask comes again."""

    def block(x: Partial, b, r, seed: int):
        return fusedpg.fusion.dropout(all_reduce(x) + b, 0.1, seed) + r

    x = torch.ones(4, 6)
    derived = fusedpg.fuse(block).derivative(x, x[0], x, 3, world_size=2)
    assert not derived.kept
    assert derived.gradients == ("x", "b", "r")
    assert [str(node.layout) for node in derived.program.outputs] == ["Replicate"] * 3
    assert derived.program.bytes() == 0
