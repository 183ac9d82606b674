"""Slices of optimizer state: their geometry, their checkpoints, and whole tensors from them.

A rank keeps the state of a parameter for one contiguous range of the parameter flattened in
memory order, that is, in order of rising address. Offsets and lengths count elements of that
order. Parameters must be non-overlapping and dense (contiguous, channels_last, transposed, ...);
strides of dimensions of size 1 mean nothing and are ignored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import StateDict

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = [
    "Box",
    "SliceTensor",
    "box_view",
    "boxes",
    "from_full",
    "merge_state_dicts",
    "to_full",
]

aten = torch.ops.aten


class Box(NamedTuple):
    """An axis-aligned part of an N-d tensor that is contiguous in memory order.

    Attributes:
        offsets: index of its first element, one number per logical dimension.
        sizes: its extent, one number per logical dimension.
        begin: position of its first element within the slice that it is a part of.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int


def _memory_dims(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions larger than 1, slowest in memory first.

    Raises:
        ValueError: unless a tensor of this shape and strides is non-overlapping and dense.
    """
    if len(shape) != len(strides):
        raise ValueError(f"{len(shape)} sizes and {len(strides)} strides")
    if 0 in shape:
        return []
    dims = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: -strides[d])
    dense = 1
    for dim in reversed(dims):
        if strides[dim] != dense:
            raise ValueError(
                f"shape {tuple(shape)} with strides {tuple(strides)} is not non-overlapping and "
                "dense"
            )
        dense *= shape[dim]
    return dims


def _check_range(numel: int, offset: int, length: int) -> None:
    if not (0 <= offset <= numel and 0 <= length <= numel - offset):
        raise ValueError(f"offset {offset} and length {length} exceed the {numel} elements")


def boxes(shape: Sequence[int], strides: Sequence[int], offset: int, length: int) -> list[Box]:
    """Decompose a range of memory order into axis-aligned boxes.

    Args:
        shape, strides: of the whole tensor, in elements.
        offset, length: the range, in elements of memory order.

    Returns:
        The boxes in memory order. They are disjoint, none is empty, and there are at most
        ``max(1, 2 * ndim - 1)`` of them; none for a length of 0.

    Raises:
        ValueError: when the tensor is not dense or the range exceeds it.
    """
    dims = _memory_dims(shape, strides)
    _check_range(math.prod(shape), offset, length)
    found: list[Box] = []

    def visit(depth: int, prefix: list[int], begin: int, end: int) -> None:
        """Cover [begin, end) of the subtensor whose first ``depth`` memory dims are fixed."""
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, index in zip(dims, prefix):
            offsets[dim], sizes[dim] = index, 1
        if depth < len(dims):
            dim = dims[depth]
            row = strides[dim]
            first, last = -(-begin // row), end // row
            if first > last:  # all within one row
                visit(depth + 1, [*prefix, last], begin - last * row, end - last * row)
                return
            if begin < first * row:
                visit(depth + 1, [*prefix, first - 1], begin - (first - 1) * row, row)
            if first < last:
                offsets[dim], sizes[dim] = first, last - first
                add(offsets, sizes)
            if last * row < end:
                visit(depth + 1, [*prefix, last], 0, end - last * row)
        else:
            add(offsets, sizes)

    def add(offsets: list[int], sizes: list[int]) -> None:
        begin = found[-1].begin + math.prod(found[-1].sizes) if found else 0
        found.append(Box(tuple(offsets), tuple(sizes), begin))

    if length > 0:
        visit(0, [], offset, offset + length)
    return found


def box_view(data: torch.Tensor, box: Box, strides: Sequence[int]) -> torch.Tensor:
    """A writable N-d view of the elements of a slice that a box covers.

    Args:
        data: the slice, 1-D and contiguous.
        box: one of ``boxes(shape, strides, offset, length)`` of that slice.
        strides: of the whole tensor, in elements.

    Returns:
        A view of ``data`` with shape ``box.sizes``.
    """
    # A box is contiguous, so within it the strides of the whole tensor are dense as well.
    return data.narrow(0, box.begin, math.prod(box.sizes)).as_strided(box.sizes, tuple(strides))


class SliceTensor(torch.Tensor):
    """One rank's slice of the state of a parameter, as optimizers put it into a ``state_dict``.

    It reports the shape and the strides of the whole parameter, which is what
    ``torch.distributed.checkpoint`` compares and reshards by, but holds the slice alone. It can
    be copied (``clone``, ``detach``, ``to``, ``copy.deepcopy``, ``copy_`` from the same range of
    a tensor of the same layout, ``empty_like``, ``zeros_like``), pickled, saved, and loaded also
    with ``torch.load(weights_only=True)`` once this module is imported. Computing with it raises
    RuntimeError: use ``local()`` for that.

    Args:
        local: the slice, a contiguous 1-D tensor; it is shared, not copied.
        shape, strides: of the whole parameter, in elements.
        offset: where the slice begins, in elements of memory order.

    Raises:
        ValueError: when ``local`` is not contiguous and 1-D or not within the parameter, or the
            strides are not dense.
    """

    _local: torch.Tensor
    _offset: int

    # Functions decompose into the operations that __torch_dispatch__ sees.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> SliceTensor:
        if isinstance(local, SliceTensor) or local.dim() != 1 or not local.is_contiguous():
            raise ValueError("a slice of optimizer state must be a contiguous 1-D tensor")
        _memory_dims(shape, strides)
        _check_range(math.prod(shape), offset, local.numel())
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            torch.Size(shape),
            strides=tuple(strides),
            dtype=local.dtype,
            device=local.device,
            requires_grad=False,
            # The whole has no memory here; functions that reach for it must find it empty.
            storage_size=0,
        )
        self._local = local.detach()
        self._offset = offset
        return self

    # torch.Tensor.__init__ takes no such arguments.
    def __init__(
        self, local: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> None:
        super().__init__()

    @property
    def offset(self) -> int:
        """Where the slice begins, in elements of the parameter's memory order."""
        return self._offset

    def local(self) -> torch.Tensor:
        """The slice itself: a plain 1-D tensor, shared with this one, possibly of 0 elements."""
        return self._local

    def _with(self, local: torch.Tensor) -> SliceTensor:
        return SliceTensor(local, self.shape, self.stride(), self._offset)

    def _where(self) -> str:
        end = self._offset + self._local.numel()
        return f"elements [{self._offset}, {end}) of {self.numel()}"

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"SliceTensor({self._where()} in memory order, shape={tuple(self.shape)}, "
            f"strides={self.stride()}, local={self._local!r})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        this = args[0] if args else None
        if isinstance(this, SliceTensor):
            layout = kwargs.pop("memory_format", None)
            # The slice would be another one if the memory order changed.
            if layout in (None, torch.preserve_format) or this.is_contiguous(memory_format=layout):
                if func in _SLICEWISE:
                    return this._with(func(this._local, **kwargs))
                # Staging for asynchronous saves makes its copies with new_empty(x.size()).
                if func is aten.new_empty.default and tuple(args[1]) == tuple(this.shape):
                    return this._with(func(this._local, [this._local.numel()], **kwargs))
            if func is aten.is_pinned.default:
                return func(this._local, *args[1:], **kwargs)
            if func is aten.copy_.default and isinstance(args[1], SliceTensor):
                this._check_same_slice(args[1])
                func(this._local, args[1]._local, *args[2:], **kwargs)
                return this
        next(x for x in pytree.tree_iter((args, kwargs)) if isinstance(x, SliceTensor))._refuse(
            func
        )

    def _refuse(self, what: object) -> NoReturn:
        raise RuntimeError(
            f"{what}: this tensor is one rank's slice of optimizer state ({self._where()} in "
            "memory order), so it can only be copied, saved and loaded. Use its local() for the "
            "slice as a plain 1-D tensor, or the optimizer's full_state_dict() for whole tensors"
        )

    # These would go past __torch_dispatch__.

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused, as computing is; see ``local()``."""
        self._refuse("numpy")

    def tolist(self) -> NoReturn:
        """Refused, as computing is; see ``local()``."""
        self._refuse("tolist")

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("__dlpack__")

    def apply_(self, *args: object) -> NoReturn:  # torch reads memory that there is not
        self._refuse("apply_ and map2_")

    map2_ = apply_  # type: ignore[assignment]

    def _check_same_slice(self, other: SliceTensor) -> None:
        # Offsets and lengths mean the same elements only in the same memory order.
        if (
            self.shape != other.shape
            or _memory_dims(self.shape, self.stride()) != _memory_dims(other.shape, other.stride())
            or self._offset != other._offset
            or self._local.numel() != other._local.numel()
        ):
            raise RuntimeError(
                f"copy_: {self._where()} of shape {tuple(self.shape)} and strides {self.stride()} "
                f"cannot come from {other._where()} of shape {tuple(other.shape)} and strides "
                f"{other.stride()}; torch.distributed.checkpoint can reshard, and the optimizer's "
                "full_state_dict() gives whole tensors"
            )

    def share_memory_(self) -> SliceTensor:
        """Move the slice to shared memory, see ``torch.Tensor.share_memory_``."""
        self._local.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the slice is in shared memory."""
        return self._local.is_shared()

    def __deepcopy__(self, memo: dict[int, object]) -> SliceTensor:
        if id(self) not in memo:
            memo[id(self)] = self._with(self._local.clone())
        return cast("SliceTensor", memo[id(self)])

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        local = self._local
        # A tensor is saved with its whole storage, which may be a buffer of many slices.
        if local.device.type != "meta" and local.untyped_storage().nbytes() != local.nbytes:
            local = local.clone()
        return _rebuild_slice_tensor, (local, tuple(self.shape), self.stride(), self._offset)

    # The protocol of torch.distributed._checkpointable. Its modules are imported late because
    # they are slow to import and only checkpoints need them.

    def _boxes(self) -> list[Box]:
        if self.numel() == 0:
            # Nobody else would mention the tensor, and it would miss in the checkpoint.
            return [Box((0,) * self.dim(), tuple(self.shape), 0)]
        return boxes(self.shape, self.stride(), self._offset, self._local.numel())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._local),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self._boxes():
            if index.offset is not None and box.offsets == tuple(index.offset):
                return box_view(self._local, box, self.stride())
        raise ValueError(
            f"{index.fqn}: no part at offset {index.offset} in {self._where()} of shape "
            f"{tuple(self.shape)} and strides {self.stride()}"
        )


