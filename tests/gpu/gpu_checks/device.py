"""The device under test, and groups on it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness import Context

DEVICE = torch.device(os.environ.get("FUSEDPG_TEST_DEVICE", "cuda:0"))
# "cpu" checks the checks: with FUSEDPG_CUDA_LIB and FUSEDPG_NCCL_LIB naming
# libfusedpg_fake_gpu.so, CPU tensors are taken for a GPU's.
FAKE = DEVICE.type == "cpu"
TIMEOUT = timedelta(seconds=120)

_groups: dict[Any, dist.ProcessGroup] = {}


def group_of(context: Context, **options: Any) -> dist.ProcessGroup:
    """A group of all ranks with some Options, made once; collective."""
    import fusedpg

    if not options and not FAKE:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    key = tuple(sorted(options.items()))
    if key not in _groups:
        if FAKE:
            options["_cpu_as_cuda"] = True
        chosen = fusedpg.Options(timeout=TIMEOUT, **options)
        _groups[key] = dist.new_group(backend="fused", timeout=TIMEOUT, pg_options=chosen)
    return _groups[key]


def synchronize() -> None:
    if not FAKE:
        torch.cuda.synchronize(DEVICE)


def to_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def to_host(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


def is_available(context: Context) -> dict[str, Any]:
    """What a worker finds; also the first touch of the GPU, which takes seconds."""
    torch.ones(1, device=DEVICE).add_(1)
    synchronize()
    if FAKE:
        return {"device": "fake"}
    nccl: Any = torch.cuda.nccl.version()
    return {"device": torch.cuda.get_device_name(DEVICE), "nccl": nccl}
