"""Sums of integers that share an exponent a block, after SwitchML (Sapio et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedpg import _agreement
from fusedpg.compress import _kernels as kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sum_(tensor: Tensor, block: int, group: ProcessGroup | None, *, average: bool = False) -> None:
    """Replaces a tensor by the sum, or mean, over all ranks.

    Two all-reduces: the largest exponent of each block, then int32 codes.

    Raises:
        TypeError: on all ranks, where another rank has another block size, number of elements or
            type.
    """
    flat = tensor.detach().contiguous().view(-1).float()
    ranks = dist.get_world_size(group)
    exponents = _agreed(kernels.block_exponents(flat, block), block, tensor, group)
    codes = kernels.block_quantise(flat, exponents, block, ranks)
    dist.all_reduce(codes, group=group)
    # A copy of one's own, if it was not float32, dense and contiguous already.
    kernels.block_dequantise_(flat, codes, exponents, block, ranks, 1 / ranks if average else 1.0)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _agreed(exponents: Tensor, block: int, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest of all ranks, each."""
    # Ranks with other blocks may have as many of them.
    call = (block, tensor.numel(), str(tensor.dtype))
    most = _agreement.largest_of_same(call, exponents, group)
    if most is None:
        raise TypeError(
            "a quantised all-reduce of other blocks, elements or types on other ranks than on rank "
            f"{dist.get_rank(group)}, which has blocks of {block} for {tensor.numel()} elements "
            f"of {tensor.dtype}"
        )
    return most


def sums(payload: Sequence[Tensor], block: int, group: ProcessGroup | None) -> list[Tensor]:
    """Those of tensors; integers are added as they are, and so is float64."""
    for tensor in payload:
        if tensor.dtype in DTYPES:
            sum_(tensor, block, group)
        else:
            dist.all_reduce(tensor, group=group)
    return list(payload)
