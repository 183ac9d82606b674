"""What each rank does in the tests of fused functions under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.testing
import torch.distributed as dist

import fusedpg
from checks.compiled import compiles
from checks.refused import refused
from fusedpg.fusion import Partial, Replicate, Shard, all_reduce
from harness import Context


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


def without_breaks(context: Context, backend: str) -> None:
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


def groups(context: Context) -> None:
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


def checked(context: Context) -> None:
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
