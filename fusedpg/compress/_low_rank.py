"""Matrices of low rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedpg.compress import _wire as wire
from fusedpg.compress._base import Compensated, Context, Encoded, Ours, Payload
from fusedpg.compress._numbers import Whole
from fusedpg.compress._piece import Piece


class PowerSGD(Ours, name="powersgd"):
    """Products of two thin matrices (Vogels et al. 2019, algorithm 1).

    Every parameter with more than one dimension is a matrix of its first one by the others, and Q
    is what the step before has left (warm start). Others, and those that would not become
    smaller, are sent as they are. Needs whole parameters, so only the communicator "allreduce".
    """

    each_parameter = False
    linear = True
    compress_rank = Whole(at_least=1, at_most=2**31 - 1)

    def __init__(self, compress_rank: int = 1) -> None:
        self.compress_rank = compress_rank

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        """Leaves the work to ``all_reduce``: messages depend on what the other ranks send."""
        now = v.now()
        return [now], Context(piece, v.residual)

    def finite(self, payload: Payload) -> bool:
        """``all_reduce`` looks: the payload is the residual, and is still to be sent."""
        return True

    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        raise TypeError(
            "PowerSGD compresses in two exchanges, the second of which depends on the first: it "
            "has no payload to decompress. Use it as the compressor of a State"
        )

    def all_reduce(
        self,
        grad: Tensor,
        payload: Payload,
        scale: float,
        at: Context,
        group: ProcessGroup,
        add: wire.Add = wire.all_reduce,
    ) -> None:
        v, residual, piece = payload[0], at.own, at.piece
        if residual is None and v.data_ptr() == grad.data_ptr():
            v = v.clone()  # the result is written over it
        matrices, whole = self._split(v, piece)
        kept = piece.state("powersgd_q")
        firsts = self._warm(matrices, kept, piece)
        lefts = [_aligned(matrix) @ _aligned(q) for (_, matrix), q in zip(matrices, firsts)]
        flat = torch.cat([x.reshape(-1) for x in (*lefts, *(part for _, part in whole))])
        (flat,) = add([flat], group)
        flat.div_(piece.world_size)
        begin = 0
        for n, left in enumerate(lefts):
            mean = flat[begin : begin + left.numel()].view_as(left)
            begin += left.numel()
            lefts[n] = torch.linalg.qr(_aligned(mean))[0]
        rights = [_aligned(matrix).T @ left for (_, matrix), left in zip(matrices, lefts)]
        means = torch.cat([x.reshape(-1) for x in rights]) if rights else flat.new_empty(0)
        (means,) = add([means], group)
        means.div_(piece.world_size)
        rest, begin = flat[begin:], 0
        for (place, matrix), left in zip(matrices, lefts):
            right = means[begin : begin + matrix.shape[1] * left.shape[1]]
            begin += right.numel()
            kept[place : place + right.numel()] = right
            product = left @ _aligned(right.view(matrix.shape[1], left.shape[1])).T
            if residual is not None:
                matrix.sub_(product)
            out = grad[place : place + matrix.numel()].view_as(matrix)
            torch.mul(product, scale, out=out)
        begin = 0
        for place, part in whole:
            mean = rest[begin : begin + part.numel()]
            begin += part.numel()
            if residual is not None:
                part.zero_()
            grad[place : place + part.numel()] = mean * scale
        if not bool(means.isfinite().all()):
            # This step's NaN is in the result; the next one begins anew.
            kept.zero_()
            if residual is not None:
                residual.nan_to_num_(0.0, 0.0, 0.0)

    def _split(
        self, v: Tensor, piece: Piece
    ) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Matrices and what is none, with their places; views of v."""
        matrices, whole, begin = [], [], 0
        for shape in piece.shapes:
            count = shape.numel()
            part = v[begin : begin + count]
            rows = shape[0] if len(shape) > 1 else 0
            columns = count // rows if rows else 0
            if rows and (rows + columns) * self._rank(rows, columns) < count:
                matrices.append((begin, part.view(rows, columns)))
            else:
                whole.append((begin, part))
            begin += count
        return matrices, whole

    def _rank(self, rows: int, columns: int) -> int:
        return min(self.compress_rank, rows, columns)

    def _warm(self, matrices: list[tuple[int, Tensor]], kept: Tensor, piece: Piece) -> list[Tensor]:
        """The Q of the step before, or the same random numbers on all ranks."""
        found = []
        seeds = {begin: one.seed for begin, one in piece.each()}
        for at, matrix in matrices:
            rows, columns = matrix.shape
            rank = self._rank(rows, columns)
            q = kept[at : at + columns * rank].view(columns, rank)
            if not bool(q.any()):
                generator = torch.Generator().manual_seed(seeds[at])
                q = torch.randn(columns, rank, generator=generator, dtype=matrix.dtype)
            found.append(q.to(matrix.device))
        return found


def _aligned(matrix: Tensor) -> Tensor:
    """In memory of its own if it does not begin where torch's tensors do: the bits of a product
    depend on that, and where a matrix lies among others must not."""
    return matrix if matrix.data_ptr() % 64 == 0 else matrix.clone()
