"""Fused functions: what a call gives, what is printed, random bits."""

from __future__ import annotations

import enum
import importlib.util
import os
import random
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import fusedpg
import harness
from checks.fusion import assert_same, reference_dropout, shard
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import (
    AsShard,
    FuseCollective,
    IllegalProgram,
    IllegalTransformation,
    Partial,
    Reorder,
    Replicate,
    Shard,
    Split,
    all_reduce,
    api,
    philox,
)
from fusedpg.fusion.estimate import seconds
from fusedpg.fusion.ir import SHARD
from fusedpg.fusion.schedule import cheapest, ordered
from fusedpg.fusion.trace import trace
from harness import ROOT, Context, on_ranks

FACTOR = 2.0
SIZES = [1, 2, 3]


def example(name: str) -> Any:
    """One of the optimizers of examples/own_optimizers.py."""
    spec = importlib.util.spec_from_file_location(
        "own_optimizers", ROOT / "examples" / "own_optimizers.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def lion(w: Any, g: Any, state: Any, t: int) -> Any:
    c = 0.9 * state["m"] + 0.1 * g
    state["m"] = 0.99 * state["m"] + 0.01 * g
    return w - 0.01 * (torch.sign(c) + 0.1 * w)


def adafactor(w: Any, g: Any, state: Any, t: int) -> Any:
    decay = 1 - t ** (-0.8)
    state["v"] = decay * state["v"] + (1 - decay) * (g**2 + 1e-30)
    u = g / torch.sqrt(state["v"])
    u = u / max(1.0, float(torch.sqrt((u**2).mean())))
    return w - 0.01 * max(1e-3, float(torch.sqrt((w**2).mean()))) * u


# The scalars of a step, and what it is compared with.
OPTIMIZERS: dict[str, tuple[tuple[str, ...], dict[str, float], Any]] = {
    "sgd": (("m",), {"lr": 0.1, "momentum": 0.9}, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})),
    "adamw": (
        ("m", "v"),
        {"t": 0, "lr": 0.01, "b1": 0.9, "b2": 0.99, "wd": 0.1},
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ),
    "rmsprop": (
        ("v",),
        {"lr": 0.01, "alpha": 0.99},
        (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.99}),
    ),
    "lion": (("m",), {"lr": 0.01, "b1": 0.9, "b2": 0.99, "wd": 0.1}, lion),
    "adafactor": (("v",), {"t": 0, "lr": 0.01}, adafactor),
}


