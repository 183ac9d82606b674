"""What the recipes of examples/frameworks train, without a framework."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import Context


def oracle(context: Context, recipes: str, steps: int, clip: bool) -> list[float]:
    """Losses of torch.optim.AdamW on DDP with Gloo."""
    sys.path.insert(0, recipes)
    import _task  # type: ignore[import-not-found]

    group = context.oracle
    rank, size = context.rank, context.world_size
    ddp = DistributedDataParallel(_task.Model(), process_group=group)
    optimizer = torch.optim.AdamW(_task.groups(ddp.module), lr=_task.LR)
    data = _task.Samples()
    losses = []
    for step in range(steps):
        first = step * _task.BATCH
        mine = [data[i] for i in range(first + rank, first + _task.BATCH, size)]
        loss = ddp(**{key: torch.stack([sample[key] for sample in mine]) for key in "xy"})
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(float(mean) / size)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    return losses
