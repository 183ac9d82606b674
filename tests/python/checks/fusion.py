"""What each rank does in the tests of fused functions, and the same on one process."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import fusedpg
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import api, philox
from fusedpg.fusion.trace import trace
from harness import ROOT, Context

NAMES = {
    "torch": torch,
    "F": F,
    "Partial": fusion.Partial,
    "Replicate": fusion.Replicate,
    "Shard": fusion.Shard,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program's text, and what it is run with."""

    text: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool  # no sums but those over ranks
    seed: int = 0


class Contributions:
    """A Partial value: all ranks' tensors in one process."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts

    def _with(self, other: Any, function: Callable[[Any, Any], Any]) -> Contributions:
        others = other.parts if isinstance(other, Contributions) else [other] * len(self.parts)
        return Contributions([function(x, y) for x, y in zip(self.parts, others)])

    def __add__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x + y)

    def __sub__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x - y)

    def __mul__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x * y)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x / y)

    def __neg__(self) -> Contributions:
        return Contributions([-x for x in self.parts])


def reference_all_reduce(x: Contributions, op: str = "sum") -> torch.Tensor:
    parts = [part.float() if part.dtype.itemsize == 2 else part for part in x.parts]
    total = parts[0].clone()
    for part in parts[1:]:
        pair = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
        total = pair(total, part)
    if op == "mean":
        total = total / len(parts)
    return total.to(x.parts[0].dtype)


def reference_dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    keep = philox.kept(p, seed, 0, x.numel(), x.device).reshape(x.shape)
    return torch.where(keep, x * (1 / (1 - p)), torch.zeros_like(x))


REFERENCE = {
    "all_reduce": reference_all_reduce,
    "reduce_scatter": reference_all_reduce,
    "all_gather": lambda x: x,
    "broadcast": lambda x, src: x.parts[src] if isinstance(x, Contributions) else x,
    "dropout": reference_dropout,
}
FUSED = {name: getattr(fusion, name) for name in REFERENCE}


def compiled(text: str, names: dict[str, Any]) -> Callable[..., Any]:
    scope = {**NAMES, **names}
    exec(compile(text, "program.py", "exec"), scope)
    function: Callable[..., Any] = scope["program"]
    return function


def tensors(case: Case, world_size: int) -> dict[str, Any]:
    """All ranks' inputs, alike on all ranks."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    return {
        "g": [draw(*case.shape) for _ in range(world_size)],
        "h": [draw(*case.shape) for _ in range(world_size)],
        "w": draw(*case.shape),
        "m": draw(*case.shape),
        "b": draw(*case.shape[-1:]),
    }


def shard(x: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    begin, length = fusedpg.shard_range(x.numel(), world_size, rank)
    return x.reshape(-1)[begin : begin + length].clone()


def agree(got: torch.Tensor, expected: torch.Tensor, case: Case, exact: bool, what: str) -> None:
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, f"{what}: {got.shape}, {expected.shape}"
    bound = {torch.float64: 1e-9, torch.float32: 2e-4}.get(case.dtype, 5e-2)
    bound = 5e-2 if "F.linear" in case.text else bound  # in 16 bits under autocast
    bound = 0 if exact else bound
    torch.testing.assert_close(
        got, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda m: f"{m}\n{what}"
    )


def random_program(context: Context, case: Case, wrong: str = "") -> int:
    """Every schedule gives what one process computes with plain torch; how many there were.

    Args:
        wrong: a line, of a result r0, with which the program is refused.
    """
    state = [None, torch.bfloat16, None, torch.float16][len(case.text) % 4]
    with torch.autocast("cpu", dtype=state, enabled=state is not None):
        if wrong:
            first = "r0 = all_reduce(g, 'mean')\n    "
            text = case.text.replace(first, first + wrong.format(x="r0") + "\n    ")
            with refused("program.py:", fusion.IllegalProgram):
                drawn = {
                    key: t[0] if isinstance(t, list) else t for key, t in tensors(case, 1).items()
                }
                drawn["m"] = shard(drawn["m"], context.world_size, context.rank)
                fusedpg.fuse(compiled(text, FUSED)).program(
                    **drawn, lr=0.5, seed=1, group=context.oracle
                )
            assert torch.is_grad_enabled()
        return _random_program(context, case)


def differs(context: Context, run: Any, mine: dict[str, Any], group: Any, uses_lr: bool) -> None:
    """With another number on the last rank all ranks raise, if it is used; else none does."""
    lr = 0.375 if context.rank == context.world_size - 1 else 0.25
    raised = False
    try:
        run(**mine, lr=lr, seed=7, group=group)
    except dist.DistBackendError:
        raised = True
    assert raised == (uses_lr and context.world_size > 1)


def _random_program(context: Context, case: Case) -> int:
    size, rank = context.world_size, context.rank
    drawn = tensors(case, size)
    function = compiled(case.text, REFERENCE)
    with torch.no_grad():
        whole = {
            key: Contributions(value) if isinstance(value, list) else value
            for key, value in drawn.items()
        }
        expected = function(**whole, lr=0.25, seed=7)
    expected = expected if isinstance(expected, tuple) else (expected,)
    mine = {key: value[rank] if isinstance(value, list) else value for key, value in drawn.items()}
    mine["m"] = shard(drawn["m"], size, rank)
    fused = fusedpg.fuse(compiled(case.text, FUSED))
    count = 0
    for group in (None, context.oracle):
        # In another order there may be other bits, from three ranks on.
        ordered = group is None and context.fused and context.one_host
        exact = case.exact and (size < 3 or ordered)
        for schedule in fused.schedules(**mine, lr=0.5, seed=1, group=group):
            before = {key: value.clone() for key, value in mine.items()}
            run = fused.scheduled(*schedule.transformations)
            results = run(**mine, lr=0.25, seed=7, group=group)
            results = results if isinstance(results, tuple) else (results,)
            for node, got, full in zip(schedule.program.outputs, results, expected):
                want = shard(full, size, rank) if str(node.layout) == "Shard" else full
                agree(got, want, case, exact, f"{case}\n{node.name}\n{schedule}")
            for key, value in mine.items():
                assert torch.equal(value, before[key]), f"{key} has changed\n{schedule}"
            if (count + len(case.text)) % 5 == 0:
                inputs = {node.name: node for node in schedule.program.inputs}
                used = bool(schedule.program.users[inputs["lr"]])
                differs(context, run, mine, group, used)
            count += 1
        run = fused(**mine, lr=0.25, seed=7, group=group)
    dist.barrier(group=context.oracle)
    return count


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


def assert_same(context: Context, x: torch.Tensor) -> None:
    """All ranks hold the same bits."""
    everyone = [torch.empty_like(x) for _ in range(context.world_size)]
    dist.all_gather(everyone, x.contiguous(), group=context.oracle)
    assert all(torch.equal(x, other) for other in everyone)


def calls(context: Context) -> None:
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


def halves(context: Context, dtype: torch.dtype) -> None:
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


def products(context: Context) -> None:
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


def spellings(context: Context) -> None:
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


def comparisons(context: Context) -> None:
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


def other_threads(context: Context) -> None:
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


def threads(context: Context) -> None:
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
