"""Ordinary collectives of tensors on a GPU, which torch's own ProcessGroupNCCL does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from checks.cases import FLOATS, close, reduce_op, reference, same, values
from gpu_checks.device import DEVICE, FAKE, group_of, synchronize
from harness import Context

NUMEL = 1003
INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
# Gloo, the stand-in of a fake GPU, adds bools up as numbers.
DTYPES = (*FLOATS, *INTS) if FAKE else (*FLOATS, *INTS, torch.bool)
REDOPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")

Check = Callable[[Context, Any, torch.dtype, bool], None]


def supported(redop: str, dtype: torch.dtype) -> bool:
    """What NCCL has; the fake's stand-in is Gloo. The backend multiplies bfloat16 itself."""
    if redop in ("AVG", "PREMUL_SUM"):
        return dtype in FLOATS and (not FAKE or (redop, dtype) == ("PREMUL_SUM", torch.bfloat16))
    return dtype != torch.bool or redop == "SUM"


def sums(dtype: torch.dtype) -> list[str]:
    return [redop for redop in ("SUM", "PREMUL_SUM") if supported(redop, dtype)]


def inputs(context: Context, dtype: torch.dtype, numel: int = NUMEL) -> list[torch.Tensor]:
    """Every rank's contents, on the host."""
    return [values(31 * numel + rank, numel, dtype) for rank in range(context.world_size)]


