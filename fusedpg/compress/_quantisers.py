"""Fewer bits an element, drawn so that the mean is right."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, Context, Encoded, Gradient, Ours, Payload
from fusedpg.compress._numbers import Real, Whole
from fusedpg.compress._piece import Piece

Seeds = int | list[int]  # of a gradient, or of each parameter of a unit
Payloads = Sequence[Payload]


class _Drawn(Ours):
    """Codes that are drawn with a seed: one gradient is a unit of one."""

    @abc.abstractmethod
    def _encode(self, v: Compensated, seeds: int | list[int], *numels: list[int]) -> Payload: ...

    @abc.abstractmethod
    def _decode(
        self, out: Gradient, payloads: Payloads, alpha: float, *numels: list[int]
    ) -> None: ...

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        return self._encode(v, piece.own_seed), Context(piece)

    def decode(self, out: Tensor, payloads: Payloads, alpha: float, at: Context) -> None:
        self._decode(out, payloads, alpha)

    def encode_unit(self, v: Compensated, piece: Piece) -> Encoded:
        return self._encode(v, piece.own_seeds(), piece.runs.numels), Context(piece)

    def decode_unit(
        self, outs: list[Tensor], payloads: Payloads, alpha: float, piece: Piece
    ) -> None:
        self._decode(outs, payloads, alpha, piece.runs.numels)


class QSGD(_Drawn, name="qsgd", whole_units=True):
    """Levels of 0 to ``quantum_num`` times a norm (Alistarh et al. 2017, section 3.1).

    ``bucket_size`` elements share a norm (0: all); up to 127 levels are a byte, more are two.
    """

    quantum_num = Whole(at_least=1, at_most=32767)
    bucket_size = Whole(at_least=0, at_most=2**31 - 1)

    def __init__(self, quantum_num: int = 127, bucket_size: int = 128) -> None:
        self.quantum_num, self.bucket_size = quantum_num, bucket_size

    def _encode(self, v: Compensated, seeds: int | list[int], *numels: list[int]) -> Payload:
        sent = kernels.qsgd(
            v.grad, v.residual, self.quantum_num, seeds, 0, v.beta, v.gamma, self.bucket_size,
            *numels,
        )  # fmt: skip
        return list(sent)

    def _decode(self, out: Gradient, payloads: Payloads, alpha: float, *numels: list[int]) -> None:
        codes, norms = zip(*payloads)
        kernels.unqsgd_(out, codes, norms, self.quantum_num, alpha, self.bucket_size, *numels)


class TernGrad(_Drawn, name="terngrad", whole_units=True):
    """-1, 0 or 1 times the largest magnitude, 2 bits an element (Wen et al. 2017).

    v is clipped at 2.5 standard deviations first, as in the paper's section 4.2, which is biased
    where that clips; ``clip_sigma=0`` does not. Where the mean is further from 0
    than that deviation, it counts in its place: of a constant nothing would ever be sent.
    """

    clip_sigma = Real(at_least=0)

    def __init__(self, clip_sigma: float = 2.5) -> None:
        self.clip_sigma = clip_sigma

    def _encode(self, v: Compensated, seeds: int | list[int], *numels: list[int]) -> Payload:
        sigma = self.clip_sigma
        return list(kernels.terngrad(v.grad, v.residual, sigma, seeds, 0, v.beta, v.gamma, *numels))

    def _decode(self, out: Gradient, payloads: Payloads, alpha: float, *numels: list[int]) -> None:
        packed, scales = zip(*payloads)
        kernels.unterngrad_(out, packed, scales, alpha, *numels)


class Natural(_Drawn, name="natural", whole_units=True):
    """Powers of two, a byte an element (natural compression, Horvath et al. 2019)."""

    def _encode(self, v: Compensated, seeds: int | list[int], *numels: list[int]) -> Payload:
        return [kernels.natural(v.grad, v.residual, seeds, 0, v.beta, v.gamma, *numels)]

    def finite(self, payload: Payload) -> bool:
        return not bool(((payload[0] & 127) == 127).any())

    def _decode(self, out: Gradient, payloads: Payloads, alpha: float, *numels: list[int]) -> None:
        kernels.unnatural_(out, [payload[0] for payload in payloads], alpha, *numels)
