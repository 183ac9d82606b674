"""The interface of compressors."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedpg._by_parameter import Kept
from fusedpg.compress import _kernels as kernels
from fusedpg.compress import _wire as wire
from fusedpg.compress._piece import Piece, Run, Runs

Payload = list[Tensor]
"""Flat tensors: all that the other ranks need besides what they know themselves."""


Gradient = Tensor | list[Tensor]
"""A flat gradient; or those of a unit, float32 on a CPU: tensors of one or more whole parameters
each."""


class Compensated(NamedTuple):
    """The value to compress: v = beta * residual + gamma * grad.

    Without a residual it is gamma * grad, and without a gradient the residual. A compressor leaves
    in the residual v minus what it sends, and does not change the gradient.
    """

    grad: Gradient | None
    residual: Tensor | None = None
    beta: float = 1.0
    gamma: float = 1.0
    kept: Kept | None = None
    """The residual of a unit, for compressors that may leave a part of it pending."""

    def now(self) -> Tensor:
        """v of one gradient, in the residual's memory if there is a residual."""
        grad = self.grad
        assert not isinstance(grad, list)
        if self.residual is None:
            assert grad is not None
            return grad if self.gamma == 1 else grad * self.gamma
        if grad is not None:
            kernels.accumulate_(self.residual, grad, self.beta, self.gamma)
        return self.residual


class Context(NamedTuple):
    """Facts that this rank's ``encode`` hands to the decoding of all ranks' payloads."""

    piece: Piece
    own: Any = None


Encoded = tuple[Payload, Context]


