"""All-reduces that skip blocks of zeros, against sums made on the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.sparse import DTYPES, Case, bits, placed, values
from gpu_checks.device import DEVICE, group_of, synchronize
from harness import Context


def summed(case: Case, world_size: int) -> torch.Tensor:
    """The contributions are small integers, so every order of additions gives these bits."""
    parts = torch.stack([values(case, rank, world_size).double() for rank in range(world_size)])
    total = parts.sum(0)
    if case.op == "AVG":
        total /= world_size
    return total.to(DTYPES[case.dtype])


def all_reduces(context: Context, cases: list[Case], options: dict[str, Any]) -> dict[str, Any]:
    """By the function and, in a group whose option says so, by the plain collective."""
    group = group_of(context, block_skip="on", **options)
    fusedpg.stats(group, reset=True)
    for case in cases:
        data = values(case, context.rank, context.world_size)
        want = summed(case, context.world_size)
        op = getattr(dist.ReduceOp, case.op)
        one, two = placed(case, data, DEVICE, group), placed(case, data, DEVICE, group)
        work = fusedpg.sparse_all_reduce(
            one, op, group, async_op=case.seed % 2 == 0, block_size=case.block
        )
        dist.all_reduce(two, op, group=group)
        if work is not None:
            work.wait()
        for got in (one.cpu(), two.cpu()):
            if case.op == "AVG":  # NCCL may multiply by the rounded reciprocal
                torch.testing.assert_close(got, want)
            else:
                assert torch.equal(bits(got), bits(want)), case
    synchronize()
    found: dict[str, Any] = fusedpg.stats(group)
    return found


def adapts(context: Context) -> dict[str, int]:
    """A group that learns by itself which of two shapes is sparse."""
    group = group_of(context, block_skip="auto")
    fusedpg.stats(group, reset=True)
    for seed in range(20):
        for case in (Case(400_000, seed=seed), Case(300_000, density=1.0, seed=seed)):
            tensor = placed(case, values(case, context.rank, context.world_size), DEVICE, group)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(bits(tensor.cpu()), bits(summed(case, context.world_size))), case
    paths: dict[str, int] = fusedpg.stats(group)["all_reduce"]["paths"]
    return paths


def residuals(context: Context) -> None:
    """What is below the threshold is sent later or left, never lost."""
    group = group_of(context)
    case = Case(50_003, 64, density=0.3, seed=5)
    residual = torch.zeros(case.numel, device=DEVICE)
    came = torch.zeros(case.numel, dtype=torch.float64)
    went = torch.zeros(case.numel, dtype=torch.float64)
    for step in range(4):
        data = values(case, context.rank, context.world_size) / (80 if step % 2 else 8)
        went += data.double()
        data = data.to(DEVICE)
        fusedpg.sparse_all_reduce(
            data, group=group, block_size=case.block, threshold=0.5, residual=residual
        )
        came += data.cpu().double()
    assert float(residual.abs().max()) <= 0.5
    assert bool(residual.any())
    others: list[Any] = [None] * context.world_size
    dist.all_gather_object(others, went - residual.cpu().double())
    torch.testing.assert_close(sum(others), came, rtol=0, atol=1e-4)


def unchanged_ddp(context: Context) -> None:
    """Embeddings under DDP: a group that skips trains as one that does not."""
    finals = []
    for options in ({}, {"block_skip": "on"}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(20_000, 16), nn.Linear(16, 4)).to(DEVICE)
        ddp = DistributedDataParallel(net, process_group=group_of(context, **options))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(context.rank)
        for _ in range(4):
            words = torch.randint(200, (8, 5), generator=generator).to(DEVICE)
            optimizer.zero_grad()
            ddp(words).square().sum().backward()
            optimizer.step()
        finals.append([parameter.detach().cpu() for parameter in net.parameters()])
    for dense, sparse in zip(*finals, strict=True):
        torch.testing.assert_close(dense, sparse)


def refuses_graphs(context: Context) -> None:
    """What travels depends on the data, so a graph cannot hold it."""
    group = group_of(context)
    tensor = torch.ones(100_000, device=DEVICE)
    fusedpg.sparse_all_reduce(tensor, group=group)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            fusedpg.sparse_all_reduce(tensor, group=group)
    except Exception as error:  # which of torch's depends on what it notices first
        assert "CUDA graph" in str(error), error
    else:
        raise AssertionError("was captured")
    fusedpg.sparse_all_reduce(tensor, group=group)
    assert torch.equal(tensor.cpu(), torch.full((100_000,), float(context.world_size**2)))
