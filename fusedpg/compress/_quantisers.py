"""Fewer bits an element, drawn so that the mean is right."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, CompensatedUnit, Context, Ours, Payload
from fusedpg.compress._numbers import Real, Whole
from fusedpg.compress._piece import Piece


class QSGD(Ours):
    """Levels of 0 to ``quantum_num`` times a norm (Alistarh et al. 2017, section 3.1).

    ``bucket_size`` elements share a norm (0: all); up to 127 levels are a byte, more are two.
    """

    quantum_num = Whole(at_least=1, at_most=32767)
    bucket_size = Whole(at_least=0, at_most=2**31 - 1)

    def __init__(self, quantum_num: int = 127, bucket_size: int = 128) -> None:
        self.quantum_num, self.bucket_size = quantum_num, bucket_size

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        sent = kernels.qsgd(
            v.grad, v.residual, self.quantum_num, piece.own_seed, 0, v.beta, v.gamma,
            self.bucket_size,
        )  # fmt: skip
        return list(sent), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        codes, norms = zip(*payloads)
        kernels.unqsgd_(out, codes, norms, self.quantum_num, alpha, self.bucket_size)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        sent = kernels.unit().qsgd(
            v.grads, v.residual, piece.runs.numels, self.quantum_num, piece.own_seeds(),
            self.bucket_size, v.beta, v.gamma,
        )  # fmt: skip
        return list(sent)

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        codes, norms = zip(*payloads)
        kernels.unit().unqsgd_(
            outs, piece.runs.numels, codes, norms, self.quantum_num, alpha, self.bucket_size
        )


class TernGrad(Ours):
    """-1, 0 or 1 times the largest magnitude, 2 bits an element (Wen et al. 2017).

    v is clipped at 2.5 standard deviations first, as in the paper's section 4.2, which is biased
    where that clips; ``clip_sigma=0`` does not. Where the mean is further from 0
    than that deviation, it counts in its place: of a constant nothing would ever be sent.
    """

    clip_sigma = Real(at_least=0)

    def __init__(self, clip_sigma: float = 2.5) -> None:
        self.clip_sigma = clip_sigma

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        sent = kernels.terngrad(
            v.grad, v.residual, self.clip_sigma, piece.own_seed, 0, v.beta, v.gamma
        )
        return list(sent), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        packed, scales = zip(*payloads)
        kernels.unterngrad_(out, packed, [float(scale) for scale in scales], alpha)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        sent = kernels.unit().terngrad(
            v.grads, v.residual, piece.runs.numels, self.clip_sigma, piece.own_seeds(), v.beta,
            v.gamma,
        )  # fmt: skip
        return list(sent)

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        packed, scales = zip(*payloads)
        kernels.unit().unterngrad_(outs, piece.runs.numels, packed, scales, alpha)


class Natural(Ours):
    """Powers of two, a byte an element (natural compression, Horvath et al. 2019)."""

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        sent = kernels.natural(v.grad, v.residual, piece.own_seed, 0, v.beta, v.gamma)
        return [sent], Context(piece)

    def finite(self, payload: Payload) -> bool:
        return not bool(((payload[0] & 127) == 127).any())

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        kernels.unnatural_(out, [payload[0] for payload in payloads], alpha)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        return [
            kernels.unit().natural(
                v.grads, v.residual, piece.runs.numels, piece.own_seeds(), v.beta, v.gamma
            )
        ]

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        codes = [payload[0] for payload in payloads]
        kernels.unit().unnatural_(outs, piece.runs.numels, codes, alpha)
