"""How much Python of ours a bucket of DDP's and a step take: none of it by parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checks.frames import during, watching
from checks.optim_script import in_mode
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only

# By mode: frames of a backward of one bucket, and of a step.
LIMITS = {"ddp": (19, 23), "overlap": (40, 16), "manual": (0, 27)}


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("mode", LIMITS)
@on_ranks(2)
def test_frames(context: Context, mode: str, layers: int) -> None:
    torch.manual_seed(0)
    layered = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    model, optimizer = in_mode(mode, layered, lr=1e-3)
    with watching():
        for _ in range(4):
            optimizer.zero_grad()
            of_backward = during(model(torch.ones(2, 8)).sum().backward)
            of_step = during(optimizer.step)
    most_of_backward, most_of_step = LIMITS[mode]
    assert of_backward.total() <= most_of_backward, f"{of_backward.total()}: {of_backward}"
    assert of_step.total() <= most_of_step, f"{of_step.total()}: {of_step}"