def optimizer(context: Context, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ten steps in place, against torch.optim or the paper's formula in float64."""
    states, scalars, reference = OPTIMIZERS[name]
    step, size, rank = example(name), context.world_size, context.rank
    generator = torch.Generator().manual_seed(3)
    expected = torch.randn(*shape, generator=generator, dtype=torch.float64)
    count = fusedpg.shard_range(expected.numel(), size, rank)[1]
    for group in (None, context.oracle):
        full = expected.clone()
        w = full.to(dtype, copy=True)
        mine = {key: torch.zeros(count, dtype=dtype) for key in states}
        whole = {key: torch.zeros_like(full) for key in states}
        compare = None if callable(reference) and not isinstance(reference, tuple) else reference
        theirs = compare[0]([full], **compare[1]) if compare else None
        for t in range(1, 11):
            grads = [
                torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(size)
            ]
            g = grads[rank].to(dtype)
            numbers = {key: (t if key == "t" else value) for key, value in scalars.items()}
            out = step.into((w, *mine.values()), g, w, *mine.values(), **numbers, group=group)
            assert out[0] is w
            mean = torch.stack(grads).mean(0)
            if theirs is not None:
                full.grad = mean
                theirs.step()
            else:
                full = reference(full, mean, whole, t)
        error = (w.double() - full).norm() / full.norm().clamp(min=1e-30)
        bound = 1e-12 if dtype == torch.float64 else 1e-5
        assert error <= bound, (name, shape, float(error))
        assert_same(context, w)


@on_ranks(*SIZES)
def test_calls(context: Context) -> None:
    """into, async_op, numbers without a new trace, flags, captured numbers."""
    size, rank = context.world_size, context.rank
    traces = []
    trace = api.trace

    def counted(*args: Any) -> Any:
        traces.append(args)
        return trace(*args)

    def step(
        g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float, flip: bool = False
    ):
        m = 0.5 * m + fusion.all_reduce(g)
        return (w + lr * m if flip else w - lr * m), m

    api.trace = counted
    fused = fusedpg.fuse(step)
    n = 70
    count = fusedpg.shard_range(n, size, rank)[1]
    g, w, m = torch.full((n,), rank + 1.0), torch.ones(n), torch.full((count,), 2.0)
    total = size * (size + 1) / 2
    new_w, new_m = fused(g, w, m, lr=0.5)
    assert torch.equal(new_w, torch.full((n,), 1 - 0.5 * (1 + total)))
    assert torch.equal(new_m, torch.full((count,), 1 + total))
    assert torch.equal(w, torch.ones(n)) and torch.equal(g, torch.full((n,), rank + 1.0))
    for lr in (0.25, 1, 0.125):
        assert torch.equal(fused(g, w, m, lr=lr)[0], torch.full((n,), 1 - lr * (1 + total)))
    assert len(traces) == 1
    assert torch.equal(fused(g, w, m, 0.5, flip=True)[0], torch.full((n,), 1 + 0.5 * (1 + total)))
    assert len(traces) == 2
    api.trace = trace

    pending = [fused(g, w, m, lr=lr, async_op=True) for lr in (0.5, 0.25)]
    for lr, call in zip((0.5, 0.25), pending):
        assert torch.equal(call.wait()[0], torch.full((n,), 1 - lr * (1 + total)))
        assert call.is_completed() and call.wait()[1] is call.wait()[1]

    before = w.data_ptr()
    later = fused.into((w, m), g, w, m, lr=0.5, async_op=True)
    if size > 1:
        assert torch.equal(w, torch.ones(n))
    assert later.wait()[0] is w
    assert w.data_ptr() == before and torch.equal(w, new_w) and torch.equal(m, new_m)

    swap = fusedpg.fuse(lambda a, b: (b, a))
    a, b = torch.zeros(3), torch.ones(3)
    swap.into((a, b), a, b)
    assert a.tolist() == [1, 1, 1] and b.tolist() == [0, 0, 0]

    factor = 2.0
    scaled = fusedpg.fuse(lambda x: factor * fusion.all_reduce(x))
    assert float(scaled(torch.ones(1))) == 2 * size
    factor = 3.0  # part of what was traced: traced again
    assert float(scaled(torch.ones(1))) == 3 * size
    result = fusedpg.fuse(lambda x: fusion.all_reduce(x))(x := torch.ones(2))
    assert result.data_ptr() != x.data_ptr() and x.tolist() == [1, 1]

    m = torch.ones(count)
    graded = g.clone().requires_grad_()
    for wrong, kind, word in [
        (lambda: fused(g, w, m[:-1], lr=0.1), ValueError, "1-d tensor of"),
        (lambda: fused(g, w, m, lr="a"), TypeError, "`lr` is float"),
        (lambda: fused(1.0, w, m, lr=0.1), TypeError, "`g` is a Partial"),
        (lambda: fused.into((w,), g, w, m, lr=0.1), ValueError, "2 results"),
        (lambda: fused.into((w, w), g, w, m, lr=0.1), ValueError, "target 1"),
        (lambda: fused.into((w.double(), m), g, w, m, lr=0.1), ValueError, "target 0"),
        (lambda: fused.into((w, m), graded, w, m, lr=0.1), RuntimeError, "`g` requires grad"),
        (lambda: fused(g.long(), w, m, lr=0.1), fusion.IllegalProgram, "int64"),
    ]:
        if count == 0 and word == "1-d tensor of":
            continue
        with refused(word, kind):
            wrong()
    with torch.no_grad():
        fused(graded, w, m, lr=0.1)


def masks(context: Context, shape: tuple[int, ...]) -> torch.Tensor:
    """What dropout keeps, the same under all schedules."""
    fused = fusedpg.fuse(lambda x, seed: fusion.dropout(fusion.all_reduce(x, "mean"), 0.4, seed))
    x = torch.ones(*shape)
    results = [
        fused.scheduled(*schedule.transformations)(x, 1234567890123)
        for schedule in fused.schedules(x, 5)
    ]
    assert len(results) > 3
    for result in results:
        assert torch.equal(result, results[0])
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(*SIZES)
def test_halves_are_summed_in_float32(context: Context, dtype: torch.dtype) -> None:
    """16-bit types are summed in float32: what would overflow or vanish does not."""
    size = context.world_size
    big = torch.full((40,), 60000.0 if dtype == torch.float16 else 256.0, dtype=dtype)
    small = big if context.rank == 0 else torch.full_like(big, 1.0)
    fused = fusedpg.fuse(lambda x: fusion.all_reduce(x, "mean"))
    exact = ((float(big[0]) + size - 1) / size, float(big[0]))
    for group in (None, context.oracle):
        for schedule in fused.schedules(big, group=group):
            run = fused.scheduled(*schedule.transformations)
            assert torch.equal(run(big, group=group), big)  # the sum overflows float16
            got = run(small, group=group)
            assert torch.equal(got, torch.full_like(big, exact[0])), got


@on_ranks(*SIZES)
def test_products(context: Context) -> None:
    """matmul of blocks, its all_reduce, and their overlap."""
    size, rank = context.world_size, context.rank
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 6 * size, generator=generator, dtype=torch.float64)
    w = torch.randn(5, 6 * size, generator=generator, dtype=torch.float64)
    b, r = torch.randn(5, dtype=torch.float64, generator=generator), torch.ones(3, 7, 5).double()

    def row(x: fusion.Shard(2), w: fusion.Shard(1), b: fusion.Replicate, r: fusion.Replicate):
        return fusion.dropout(fusion.all_reduce(F.linear(x, w)) + b, 0.5, 3) + r

    fused = fusedpg.fuse(row)
    mine = x[..., 6 * rank : 6 * rank + 6], w[:, 6 * rank : 6 * rank + 6]
    expected = reference_dropout(F.linear(x, w, b), 0.5, 3) + r
    for group in (None, context.oracle):
        found = fused.schedules(*mine, b, r, group=group)
        assert any("overlap in 4 chunks" in str(schedule) for schedule in found)
        for schedule in found:
            run = fused.scheduled(*schedule.transformations)
            torch.testing.assert_close(run(*mine, b, r, group=group), expected)
    overlapped = fused.scheduled(fusion.Overlap(chunks=5))(*mine, b, r, async_op=True)
    torch.testing.assert_close(overlapped.wait(), expected)