def mine(context: Context, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    return inputs(context, dtype, numel)[context.rank].to(DEVICE)


def empty(dtype: torch.dtype, numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=DEVICE)


def finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if work is not None:
        work.wait()


def equal(found: torch.Tensor, want: torch.Tensor) -> None:
    assert same(found.cpu(), want), "moved data has changed"


def all_reduce(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    for redop in REDOPS:
        if supported(redop, dtype):
            tensor = mine(context, dtype)
            finish(dist.all_reduce(tensor, reduce_op(redop), group, async_op), async_op)
            close(tensor.cpu(), reference(redop, inputs(context, dtype)))


def reduce(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    root = context.world_size - 1
    for redop in sums(dtype):
        tensor = mine(context, dtype)
        finish(dist.reduce(tensor, root, reduce_op(redop), group, async_op), async_op)
        if context.rank == root:
            close(tensor.cpu(), reference(redop, inputs(context, dtype)))
        elif redop == "PREMUL_SUM":
            equal(tensor, mine(context, dtype).cpu())


def broadcast(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    for root in range(context.world_size):
        tensor = mine(context, dtype)
        finish(dist.broadcast(tensor, root, group=group, async_op=async_op), async_op)
        equal(tensor, inputs(context, dtype)[root])


def all_gather(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    outputs = [empty(dtype, NUMEL) for _ in range(context.world_size)]
    finish(dist.all_gather(outputs, mine(context, dtype), group, async_op), async_op)
    for found, want in zip(outputs, inputs(context, dtype), strict=True):
        equal(found, want)
    flat = empty(dtype, NUMEL * context.world_size)
    work = dist.all_gather_into_tensor(flat, mine(context, dtype), group, async_op)
    finish(work, async_op)
    equal(flat, torch.cat(inputs(context, dtype)))


def reduce_scatter(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, rank = context.world_size, context.rank
    for redop in sums(dtype):
        op = reduce_op(redop)
        whole = reference(redop, inputs(context, dtype, NUMEL * size))
        source = mine(context, dtype, NUMEL * size)
        output = empty(dtype, NUMEL)
        finish(dist.reduce_scatter_tensor(output, source, op, group, async_op), async_op)
        close(output.cpu(), whole.chunk(size)[rank])
        output = empty(dtype, NUMEL)
        parts = list(source.chunk(size))
        finish(dist.reduce_scatter(output, parts, op, group, async_op), async_op)
        close(output.cpu(), whole.chunk(size)[rank])
        equal(source, mine(context, dtype, NUMEL * size).cpu())


def all_to_all(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, rank = context.world_size, context.rank
    output = empty(dtype, NUMEL * size)
    source = mine(context, dtype, NUMEL * size)
    work = dist.all_to_all_single(output, source, group=group, async_op=async_op)
    finish(work, async_op)
    sent = inputs(context, dtype, NUMEL * size)
    equal(output, torch.cat([one.chunk(size)[rank] for one in sent]))
    # Rank r sends r + 1 elements to everybody.
    source = mine(context, dtype, (rank + 1) * size)
    output = empty(dtype, size * (size + 1) // 2)
    work = dist.all_to_all_single(
        output, source, [r + 1 for r in range(size)], [rank + 1] * size, group, async_op
    )
    finish(work, async_op)
    parts = [inputs(context, dtype, (r + 1) * size)[r].chunk(size)[rank] for r in range(size)]
    equal(output, torch.cat(parts))


def rooted(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, rank = context.world_size, context.rank
    everyone = inputs(context, dtype)
    lists = [empty(dtype, NUMEL) for _ in range(size)] if rank == 0 else None
    finish(dist.gather(mine(context, dtype), lists, 0, group, async_op), async_op)
    for found, want in zip(lists or [], everyone, strict=False):
        equal(found, want)
    output = empty(dtype, NUMEL)
    sources = [one.to(DEVICE) for one in everyone] if rank == 0 else None
    finish(dist.scatter(output, sources, 0, group, async_op), async_op)
    equal(output, everyone[rank])


def point_to_point(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, rank = context.world_size, context.rank
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    source, output = mine(context, dtype), empty(dtype, NUMEL)
    if async_op:
        ops = [
            dist.P2POp(dist.isend, source, right, group),
            dist.P2POp(dist.irecv, output, left, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    elif rank % 2 == 0:
        dist.send(source, right, group)
        dist.recv(output, left, group)
    else:
        dist.recv(output, left, group)
        dist.send(source, right, group)
    # With an odd number of ranks the first and the last both send first: NCCL's sends of this size
    # need no waiting receiver.
    equal(output, inputs(context, dtype)[left])


def coalesced(context: Context, group: Any, dtype: torch.dtype, async_op: bool) -> None:
    for redop in sums(dtype):
        tensors = [mine(context, dtype, NUMEL + i) for i in range(3)]
        with dist._coalescing_manager(group, device=DEVICE, async_ops=async_op) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, reduce_op(redop), group)
        if async_op:
            manager.wait()
        for i, tensor in enumerate(tensors):
            close(tensor.cpu(), reference(redop, inputs(context, dtype, NUMEL + i)))


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        all_to_all,
        rooted,
        point_to_point,
        coalesced,
    )
}


def every_type(context: Context, name: str) -> None:
    group = group_of(context)
    for dtype in DTYPES:
        for async_op in (False, True):
            CHECKS[name](context, group, dtype, async_op)


def names(context: Context) -> None:
    """One backend stands behind both kinds of tensors, and both keep working."""
    group = group_of(context)
    assert dist.get_backend(group) == "fused"
    for device in (torch.device("cpu"), DEVICE):
        assert group._get_backend(device).name() == "fused"
    for device in (torch.device("cpu"), DEVICE, torch.device("cpu"), DEVICE):
        tensor = torch.full((17,), float(context.rank + 1), device=device)
        dist.all_reduce(tensor, group=group)
        size = context.world_size
        assert bool((tensor == size * (size + 1) / 2).all()), device
    dist.barrier(group)
    objects: list[Any] = [None] * context.world_size
    dist.all_gather_object(objects, {"rank": context.rank}, group)
    assert objects == [{"rank": rank} for rank in range(context.world_size)]


def mixed_devices(context: Context) -> None:
    """A call that mixes devices raises, and the group stays usable."""
    group = group_of(context)
    outputs = [torch.zeros(5) for _ in range(context.world_size)]
    try:
        dist.all_gather(outputs, torch.ones(5, device=DEVICE), group)
    except (ValueError, RuntimeError):
        pass
    else:
        raise AssertionError("tensors of two devices in one call")
    synchronize()
    names(context)


def subgroups(context: Context) -> None:
    """Groups of some ranks have communicators of their own."""
    size, rank = context.world_size, context.rank
    group_of(context)
    for members in ([0], list(range(size)), list(range(size))[::-2]):
        group = dist.new_group(sorted(members), backend="fused")
        if rank in members:
            tensor = torch.ones(33, device=DEVICE)
            dist.all_reduce(tensor, group=group)
            assert bool((tensor == len(members)).all())
            dist.destroy_process_group(group)


def nccl_versions(context: Context) -> tuple[Any, Any]:
    """The engine's, and torch's."""
    import fusedpg
    from checks.fused_ops import Run
    from gpu_checks.fused import GpuModel

    model = GpuModel(context, Run("sgd"))
    model.set_gradients(0)
    model.step()
    code = fusedpg.group_info(model.group)["nccl_version"]
    ours = (code // 10000, code // 100 % 100, code % 100)
    return (ours, ours) if FAKE or context.world_size == 1 else (ours, torch.cuda.nccl.version())
