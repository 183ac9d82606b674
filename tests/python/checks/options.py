"""Options and variables as a rank sees them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from checks import fused_ops, numerics
from checks.cases import REDUCIBLE, Case, digest, logical, reduce_op, supported
from fusedpg._registration import load_extension
from fuzz import compress_kernels
from harness import Context


def variable(context: Context, name: str) -> str | None:
    return os.environ.get(name)


def precedence(context: Context) -> None:
    """Variables set the default group, options a group of their own."""
    import fusedpg

    info = fusedpg.group_info()
    assert info["threads"] == 1
    assert info["arena_reserved"] >= 64 << 20
    group = dist.new_group(pg_options=fusedpg.Options(threads=2, arena_bytes=512 << 20))
    other = fusedpg.group_info(group)
    assert other["threads"] == 2
    assert other["arena_reserved"] >= 512 << 20
    assert other["arena_reserved"] > info["arena_reserved"]
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == context.world_size).all())


def worker_pool(context: Context, threads: int) -> None:
    """All kernels in ranges, against the same references."""
    import fusedpg

    assert fusedpg.group_info()["threads"] == threads
    for numel in (1, 1000, 70_001, (1 << 20) + 13):
        for memory in ("ordinary", "arena"):
            numerics.all_reduce(context, Case("all_reduce", numel=numel, memory=memory))
    numerics.reduce_scatter(context, Case("reduce_scatter", numel=300_001))
    for memory in ("ordinary", "arena"):
        run = fused_ops.Run(shapes=((300_007,), (33,)), steps=3, memory=memory)
        fused_ops.parity(context, run)


def kernels(context: Context, isa: str | None) -> str:
    """One digest of every kernel's results."""
    import fusedpg

    if isa is not None:
        assert fusedpg.group_info()["isa"] == isa
        assert load_extension().isa() == isa
    results = []
    for dtype in REDUCIBLE:
        for redop in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BXOR", "PREMUL_SUM"):
            if not supported(redop, dtype):
                continue
            case = Case("all_reduce", dtype, 5003, redop=redop, seed=8)
            tensor = logical(case, context.rank)
            dist.all_reduce(tensor, reduce_op(redop))
            results.append(tensor)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        numerics.special(context, dtype, "SUM", 4099)
    run = fused_ops.Run(hyper=(("amsgrad", True),), steps=10)
    compressed = compress_kernels.run(5000, 150, 70_000)
    return digest(results) + fused_ops.parity(context, run) + compressed


def other_devices(context: Context) -> str:
    """A tensor of a device we were not built for; the text of the error."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    try:
        # torch itself keeps such tensors from the backend: ask it directly.
        backend.allreduce([torch.ones(3, device="meta")])
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError("a meta tensor was reduced")
