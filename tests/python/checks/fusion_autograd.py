"""Gradients of fused functions on each rank, and of the same function on one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
from checks.fusion import (
    FUSED,
    REFERENCE,
    Case,
    Contributions,
    agree,
    compiled,
    reference_dropout,
    shard,
    tensors,
)
from fusedpg import fusion
from fusedpg.fusion import Replicate, Shard
from harness import Context

NUMBERS = {"lr": 0.25, "seed": 7}


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def weights(shape: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    """What a result is multiplied with in the loss, alike on all ranks."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def reference(case: Case, drawn: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the logical tensors, by torch alone."""
    whole = {
        key: [leaf(x) for x in value] if isinstance(value, list) else leaf(value)
        for key, value in drawn.items()
    }
    arguments = {
        key: Contributions(value) if isinstance(value, list) else value
        for key, value in whole.items()
    }
    results = compiled(case.text, REFERENCE)(**arguments, **NUMBERS)
    loss = sum((y * weights(y.shape, y.dtype, n)).sum() for n, y in enumerate(results))
    if loss.requires_grad:
        loss.backward()

    def of(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) if x.grad is None else x.grad

    return {
        key: [of(x) for x in value] if isinstance(value, list) else of(value)
        for key, value in whole.items()
    }


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


def each_gradient(context: Context, cases: list[Case]) -> None:
    for case in cases:
        drawn = tensors(case, context.world_size)
        mine = own(context, drawn)
        fused = fusedpg.fuse(compiled(case.text, FUSED)).scheduled(backward=())
        derived = derivative(fused, mine, None)
        compare(context, case, fused, derived, mine, reference(case, drawn), None, "as written")


def own(context: Context, drawn: dict[str, Any]) -> dict[str, torch.Tensor]:
    size, rank = context.world_size, context.rank
    mine = {key: value[rank] if isinstance(value, list) else value for key, value in drawn.items()}
    mine["m"] = shard(drawn["m"], size, rank)
    return mine


def derivative(fused: Any, mine: dict[str, torch.Tensor], group: Any) -> Any:
    return fused.derivative(
        **{key: leaf(value) for key, value in mine.items()}, **NUMBERS, group=group
    )


def compare(
    context: Context,
    case: Case,
    run: Any,
    derived: Any,
    mine: dict[str, torch.Tensor],
    expected: dict[str, Any],
    group: Any,
    text: str,
) -> None:
    size, rank = context.world_size, context.rank
    given = {key: leaf(value) for key, value in mine.items()}
    results = run(**given, **NUMBERS, group=group)
    nodes = derived.forward.outputs[: len(results)]
    loss = torch.zeros((), dtype=case.dtype)
    for number, (node, result) in enumerate(zip(nodes, results)):
        weight = weights(node.shape, result.dtype, number)
        if str(node.layout) == "Shard":
            weight = shard(weight, size, rank)
        loss = loss + (result * weight).sum()
    if loss.requires_grad:
        loss.backward()
    for key, value in given.items():
        want = expected[key]
        want = want[rank] if isinstance(want, list) else want
        want = shard(want, size, rank) if key == "m" else want
        got = torch.zeros_like(value) if value.grad is None else value.grad
        what = f"{case}\ngradient of {key}\n{text}\n{derived.program}"
        agree(got, want, case, False, what)


def block(
    x: fusion.Shard(-1), w: fusion.Shard(1), b, r, n, p: float, seed: int
) -> tuple[fusion.Replicate, fusion.Replicate]:
    """The row-parallel half of a transformer's layer."""
    h = fusion.dropout(fusion.all_reduce(F.linear(x, w)) + b, p, seed) + r
    return F.rms_norm(h, (h.shape[-1],), n, 1e-5), h


def products(context: Context, dtype: torch.dtype) -> None:
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


def calls(context: Context) -> None:
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


def kinks(context: Context) -> None:
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


def results_of_their_own(context: Context) -> None:
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
