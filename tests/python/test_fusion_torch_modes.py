"""Fused functions under torch's modes: autocast, no_grad, default types and devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
import harness
from checks.compiled import compiles, environment
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import Partial, Replicate, Shard, all_reduce
from harness import Context, on_ranks


def product(x: Replicate, w: Replicate):
    return torch.relu(x @ w) * 2


def linear(x: Replicate, w: Replicate, b: Replicate):
    y = F.linear(x, w, b)
    return F.rms_norm(y * 0.5 + x, (64,), b, 1e-3), y


def mixed(x: Replicate, w: Replicate):
    with torch.autocast("cpu", enabled=False):
        y = x @ w
    return y + x @ w, x.float() @ w.float()


def inside(x: Replicate, w: Replicate):
    with torch.autocast("cpu", dtype=torch.float16):
        y = x @ w
    return y * 2, (x + 0) @ (
        w + 0
    )  # of x and w itself torch remembers the casts, whatever the type


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": product,
    "linear": linear,
    "mixed": mixed,
    "inside": inside,
}
STATES = [None, torch.bfloat16, torch.float16]


def autocast(state: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if state is None else torch.autocast("cpu", dtype=state)


def close(got: Any, want: Any, what: Any) -> None:
    """The same types, and numbers as near as the coarsest type lets them be."""
    if isinstance(want, torch.Tensor):
        got, want = (got,), (want,)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, (what, x.dtype, y.dtype)
        scale = float(y.double().abs().max()) or 1.0
        error = float((x.double() - y.double()).abs().max()) / scale
        coarse = y.dtype.itemsize == 2 or what[-1] is not None or "inside" in what
        assert error <= (2e-2 if coarse else 1e-5), (what, error)


def functions(context: Context, dtype: torch.dtype) -> None:
    """Each function under each state, in turn, so that a program of another state is near."""
    drawn = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 64, generator=drawn), torch.randn(64, 64, generator=drawn)
    b = torch.randn(64, generator=drawn)
    x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
    with compiles(context):
        fused = {name: fusedpg.fuse(function) for name, function in FUNCTIONS.items()}
        for state in (*STATES, *STATES):
            for name, function in FUNCTIONS.items():
                given = (x, w, b) if name == "linear" else (x, w)
                outcome, found = [], []
                for run in (function, fused[name]):
                    mine = [t.clone().requires_grad_() for t in given]
                    with autocast(state):
                        results = run(*mine)
                    results = results if isinstance(results, tuple) else (results,)
                    sum(r.double().square().sum() for r in results).backward()
                    outcome.append([r.detach() for r in results])
                    found.append([t.grad for t in mine])
                what = name, dtype, state
                close(outcome[1], outcome[0], what)
                close(found[1], found[0], what)
                with torch.no_grad(), autocast(state):
                    close(fused[name](*given), function(*given), what)
                    targets = [torch.empty_like(r) for r in outcome[0]]
                    for _ in range(3):  # the third takes a shortcut, if any is there
                        fused[name].into(targets, *given)
                    close(targets, outcome[0], what)


def scaled(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return fusedpg.fuse(lambda x: function(x) * 1.0)


pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.bfloat16),
        *(
            harness.slow(*case)
            for case in [(1, torch.bfloat16), (1, torch.float32), (2, torch.float32)]
        ),
        *(harness.slow(size, torch.float64) for size in (1, 2)),
    ],
)
def test_autocast(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(functions, dtype, timeout=240)  # dozens are compiled


def blocks(context: Context) -> None:
    """A parallel layer: blocks of a product, a sum over the ranks, a fused collective behind it."""
    size, rank = context.world_size, context.rank

    def layer(x: Shard(1), w: Shard(0), b: Replicate, res: Replicate, seed: int):
        return res + fusion.dropout(all_reduce(x @ w) + b, 0.0, seed)

    drawn = torch.Generator().manual_seed(0)
    x, w = torch.randn(96, 32 * size, generator=drawn), torch.randn(32 * size, 64, generator=drawn)
    b, res = torch.randn(64, generator=drawn), torch.randn(96, 64, generator=drawn)
    mine = x.chunk(size, 1)[rank].contiguous(), w.chunk(size, 0)[rank].contiguous(), b, res
    fused = fusedpg.fuse(layer)
    with compiles(context):
        for group in (None, context.oracle):
            for schedule in fused.schedules(*mine, 1, group=group):
                run = fused.scheduled(*schedule.transformations)
                for state in (torch.bfloat16, None, torch.bfloat16):
                    with autocast(state):
                        # The sum is of rounded products, added in float32.
                        parts = [
                            (p @ q).float() for p, q in zip(x.chunk(size, 1), w.chunk(size, 0))
                        ]
                        total = sum(parts).to(torch.float32 if state is None else state)
                        close(run(*mine, 1, group=group), res + (total + b), (schedule, state))


@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
def test_autocast_of_blocks(world_size: int) -> None:
    harness.pool(world_size).run(blocks)


@on_ranks(2)
def test_threads_and_devices(context: Context) -> None:
    """`wait` elsewhere than the call: in another state, and under another default device."""
    x, w = torch.randn(32, 32), torch.randn(32, 32)
    fused = fusedpg.fuse(lambda x, w: torch.relu(all_reduce(x) @ w) + 1)
    size = context.world_size
    with compiles(context):
        for at_call, at_wait in ((None, torch.bfloat16), (torch.bfloat16, None)):
            with autocast(at_call):
                pending = fused(x, w, async_op=True)
            with autocast(at_wait):
                got = pending.wait()
            y = x.clone()
            dist.all_reduce(y, group=context.oracle)
            with autocast(at_call):
                close(got, torch.relu(y @ w) + 1, (size, at_call or at_wait))
        with torch.device("meta"):
            close(fused(x, w), torch.relu(y @ w) + 1, (size, None))
    twice = fusedpg.fuse(lambda x: torch.where(x > 0, 0.0, 1.0))
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            assert twice(x).dtype == default
        finally:
            torch.set_default_dtype(torch.float32)


@on_ranks(2)
def test_under_compile(context: Context) -> None:
    """The state outside of a compiled function, and inside of it, is that of the call."""
    torch._dynamo.reset()
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    fused = fusedpg.fuse(product)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fused(x, w)
        return fused(x, w).float() + y.float()

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = product(x, w)
        return product(x, w).float() + y.float()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with compiles(context):
        for state in (None, torch.bfloat16, None):
            gradients = []
            for run in (plain, compiled):
                mine = [t.clone().requires_grad_() for t in (x, w)]
                with autocast(state):
                    result = run(*mine)
                result.sum().backward()
                gradients.append([result.detach(), *(t.grad for t in mine)])
            close(gradients[1], gradients[0], ("compile", torch.bfloat16))


@on_ranks(2)
def test_managers(context: Context) -> None:
    """Context managers that a program cannot keep are refused, wherever the call is."""
    x, w = torch.ones(3), torch.ones(3)

    def no_grad(x: Partial):
        a = all_reduce(x)
        with torch.no_grad():
            scale = a * 2
        return a * scale

    def switched(x: Partial):
        a = all_reduce(x)
        torch.set_grad_enabled(False)
        return a * 2

    def inference(x: Partial):
        with torch.inference_mode():
            return all_reduce(x) * 2

    def default(x: Partial):
        a = all_reduce(x)
        torch.set_default_dtype(torch.float64)
        try:
            return torch.where(a > 0, 0.0, 1.0)
        finally:
            torch.set_default_dtype(torch.float32)

    for function, text in (
        (no_grad, "gradients are off"),
        (switched, "gradients are off"),
        (inference, "gradients are off"),
        (default, "default dtype has changed"),
    ):
        for outside in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
            with outside, refused(text, fusion.IllegalProgram):
                fusedpg.fuse(function)(x)
            assert torch.is_grad_enabled()

    def attribute(x: Partial, w: Replicate):
        w.data = all_reduce(x)
        return w * 2

    with refused("`data` of a tensor is assigned to", fusion.IllegalProgram):
        fusedpg.fuse(attribute)(x, w)


@on_ranks(2)
def test_in_place(context: Context) -> None:
    """Python's in-place operators on tensors are refused; on numbers they mean another number."""
    g, w = torch.ones(4), torch.full((4,), 2.0)

    def number(g: Partial, w: Replicate, lr: float):
        lr *= 2
        lr += 1
        return w - lr * all_reduce(g)

    assert torch.equal(fusedpg.fuse(number)(g, w, 0.5), w - 2.0 * context.world_size)
    for sign in ("+", "-", "*", "/", "**", "@"):
        text = f"def program(g, w):\n    w {sign}= all_reduce(g)\n    return w\n"
        scope: dict[str, Any] = {"all_reduce": all_reduce}
        exec(compile(text, "program.py", "exec"), scope)
        with refused("program.py:2: `i", fusion.IllegalProgram):
            fusedpg.fuse(scope["program"])(g, w)
    assert torch.equal(w, torch.full((4,), 2.0))


