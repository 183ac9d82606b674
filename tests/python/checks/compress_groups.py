"""Ranks of one group that are in different numbers of other groups."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusedpg import compress


def ranks_that_know_more_groups(context: Any, params: dict[str, Any]) -> None:
    """A pipeline's first stage is in one more; ``new_group`` names groups by their number."""
    limit = datetime.timedelta(seconds=20)
    group = dist.new_group(list(range(context.world_size)), timeout=limit)
    others = [
        dist.new_group([context.rank], use_local_synchronization=True) for _ in range(context.rank)
    ]
    for _ in range(2):  # also a second state, and a lane that is made anew
        torch.manual_seed(0)
        ddp = DistributedDataParallel(torch.nn.Linear(30, 20), process_group=group)
        ddp.register_comm_hook(compress.from_params(params, group=group), compress.hook)
        ddp(torch.full((4, 30), float(context.rank))).sum().backward()
        for p in ddp.parameters():
            assert p.grad is not None
            same = p.grad.clone()
            dist.broadcast(same, 0, group=group)
            assert torch.equal(same, p.grad)
        compress._lane.drop(compress._lane.of(group))
    # torch numbers groups by how many a rank has made, since 2.15 all of them.
    others += [
        dist.new_group([context.rank], use_local_synchronization=True)
        for _ in range(context.rank, context.world_size)
    ]
    for other in (*others, group):
        dist.destroy_process_group(other)
