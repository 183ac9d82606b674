"""Several tensors of one rank in one call, as ProcessGroupGloo takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import Context

Tensors = list[torch.Tensor]


def backend(group: Any) -> Any:
    group = group or dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu"))


def tensors(context: Context, count: int, numel: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(100 * seed + context.rank)
    return [torch.randint(-9, 9, (numel,), generator=generator).double() for _ in range(count)]


def all_reduce(
    context: Context, group: Any, count: int, numel: int, seed: int, op: Any = dist.ReduceOp.SUM
) -> Tensors:
    given = tensors(context, count, numel, seed)
    options = dist.AllreduceOptions()
    options.reduceOp = op
    backend(group).allreduce(given, options).wait()
    return given


def all_reduce_max(context: Context, group: Any, *rest: int) -> Tensors:
    return all_reduce(context, group, *rest, op=dist.ReduceOp.MAX)


def broadcast(context: Context, group: Any, count: int, numel: int, seed: int) -> Tensors:
    given = tensors(context, count, numel, seed)
    options = dist.BroadcastOptions()
    options.rootRank = seed % context.world_size
    options.rootTensor = seed % count
    backend(group).broadcast(given, options).wait()
    return given


def all_gather(context: Context, group: Any, count: int, numel: int, seed: int) -> Tensors:
    given = tensors(context, count, numel, seed)
    outputs = [
        [torch.zeros_like(given[0]) for _ in range(count * context.world_size)]
        for _ in range(count)
    ]
    backend(group).allgather(outputs, given).wait()
    return [t for each in outputs for t in each]


def sparse(context: Context, group: Any, count: int, numel: int, seed: int) -> Tensors:
    given = [(t * (t > 3)).to_sparse().coalesce() for t in tensors(context, count, numel, seed)]
    backend(group).allreduce(given).wait()
    return [t.to_dense() for t in given]


OPS: dict[str, Callable[..., Tensors]] = {
    "all_reduce": all_reduce,
    "all_reduce_max": all_reduce_max,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "sparse": sparse,
}


def check(context: Context, name: str) -> None:
    for seed, (count, numel) in enumerate([(1, 5), (2, 7), (3, 1), (2, 40_000), (3, 70_001)]):
        got = OPS[name](context, None, count, numel, seed)
        want = OPS[name](context, context.oracle, count, numel, seed)
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine, theirs), (name, count, numel)
