"""Fused functions inside of functions under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn

import fusedpg
import harness
from checks.compiled import compiles
from checks.refused import refused
from fusedpg.fusion import Partial, Replicate, Shard, all_reduce
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only


@fusedpg.fuse
def block(x: Partial, b: Replicate, m: Shard, scale: float, shift: int = 0, wide: bool = False):
    y = all_reduce(x) * scale + b + shift
    return (y.double() if wide else y), y * 2, m + reduced(x)


def reduced(x: Any) -> Any:
    return fusedpg.fusion.reduce_scatter(x, "mean")


@fusedpg.fuse
def one(x: Partial, b: Replicate):
    return all_reduce(x) * b


def model(x: torch.Tensor, b: torch.Tensor, m: torch.Tensor, scale: float) -> torch.Tensor:
    y, z, part = block(x * 2, b, m, scale, wide=True)
    return (y + z).sin().sum() + (part * part).sum() + (one(x, b) * b).sum()


def arguments(context: Context) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(9)
    x = torch.randn(context.world_size, 6, 8, generator=drawn)[context.rank]
    m = torch.randn(48, generator=drawn)
    begin, length = fusedpg.shard_range(48, context.world_size, context.rank)
    return [x, torch.randn(8, generator=drawn), m[begin : begin + length].clone()]


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.long), harness.slow("inductor")]
)
@on_ranks(harness.slow(1), 2, timeout=200)  # torch compiles, which takes a minute beside others
def test_one_graph(context: Context, backend: str) -> None:
    """One graph, forward and backward, with the numbers of eager calls; numbers may change."""
    torch._dynamo.reset()
    given = arguments(context)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with compiles(context):
        for scale in (0.5, 0.7, 0.9):
            torch.testing.assert_close(compiled(*given, scale), model(*given, scale))
        gradients = []
        for function in (model, compiled):
            mine = [x.clone().requires_grad_() for x in given]
            function(*mine, 0.5).backward()
            gradients.append([x.grad for x in mine])
    for x, y in zip(*gradients):
        assert x is not None and bool(x.abs().sum())
        torch.testing.assert_close(y, x)


@pytest.mark.long
@on_ranks(2)
def test_groups_and_breaks(context: Context) -> None:
    """A group is passed as ever; what has no operation breaks the graph."""
    torch._dynamo.reset()
    x, b, _ = arguments(context)
    group = dist.new_group(backend=context.backend)

    def of_group(x: torch.Tensor) -> Any:
        return one(x, b, group=group) + 1

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of_group, backend=counter, fullgraph=True)
    assert torch.equal(compiled(x), of_group(x))
    assert counter.frame_count == 1

    def waiting(x: torch.Tensor) -> Any:
        pending = one(x + 1, b, async_op=True)
        return pending.wait() + 1

    assert torch.equal(torch.compile(waiting, backend="aot_eager")(x), waiting(x))

    def into(x: torch.Tensor) -> Any:
        return one.into(torch.empty_like(x), x + 1, b) + 1

    assert torch.equal(torch.compile(into, backend="aot_eager")(x), into(x))
    dist.destroy_process_group(group)


@on_ranks(2)
def test_rules(context: Context) -> None:
    """The operation keeps torch's rules for operations, and arguments are checked."""
    x, b, _ = arguments(context)
    kinds = "tensor\ntensor"
    handle = one._handle
    torch.library.opcheck(
        torch.ops.fusedpg.fused_function.default,
        ([x, b], [], [], handle, kinds, "", "", "cpu "),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch._dynamo.reset()
    for call in (lambda: one(x), lambda: one(x, b, x), lambda: one(x, b, other=b)):
        with refused("argument", Exception):
            torch.compile(call, backend="aot_eager", fullgraph=True)()


# --- what torch.compile makes dynamic ------------------------------------------------------------


class Layer(nn.Module):
    """Each has a function of its own, which the same lines call."""

    def __init__(self, factor: float) -> None:
        super().__init__()

        @fusedpg.fuse
        def step(x: Partial, b: Replicate, shift: int, scale: float):
            return all_reduce(x) * factor * scale + b + shift

        self.step = step

    def forward(self, x: torch.Tensor, b: torch.Tensor, shift: int, scale: float) -> Any:
        return self.step(x, b, shift, scale).tanh()


@on_ranks(1)
def test_functions_that_the_same_lines_call(context: Context) -> None:
    torch._dynamo.reset()
    x, b, _ = arguments(context)
    layers = [Layer(float(number)) for number in range(1, 3)]
    compiled = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in layers]
    for turn in range(2):
        for layer, other in zip(layers, compiled):
            results = []
            for function in (layer, other):
                mine = x.clone().requires_grad_(), b.clone().requires_grad_()
                y = function(*mine, 3 + turn, 0.5 + turn)
                y.sum().backward()
                results.append((y.detach(), mine[0].grad, mine[1].grad))
            for got, want in zip(*results):
                torch.testing.assert_close(got, want)


@on_ranks(1)
def test_numbers_that_change(context: Context) -> None:
    """Numbers that are others in each call need no graph of their own."""
    x, b, _ = arguments(context)
    layer = Layer(0.5)
    for floats, ints in ((True, False), (False, True)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        for turn in range(4):
            numbers = 3 + turn * ints, 0.1 + turn * floats
            grads = []
            for function in (layer, compiled):
                mine = x.clone().requires_grad_()
                function(mine, b, *numbers).sum().backward()
                grads.append(mine.grad)
            torch.testing.assert_close(*grads)
        assert counter.frame_count <= 2, counter.frame_count


FACTOR = 2.0


@fusedpg.fuse
def scaled(x: Partial, b: Replicate):
    return all_reduce(x) * b * FACTOR


@on_ranks(1)
def test_numbers_that_change_before_backward(context: Context) -> None:
    """A number from outside that changes meanwhile: the backward is that of the forward."""
    global FACTOR
    torch._dynamo.reset()
    x, b, _ = arguments(context)
    compiled = torch.compile(lambda x, b: scaled(x, b).sum(), backend="aot_eager", fullgraph=True)
    grads = []
    for function in (lambda x, b: scaled(x, b).sum(), compiled, compiled):
        FACTOR = 2.0
        mine = b.clone().requires_grad_()
        y = function(x, mine)
        FACTOR = 3.0
        function(x, b.clone().requires_grad_())
        y.backward()
        grads.append(mine.grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])
