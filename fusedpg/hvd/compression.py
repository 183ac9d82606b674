"""Types that tensors are sent in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """One's own: subclass, and write both methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Returns the tensor to send, and the context that ``decompress`` gets."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point numbers as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        if tensor.dtype.is_floating_point:
            return tensor.to(torch.float16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors of Horovod."""

    none = NoneCompressor
    fp16 = FP16Compressor
