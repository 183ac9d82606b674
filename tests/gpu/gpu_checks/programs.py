"""Generated kernels of fused functions, against torch's functions on the host."""

from __future__ import annotations

import torch

from checks import cuda_programs
from checks.cuda_programs import CLOSE, EXACT
from gpu_checks.device import DEVICE, group_of
from harness import Context


def exact(context: Context, dtype: torch.dtype) -> None:
    for name in EXACT:
        cuda_programs.exact(context, dtype, name, DEVICE, group_of(context))


def close(context: Context, dtype: torch.dtype) -> dict[str, float]:
    group = group_of(context)
    return {name: cuda_programs.close(context, dtype, name, DEVICE, group) for name in CLOSE}


def masks(context: Context, dtype: torch.dtype) -> str:
    return cuda_programs.masks(context, dtype, DEVICE, group_of(context))
