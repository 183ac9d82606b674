"""Memories keep what a rank has not sent of gradients. GRACE has given them their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedpg.compress import _kernels as kernels
from fusedpg.compress._base import (
    Compensated,
    Compressor,
    Encoded,
    Gradient,
    check_size,
    in_shape,
)
from fusedpg.compress._numbers import Real, real
from fusedpg.compress._piece import Piece


class Memory:
    """One's own: subclass, write ``compensate`` and ``update`` as in GRACE, and pass an instance.

    Both get a parameter's gradient and its name, as ``compress`` of :class:`Compressor` does.
    ``self.state(name)`` is a tensor of its shape, zeros at first, which stays from step to step,
    follows the parameter and is part of checkpoints.

    Attributes:
        scale: what decompressed gradients are multiplied by.
        beta, gamma: what is compressed is beta * residual + gamma * gradient.
    """

    scale: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    _piece: Piece | None = None

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        """Returns the tensor to compress in place of a gradient, which must not change."""
        return tensor

    def update(
        self,
        tensor: Tensor,
        name: str,
        compressor: Compressor,
        tensor_compressed: Sequence[Tensor],
        ctx: object,
    ) -> None:
        """Called with what ``compensate`` gave and what ``compressor.compress`` made of it."""

    def state(self, name: str) -> Tensor:
        if self._piece is None:
            raise RuntimeError(
                f"{type(self).__name__}.state() was called outside of compensate() and update(): a "
                "state belongs to the gradient that these two are called with; call it there"
            )
        return in_shape(self._piece.state(name), self._piece)

    def encode(self, compressor: Compressor, grad: Gradient, piece: Piece) -> Encoded:
        """Compensates, compresses and updates. What communicators call.

        Args:
            grad: or a unit's, as `Compensated` has them, for memories and compressors that do all
                parameters of a piece in one call.
        """
        assert isinstance(grad, Tensor)
        self._piece = piece
        try:
            # A copy, as it may keep what it is given, and what it gives must not change, either.
            v = self.compensate(in_shape(grad.clone(), piece), piece.name)
            check_size(v, piece.numel, f"{type(self).__name__}.compensate()", piece)
            payload, at = compressor.encode(Compensated(v.reshape(-1)), piece)
            self.update(v, piece.name, compressor, *compressor.as_compressed(payload, at))
        finally:
            self._piece = None
        home = v.untyped_storage().data_ptr()
        return [t.clone() if t.untyped_storage().data_ptr() == home else t for t in payload], at

    def for_sums(self) -> Memory:
        """The memory of a rank that compresses sums for the others (communicator "ps")."""
        return self


class NoneMemory(Memory):
    """Nothing is kept."""

    def encode(self, compressor: Compressor, grad: Gradient, piece: Piece) -> Encoded:
        encode = compressor.encode_unit if isinstance(grad, list) else compressor.encode
        return encode(Compensated(grad), piece)


class ResidualMemory(Memory):
    """Error feedback: v = beta * residual + gamma * gradient; the residual is what v loses.

    (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019, arXiv:1901.09847.)
    """

    beta = Real(at_least=0)
    gamma = Real(above=0)

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        self.beta, self.gamma = beta, gamma

    def encode(self, compressor: Compressor, grad: Gradient, piece: Piece) -> Encoded:
        kept = None
        if isinstance(grad, list) and compressor.leaves_pending and piece.kept is not None:
            kept = piece.kept("residual")
        residual = piece.state("residual") if kept is None else kept.tensor
        v = Compensated(grad, residual, self.beta, self.gamma, kept)
        encode = compressor.encode_unit if isinstance(grad, list) else compressor.encode
        payload, at = encode(v, piece)
        if not compressor.finite(payload):
            # A NaN is sent and seen by all; it does not stay for the steps that follow. Residuals
            # of a unit's other parameters are finite, so this leaves them as they are.
            piece.state("residual").nan_to_num_(0.0, 0.0, 0.0)
        return payload, at

    def for_sums(self) -> Memory:
        return ResidualMemory()


class EFSignSGDMemory(ResidualMemory):
    """Error feedback of updates: v = residual + lr * gradient, and results are divided by lr.

    ``lr`` is an attribute: set it when the learning rate changes, so that what was not sent is
    sent with the rate of its time.
    """

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr
        super().__init__(1.0, self.lr)

    def for_sums(self) -> Memory:
        return self

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = self.gamma = real("lr", lr, above=0)
        self.scale = 1 / self._lr


class DGCMemory(Memory):
    """Momentum correction and factor masking (Lin et al. 2018, algorithm 4, without Nesterov).

    u = momentum * u + gradient; v += u; both become 0 where v is sent, or only v with
    ``momentum_masking=False``. The optimizer behind it should have no momentum of its own.
    ``gradient_clipping`` bounds a parameter's gradient to that norm over the square root of the
    world size first (0: no clipping).
    """

    momentum = Real(at_least=0, below=1)
    gradient_clipping = Real(at_least=0)

    def __init__(
        self,
        momentum: float = 0.9,
        gradient_clipping: float = 0.0,
        momentum_masking: bool = True,
    ) -> None:
        if not isinstance(momentum_masking, bool):
            raise ValueError(f"momentum_masking is True or False, got {momentum_masking!r}")
        self.momentum_masking = momentum_masking
        if gradient_clipping is True:
            raise ValueError(
                "gradient_clipping must be a number, the largest norm of a gradient, got True: "
                "GRACE then bounds each element by the root of the mean of the ranks' sums of "
                "squares, which hardly any element exceeds. Give a number, or 0 for no clipping"
            )
        self.momentum = momentum
        self.gradient_clipping = 0.0 if gradient_clipping is False else gradient_clipping

    def encode(self, compressor: Compressor, grad: Gradient, piece: Piece) -> Encoded:
        momentum, velocity = piece.state("dgc_momentum"), piece.state("residual")
        clips, v = self.gradient_clipping > 0, Compensated(None, velocity)
        if isinstance(grad, list):
            numels, unit = piece.runs.numels, kernels.extension()
            squares = unit.square_sums(grad, numels) if clips else ()
            gammas = [self._gamma(square, piece) for square in squares] or 1.0
            unit.dgc_accumulate_(momentum, velocity, grad, self.momentum, gammas, numels)
            payload, at = compressor.encode_unit(v, piece)
            if self.momentum_masking:
                counts, indices, _ = compressor.sent_of_unit(payload, piece)
                unit.zero_at_(momentum, indices, numels, counts)
        else:
            gamma = self._gamma(kernels.square_sums(grad)[0], piece) if clips else 1.0
            kernels.dgc_accumulate_(momentum, velocity, grad, self.momentum, gamma)
            payload, at = compressor.encode(v, piece)
            if self.momentum_masking:
                kernels.zero_at_(momentum, compressor.indices(payload, piece))
        if not compressor.finite(payload):
            for tensor in (momentum, velocity):
                tensor.nan_to_num_(0.0, 0.0, 0.0)
        return payload, at

    def _gamma(self, square_sum: float, piece: Piece) -> float:
        bound = self.gradient_clipping / piece.world_size**0.5
        norm = square_sum**0.5
        return min(1.0, bound / norm) if norm > 0 else 1.0

    def for_sums(self) -> Memory:
        return ResidualMemory()


class PowerSGDMemory(ResidualMemory):
    """Error feedback for the compressor "powersgd"; the compressor keeps the factors."""


BY_NAME: dict[str, type[Memory]] = {
    "none": NoneMemory,
    "residual": ResidualMemory,
    "dgc": DGCMemory,
    "efsignsgd": EFSignSGDMemory,
    "powersgd": PowerSGDMemory,
}

__all__ = [
    "BY_NAME",
    "DGCMemory",
    "EFSignSGDMemory",
    "Memory",
    "NoneMemory",
    "PowerSGDMemory",
    "ResidualMemory",
]
