"""What a served group does otherwise than Gloo on valid input: a function a row of serve_gloo.md.

Each gets a group and gives what came out, which tests compare for a group of Gloo and a served one.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from harness import Context

Group = Any


class Row(NamedTuple):
    ranks: int
    run: Callable[[Context, Group], Any]
    gloo: Any  # what Gloo gives, by rank; None: it is not always the same
    served: Any


def _reduce(context: Context, group: Group) -> Any:
    t = torch.tensor([context.rank + 1.0])
    dist.reduce(t, 0, group=group)
    return t.item()


def _transposed_sum(context: Context, group: Group) -> Any:
    t = torch.arange(4.0).view(2, 2)
    t = t.clone() if context.rank == 0 else t.t().contiguous().t()
    dist.all_reduce(t, group=group)
    return t.tolist()


def _transposed_broadcast(context: Context, group: Group) -> Any:
    t = torch.arange(4.0).view(2, 2)
    t = t.t() if context.rank == 0 else torch.zeros(2, 2)
    dist.broadcast(t, 0, group=group)
    return t.tolist()


def _extremes(context: Context, group: Group) -> Any:
    found = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        t = torch.tensor([float("nan"), 1.0] if context.rank == 0 else [1.0, float("nan")])
        dist.all_reduce(t, op, group=group)
        found += t.isnan().tolist()
    return found


def _half_mean(context: Context, group: Group) -> Any:
    t = torch.tensor([65504.0], dtype=torch.float16)
    dist.all_reduce(t, dist.ReduceOp.AVG, group=group)
    return t.item()


def _order(context: Context, group: Group) -> Any:
    t = torch.tensor([(2.0**26, 1.0, -(2.0**26), 1.0)[context.rank]])
    dist.all_reduce(t, group=group)
    return t.item()


def _positions(context: Context, group: Group) -> Any:
    t = torch.full((3000,), (2.0**24, 1.0, 1.0)[context.rank])
    dist.all_reduce(t, group=group)
    return len(t.unique())


def _bools(context: Context, group: Group) -> Any:
    t = torch.tensor([True])
    dist.all_reduce(t, group=group)
    return t.view(torch.uint8).item()


def _works(call: Callable[[], Any]) -> bool:
    with contextlib.suppress(RuntimeError, ValueError):
        call()
        return True
    return False


def _uint16(context: Context, group: Group) -> Any:
    t = torch.ones(3, dtype=torch.uint16)
    return _works(lambda: dist.all_reduce(t, group=group)) and t.tolist()


def _float8(context: Context, group: Group) -> Any:
    t = torch.full((3,), context.rank + 1.0).to(torch.float8_e4m3fn)
    return _works(lambda: dist.broadcast(t, 1, group=group)) and t.float().tolist()


def _uneven(context: Context, group: Group) -> Any:
    parts = [torch.zeros(r + 1) for r in range(context.world_size)]
    mine = torch.full((context.rank + 1,), context.rank + 1.0)
    return _works(lambda: dist.all_gather(parts, mine, group=group)) and torch.cat(parts).tolist()


def _sparse_mean(context: Context, group: Group) -> Any:
    t = torch.eye(3).mul(context.rank).to_sparse()
    works = _works(lambda: dist.all_reduce(t, dist.ReduceOp.AVG, group=group))
    return works and t.to_dense().diagonal().tolist()


def _gradient_of_scatter(context: Context, group: Group) -> Any:
    x = torch.ones(2 * context.world_size, requires_grad=True)
    out = torch.zeros(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.reduce_scatter_tensor(out, x, group=group)
        if not out.requires_grad:
            return None
        out.sum().backward()
    return None if x.grad is None else x.grad.tolist()


def _gathered_leaf(context: Context, group: Group) -> Any:
    if group is context.oracle:
        return None  # its ranks raise in different calls, and wait for each other then
    out, x = torch.zeros(2 * context.world_size), torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):
            dist.all_gather_into_tensor(out.zero_(), x, group=group)
    return out.tolist()


def _polled(context: Context, group: Group) -> Any:
    part = torch.zeros(1)
    work = dist.reduce_scatter_tensor(
        part, torch.ones(context.world_size), group=group, async_op=True
    )
    # Gloo's has ended long before: its Work says nothing for ever.
    end = time.monotonic() + (2 if group is context.oracle else 20)
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    done = work.is_completed()
    work.wait()
    return done, part.item()


ROWS = {
    "`reduce(t, dst)` overwrites": Row(4, _reduce, None, [10.0, 2.0, 3.0, 4.0]),
    "`all_reduce` of a tensor that is transposed on some ranks": Row(
        2, _transposed_sum, None, [[[0.0, 2.0], [4.0, 6.0]]] * 2
    ),
    "`broadcast` of a transposed tensor": Row(
        2,
        _transposed_broadcast,
        [[[0.0, 2.0], [1.0, 3.0]], [[0.0, 1.0], [2.0, 3.0]]],
        [[[0.0, 2.0], [1.0, 3.0]]] * 2,
    ),
    "MAX and MIN lose a NaN": Row(2, _extremes, None, [[True] * 4] * 2),
    "the mean of float16": Row(2, _half_mean, [float("inf")] * 2, [65504.0] * 2),
    "sums of float32 depend on the algorithm": Row(4, _order, [0.0] * 4, [1.0] * 4),
    "the same sum has other bits": Row(3, _positions, [2] * 3, [1] * 3),
    "the sum of bools": Row(2, _bools, [2] * 2, [1] * 2),
    "uint16": Row(2, _uint16, [False] * 2, [[2, 2, 2]] * 2),
    "float8": Row(2, _float8, [False] * 2, [[2.0, 2.0, 2.0]] * 2),
    "`all_gather` into a list of tensors of different sizes": Row(
        2, _uneven, [False] * 2, [[1.0, 2.0, 2.0]] * 2
    ),
    "the mean of sparse tensors": Row(2, _sparse_mean, [False] * 2, [[0.5] * 3] * 2),
    "`reduce_scatter_tensor` of a tensor that requires grad": Row(
        2, _gradient_of_scatter, None, [None] * 2
    ),
    "`is_completed()` of an asynchronous `reduce_scatter`": Row(
        2, _polled, [(False, 2.0)] * 2, [(True, 2.0)] * 2
    ),
    "`all_gather_into_tensor` of a tensor that requires grad": Row(
        2, _gathered_leaf, None, [[1.0] * 4] * 2
    ),
}


def compare(context: Context, name: str) -> tuple[Any, Any]:
    """What came out on Gloo, and on a served group."""
    from fusedpg import _serve_gloo

    row = ROWS[name]
    gloo = row.run(context, context.oracle)
    _serve_gloo.serve_gloo(True)
    try:
        group = dist.new_group(backend="gloo")
        try:
            return gloo, row.run(context, group)
        finally:
            dist.destroy_process_group(group)
    finally:
        _serve_gloo.serve_gloo(False)
