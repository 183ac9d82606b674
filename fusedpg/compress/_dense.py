"""Every element, whole or as float16."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, Context, Ours, Payload
from fusedpg.compress._piece import Piece


class NoneCompressor(Ours):
    """Sends v as it is."""

    each_parameter = False
    linear = True

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        now = v.now()
        if v.residual is None:
            return [now], Context(piece)
        payload = [now.clone()]
        v.residual.zero_()
        return payload, Context(piece)

    def decode(self, out: Tensor, payload: Payload, alpha: float, add: bool, at: Context) -> None:
        if add:
            kernels.accumulate_(out, payload[0], 1.0, alpha)
        elif out.data_ptr() == payload[0].data_ptr():
            out.mul_(alpha)
        else:
            torch.mul(payload[0], alpha, out=out)


class FP16(Ours):
    """Sends float16 of v / world size, so that sums do not overflow before single gradients do."""

    each_parameter = False
    linear = True

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        now = v.now()
        half = (now / piece.world_size).half()
        if v.residual is not None:
            v.residual.sub_(half.to(now.dtype), alpha=piece.world_size)
        return [half], Context(piece)

    def decode(self, out: Tensor, payload: Payload, alpha: float, add: bool, at: Context) -> None:
        wide = payload[0].to(out.dtype)
        if add:
            kernels.accumulate_(out, wide, 1.0, alpha * at.piece.world_size)
        else:
            torch.mul(wide, alpha * at.piece.world_size, out=out)
