"""Every element, whole or as float16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, Context, Encoded, Ours, Payload
from fusedpg.compress._piece import Piece


class NoneCompressor(Ours, name="none"):
    """Sends v as it is."""

    each_parameter = False
    linear = True

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        now = v.now()
        if v.residual is None:
            return [now], Context(piece)
        payload = [now.clone()]
        v.residual.zero_()
        return payload, Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        first, *others = (payload[0] for payload in payloads)
        if out.data_ptr() == first.data_ptr():
            out.mul_(alpha)
        else:
            torch.mul(first, alpha, out=out)
        for one in others:
            kernels.accumulate_(out, one, 1.0, alpha)


class FP16(Ours, name="fp16"):
    """Sends float16 of v / world size, so that sums do not overflow before single gradients do."""

    each_parameter = False
    linear = True

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        now = v.now()
        half = (now / piece.world_size).half()
        if v.residual is not None:
            v.residual.sub_(half.to(now.dtype), alpha=piece.world_size)
        return [half], Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        alpha *= at.piece.world_size
        first, *others = (payload[0].to(out.dtype) for payload in payloads)
        torch.mul(first, alpha, out=out)
        for one in others:
            kernels.accumulate_(out, one, 1.0, alpha)
