"""How much Python of ours a compressed bucket takes, in the hook and beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.frames import during, watching
from fusedpg import compress
from harness import Context, on_ranks

# By compressor: frames of a backward of one bucket, and of each parameter in it.
LIMITS = {"topk": (101, 14), "onebit": (98, 5), "signsgd": (73, 4), "fp16": (65, 4)}
KEEPS = ("topk", "onebit")


@pytest.mark.parametrize("compressor", LIMITS)
@on_ranks(2)
def test_frames(context: Context, compressor: str) -> None:
    totals = []
    for layers in (1, 6):
        torch.manual_seed(0)
        group = dist.new_group()  # with a thread of its own
        model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        ddp = DistributedDataParallel(model, process_group=group)
        memory = "residual" if compressor in KEEPS else "none"
        state = compress.from_params({"compressor": compressor, "memory": memory}, group=group)
        ddp.register_comm_hook(state, compress.hook)

        def backward(loss: torch.Tensor, state: compress.State = state) -> None:
            loss.backward()
            state.set_epoch(0)  # waits for the thread

        with watching():
            for _ in range(4):
                loss = ddp(torch.ones(2, 8)).sum()
                counted = during(lambda loss=loss, run=backward: run(loss))
        totals.append(counted)
    few, many = totals
    each = (many.total() - few.total()) / 10
    bucket = few.total() - 2 * each - 4  # without what waits
    of_bucket, of_parameter = LIMITS[compressor]
    assert each <= of_parameter, f"{each} frames a parameter, {many - few}"
    assert bucket <= of_bucket, f"{bucket} frames a bucket, {few}"
