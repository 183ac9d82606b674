"""What builds on the backend: FSDP2, DTensor, checkpoints, torch.compile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import harness
from harness import Context, on_ranks, slow


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 34), nn.ReLU(), nn.Linear(34, 21), nn.ReLU())


def inputs(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 16, generator=generator)


def unsharded(context: Context, steps: int) -> list[torch.Tensor]:
    """The same training in one process on averaged gradients."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(context.world_size):
            (model(inputs(step, rank)).pow(2).mean() / context.world_size).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def whole(module: nn.Module) -> list[torch.Tensor]:
    full = [getattr(param, "full_tensor", lambda p=param: p)() for param in module.parameters()]
    return [one.detach() for one in full]


@pytest.mark.parametrize("comm_memory", [False, pytest.param(True, marks=pytest.mark.fused_only)])
@on_ranks(1, 2, 3, slow(4))
def test_fsdp(context: Context, comm_memory: bool) -> None:
    """fully_shard, optionally with its buffers in our arena; Gloo allocates nothing."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (context.world_size,))
    model = mlp()
    modules = [module for module in model if isinstance(module, nn.Linear)]
    for module in modules:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if comm_memory:
        for module in [*modules, model]:
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        model(inputs(step, context.rank)).pow(2).mean().backward()
        optimizer.step()
    for mine, want in zip(whole(model), unsharded(context, 5), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


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


@on_ranks(1, 2, 3, slow(4))
def test_tensor_parallel(context: Context) -> None:
    """Column- and row-wise parallel layers equal the whole model."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    size = 12 * context.world_size
    model = nn.Sequential(nn.Linear(16, size), nn.ReLU(), nn.Linear(size, 16))
    x = inputs(0, 0)
    want = model(x).sum()
    want.backward()
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    value = want.detach().clone()
    model.zero_grad()
    mesh = init_device_mesh("cpu", (context.world_size,))
    parallel = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    got = parallel(x).sum()
    got.backward()
    torch.testing.assert_close(got.detach(), value, rtol=1e-4, atol=1e-4)
    for param, grad in zip(parallel.parameters(), grads, strict=True):
        mine: Any = param.grad
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(mine, grad, rtol=1e-4, atol=1e-5)


@harness.on_ranks(4)
def test_two_dimensional_mesh(context: Context) -> None:
    """Groups of a 2 x 2 mesh sum along their own dimension."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, want in (("dp", 2 * (context.rank % 2) + 2), ("tp", 4 * (context.rank // 2) + 1)):
        tensor = torch.full((10,), float(context.rank))
        dist.all_reduce(tensor, group=mesh[name].get_group())
        assert bool((tensor == want).all()), (name, tensor[0])


@on_ranks(1, 2, 3, slow(4))
def test_checkpoint(context: Context) -> None:
    """torch.distributed.checkpoint saves and loads sharded and plain tensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (context.world_size,))
    full = torch.arange(35.0).reshape(7, 5)
    path = Path(context.scratch) / "checkpoint"
    state = {
        "sharded": distribute_tensor(full, mesh, [Shard(0)]),
        "plain": torch.arange(9.0),
        "number": 7,
    }
    dcp.save(state, checkpoint_id=path)
    empty: dict[str, Any] = {
        "sharded": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)]),
        "plain": torch.zeros(9),
        "number": 0,
    }
    dcp.load(empty, checkpoint_id=path)
    assert torch.equal(empty["sharded"].full_tensor(), full)
    assert torch.equal(empty["plain"], torch.arange(9.0))
    assert empty["number"] == 7
    future = dcp.async_save(
        {"plain": torch.ones(5)},
        checkpoint_id=Path(context.scratch) / "second",
        process_group=context.oracle,
    )
    future.result()


@on_ranks(1, 2, 3, slow(4))
def test_functional_collectives(context: Context) -> None:
    """The functional collectives."""
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD
    size, rank = context.world_size, context.rank
    x = torch.arange(12.0).reshape(6, 2) + rank
    total = size * torch.arange(12.0).reshape(6, 2) + sum(range(size))
    assert torch.equal(fc.all_reduce(x, "sum", group), total)
    torch.testing.assert_close(fc.all_reduce(x, "avg", group), total / size)
    gathered = fc.all_gather_tensor(x, 0, group)
    assert torch.equal(gathered, torch.cat([x - rank + other for other in range(size)]))
    if 12 % size == 0:
        y = torch.arange(12.0) + rank
        whole_ = size * torch.arange(12.0) + sum(range(size))
        part = fc.reduce_scatter_tensor(y, "sum", 0, group)
        assert torch.equal(part, whole_.chunk(size)[rank])
        exchanged = fc.all_to_all_single(y, None, None, group)
        want = torch.cat([(y - rank + other).chunk(size)[rank] for other in range(size)])
        assert torch.equal(exchanged, want)
    assert torch.equal(fc.broadcast(x, 0, group), x - rank)
    first, second = fc.all_reduce_coalesced([x, x * 2], "sum", group)
    assert torch.equal(first * 2, second)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@on_ranks(2, timeout=180)
def test_compile(context: Context) -> None:
    """A compiled function with collectives in its graph, forwards and backwards."""
    import torch._dynamo
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD

    def function(x: torch.Tensor) -> torch.Tensor:
        y = fc.all_reduce(x * 2, "sum", group)
        return fc.all_gather_tensor(y + 1, 0, group)

    torch._dynamo.reset()
    x = torch.arange(10.0) + context.rank
    got = torch.compile(function, fullgraph=True, backend="inductor")(x)
    assert torch.equal(got, function(x))


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
