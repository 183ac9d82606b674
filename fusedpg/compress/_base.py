"""What a compressor is."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._piece import Piece

Payload = list[Tensor]
"""Flat tensors: all that the other ranks need besides what they know themselves."""


class Compensated(NamedTuple):
    """What is to be compressed: v = beta * residual + gamma * grad.

    Without a residual it is gamma * grad, and without a gradient the residual. A compressor leaves
    in the residual v minus what it sends, and the gradient alone.
    """

    grad: Tensor | None
    residual: Tensor | None = None
    beta: float = 1.0
    gamma: float = 1.0

    def now(self) -> Tensor:
        """v, in the residual's memory if there is a residual."""
        if self.residual is None:
            assert self.grad is not None
            return self.grad if self.gamma == 1 else self.grad * self.gamma
        if self.grad is not None:
            kernels.accumulate_(self.residual, self.grad, self.beta, self.gamma)
        return self.residual


class Context(NamedTuple):
    """What this rank's ``encode`` tells the decoding of all ranks' payloads."""

    piece: Piece
    own: Any = None


class Compressor(abc.ABC):
    """One's own: subclass, write ``compress`` and ``decompress``, and pass an instance.

    ::

        class Halves(fusedpg.compress.Compressor):
            def compress(self, tensor, name):
                return [tensor.bfloat16()], None

            def decompress(self, tensors, ctx):
                return tensors[0].float()

    ``compress`` gets a flat tensor, which it leaves alone, and the piece's name; it returns tensors
    of any shapes and types and a context. ``decompress`` gets a rank's tensors and the context of
    *this* rank's call, as in GRACE; it returns a tensor of as many elements.

    Attributes:
        average: the result is the mean of what the ranks sent, else the sum.
        tensors_size_are_same: all ranks send tensors of the same sizes.
        linear: the sum of the ranks' tensors decompresses to the sum of their gradients.
    """

    average: bool = True
    tensors_size_are_same: bool = True
    linear: bool = False
    # What a memory may ask: whether payloads have the indices of what they send, and whether
    # decompressed values have the gradients' magnitude.
    sparse: ClassVar[bool] = False
    keeps_magnitude: ClassVar[bool] = True

    @abc.abstractmethod
    def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], Any]: ...

    @abc.abstractmethod
    def decompress(self, tensors: Sequence[Tensor], ctx: Any) -> Tensor: ...

    # --- what communicators and memories call -------------------------------------------

    def encode(self, v: Compensated, piece: Piece) -> tuple[Payload, Context]:
        """The payload, and the context of ``decode``. What is lost is left in v's residual."""
        now = v.now()
        # A rank's shard of few elements may be empty, of which not everybody can make something.
        tensors, ctx = self.compress(now if now.numel() else now.new_zeros(1), piece.name)
        shapes = [tensor.shape for tensor in tensors]
        if v.residual is not None:
            # What is sent may be a view of what is about to change.
            home = now.untyped_storage().data_ptr()
            tensors = [t.clone() if t.untyped_storage().data_ptr() == home else t for t in tensors]
        if v.residual is not None and now.numel():
            v.residual.sub_(self.decompress(tensors, ctx).reshape(-1))
        return [tensor.reshape(-1) for tensor in tensors], Context(piece, (shapes, ctx))

    def decode(self, out: Tensor, payload: Payload, alpha: float, add: bool, at: Context) -> None:
        """out = alpha * decompressed, or with ``add`` out += it."""
        shapes, own = at.own
        if not out.numel():
            return
        if self.tensors_size_are_same:
            payload = [tensor.view(shape) for tensor, shape in zip(payload, shapes)]
        values = self.decompress(payload, own).reshape(-1)
        if add:
            out.add_(values, alpha=alpha)
        else:
            out.copy_(values.to(out.dtype) * alpha)

    def combine(self, out: Tensor, payloads: Sequence[Payload], scale: float, at: Context) -> None:
        """out = scale * what the ranks' payloads give together, added in the order of ranks."""
        alpha = scale / len(payloads) if self.average else scale
        for rank, payload in enumerate(payloads):
            self.decode(out, payload, alpha, rank > 0, at)

    def all_reduce(
        self, grad: Tensor, payload: Payload, scale: float, at: Context, group: Any
    ) -> None:
        """The same for linear ones, whose payloads are added on the way."""
        for tensor in payload:
            dist.all_reduce(tensor, group=group)
        alpha = scale / at.piece.world_size if self.average else scale
        self.decode(grad, payload, alpha, False, at)

    def as_compressed(self, payload: Payload, at: Context) -> tuple[Sequence[Tensor], Any]:
        """What ``compress`` returned, for ``decompress``."""
        shapes, ctx = at.own
        return [tensor.view(shape) for tensor, shape in zip(payload, shapes)], ctx

    def finite(self, payload: Payload) -> bool:
        """Whether v was, as far as the payload tells. If not, the residual is cleared of it."""
        return all(
            bool(tensor.isfinite().all()) for tensor in payload if tensor.is_floating_point()
        )

    def indices(self, payload: Payload, piece: Piece) -> Tensor:
        """Which elements a sparse payload has."""
        raise TypeError(
            f"{type(self).__name__} sends every element: the memory dgc is for sparse compressors"
        )


class Ours(Compressor):
    """GRACE's two functions, by those that the library calls."""

    def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], Any]:
        of = (tensor.shape,)
        piece = Piece(name, tensor.numel(), of, 0, 1, 0, tensor.dtype, tensor.device, _no_state)
        return self.encode(Compensated(tensor.reshape(-1)), piece)

    def decompress(self, tensors: Sequence[Tensor], ctx: Any) -> Tensor:
        piece = ctx.piece
        out = torch.empty(piece.numel, dtype=piece.dtype, device=piece.device)
        self.decode(out, list(tensors), 1.0, False, ctx)
        return out.view(piece.shapes[0]) if len(piece.shapes) == 1 else out

    def as_compressed(self, payload: Payload, at: Context) -> tuple[Sequence[Tensor], Any]:
        return payload, at


def _no_state(name: str, *_: Any) -> Tensor:
    raise ValueError(f"compress() outside of training has no {name}")
