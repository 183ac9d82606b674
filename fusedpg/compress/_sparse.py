"""Some of the elements, as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import Compensated, Context, Ours, Payload
from fusedpg.compress._numbers import Real
from fusedpg.compress._piece import Piece


class _Sparse(Ours):
    """Values and their indices (int32), in the order of indices."""

    sparse = True

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        indices = [self.indices(payload, at.piece) for payload in payloads]
        kernels.scatter_(out, indices, [payload[0] for payload in payloads], alpha)

    def indices(self, payload: Payload, piece: Piece) -> Tensor:
        return payload[1]


class TopK(_Sparse):
    """The ``compress_ratio`` of elements with the largest magnitudes (Aji and Heafield 2017).

    Of equal ones the first; NaN counts as the largest, so it is sent.
    """

    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, compress_ratio: float = 0.3) -> None:
        self.compress_ratio = compress_ratio

    def count(self, numel: int) -> int:
        return min(numel, max(1, int(numel * self.compress_ratio)))

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        k = self.count(piece.numel)
        return list(kernels.topk(v.grad, v.residual, k, v.beta, v.gamma)), Context(piece)


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
            known = piece.cache["drawn"] = self._drawn(piece, device)
        return known

    def _drawn(self, piece: Piece, device: torch.device) -> Tensor:
        count = min(piece.numel, max(1, int(piece.numel * self.compress_ratio)))
        generator = torch.Generator().manual_seed(piece.seed)
        drawn = torch.rand(count, generator=generator, dtype=torch.float64)
        # Runs are not all of one length: those of every place have to be.
        shift = int(torch.randint(max(piece.numel, 1), (), generator=generator))
        edges = torch.arange(count + 1, dtype=torch.float64).mul_(piece.numel / max(count, 1))
        begins = edges.floor_()[:-1]
        ends = torch.cat([begins[1:], begins.new_tensor([piece.numel])])
        picked = begins + (drawn * (ends - begins)).floor_()
        picked = torch.minimum(picked, ends - 1).add_(shift)
        # Those behind the end are the first ones.
        inside = int(torch.searchsorted(picked, float(piece.numel)))
        turned = torch.cat([picked[inside:] - piece.numel, picked[:inside]])
        return turned.to(torch.int32).to(device)

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


class GuardedThreshold(Threshold):
    """Elements above ``threshold``, but at least ``compress_ratio`` of them: the largest."""

    each_parameter = True
    compress_ratio = Real(above=0, at_most=1)

    def __init__(self, threshold: float = 0.01, compress_ratio: float = 0.3) -> None:
        super().__init__(threshold)
        self.compress_ratio = compress_ratio

    def at_least(self, numel: int) -> int:
        return min(numel, max(1, int(numel * self.compress_ratio)))
