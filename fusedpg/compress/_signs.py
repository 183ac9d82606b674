"""A bit an element."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, CompensatedUnit, Context, Ours, Payload
from fusedpg.compress._numbers import Real
from fusedpg.compress._piece import Piece


class SignSGD(Ours):
    """Signs, a bit each; the result is the sign of the majority (Bernstein et al. 2018).

    Zero counts as positive, and so does a draw. With a NaN or an Inf on any rank the result is NaN.
    """

    each_parameter = False
    average = False
    keeps_magnitude = False

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        return list(kernels.signs(v.grad, v.residual, False, v.beta, v.gamma)), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        packed, scales = zip(*payloads)
        high = [float(scale) for scale in scales]
        kernels.unpack_signs_(out, packed, [-scale for scale in high], high, alpha)

    def combine(self, out: Tensor, payloads: Sequence[Payload], scale: float, at: Context) -> None:
        packed = torch.stack([payload[0] for payload in payloads])
        for payload in payloads:
            scale *= float(payload[1])
        kernels.vote_signs_(out, packed, scale)


class Signum(SignSGD):
    """SignSGD of a running mean: m = momentum * m + (1 - momentum) * v."""

    momentum = Real(at_least=0, below=1)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        now = v.now()
        mean = piece.state("signum")
        kernels.accumulate_(mean, now, self.momentum, 1 - self.momentum)
        packed, scale = kernels.signs(mean, None, False)
        if not bool(scale.isfinite()):
            # This step's NaN is in the result; it does not stay for the steps that follow.
            mean.nan_to_num_(0.0, 0.0, 0.0)
        return [packed, scale], Context(piece)


class EFSignSGD(Ours):
    """Signs times the mean magnitude (Karimireddy et al. 2019, algorithm 1)."""

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        return list(kernels.signs(v.grad, v.residual, True, v.beta, v.gamma)), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        packed, scales = zip(*payloads)
        high = [float(scale) for scale in scales]
        kernels.unpack_signs_(out, packed, [-scale for scale in high], high, alpha)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        numels = piece.runs.numels
        return list(kernels.unit().signs(v.grads, v.residual, numels, True, v.beta, v.gamma))

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        packed, scales = zip(*payloads)
        kernels.unit().unpack_signs_(outs, piece.runs.numels, packed, scales, True, alpha)


class OneBit(Ours):
    """Signs, and the means of what is negative and of what is not (Seide et al. 2014)."""

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        return list(kernels.onebit(v.grad, v.residual, v.beta, v.gamma)), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        packed, means = zip(*payloads)
        low, high = zip(*(pair.tolist() for pair in means))
        kernels.unpack_signs_(out, packed, low, high, alpha)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        return list(kernels.unit().onebit(v.grads, v.residual, piece.runs.numels, v.beta, v.gamma))

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        packed, means = zip(*payloads)
        kernels.unit().unpack_signs_(outs, piece.runs.numels, packed, means, False, alpha)