@on_ranks(*SIZES)
def test_spellings(context: Context) -> None:
    """torch's functional all_reduce, a group, a factor of a sum, and a Shard and its full sizes."""
    size, rank = context.world_size, context.rank
    world = dist.group.WORLD
    fused = fusedpg.fuse(lambda x: 2 * funcol.all_reduce(x, "avg", world))
    assert fused(torch.full((3,), rank + 1.0)).tolist() == [size + 1.0] * 3
    try:
        fused(torch.ones(3), group=context.oracle)
    except fusion.IllegalProgram as error:
        assert "names another" in str(error)
    else:
        raise AssertionError("another group than the call's")

    scaled = fusedpg.fuse(lambda x: torch.add(y := fusion.all_reduce(x), y * y, alpha=3))
    assert scaled(torch.ones(2)).tolist() == [size + 3.0 * size * size] * 2

    def step(g: fusion.Partial, m: fusion.Replicate) -> fusion.Shard:
        return m + fusion.reduce_scatter(g)

    n = 100
    whole = torch.arange(n, dtype=torch.float32)
    part = shard(whole, size, rank)
    fused = fusedpg.fuse(step)
    assert torch.equal(fused(torch.ones(n), whole), part + size)

    def sizes(g: fusion.Partial, m: fusion.Shard) -> fusion.Shard:  # of the full tensor
        m = m * m.shape[1] + m.size(0) / (m.shape[0] - 1) / (m.numel() - 1)
        return m + fusion.all_reduce(g)

    run = fusedpg.fuse(sizes)
    expected = part * 25 + 4 / 3 / 99 + size
    torch.testing.assert_close(run(torch.ones(4, 25), part), expected)


