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

# By compressor: frames of a backward of one bucket, of which HOOK are the backward's thread's.
LIMITS = {"topk": 80, "onebit": 71, "signsgd": 50, "fp16": 48}
HOOK = 18
KEEPS = ("topk", "onebit")


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("compressor", LIMITS)
@on_ranks(2)
def test_frames(context: Context, compressor: str, layers: int) -> None:
    torch.manual_seed(0)
    group = dist.new_group()  # with a thread of its own
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    ddp = DistributedDataParallel(model, process_group=group)
    memory = "residual" if compressor in KEEPS else "none"
    state = compress.from_params({"compressor": compressor, "memory": memory}, group=group)
    ddp.register_comm_hook(state, compress.hook)

    def backward() -> None:
        loss.backward()
        state.set_epoch(0)  # waits for the thread, in four frames

    with watching():
        for _ in range(4):
            loss = ddp(torch.ones(2, 8)).sum()
            counted = during(backward)
            loss = ddp(torch.ones(2, 8)).sum()
            of_hook = during(loss.backward, alone=True)
            state.set_epoch(0)
    assert of_hook.total() <= HOOK, f"{of_hook.total()}: {of_hook}"
    assert counted.total() - 4 <= LIMITS[compressor], f"{counted.total() - 4}: {counted}"