@on_ranks(2)
def test_mistakes(context: Context) -> None:
    """Errors say what to do, and names of parameters are anything that is not reserved."""
    x, size = torch.ones(4), context.world_size
    fused = fusedpg.fuse(lambda x, s: all_reduce(x) * s)
    other = dist.new_group([0], backend="gloo")
    if context.rank:
        with refused(f"rank {context.rank} is not in the group of this call", ValueError):
            fused(x, 2.0, group=other)
        with refused("group is a ProcessGroup, got str", TypeError):
            fused(x, 2.0, group="default")  # type: ignore[arg-type]

    def named(function: Partial, self: Replicate, static: float, targets: bool, program: Replicate):
        return all_reduce(function) * static + self + (program if targets else 0 * program)

    call = fusedpg.fuse(named)
    want = torch.full((4,), 2.0 * size + 2)
    assert torch.equal(call(function=x, self=x, static=2.0, targets=True, program=x), want)
    into = torch.empty(4)
    call.into(into, function=x, self=x, static=2.0, targets=True, program=x)
    assert torch.equal(into, want)

    for transformed in (
        lambda: torch.vmap(lambda y: fused(y, 2.0))(torch.ones(3, 4)),
        lambda: torch.func.grad(lambda y: fused(y, 2.0).sum())(x),
    ):
        with refused("torch.func", TypeError):
            transformed()

    large = (1 << 60) + (1 << 36) + 1  # float64 rounds it to the middle of two numbers of float32
    whole = fusedpg.fuse(lambda x, n: all_reduce(x) * n + n)
    for mode in ("compiled", "eager"):
        with compiles(context), environment(FUSEDPG_FUSION=mode):
            with refused(f"{large} is no float64", ValueError):
                whole(x, large)
            got = whole(x, 1 << 60)
            assert torch.equal(got, torch.full((4,), float((size + 1) << 60))), got
    with refused("is no float64", fusion.IllegalProgram):
        fusedpg.fuse(lambda x: all_reduce(x) * (1 << 60 | 1))(x)

    pair = fusedpg.fuse(lambda x: (all_reduce(x), 2 * x))
    memory = torch.zeros(2, 6)
    for targets in ((memory[0, :4], memory[0, 2:]), (memory.t()[:4, 0], memory[0, 1:5])):
        with refused("targets 0 and 1 lie in the same memory", ValueError):
            pair.into(targets, x)
    columns = torch.zeros(4, 2)
    for _ in range(3):
        pair.into((columns[:, 0], columns[:, 1]), x)
        assert columns.tolist() == [[size, 2.0]] * 4


@on_ranks(2)
def test_magnitudes(context: Context) -> None:
    """Transcendental functions of small and large numbers, against float64."""
    sizes = torch.logspace(-30, 1.5, 4000, dtype=torch.float64)
    x64 = torch.cat([sizes, -sizes]).float().double()
    functions: dict[str, tuple[Callable[..., Any], int]] = {
        "erf": (torch.erf, 2),
        "tanh": (torch.tanh, 2),
        "exp": (lambda x: torch.exp(-torch.abs(x)), 2),
        "sigmoid": (torch.sigmoid, 4),
    }
    with compiles(context):
        for name, (function, ulps) in functions.items():
            got = scaled(function)(x64.float()).double()
            want = function(x64)
            normal = want.abs() > 1e-37
            error = ((got - want).abs() / want.abs())[normal].max()
            assert error <= ulps * 2**-23, (name, float(error))
