"""Some of the elements, as they are."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, Context, Encoded, Ours, Payload
from fusedpg.compress._numbers import Real
from fusedpg.compress._piece import Piece


def _shares(numels: Sequence[int], ratio: float) -> list[int]:
    """So many elements of each parameter: at least one, if there are any."""
    return [min(numel, max(1, int(numel * ratio))) for numel in numels]


class _Sparse(Ours):
    """Values and their indices (int32), in the order of indices."""

    sparse = True

    @abc.abstractmethod
    def _encode(self, v: Compensated, piece: Piece, numels: list[int], *unit: list[int]) -> Payload:
        """Encodes one gradient; or several, if ``unit`` has ``numels`` once more."""

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        return self._encode(v, piece, [piece.numel]), Context(piece)

    def encode_unit(self, v: Compensated, piece: Piece) -> Encoded:
        numels = piece.runs.numels
        return self._encode(v, piece, numels, numels), Context(piece)

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        indices = [self.indices(payload, at.piece) for payload in payloads]
        kernels.scatter_(out, indices, [payload[0] for payload in payloads], alpha)

    def indices(self, payload: Payload, piece: Piece) -> Tensor:
        return payload[1]

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        sent = [self.sent_of_unit(payload, piece) for payload in payloads]
        counts, indices, values = zip(*sent)
        kernels.scatter_(outs, indices, values, alpha, piece.runs.numels, counts)


class TopK(_Sparse, name="topk", whole_units=True):
    """The ``compress_ratio`` of elements with the largest magnitudes (Aji and Heafield 2017).

    Of equal ones the first; NaN counts as the largest, so it is sent.
    """

    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, compress_ratio: float = 0.3) -> None:
        self.compress_ratio = compress_ratio

    def _encode(self, v: Compensated, piece: Piece, numels: list[int], *unit: list[int]) -> Payload:
        ks = _shares(numels, self.compress_ratio)
        return list(kernels.topk(v.grad, v.residual, ks if unit else ks[0], v.beta, v.gamma, *unit))

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        values, indices = payload
        return _shares(piece.runs.numels, self.compress_ratio), indices, values


class DGC(TopK, name="dgc", whole_units=True):
    """Top-k for the memory "dgc" (Deep Gradient Compression, Lin et al. 2018).

    The paper estimates the threshold from a sample; this one is exact.
    """


class RandomK(_Sparse, name="randomk", whole_units=True):
    """The same ``compress_ratio`` of elements on all ranks, others in every step.

    One element of every run of about 1 / compress_ratio is drawn, where the first run begins is
    drawn, too, so each is sent with the same probability; and indices need not travel. torch's
    generators are left alone.
    """

    linear = True
    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, compress_ratio: float = 0.3) -> None:
        self.compress_ratio = compress_ratio

    def _encode(self, v: Compensated, piece: Piece, numels: list[int], *unit: list[int]) -> Payload:
        counts, indices = self._drawn(piece, numels, *unit)
        more = (*unit, counts) if unit else ()
        return [kernels.pick(v.grad, v.residual, indices, v.beta, v.gamma, *more)]

    def _drawn(self, piece: Piece, numels: list[int], *unit: list[int]) -> tuple[list[int], Tensor]:
        """How many elements of each gradient are sent, and which."""
        key = "drawn of unit" if unit else "drawn"
        known = piece.cache.get(key)
        if known is None:
            counts = _shares(numels, self.compress_ratio)
            seeds = piece.seeds() if unit else [piece.seed]
            drawn = kernels.extension().drawn(numels, counts, seeds)
            known = piece.cache[key] = counts, drawn.to(piece.device)
        return known

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        numels = piece.runs.numels
        return *self._drawn(piece, numels, numels), payload[0]

    def indices(self, payload: Payload, piece: Piece) -> Tensor:
        return self._drawn(piece, [piece.numel])[1].to(payload[0].device)


class Threshold(_Sparse, name="threshold"):
    """Elements whose magnitude is above ``threshold``."""

    each_parameter = False
    tensors_size_are_same = False
    threshold = Real(at_least=0)

    def __init__(self, threshold: float = 0.01) -> None:
        self.threshold = threshold

    def at_least(self, numels: Sequence[int]) -> list[int]:
        """So many elements of each parameter are sent, whatever their magnitude."""
        return [0] * len(numels)

    def _encode(self, v: Compensated, piece: Piece, numels: list[int], *unit: list[int]) -> Payload:
        each = self.at_least(numels)
        least = each if unit else each[0]
        threshold = kernels.threshold
        return list(threshold(v.grad, v.residual, self.threshold, least, v.beta, v.gamma, *unit))

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        counts, values, indices = payload
        return counts.tolist(), indices, values


class GuardedThreshold(Threshold, name="guarded_threshold", whole_units=True):
    """Elements above ``threshold``, but at least ``compress_ratio`` of them: the largest."""

    each_parameter = True
    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, threshold: float = 0.01, compress_ratio: float = 0.3) -> None:
        super().__init__(threshold)
        self.compress_ratio = compress_ratio

    def at_least(self, numels: Sequence[int]) -> list[int]:
        return _shares(numels, self.compress_ratio)
