"""Parallel layers on one dimension of a mesh, DDP on the other, against one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from checks.compiled import compiles
from fusedpg import tensor_parallel
from harness import Context


def train(context: Context) -> None:
    """Each pair of ranks has the model and its own rows; the pairs average gradients."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(5, 14), nn.GELU(), nn.Linear(14, 3)).double()
    plan = {"0": tensor_parallel.ColwiseParallel(), "2": tensor_parallel.RowwiseParallel()}
    mine = parallelize_module(copy.deepcopy(whole), mesh["tp"], plan)
    _pre_dp_module_transform(mine)
    ddp = DistributedDataParallel(mine, process_group=mesh["dp"].get_group())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, ddp)]
    with compiles(context):
        for _ in range(3):
            x = torch.randn(2, 7, 5, dtype=torch.float64)
            whole(x).square().mean().backward()
            y = ddp(x[mesh["dp"].get_local_rank()])
            y.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            x = torch.randn(9, 5, dtype=torch.float64)
            torch.testing.assert_close(mine(x), whole(x), rtol=1e-9, atol=1e-9)
    for parameter, full in zip(mine.parameters(), whole.parameters()):
        other = full.detach()
        size, place = mesh["tp"].size(), mesh["tp"].get_local_rank()
        for dim in range(other.dim()):
            if parameter.shape[dim] != other.shape[dim]:
                other = other.chunk(size, dim)[place]
        torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-9)
    dist.barrier(group=context.oracle)
