"""A bit an element."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, Context, Encoded, Ours, Payload
from fusedpg.compress._numbers import Real
from fusedpg.compress._piece import Piece


class SignSGD(Ours, name="signsgd"):
    """Signs, a bit each; the result is the sign of the majority (Bernstein et al. 2018).

    Zero counts as positive, and so does a draw. With a NaN or an Inf on any rank the result is NaN.
    """

    each_parameter = False
    average = False
    keeps_magnitude = False

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        return list(kernels.signs(v.grad, v.residual, False, v.beta, v.gamma)), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        packed, scales = zip(*payloads)
        kernels.unpack_signs_(out, packed, scales, False, alpha)

    def combine(self, out: Tensor, payloads: Sequence[Payload], scale: float, at: Context) -> None:
        packed = torch.stack([payload[0] for payload in payloads])
        for payload in payloads:
            scale *= float(payload[1])
        kernels.vote_signs_(out, packed, scale)


class Signum(SignSGD, name="signum"):
    """SignSGD of a running mean: m = momentum * m + (1 - momentum) * v."""

    momentum = Real(at_least=0, below=1)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        now = v.now()
        mean = piece.state("signum")
        kernels.accumulate_(mean, now, self.momentum, 1 - self.momentum)
        packed, scale = kernels.signs(mean, None, False)
        if not bool(scale.isfinite()):
            # This step's NaN is in the result; it does not stay for the steps that follow.
            mean.nan_to_num_(0.0, 0.0, 0.0)
        return [packed, scale], Context(piece)


@dataclasses.dataclass
class _Owed:
    """Values that a message has sent and the residual still has: the next call for the same
    parameters subtracts them in its pass, and anybody else beforehand."""

    numels: list[int]
    values: Tensor  # of each parameter, of clear bits and of set ones

    def __call__(self, residual: Tensor) -> None:
        kernels.extension().subtract_signs_(residual, self.numels, self.values)


def _owing(
    v: Compensated, piece: Piece, kernel: Callable[[Tensor | None, bool], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Calls a kernel with memory for what is owed, and whether anything is."""
    if v.kept is None:
        return kernel(None, False)
    before = v.kept.pending
    if isinstance(before, _Owed):
        return kernel(before.values, True)
    v.kept.settle()
    numels = piece.runs.numels
    owed = _Owed(numels, torch.empty(2 * len(numels)))
    sent = kernel(owed.values, False)
    v.kept.pending = owed
    return sent


class _Scaled(Ours):
    """Signs, and what they stand for: one gradient is a unit of one."""

    leaves_pending = True
    two: ClassVar[bool] = False  # values of a parameter, or one with either sign

    @abc.abstractmethod
    def _encode(self, v: Compensated, *unit: object) -> Sequence[Tensor]: ...

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        return list(self._encode(v)), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        packed, values = zip(*payloads)
        kernels.unpack_signs_(out, packed, values, self.two, alpha)

    def encode_unit(self, v: Compensated, piece: Piece) -> Encoded:
        def kernel(owed: Tensor | None, owes: bool) -> Sequence[Tensor]:
            return self._encode(v, piece.runs.numels, owed, owes)

        return list(_owing(v, piece, kernel)), Context(piece)

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        packed, values = zip(*payloads)
        kernels.unpack_signs_(outs, packed, values, self.two, alpha, piece.runs.numels)


class EFSignSGD(_Scaled, name="efsignsgd", whole_units=True):
    """Signs times the mean magnitude (Karimireddy et al. 2019, algorithm 1)."""

    def _encode(self, v: Compensated, *unit: object) -> Sequence[Tensor]:
        return kernels.signs(v.grad, v.residual, True, v.beta, v.gamma, *unit)


class OneBit(_Scaled, name="onebit", whole_units=True):
    """Signs, and the means of what is negative and of what is not (Seide et al. 2014)."""

    two = True

    def _encode(self, v: Compensated, *unit: object) -> Sequence[Tensor]:
        return kernels.onebit(v.grad, v.residual, v.beta, v.gamma, *unit)
