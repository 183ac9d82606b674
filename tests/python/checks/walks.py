"""Counts the Python frames of fusedpg that a call takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import fusedpg
from checks.compiled import compiles
from fusedpg import fusion
from harness import Context

_OURS = os.path.dirname(fusedpg.__file__) + os.sep


def frames(call: Callable[[], object]) -> int:
    """How many functions of the package begin, or generators go on, while `call` runs."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_OURS)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def all_reduce(_: Context) -> int:
    tensor = torch.ones(1024)
    fusedpg.all_reduce_(tensor)  # the name's first use imports its module
    return frames(lambda: fusedpg.all_reduce_(tensor))


def step(g: fusion.Partial, w: fusion.Replicate, lr: float) -> Any:
    return w - lr * fusion.all_reduce(g, "mean")


def momentum(g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float) -> Any:
    m = 0.9 * m + fusion.reduce_scatter(g, "mean")
    return w - lr * fusion.all_gather(m), m


def fused_calls(context: Context) -> dict[str, list[int]]:
    """By function the frames of the first calls; the cache has the generated code."""
    w, g = torch.ones(1000), torch.ones(1000)
    m = torch.zeros(fusedpg.shard_range(1000, context.world_size, context.rank)[1])
    counts = {}
    with compiles(context):
        for function, tensors in ((step, (g, w)), (momentum, (g, w, m))):
            fusedpg.fuse(function)(*tensors, lr=0.1)
            fused = fusedpg.fuse(function)
            counts[function.__name__] = [
                frames(lambda fused=fused, tensors=tensors: fused(*tensors, lr=0.1))
                for _ in range(4)
            ]
    return counts
