"""What builds on the backend: FSDP2, DTensor, checkpoints, torch.compile."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import harness
from checks import parallel
from harness import Context


@pytest.mark.parametrize("comm_memory", [False, True])
def test_fsdp(workers: harness.Workers, comm_memory: bool) -> None:
    if comm_memory and not harness.IS_FUSED:
        pytest.skip("Gloo allocates nothing")
    workers.run(parallel.fsdp, comm_memory)


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_dtensor(context: Context) -> None:
    """Every redistribution of a tensor that does not divide evenly."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (context.world_size,))
    full = torch.arange(7 * 10.0).reshape(7, 10)
    placements = [Replicate(), Shard(0), Shard(1)]
    for source in placements:
        for target in placements:
            tensor = distribute_tensor(full, mesh, [source]).redistribute(mesh, [target])
            assert torch.equal(tensor.full_tensor(), full), (source, target)
    from torch.distributed.tensor import DTensor

    partial = DTensor.from_local(torch.full((4, 4), 1.0 + context.rank), mesh, [Partial()])
    total = context.world_size * (context.world_size + 1) / 2
    for target in placements:
        got = partial.redistribute(mesh, [target]).full_tensor()
        assert bool((got == total).all()), target


def test_tensor_parallel(workers: harness.Workers) -> None:
    workers.run(parallel.tensor_parallel)


@harness.on_ranks(4)
def test_two_dimensional_mesh(context: Context) -> None:
    """Groups of a 2 x 2 mesh sum along their own dimension."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, want in (("dp", 2 * (context.rank % 2) + 2), ("tp", 4 * (context.rank // 2) + 1)):
        tensor = torch.full((10,), float(context.rank))
        dist.all_reduce(tensor, group=mesh[name].get_group())
        assert bool((tensor == want).all()), (name, tensor[0])


def test_checkpoint(workers: harness.Workers) -> None:
    workers.run(parallel.checkpoint)


def test_functional_collectives(workers: harness.Workers) -> None:
    workers.run(parallel.functional)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compile(pair: harness.Workers) -> None:
    pair.run(parallel.compiled, timeout=180)


@harness.on_ranks(2, timeout=120)
def test_compile_in_place(context: Context) -> None:
    """dist.all_reduce inside a compiled function."""
    import torch._dynamo

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    torch._dynamo.reset()
    x = torch.arange(10.0) + context.rank
    got = torch.compile(function, backend="aot_eager")(x)
    assert torch.equal(got, function(x))


@pytest.mark.fused_only
def test_debug_detail() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group and checks every call."""
    from checks import ddp, p2p
    from checks.collectives import Case, check

    with harness.Workers(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as workers:
        for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor"):
            workers.run(check, Case(op, numel=1003))
        workers.run(p2p.batch, 100)
        workers.run(ddp.variant, "plain")
