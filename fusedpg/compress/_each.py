"""Each parameter is compressed by itself, whatever is sent at once.

So a scale, a norm or a share of the elements is a parameter's, as in GRACE, and no result depends
on how gradients are grouped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedpg.compress import _wire as wire
from fusedpg.compress._base import (
    WHOLE_UNITS,
    Compensated,
    Compressor,
    Context,
    Encoded,
    Gradient,
    Ours,
    Payload,
)
from fusedpg.compress._piece import Parts, Piece
from fusedpg.compress.memories import (
    DGCMemory,
    EFSignSGDMemory,
    Memory,
    NoneMemory,
    ResidualMemory,
)

_UNIT_MEMORIES = frozenset({NoneMemory, ResidualMemory, EFSignSGDMemory, DGCMemory})


class EachParameter(Compressor):
    """A compressor that gets one parameter after the other. Its context has those of the
    parameters, and how many tensors each of them sends; or nothing, where they are done in one
    call."""

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        self.average, self.linear = inner.average, inner.linear
        self.tensors_size_are_same = inner.tensors_size_are_same

    @property
    def alike(self) -> bool:
        return self.inner.alike

    def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], object]:
        return self.inner.compress(tensor, name)

    def decompress(self, tensors: Sequence[Tensor], ctx: object) -> Tensor:
        return self.inner.decompress(tensors, ctx)

    def combine(
        self, out: Tensor | Parts, payloads: Sequence[Payload], scale: float, at: Context
    ) -> None:
        if at.own is None:
            alpha = scale / len(payloads) if self.average else scale
            self._decode_unit(out, payloads, alpha, at.piece)
            return
        if not self.alike:
            self._check_counts(payloads, at)
            payloads = [payload[1:] for payload in payloads]
        for begin, end, first, last, inner in _parts(at):
            theirs = [payload[first:last] for payload in payloads]
            self.inner.combine(out[begin:end], theirs, scale, inner)

    def _check_counts(self, payloads: Sequence[Payload], at: Context) -> None:
        own = [count for count, _ in at.own]
        for rank, payload in enumerate(payloads):
            theirs = payload[0].tolist()
            if theirs != own:
                n = next(n for n, pair in enumerate(zip(theirs, own)) if pair[0] != pair[1])
                raise TypeError(
                    f"{type(self.inner).__name__}.compress() gave {theirs[n]} tensors for "
                    f"{at.own[n][1].piece.name!r} on rank {rank}, and {own[n]} here: all ranks "
                    "send as many"
                )

    def _decode_unit(
        self, out: Tensor | Parts, payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        outs = out.outputs if isinstance(out, Parts) else [out]
        self.inner.decode_unit(outs, payloads, alpha, piece)

    def all_reduce(
        self,
        grad: Tensor | Parts,
        payload: Payload,
        scale: float,
        at: Context,
        group: ProcessGroup,
        add: wire.Add = wire.all_reduce,
    ) -> None:
        if at.own is None:
            alpha = scale / at.piece.world_size if self.average else scale
            self._decode_unit(grad, [add(payload, group)], alpha, at.piece)
            return
        if not self.alike:
            wire.check_alike(payload, type(self.inner).__name__, group)
            payload = payload[1:]
        sums = add(payload, group)
        for begin, end, first, last, inner in _parts(at):
            self.inner.decode_sum(grad[begin:end], sums[first:last], scale, inner)

    def context_of(self, piece: Piece, at: Context) -> Context:
        if at.own is None:
            return Context(piece)
        each = [one for _, one in piece.each()]
        if isinstance(self.inner, Ours):
            count, own = at.own[0]
            return Context(piece, [(count, self.inner.context_of(one, own)) for one in each])
        parts = []
        for one in each:
            nothing = torch.zeros(one.numel, dtype=one.dtype, device=one.device)
            payload, inner = self.inner.encode(Compensated(nothing), one)
            parts.append((len(payload), inner))
        return Context(piece, parts)


class EachParametersMemory(Memory):
    """The same of a memory."""

    def __init__(self, inner: Memory) -> None:
        self.inner = inner

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.inner.scale

    def encode(self, compressor: Compressor, grad: Gradient | Parts, piece: Piece) -> Encoded:
        assert isinstance(compressor, EachParameter) and not isinstance(grad, list)
        if (
            type(compressor.inner) in WHOLE_UNITS
            and type(self.inner) in _UNIT_MEMORIES
            and piece.dtype == torch.float32
            and piece.device.type == "cpu"
        ):
            sources = grad.sources if isinstance(grad, Parts) else [grad]
            return self.inner.encode(compressor.inner, sources, piece)
        source = grad.source if isinstance(grad, Parts) else lambda a, b: grad[a:b]
        payload: Payload = []
        parts = []
        for begin, one in piece.each():
            of = source(begin, begin + one.numel)
            sent, at = self.inner.encode(compressor.inner, of, one)
            payload += sent
            parts.append((len(sent), at))
        if not compressor.alike:
            # In front, how many tensors are whose: the user's may be others than the ranks expect.
            counts = [count for count, _ in parts]
            payload.insert(0, torch.tensor(counts, device=piece.device))
        return payload, Context(piece, parts)

    def for_sums(self) -> Memory:
        return EachParametersMemory(self.inner.for_sums())


def _parts(at: Context) -> list[tuple[int, int, int, int, Context]]:
    """Each parameter's range of elements, range of tensors in a payload, and context."""
    found, begin, first = [], 0, 0
    for count, inner in at.own:
        numel = inner.piece.numel
        found.append((begin, begin + numel, first, first + count, inner))
        begin, first = begin + numel, first + count
    return found
