"""Ranks that call a fused function with other numbers or flags: all of them raise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
import harness
from checks.compiled import compiles, environment
from fusedpg import fusion
from fusedpg.fusion import Partial, Replicate, Shard, alike, all_gather, all_reduce, reduce_scatter
from harness import Context, on_ranks


def adam(g: Partial, w: Replicate, m: Replicate, v: Replicate, s: float):
    g = all_reduce(g)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - s * m / (torch.sqrt(v) + 1e-8), m, v


def norm(g: Partial, w: Replicate, s: float):
    y = all_reduce(g, "mean") * s + w
    return y, F.rms_norm(y, (64,), eps=1e-5)


def local(g: Replicate, w: Replicate, s: float):
    return torch.relu(g @ w) * s


def scattered(g: Partial, w: Replicate, s: float):
    return all_gather(s * reduce_scatter(g)) + w


def clipped(g: Partial, w: Replicate, s: float):
    g = reduce_scatter(g, "mean")
    return all_gather(w - g * torch.clamp(s / (g.norm() + 1e-6), max=1.0)), g.norm()


def extremes(g: Partial, w: Replicate, s: float):
    return all_reduce(g, "max") * s, all_reduce(g * w, "min")


def overlapped(g: Replicate, w: Partial, s: float):
    return s * all_reduce(g @ w)


def half(g: Partial, w: Replicate, s: float):
    return all_reduce(g.to(torch.bfloat16)).float() * s + w


def received(g: Partial, w: Replicate, s: float):
    return fusion.broadcast(g, 0) * s + w


def flagged(g: Partial, w: Replicate, s: bool):
    return all_reduce(g) + w if s else all_reduce(g) - w


def flagged_alone(g: Replicate, w: Replicate, s: bool):
    return g + w if s else g - w


def dropped(g: Partial, w: Replicate, s: int):
    return fusion.dropout(all_reduce(g), 0.5, s) @ w


FUNCTIONS: list[Callable[..., Any]] = [
    adam, norm, local, scattered, clipped, extremes, overlapped, half, received, flagged,
    flagged_alone, dropped,
]  # fmt: skip


def call(context: Context, run: Callable[[], Any], differs: bool, what: Any) -> None:
    """All ranks raise alike, or none does; then the group is as it was."""
    message = ""
    try:
        run()
    except dist.DistBackendError as error:
        message = str(error)
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, bool(message), group=context.oracle)
    assert everyone == [differs] * context.world_size, (what, everyone, message)
    if differs:
        assert "rank" in message, message
        # Functions with flags have other programs for them; the others differ in a number.
        assert "flag" in what[0] or "programs differ" not in message, (what, message)
    one = torch.ones(3)
    dist.all_reduce(one)
    assert one.tolist() == [context.world_size] * 3


def differ(context: Context, every: bool) -> None:
    """Every function on each path: schedules, two backends, code or none, gradients.

    Of its schedules the first and the last, or `every` one: each is compiled.
    """
    rank, size = context.rank, context.world_size
    last = rank == size - 1
    drawn = torch.Generator().manual_seed(5)
    tensors = [torch.randn(64, 64, generator=drawn) for _ in range(4)]
    for function in FUNCTIONS:
        given = tensors if function is adam else tensors[:2]
        one, other = (True, False) if "flag" in function.__name__ else (2, 3)
        fused = fusedpg.fuse(function)
        for group, mode in ((None, "compiled"), (None, "eager"), (context.oracle, "compiled")):
            with compiles(context), environment(FUSEDPG_FUSION=mode):
                schedules = fused.schedules(*given, one, group=group)
                for schedule in schedules[:: 1 if every else max(1, len(schedules) - 1)]:
                    run = fused.scheduled(*schedule.transformations)
                    for differs in (False, size > 1, False):
                        value = other if differs and last else one
                        what = function.__name__, schedule.title, mode, group is None
                        call(context, partial(run, *given, value, group=group), differs, what)
        value = other if last else one
        into = [torch.empty_like(x) for x in results_of(fused(*given, one))]
        ways: list[Callable[[], Any]] = [
            lambda f=fused, g=given, v=value: f(*g, v, async_op=True).wait(),
            lambda f=fused, g=given, v=value, t=into: f.into(t, *g, v),
            lambda f=fused, g=given, v=value: f(*[x.clone().requires_grad_() for x in g], v),
        ]
        for number, way in enumerate(ways):
            if number < 2 or function not in (extremes, received):  # without a derivative
                call(context, way, size > 1, (function.__name__, number))


def results_of(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize(
    ("world_size", "every"), [(2, False), *(harness.slow(size, True) for size in (1, 2, 3))]
)
def test_ranks_differ(world_size: int, every: bool) -> None:
    harness.pool(world_size).run(differ, every, timeout=300)


@on_ranks(2)
def test_what_may_differ(context: Context) -> None:
    """1 is 1.0, and what no result depends on may differ."""
    x = torch.ones(5)
    scaled = fusedpg.fuse(lambda x, s: all_reduce(x) * s)
    got = scaled(x, 1 if context.rank else 1.0, group=context.oracle)
    assert got.tolist() == [context.world_size] * 5
    unused = fusedpg.fuse(lambda x, s: all_reduce(x) * 2)
    got = unused(x, float(context.rank), group=context.oracle)
    assert got.tolist() == [2 * context.world_size] * 5


def gathered(x: Shard, w: Replicate):
    return all_gather(x * w)


@on_ranks(2)
def test_sizes_whose_slices_are_as_long(context: Context) -> None:
    """Slices of 132 elements on two ranks have as many lines as those of 160."""
    for differs in (False, True, False):
        numel = 160 if differs and context.rank else 132
        w = torch.arange(float(numel))
        first, length = fusedpg.shard_range(numel, context.world_size, context.rank)
        run = partial(fusedpg.fuse(gathered), w[first:][:length], w)
        call(context, run, differs, (f"flag: {numel}",))


def arithmetic() -> None:
    """The sums of words tell whether marks are equal, whatever they are and however many."""
    drawn = random.Random(4)
    for size in (2, 3, 5, 8, 64, 100, 1024):
        for op in ("sum", "mean", "max", "min"):
            for _ in range(30):
                marks = [drawn.getrandbits(64)] * size
                if drawn.random() < 0.7:
                    # One bit on one rank; or others whose mean is the rest's mark.
                    where, bit = drawn.randrange(size), 1 << drawn.randrange(64)
                    marks[where] ^= bit
                    if drawn.random() < 0.5:
                        marks[where - 1] ^= bit
                rows = torch.tensor(
                    [alike.words(alike.Mark(0, m), size, op) for m in marks], dtype=torch.float32
                )
                total = rows[0].clone()
                for row in rows[1:]:
                    pair = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
                    total = pair(total, row)
                assert math.isfinite(float(total.abs().max()))
                same = len(set(marks)) == 1
                assert alike.equal(total.tolist(), size, op) == same, (size, op, marks)


def test_arithmetic() -> None:
    arithmetic()


def twice(x: Partial, w: Replicate):
    """What a call does after its first operation says nothing of the call."""
    return fusion.broadcast(all_reduce(x), 0) + w


def in_two(x: Partial, w: Replicate):
    return all_gather(reduce_scatter(x)) + w


def summed_twice(x: Partial, w: Replicate):
    return all_reduce(x) * 2 + all_reduce(x, "max") + w


@pytest.mark.parametrize("function", [twice, in_two, summed_twice])
@on_ranks(2, 3)
def test_calls_are_waited_for_in_one_order(context: Context, function: Any) -> None:
    """Else ranks would mix what the calls do after their first operations, of equal shapes."""
    fused = fusedpg.fuse(function).scheduled()
    w, last = torch.zeros(40), context.rank == context.world_size - 1
    xs = [torch.full((40,), float(10**n)) for n in range(3)]
    want = [fused(x, w) for x in xs]

    def begun() -> list[Any]:
        return [fused(x, w, async_op=True) for x in xs]

    def all_raise(waits: list[Callable[[], Any]], match: str) -> None:
        for one in waits:
            with pytest.raises(dist.DistBackendError, match=match):
                one()

    for order in ((0, 1, 2), (2, 0, 1)):
        calls = begun()
        for n in order:
            assert torch.equal(calls[n].wait(), want[n])
    # Every rank raises, for each call that ranks wait for at different times.
    calls = begun()
    all_raise(
        [calls[n].wait for n in ((1, 0) if last else (0, 1))], "in the same order on all ranks"
    )
    assert torch.equal(calls[2].wait(), want[2])
    # A call between, which has no number or is the group's own.
    for between in (partial(fused, xs[0], w), partial(dist.broadcast, torch.zeros(40), 0)):
        call = fused(xs[1], w, async_op=True)
        waits = [call.wait, between]
        if function is twice:
            all_raise(waits[::-1] if last else waits, "ranks disagree")
        else:
            call.wait(), between()
    # Calls that are refused on one rank alone count on all.
    with pytest.raises((TypeError, dist.DistBackendError)):
        fused(xs[0], w, *([1] if last else []), async_op=True).wait()
    calls = begun()
    assert all(torch.equal(call.wait(), x) for call, x in zip(calls, want, strict=True))