class Compressor(abc.ABC):
    """One's own: subclass, write ``compress`` and ``decompress``, and pass an instance.

    ::

        class Halves(fusedpg.compress.Compressor):
            def compress(self, tensor, name):
                return [tensor.bfloat16()], None

            def decompress(self, tensors, ctx):
                return tensors[0].float()

    A class that was written for GRACE works as it is. ``compress`` gets the gradient of a parameter
    and the parameter's name (see ``named_parameters`` of :class:`State`), and leaves the gradient
    alone; between hosts, and with the communicators "alltoall" and "ps", it gets a flat part of it.
    It returns a list of tensors of any shapes and types, and a context. ``decompress`` gets a
    rank's tensors and the context of *this* rank's call; it returns a tensor of as many elements.
    ``aggregate`` makes one tensor of the ranks' decompressed ones, of which the mean is taken if
    ``average`` says so.

    All ranks must have the same in attributes that are numbers, strings or None, unless the
    attribute's name begins with an underscore.

    Args:
        average: the result is what ``aggregate`` gives divided by the number of ranks.
        tensors_size_are_same: all ranks send tensors of the same sizes. Then ``decompress`` gets
            them in the shapes that ``compress`` gave them, else flat.

    Attributes:
        linear: the sum of the ranks' tensors decompresses to the sum of their gradients.
    """

    average: bool = True
    tensors_size_are_same: bool = True
    linear: bool = False
    # For memories: whether payloads have the indices of what they send, and whether
    # decompressed values have the gradients' magnitude.
    sparse: ClassVar[bool] = False
    keeps_magnitude: ClassVar[bool] = True
    # Whether each parameter has to be compressed by itself. It need not where that makes no
    # difference to the result.
    each_parameter: ClassVar[bool] = True
    # Whether the residual of a unit may be given unsettled.
    leaves_pending: ClassVar[bool] = False

    def __init__(
        self, average: bool | None = None, tensors_size_are_same: bool | None = None
    ) -> None:
        if average is not None:
            self.average = average
        if tensors_size_are_same is not None:
            self.tensors_size_are_same = tensors_size_are_same

    @abc.abstractmethod
    def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], object]: ...

    @abc.abstractmethod
    def decompress(self, tensors: Sequence[Tensor], ctx: Any) -> Tensor: ...

    def aggregate(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor of the ranks' decompressed ones, which are in the order of ranks."""
        return sum(tensors[1:], tensors[0])

    # --- what communicators and memories call -------------------------------------------

    @property
    def alike(self) -> bool:
        """Whether a rank knows the types and sizes of the others' payloads by its own."""
        return False  # one's own may say so and be wrong

    def encode(self, v: Compensated, piece: Piece) -> Encoded:
        """The payload, and the context of decoding. What is lost is left in v's residual."""
        now = v.now()
        # A copy, as it may keep what it is given. A rank's shard of few elements may be empty, of
        # which not everybody can make something.
        given = in_shape(now.clone(), piece) if now.numel() else now.new_zeros(1)
        tensors, ctx = self._checked(self.compress(given, piece.name), piece)
        at = Context(piece, ([(tensor.dtype, tensor.shape) for tensor in tensors], ctx))
        if v.residual is not None and now.numel():
            v.residual.sub_(self._decompressed(tensors, at).reshape(-1))
        return [tensor.reshape(-1) for tensor in tensors], at

    def combine(self, out: Tensor, payloads: Sequence[Payload], scale: float, at: Context) -> None:
        """out = scale * what the ranks' payloads give together, added in the order of ranks."""
        if not out.numel():
            return
        values = []
        for rank, payload in enumerate(payloads):
            self._check_kinds(payload, rank, at)
            decompressed = self._decompressed(self._shaped(payload, at), at)
            values.append(decompressed.to(out.dtype))
        total = self.aggregate(values)
        check_size(total, out.numel(), f"{type(self).__name__}.aggregate()", at.piece)
        if self.average:
            total = total / len(payloads)
        out.copy_((total if scale == 1 else total * scale).reshape(-1))

    def all_reduce(
        self,
        grad: Tensor,
        payload: Payload,
        scale: float,
        at: Context,
        group: ProcessGroup,
        add: wire.Add = wire.all_reduce,
    ) -> None:
        """The same for linear ones, whose payloads are added on the way."""
        if not self.alike:
            wire.check_alike(payload, type(self).__name__, group)
        self.decode_sum(grad, add(payload, group), scale, at)

    def decode_sum(self, out: Tensor, payload: Payload, scale: float, at: Context) -> None:
        """out = scale * what the sum of all ranks' payloads gives."""
        if out.numel():
            values = self._decompressed(self._shaped(payload, at), at).reshape(-1).to(out.dtype)
            factor = scale / at.piece.world_size if self.average else scale
            out.copy_(values if factor == 1 else values * factor)

    def context_of(self, piece: Piece, at: Context) -> Context:
        """The context of another rank's piece; ``at`` is that of one's own."""
        if piece.numel == at.piece.numel:
            return at._replace(piece=piece)
        # The context of a user's compressor is about this rank's piece.
        nothing = torch.zeros(piece.numel, dtype=piece.dtype, device=piece.device)
        return self.encode(Compensated(nothing), piece)[1]

    def as_compressed(self, payload: Payload, at: Context) -> tuple[Sequence[Tensor], object]:
        """The return value of ``compress``, for ``decompress``."""
        return self._shaped(payload, at), at.own[1]

    def finite(self, payload: Payload) -> bool:
        """Whether v was, as far as the payload tells. If not, the residual is cleared of it."""
        for tensor in payload:
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return False
        return True

    def indices(self, payload: Payload, piece: Piece) -> Tensor:
        """Which elements a sparse payload has."""
        raise TypeError(
            f"{type(self).__name__} sends every element: the memory dgc is for sparse compressors"
        )

    # --- of all parameters of a unit in one call, where a compressor can ---------------------

    def encode_unit(self, v: Compensated, piece: Piece) -> Encoded:
        """``encode`` of each of a piece's parameters, in one payload."""
        raise NotImplementedError

    def decode_unit(
        self, outs: list[Tensor], payloads: Sequence[Payload], alpha: float, piece: Piece
    ) -> None:
        """``decode`` of those; ``outs`` have one or more whole parameters each."""
        raise NotImplementedError

    def sent_of_unit(self, payload: Payload, piece: Piece) -> tuple[list[int], Tensor, Tensor]:
        """For sparse payloads: how many elements of each parameter it has, their indices, and
        their values."""
        raise NotImplementedError

    # --- what one's own is given and returns ---------------------------------------------

    def _checked(self, returned: object, piece: Piece) -> tuple[list[Tensor], object]:
        name = f"{type(self).__name__}.compress()"
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise TypeError(
                f"{name} returns a list of tensors and a context; for {piece.name!r} it returned "
                f"{type(returned).__name__}"
            )
        tensors, ctx = returned
        if not isinstance(tensors, (list, tuple)) or not all(
            isinstance(tensor, Tensor) for tensor in tensors
        ):
            raise TypeError(
                f"{name} returns a list of tensors, such as [tensor], and a context; for "
                f"{piece.name!r} its list is {type(tensors).__name__}"
            )
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.device != piece.device:
                raise TypeError(
                    f"{name} returns dense tensors on {piece.device}; for {piece.name!r} it "
                    f"returned {tensor.layout} on {tensor.device}"
                )
        return [tensor.detach() for tensor in tensors], ctx

    def _check_kinds(self, payload: Payload, rank: int, at: Context) -> None:
        kinds = at.own[0]
        differs = [tensor.dtype for tensor in payload] != [dtype for dtype, _ in kinds]
        if self.tensors_size_are_same:
            sizes = [shape.numel() for _, shape in kinds]
            differs |= [tensor.numel() for tensor in payload] != sizes
        if differs:
            found = [(tensor.dtype, tensor.numel()) for tensor in payload]
            own = [(dtype, shape.numel()) for dtype, shape in kinds]
            raise TypeError(
                f"{type(self).__name__}.compress() gave tensors of {found} for {at.piece.name!r} "
                f"on rank {rank}, and of {own} here: all ranks send the same types and, but with "
                "tensors_size_are_same=False, sizes"
            )

    def _shaped(self, payload: Payload, at: Context) -> list[Tensor]:
        if not self.tensors_size_are_same:
            return payload
        return [tensor.view(shape) for tensor, (_, shape) in zip(payload, at.own[0], strict=True)]

    def _decompressed(self, tensors: Sequence[Tensor], at: Context) -> Tensor:
        values = self.decompress(tensors, at.own[1])
        check_size(values, at.piece.numel, f"{type(self).__name__}.decompress()", at.piece)
        return values


def check_size(value: object, numel: int, function: str, piece: Piece) -> None:
    """Raises TypeError unless a function of the user's has returned a tensor of this size."""
    if not isinstance(value, Tensor) or value.numel() != numel:
        found = f"{value.numel()} elements" if isinstance(value, Tensor) else repr(value)
        raise TypeError(
            f"{function} returns a tensor of {numel} elements for {piece.name!r}, found {found}"
        )


def in_shape(flat: Tensor, piece: Piece) -> Tensor:
    """A whole parameter's gradient in its shape, anything else flat."""
    return flat.view(piece.shapes[0]) if len(piece.shapes) == 1 else flat


BY_NAME: dict[str, type[Compressor]] = {}
"""Compressors by the names that GRACE (Xu et al. 2021) gave them."""
WHOLE_UNITS: set[type[Compressor]] = set()
"""Those that do all parameters of a unit in one call, bit for bit as one after the other."""


class Ours(Compressor):
    """GRACE's two functions, by those that the library calls."""

    def __init_subclass__(
        cls, name: str = "", whole_units: bool = False, **options: object
    ) -> None:
        """Registers a compressor. A subclass of it, which may do anything else, is none yet."""
        super().__init_subclass__(**options)
        if name:
            if name in BY_NAME:
                raise ValueError(f"the compressor {name!r} is {BY_NAME[name].__name__} already")
            BY_NAME[name] = cls
        if whole_units:
            WHOLE_UNITS.add(cls)

    def __init__(self) -> None:
        pass

    @property
    def alike(self) -> bool:
        return self.tensors_size_are_same

    def combine(self, out: Tensor, payloads: Sequence[Payload], scale: float, at: Context) -> None:
        self.decode(out, payloads, scale / len(payloads) if self.average else scale, at)

    def decode_sum(self, out: Tensor, payload: Payload, scale: float, at: Context) -> None:
        alpha = scale / at.piece.world_size if self.average else scale
        self.decode(out, [payload], alpha, at)

    @abc.abstractmethod
    def decode(self, out: Tensor, payloads: Sequence[Payload], alpha: float, at: Context) -> None:
        """out = alpha * what the payloads of all ranks give, added in the order of ranks."""

    def context_of(self, piece: Piece, at: Context) -> Context:
        return at._replace(piece=piece)

    def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], object]:
        runs = Runs((Run(name, 0, 0, tensor.numel(), tensor.shape),))
        piece = Piece(name, tensor.numel(), runs, 0, 1, 0, tensor.dtype, tensor.device, _no_state)
        return self.encode(Compensated(tensor.reshape(-1)), piece)

    def decompress(self, tensors: Sequence[Tensor], ctx: Any) -> Tensor:
        piece = ctx.piece
        out = torch.empty(piece.numel, dtype=piece.dtype, device=piece.device)
        self.decode(out, [list(tensors)], 1.0, ctx)
        return in_shape(out, piece)

    def as_compressed(self, payload: Payload, at: Context) -> tuple[Sequence[Tensor], object]:
        return payload, at


def _no_state(name: str, *_: object) -> Tensor:
    raise ValueError(f"compress() outside of training has no {name}")