@on_ranks(*SIZES)
def test_comparisons(context: Context) -> None:
    """Masks and 16-bit values as results, sliced and gathered."""
    size, rank = context.world_size, context.rank
    drawn = torch.Generator().manual_seed(1)
    g = [torch.randint(-8, 9, (5, 11), generator=drawn).to(torch.bfloat16) for _ in range(size)]
    w = torch.randint(-8, 9, (5, 11), generator=drawn).to(torch.bfloat16)
    total = torch.stack(g).sum(0)

    def compare(g: fusion.Partial, w: fusion.Replicate) -> tuple[Any, ...]:
        x = fusion.all_reduce(g)
        return (x > w) & (w != 0), x * 2, torch.where(~(x > w), x, w).half()

    fused = fusedpg.fuse(compare)
    mask = total > w
    expected = (mask & (w != 0), total * 2, torch.where(~mask, total, w).half())
    for group in (None, context.oracle):
        for schedule in fused.schedules(g[rank], w, group=group):
            run = fused.scheduled(*schedule.transformations)
            for got, want in zip(run(g[rank], w, group=group), expected):
                assert got.dtype == want.dtype and torch.equal(got, want), schedule
    named = fused.scheduled(fusion.Split(), fusion.Reorder(), fusion.AsShard("mul_whole"))
    assert torch.equal(named(g[rank], w)[1], shard(total * 2, size, rank))


