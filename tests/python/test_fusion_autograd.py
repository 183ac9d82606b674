"""Gradients through fused functions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import forward_ad

import fusedpg
import harness
from checks import fusion_autograd as checks
from checks.fusion import Case
from checks.refused import refused
from fusedpg.fusion import IllegalProgram, Partial, all_reduce, broadcast
from fuzz.functions import BINARY, REDUCING, SMOOTH, UNARY, run_cases
from harness import Context, on_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_gradients_under_all_schedules(world_size: int) -> None:
    seen = run_cases(lambda: harness.pool(world_size), checks.random_gradients, 5, smooth=True)
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


def test_each_rule() -> None:
    """Of whole values, of slices, and of rows that are broadcast."""
    cases = []
    for text in UNARY + SMOOTH + BINARY + REDUCING:
        lines = [
            "def program(g: Partial, h: Partial, w: Replicate, m: Shard, b: Replicate, lr: float, "
            "seed: int) -> (None, Shard):",
            "x = all_reduce(g) + 0.5 * w",
            "y = reduce_scatter(h) - m",
            f"return {text.format(x='x', y='(w * b)')}, {text.format(x='y', y='all_reduce(g)')},",
        ]
        cases.append(Case("\n    ".join(lines), (4, 9), torch.float64, False, 3))
    harness.pool(2).run(checks.each_gradient, cases)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls(world_size: int) -> None:
    harness.pool(world_size).run(checks.calls)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("check", ["kinks", "results_of_their_own"])
def test_on_ranks(world_size: int, check: str) -> None:
    harness.pool(world_size).run(getattr(checks, check))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_products(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(checks.products, dtype)


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
