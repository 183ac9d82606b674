"""What torch.compile makes dynamic: functions that the same lines call, numbers that change."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.testing
from torch import nn

import fusedpg
from checks.fusion_compile import arguments
from fusedpg.fusion import Partial, Replicate, all_reduce
from harness import Context


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


def instances(context: Context) -> None:
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


def many_numbers(context: Context) -> None:
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


def changes_before_backward(context: Context) -> None:
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
