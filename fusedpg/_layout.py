"""The order in which a tensor's elements lie in memory."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, in whatever order of dimensions."""
    stride = 1
    for size, step in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: s[1]):
        if size == 1:
            continue
        if step != stride:
            return tensor.numel() == 0
        stride *= size
    return True