@on_ranks(*SIZES)
def test_other_threads(context: Context) -> None:
    """While one traces, another one calls modules and torch's functional collectives."""
    world, layer, found = dist.group.WORLD, torch.nn.Linear(2, 2), []
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        try:
            assert begun.wait(60)
            pending = funcol.all_reduce(torch.ones(3), "sum", world)
            assert isinstance(pending, funcol.AsyncCollectiveTensor)
            found.extend((pending + 0).tolist() + funcol.wait_tensor(pending).tolist())
            found.append(tuple(layer(torch.ones(2)).shape))
        except BaseException as error:
            found.append(error)
        finally:
            done.set()

    def program(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert done.wait(60)
        return x + funcol.all_reduce(x, "sum", world)

    thread = threading.Thread(target=work)
    thread.start()
    graph = trace(program, ["x"], {})  # fuse() takes no program that reads events
    thread.join()
    assert found == [float(context.world_size)] * 6 + [(2,)], found
    assert funcol.all_reduce in {node.target for node in graph.nodes}


@on_ranks(*SIZES)
def test_threads(context: Context) -> None:
    """Several threads, each with a group of its own, first calls at once."""
    groups = [dist.new_group(backend=context.backend) for _ in range(3)]
    fused = fusedpg.fuse(lambda g, w: w - 0.5 * fusion.all_reduce(g, "mean"))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                n = 10 + number
                g = torch.full((n,), float(context.rank + turn))
                got = fused(g, torch.ones(n), group=groups[number])
                mean = (context.world_size - 1) / 2 + turn
                assert torch.equal(got, torch.full((n,), 1 - 0.5 * mean))
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    assert not any(thread.is_alive() for thread in running)
    if failures:
        raise failures[0]
    for group in groups:
        dist.destroy_process_group(group)


class Config:
    factor = 2.0
    factors: ClassVar[list[float]] = [2.0]

    @staticmethod
    def times(x: Any) -> Any:
        return x * Config.factor

    @classmethod
    def scale(cls) -> float:
        return cls.factor


class Held:
    def __init__(self) -> None:
        self.factor = FACTOR


def scaled(x: Any) -> Any:
    return x * scaled.factor  # type: ignore[attr-defined]


class Mode(enum.Enum):
    DOUBLE = 2.0


class Derived(Config):
    pass


def times(x: Any, factor: float = 2.0) -> Any:
    return x * factor


def library() -> types.ModuleType:
    """A module of the user's with one in it."""
    module, inside = types.ModuleType("library"), types.ModuleType("library.inside")
    exec("def times(x):\n    return x * FACTOR\n", vars(module))
    module.FACTOR = inside.FACTOR = 2.0
    module.FACTORS = [2.0]
    module.inside = inside
    return module


scaled.factor = 2.0  # type: ignore[attr-defined]
lib = library()
act: Any = torch.square
gelu = torch.nn.GELU()


def again(name: str, factor: float) -> Callable[[], None]:
    """A definition of `times` that is run again, like a cell of a notebook."""

    def change() -> None:
        text = f"def {name}(x, factor={factor}):\n    return x * factor\n"
        exec(compile(text, __file__, "exec"), globals())

    return change


def other_code() -> None:
    times.__code__ = (lambda x, factor=2.0: x * factor + 1).__code__


def other_default() -> None:
    times.__defaults__ = (3.0,)


def local_import(x: Any) -> Any:
    module = lib
    return module.inside.FACTOR * fusion.all_reduce(x)


def cases() -> Iterator[tuple[str, Callable[..., Any], Callable[[], Any], float]]:
    """A function of ones and 2, how the 2 changes, and what it is then."""
    yield (
        "a module in a module",
        lambda x: fusion.all_reduce(x) * lib.inside.FACTOR,
        (lambda: setattr(lib.inside, "FACTOR", 3.0)),
        3,
    )
    yield "a module that is renamed", local_import, (lambda: setattr(lib.inside, "FACTOR", 5.0)), 5
    yield (
        "another module",
        lambda x: fusion.all_reduce(x) * lib.inside.FACTOR,
        (lambda: setattr(lib, "inside", types.SimpleNamespace(FACTOR=7.0))),
        None,
    )
    yield (
        "a function of a module",
        lambda x: lib.times(fusion.all_reduce(x)),
        (lambda: setattr(lib, "FACTOR", 4.0)),
        4,
    )
    yield (
        "a class",
        lambda x: fusion.all_reduce(x) * Config.factor,
        (lambda: setattr(Config, "factor", 3.0)),
        3,
    )
    yield (
        "a base class",
        lambda x: fusion.all_reduce(x) * Derived.factor,
        (lambda: setattr(Config, "factor", 5.0)),
        5,
    )
    yield (
        "a class that comes between",
        lambda x: fusion.all_reduce(x) * Derived.factor,
        (lambda: setattr(Derived, "factor", 6.0)),
        6,
    )
    yield (
        "a function of a class",
        lambda x: Config.times(fusion.all_reduce(x)),
        (lambda: setattr(Config, "factor", 8.0)),
        8,
    )
    yield "a function's default", lambda x: times(fusion.all_reduce(x)), other_default, 3
    yield "a function's code", lambda x: times(fusion.all_reduce(x)), other_code, 4
    yield "a function", lambda x: times(fusion.all_reduce(x)), again("times", 9.0), 9
    yield (
        "a class of a class method",
        lambda x: fusion.all_reduce(x) * Config.scale(),
        (lambda: setattr(Config, "factor", 9.0)),
        9,
    )
    yield (
        "an attribute of a function",
        lambda x: scaled(fusion.all_reduce(x)),
        (lambda: setattr(scaled, "factor", 3.0)),
        3,
    )
    yield (
        "a global that a constructor reads",
        lambda x: fusion.all_reduce(x) * Held().factor,
        (lambda: globals().update(FACTOR=7.0)),
        7,
    )
    yield (
        "torch's functions",
        lambda x: act(2 * fusion.all_reduce(x)),
        (lambda: globals().update(act=torch.neg)),
        -2,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", SIZES)
def test_optimizers(world_size: int, name: str) -> None:
    workers = harness.pool(world_size)
    for shape in [(1,), (5, 13)]:
        workers.run(optimizer, name, shape, torch.float64)
    if name != "lion":  # a sign may turn where float32 rounds
        workers.run(optimizer, name, (200,), torch.float32)


def changes(context: Context) -> None:
    """Each function is traced again when what it reads is another."""
    for name, function, change, factor in cases():
        fused = fusedpg.fuse(function)
        x, y = torch.ones(5), torch.zeros(5)

        def call(fused: Any = fused, x: torch.Tensor = x, y: torch.Tensor = y) -> list[float]:
            into = fused.into(y, x).tolist()
            assert fused(x).tolist() == into
            return [value / context.world_size for value in into]

        before = call()
        assert call() == call() == before, name
        change()
        if factor is None:
            with refused("`lib.inside` is a SimpleNamespace from outside", fusion.IllegalProgram):
                call()
            continue
        found = call()
        bias = 1 - 1 / context.world_size if name == "a function's code" else 0
        assert found == [factor - bias] * 5, (name, before, found)
        if name != "a function's code":
            assert before != found, name


def refuses(context: Context) -> None:
    """What could change unnoticed, and what cannot."""
    x = torch.ones(3)
    for function, name in (
        (lambda x: x * lib.FACTORS[0], "lib.FACTORS"),
        (lambda x: x * Config.factors[0], "Config.factors"),
    ):
        with refused(f"`{name}` is a list from outside of", fusion.IllegalProgram):
            fusedpg.fuse(function)(x)

    def assigns(x: Any) -> Any:
        global FACTOR
        FACTOR += 1
        return x * FACTOR

    def counts(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * count

    count, name = 0, "factor"
    unwatched: list[tuple[Callable[..., Any], str]] = [
        (lambda x: x * float(os.environ["HOME"] == ""), "`os.environ` is a"),
        (lambda x: x * len(os.getenv("HOME", "")), "`os.getenv` of os would be called once"),
        (lambda x: x * globals()["FACTOR"], "`globals` reads what could change"),
        (lambda x: x * getattr(Config, name), "`getattr` reads what could change"),
        (lambda x: x * vars(Config)["factor"], "`vars` reads what could change"),
        (lambda x: x * eval("FACTOR"), "`eval` reads what could change"),
        (lambda x: x * sys.modules[__name__].FACTOR, "`sys.modules` is a dict"),
        (lambda x: x * time.time(), "`time.time` of time would be called once"),
        (lambda x: x * random.random(), "draws random numbers"),
        (lambda x: x * torch.rand(()).item(), "draws random numbers"),
        (lambda x: gelu(x), "`gelu` is a module of torch.nn, GELU"),
        (assigns, "`FACTOR` is assigned to"),
        (counts, "`count` is assigned to"),
    ]
    for function, text in unwatched:
        with refused(text, fusion.IllegalProgram):
            fusedpg.fuse(function)(x)

    def constant(x: Any) -> Any:
        return x * 2 if Mode.DOUBLE is Mode(2.0) else x

    assert fusedpg.fuse(constant)(x).tolist() == [2.0] * 3
    lib.mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[attr-defined]

    def by_mesh(x: Any) -> Any:
        return funcol.all_reduce(x, "sum", lib.mesh.get_group())

    assert fusedpg.fuse(by_mesh)(x).tolist() == [context.world_size] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_read_from_outside_changes(world_size: int) -> None:
    with harness.Workers(world_size) as workers:  # it changes what its module holds
        workers.run(changes)
        workers.run(refuses)


@pytest.mark.parametrize("shape", [(1,), (1001,), (7, 33)])
def test_dropout_masks_do_not_depend_on_ranks(shape: tuple[int, ...]) -> None:
    results = [mask for size in SIZES for mask in harness.pool(size).run(masks, shape)]
    for result in results:
        assert torch.equal(result, results[0])
    if results[0].numel() > 100:
        assert 0.5 < float((results[0] != 0).float().mean()) < 0.7
        kept = results[0][results[0] != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.6))


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, with Python's integers."""
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            right >> 32 ^ counter[1] ^ key[0],
            right & 0xFFFFFFFF,
            left >> 32 ^ counter[3] ^ key[1],
            left & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_philox_known_answers() -> None:
    """Those of Random123, for the reference and for ours where a counter has 64 bits."""
    ones = 0xFFFFFFFF
    assert philox_reference([0] * 4, [0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_reference([ones] * 4, [ones] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    assert philox.words(0, 0, 4).tolist() == philox_reference([0] * 4, [0, 0])


@hypothesis.given(
    seed=st.integers(0, 2**64 - 1), begin=st.integers(0, 2**40), count=st.integers(0, 11)
)
def test_philox(seed: int, begin: int, count: int) -> None:
    key = [seed % 2**32, seed >> 32]
    expected = [
        philox_reference([i // 4 % 2**32, i // 4 >> 32, 0, 0], key)[i % 4]
        for i in range(begin, begin + count)
    ]
    assert philox.words(seed, begin, count).tolist() == expected


def test_who_is_kept() -> None:
    """Also of many elements, part by part; and at the bound itself."""
    cpu, seed, begin = torch.device("cpu"), 77, 5
    bits = philox.words(seed, begin, 200_000) >> 8
    assert torch.equal(philox.kept(0.3, seed, begin, 200_000, cpu), bits >= 5033165)
    for count in (1 << 16, (1 << 16) + 1):
        assert torch.equal(philox.kept(0.3, seed, begin, count, cpu), bits[:count] >= 5033165)
    first = int(bits[0])
    assert bool(philox.kept(first / (1 << 24), seed, begin, 1, cpu))
    assert not bool(philox.kept((first + 0.5) / (1 << 24), seed, begin, 1, cpu))
    assert bool(philox.kept((first - 0.5) / (1 << 24), seed, begin, 1, cpu))


def test_philox_refuses_other_seeds() -> None:
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="a seed is"):
            philox.words(seed, 0, 1)


@fusedpg.fuse
def sgd(g: Partial, w: Replicate, m: Shard, lr: float):
    m = 0.9 * m + all_reduce(g, "mean")
    return w - lr * m, m


def test_printed() -> None:
    args = torch.ones(100), torch.ones(100), torch.ones(64), 0.1
    text = str(sgd.program(*args, world_size=2))
    assert "sgd(g: Partial f32[100], w: Replicate f32[100], m: Shard f32[100], lr: float)" in text
    assert "return sub: Replicate, add: Shard" in text
    assert "# Replicate f32[100]  test_fusion.py:" in text
    program = sgd.program(*args, world_size=2)
    for transformation in (Split(), Reorder(), FuseCollective()):
        program = transformation.apply(program)
    lines = [line.split("#")[0].strip() for line in str(program).splitlines()[1:]]
    assert lines == [
        "fused collective:",
        "w_slice = slice(w)",
        "mul = mul(0.9, m)",
        "all_reduce_scattered = reduce_scatter(g, op='mean')",
        "add = add(mul, all_reduce_scattered)",
        "mul_1 = mul(lr, add)",
        "sub = sub(w_slice, mul_1)",
        "sub_whole = all_gather(sub)",
        "return sub_whole: Replicate, add: Shard",
    ]
    found = sgd.schedules(*args, world_size=2)
    assert len({str(schedule.program) for schedule in found}) == len(found)
    assert found[0].title == "as written"
    assert found[0].program.bytes() == 600
    chosen = sgd.schedule(*args, world_size=2)
    assert chosen.program.bytes() == 400
    assert "FuseCollective()" in str(chosen)


def test_schedules_differ() -> None:
    """In more than the names of values: `Split` and `AsShard` make one program in either order."""

    def program(g: Partial, m: Shard, w: Replicate) -> tuple[Shard, None]:
        v = all_reduce(g, "mean")
        return 0.9 * m + v, w - v

    x = torch.zeros(64)
    seen = []
    for schedule in fusedpg.fuse(program).schedules(x, x[:32], x, world_size=2):
        text = str(schedule.program)
        for number, node in enumerate(schedule.program.nodes):
            text = re.sub(rf"\b{node.name}\b", f"v{number}", text)
        seen.append([line.split("#")[0].split() for line in text.splitlines()])
    assert len(seen) > 3 and all(text not in seen[:n] for n, text in enumerate(seen))


def test_choice_of_a_schedule() -> None:
    """One pass over memory, where it sends no more than what is written."""

    def behind(x: Partial, b: Replicate, r: Replicate):
        return r + (all_reduce(x) + b)

    given = torch.ones(4096, 1024), torch.ones(1024), torch.ones(4096, 1024)
    for world_size in (1, 2, 8):
        program = fusedpg.fuse(behind).program(*given, world_size=world_size)
        for one_host in (True, False):
            assert cheapest(program, one_host).title == "Split(), Reorder(), FuseCollective()"
        times = [seconds(schedule.program) for schedule in ordered(program)]
        assert times == sorted(times) and times[0] < times[-1] / 2


def test_as_shard_of_an_argument() -> None:
    def kept(g: Partial, m: Replicate) -> Shard:
        return m + fusedpg.fusion.reduce_scatter(g)

    program = AsShard("m").apply(
        AsShard().apply(fusedpg.fuse(kept).program(*[torch.ones(4, 3)] * 2, world_size=2))
    )
    assert [str(node.layout) for node in program.inputs] == ["Partial", "Shard"]
    assert "slice" not in str(program)
    # In a schedule it is the annotation: calls pass slices.
    step = fusedpg.fuse(kept).scheduled(AsShard("m"), FuseCollective())
    program = step.schedule(torch.ones(4, 3), torch.ones(12), world_size=1).program
    assert [node.type for node in program.inputs] == ["Partial f32[4, 3]", "Shard f32[4, 3]"]
    again = step.scheduled(Split()).scheduled()  # which keeps what calls pass
    assert again.program(torch.ones(4, 3), torch.ones(12), world_size=1).inputs[1].layout == SHARD
    with pytest.raises(IllegalTransformation, match=r"AsShard\(g\).*the argument is Partial"):
        fusedpg.fuse(kept).scheduled(AsShard("g"))

    def used_whole(m, x: Partial):
        return torch.matmul(m, x), m * all_reduce(x)

    with pytest.raises(IllegalProgram, match="Shard"):
        run = fusedpg.fuse(used_whole).scheduled(AsShard("m"))
        run.program(torch.ones(16), torch.ones(4, 4), world_size=1)


def test_shapes_of_shards_are_found() -> None:
    """From what they are combined with, however late."""

    @fusedpg.fuse
    def many(g: Partial, m: Shard, v: Shard, b: Replicate, w: Replicate) -> tuple[Shard, Replicate]:
        m = 2 * m
        v = v * v + m
        return v * b, (w + v.sqrt()) * F.silu(all_reduce(g))

    for world_size, count in ((1, 40), (2, 32), (3, 32)):
        part = torch.ones(count)
        args = torch.ones(8, 5), part, part, torch.ones(5), torch.ones(8, 5)
        program = many.program(*args, world_size=world_size)
        assert [node.shape for node in program.inputs[1:3]] == [(8, 5), (8, 5)]


def test_outside_of_a_program() -> None:
    with pytest.raises(TypeError, match="inside a function"):
        all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="init_process_group"):
        sgd(torch.ones(2), torch.ones(2), torch.ones(2), lr=0.1)
    with pytest.raises(TypeError, match="takes a Python function"):
        fusedpg.fuse(torch.exp)
