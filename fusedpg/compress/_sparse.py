"""Some of the elements, as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, CompensatedUnit, Context, Ours, Payload
from fusedpg.compress._numbers import Real
from fusedpg.compress._piece import Piece


def _share(numel: int, ratio: float) -> int:
    """At least one, if there are any."""
    return min(numel, max(1, int(numel * ratio)))


class _Sparse(Ours):
    """Values and their indices (int32), in the order of indices."""

    sparse = True

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
        kernels.unit().scatter_(outs, piece.runs.numels, counts, indices, values, alpha)


class TopK(_Sparse):
    """The ``compress_ratio`` of elements with the largest magnitudes (Aji and Heafield 2017).

    Of equal ones the first; NaN counts as the largest, so it is sent.
    """

    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, compress_ratio: float = 0.3) -> None:
        self.compress_ratio = compress_ratio

    def count(self, numel: int) -> int:
        return _share(numel, self.compress_ratio)

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        k = self.count(piece.numel)
        return list(kernels.topk(v.grad, v.residual, k, v.beta, v.gamma)), Context(piece)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        numels = piece.runs.numels
        ks = [self.count(numel) for numel in numels]
        return list(kernels.unit().topk(v.grads, v.residual, numels, ks, v.beta, v.gamma))

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        values, indices = payload
        return [self.count(numel) for numel in piece.runs.numels], indices, values


class DGC(TopK):
    """Top-k for the memory "dgc" (Deep Gradient Compression, Lin et al. 2018).

    The paper estimates the threshold from a sample; this one is exact.
    """


class RandomK(_Sparse):
    """The same ``compress_ratio`` of elements on all ranks, others in every step.

    One element of every run of about 1 / compress_ratio is drawn, where the first run begins is
    drawn, too, so each is sent with the same probability; and indices need not travel. torch's
    generators are left alone.
    """

    linear = True
    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, compress_ratio: float = 0.3) -> None:
        self.compress_ratio = compress_ratio

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        now = v.now()
        indices = self._draw(piece, now.device)
        values = kernels.gather(now, indices)
        if v.residual is not None:
            # Otherwise a NaN would stay until it is drawn, in whatever step that is.
            if not math.isfinite(kernels.square_sum(now)):
                values.fill_(math.nan)
            kernels.zero_at_(v.residual, indices)
        return [values], Context(piece)

    def _draw(self, piece: Piece, device: torch.device) -> Tensor:
        known: Tensor | None = piece.cache.get("drawn")
        if known is None:
            counts = [self.count(piece.numel)]
            drawn = kernels.unit().drawn([piece.numel], counts, [piece.seed])
            known = piece.cache["drawn"] = drawn.to(device)
        return known

    def count(self, numel: int) -> int:
        return _share(numel, self.compress_ratio)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        numels = piece.runs.numels
        counts, indices = self._draw_unit(piece)
        return [kernels.unit().pick(v.grads, v.residual, numels, indices, counts, v.beta, v.gamma)]

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        return *self._draw_unit(piece), payload[0]

    def _draw_unit(self, piece: Piece) -> tuple[list[int], Tensor]:
        known: tuple[list[int], Tensor] | None = piece.cache.get("drawn of unit")
        if known is None:
            numels = piece.runs.numels
            counts = [self.count(numel) for numel in numels]
            known = counts, kernels.unit().drawn(numels, counts, piece.seeds())
            piece.cache["drawn of unit"] = known
        return known

    def indices(self, payload: Payload, piece: Piece) -> Tensor:
        return self._draw(piece, payload[0].device)


class Threshold(_Sparse):
    """Elements whose magnitude is above ``threshold``."""

    each_parameter = False
    tensors_size_are_same = False
    threshold = Real(at_least=0)

    def __init__(self, threshold: float = 0.01) -> None:
        self.threshold = threshold

    def at_least(self, numel: int) -> int:
        return 0

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        least = self.at_least(piece.numel)
        sent = kernels.threshold(v.grad, v.residual, self.threshold, least, v.beta, v.gamma)
        return list(sent), Context(piece)

    def encode_unit(self, v: CompensatedUnit, piece: Piece) -> Payload:
        numels = piece.runs.numels
        least = [self.at_least(numel) for numel in numels]
        return list(
            kernels.unit().threshold(
                v.grads, v.residual, numels, self.threshold, least, v.beta, v.gamma
            )
        )

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        counts, values, indices = payload
        return counts.tolist(), indices, values


class GuardedThreshold(Threshold):
    """Elements above ``threshold``, but at least ``compress_ratio`` of them: the largest."""

    each_parameter = True
    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, threshold: float = 0.01, compress_ratio: float = 0.3) -> None:
        super().__init__(threshold)
        self.compress_ratio = compress_ratio

    def at_least(self, numel: int) -> int:
        return _share(numel, self.compress_ratio)