_SLICEWISE = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.zeros_like.default,
    }
)


def _rebuild_slice_tensor(
    local: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> SliceTensor:
    """Unpickle a SliceTensor. Saved files name this function: it must keep place and arguments."""
    return SliceTensor(local, shape, strides, offset)


# Harmless: it only checks and wraps its arguments.
torch.serialization.add_safe_globals([_rebuild_slice_tensor])


def from_full(full: torch.Tensor, param: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Copy a slice out of a whole state tensor.

    Args:
        full: the state of ``param``: its shape, any strides, device and dtype; never written.
        param: the parameter, whose memory order counts.
        offset, length: the slice, in elements of that order.

    Returns:
        A new plain 1-D tensor of ``length`` elements with the device and dtype of ``full``. No
        more than that is allocated.

    Raises:
        ValueError: when the shapes differ, ``param`` is not dense, or the range exceeds it.
    """
    if full.shape != param.shape:
        raise ValueError(
            f"state of shape {tuple(full.shape)} for a parameter of shape {tuple(param.shape)}"
        )
    strides = param.stride()
    parts = boxes(param.shape, strides, offset, length)
    with torch.no_grad():
        result = torch.empty(length, dtype=full.dtype, device=full.device)
        for box in parts:
            source = full
            for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes)):
                source = source.narrow(dim, begin, size)
            box_view(result, box, strides).copy_(source)
    return result


def to_full(
    pieces: Sequence[tuple[int, torch.Tensor]], shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Assemble a whole tensor from slices of it.

    Args:
        pieces: pairs of an offset in elements of memory order and a 1-D tensor, in any order.
            All have one dtype; empty ones are allowed.
        shape, strides: of the result, in elements.

    Returns:
        A new tensor with these strides, on the device of the first piece.

    Raises:
        ValueError: when there are no pieces, they differ in dtype, overlap, exceed the tensor or
            leave gaps, or the strides are not dense.
    """
    _memory_dims(shape, strides)
    if not pieces:
        raise ValueError("no pieces")
    dtypes = {piece.dtype for _, piece in pieces}
    if len(dtypes) > 1:
        raise ValueError(f"pieces of different dtypes: {sorted(map(str, dtypes))}")
    numel = math.prod(shape)
    gaps: list[str] = []
    done = 0
    ordered = sorted((p for p in pieces if p[1].numel() > 0), key=lambda p: p[0])
    for offset, piece in ordered:
        if piece.dim() != 1:
            raise ValueError(f"a piece of shape {tuple(piece.shape)} is not 1-D")
        _check_range(numel, offset, piece.numel())
        if offset < done:
            end = min(done, offset + piece.numel())
            raise ValueError(f"elements [{offset}, {end}) of {numel} are there more than once")
        if offset > done:
            gaps.append(f"[{done}, {offset})")
        done = offset + piece.numel()
    if done < numel:
        gaps.append(f"[{done}, {numel})")
    if gaps:
        raise ValueError(f"elements {', '.join(gaps)} of {numel} are missing")
    first = pieces[0][1]
    with torch.no_grad():
        full = torch.empty_strided(
            tuple(shape), tuple(strides), dtype=first.dtype, device=first.device
        )
        flat = full.as_strided((numel,), (1,))
        for offset, piece in ordered:
            flat.narrow(0, offset, piece.numel()).copy_(piece)
    return full


def merge_state_dicts(state_dicts: Sequence[Mapping[str, object]]) -> StateDict:
    """Merge the local state dicts of all ranks into one that ``torch.optim`` can load.

    Args:
        state_dicts: of every rank once, in any order; never changed. Values at any depth that are
            SliceTensors are pieces of whole tensors; everything else must agree.

    Returns:
        A dict of the same structure with ordinary whole tensors, which have the strides of their
        parameters. It shares no memory with the inputs.

    Raises:
        ValueError: naming the entry and its missing or repeated elements, when a rank's dict is
            absent or given twice, or the entry in which dicts disagree.
    """
    if not state_dicts:
        raise ValueError("no state dicts to merge")
    return cast("StateDict", _merge("", list(state_dicts)))


def _merge(path: str, values: list[Any]) -> Any:
    """Merge what all ranks have at one place of their dicts."""
    first = values[0]
    name = path or "the state dicts"
    if any(isinstance(value, SliceTensor) for value in values):
        if not all(isinstance(value, SliceTensor) for value in values):
            raise ValueError(f"{name}: a slice on some ranks and something else on others")
        layouts = {(tuple(value.shape), value.stride()) for value in values}
        if len(layouts) > 1:
            raise ValueError(f"{name}: ranks have different layouts: {sorted(layouts)}")
        try:
            pieces = [(value.offset, value.local()) for value in values]
            return to_full(pieces, first.shape, first.stride())
        except ValueError as error:
            raise ValueError(
                f"{name}: {error} (merging {len(values)} state dicts; the dict of every rank is "
                "needed, once)"
            ) from None
    if isinstance(first, Mapping) and all(isinstance(value, Mapping) for value in values):
        for key in {key: None for value in values for key in value}:
            absent = [i for i, value in enumerate(values) if key not in value]
            if absent:
                raise ValueError(
                    f"{_join(path, key)} is missing in state dicts {absent} of {len(values)}"
                )
        return {key: _merge(_join(path, key), [value[key] for value in values]) for key in first}
    if type(first) in (list, tuple) and all(
        type(value) is type(first) and len(value) == len(first) for value in values
    ):
        return type(first)(
            _merge(_join(path, i), [value[i] for value in values]) for i in range(len(first))
        )
    for i, value in enumerate(values):
        if not _same(first, value):
            raise ValueError(f"{name} differs between state dicts 0 and {i}: {first} and {value}")
    return first.detach().clone() if isinstance(first, torch.Tensor) else copy.deepcopy(first)


def _join(path: str, key: object) -> str:
    return f"{path}[{key!r}]" if path else str(key)


def _same(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    # NaN of diverged runs equals itself here.
    return bool(((a == b) | ((a != a) & (b != b))).all())
