"""The operations, at once and asynchronous, in place and not, with their gradients."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fusedpg._collectives import Collective, Results
from fusedpg.hvd import _controller as c
from fusedpg.hvd._basics import (
    ProcessSet,
    begin,
    check_tensor,
    engine,
    global_process_set,
    membership,
    next_name,
    rank,
    size,
    state,
    synchronize,
    telling,
    then,
)
from fusedpg.hvd._controller import Signature
from fusedpg.hvd._engine import Operation
from fusedpg.hvd.compression import Compression, Compressor
from fusedpg.hvd.exceptions import HorovodInternalError

P = ParamSpec("P")
Result = TypeVar("Result")

Average, Sum, Adasum, Min, Max, Product = range(6)
"""Reduction operations."""


def _first(results: Sequence[Result]) -> Result:
    return results[0]


def _begin(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[..., object],
    outputs: Sequence[Tensor] = (),
    **more: Any,
) -> int:
    """Submits an operation on the tensors; its signature has more fields than kind and tensors."""
    key = membership(process_set), next_name(kind) if name is None else f"{kind}.{name}"
    # Comprehensions of lists, as those of tuples take a frame for each tensor.
    dtypes = (*[str(tensor.dtype)[6:] for tensor in tensors],)
    shapes = (*[tuple(tensor.shape) for tensor in tensors],)
    signature = Signature(kind, dtypes, shapes, **more)
    return begin(Operation(key, signature, tensors, outputs), finish)


# --- forms ----------------------------------------------------------------------------------


def _named(function: Any, of: Callable[..., object], called: str, doc: str, returns: str) -> Any:
    """Gives a form of another function a name, a text, and that one's signature."""
    signature = inspect.signature(of)
    parameters = list(signature.parameters.values())
    if parameters[0].name == "tensors" and not called.startswith("grouped_"):
        parameters[0] = parameters[0].replace(name="tensor", annotation="Tensor")
    function.__name__ = function.__qualname__ = called
    function.__doc__, function.__module__ = doc, __name__
    function.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
    return function


def _alone(
    grouped: Callable[Concatenate[Sequence[Tensor], P], Any], doc: str
) -> Callable[Concatenate[Tensor, P], Any]:
    """The form of a grouped operation for one tensor."""
    is_async = "_async" in grouped.__name__

    def single(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> Any:
        result = grouped([tensor], *args, **kwargs)
        return then(result, _first) if is_async else result[0]

    name = grouped.__name__.removeprefix("grouped_")
    return _named(single, grouped, name, doc, "int" if is_async else "Tensor")


def _waiting(begin: Callable[P, int], doc: str) -> Callable[P, Any]:
    """The form of an asynchronous operation that waits."""

    def waits(*args: P.args, **kwargs: P.kwargs) -> Any:
        return synchronize(begin(*args, **kwargs))

    returns = "list[Tensor]" if begin.__name__.startswith("grouped_") else "Tensor"
    return _named(waits, begin, begin.__name__.replace("_async", ""), doc, returns)


# --- all-reduce -----------------------------------------------------------------------------


def _op(op: int | None, average: bool | None) -> int:
    if op is not None and average is not None:
        raise ValueError("hvd: give op or average, not both")
    if average is not None:
        caller, level = sys._getframe(1), 2
        while caller.f_back is not None and caller.f_code.co_filename == __file__:
            caller, level = caller.f_back, level + 1
        warnings.warn("hvd: average= is deprecated; use op=", DeprecationWarning, level)
        return Average if average else Sum
    op = Average if op is None else op
    if op not in range(6):
        raise ValueError(f"hvd: {op!r} is not a reduction operation")
    return op


def _some(kind: str, tensors: Sequence[Tensor], written: bool = False) -> list[Tensor]:
    if not tensors:
        raise ValueError(f"hvd: {kind} needs a tensor")
    return [check_tensor(tensor, written) for tensor in tensors]


def _empty(own: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in own]


def _allreduce(
    tensors: Sequence[Tensor],
    in_place: bool,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    with telling(c.ALLREDUCE, name, process_set):
        op = _op(op, average)
        tensors = list(tensors)
        own = _some(c.ALLREDUCE, tensors, in_place)
        if op == Adasum:
            if process_set.process_set_id != 0:
                raise NotImplementedError("hvd: Adasum works in the global process set only")
            if size() & (size() - 1):
                raise NotImplementedError("hvd: Adasum needs a power of two of ranks")
            if any(not tensor.is_floating_point() for tensor in own):
                raise ValueError("hvd: Adasum needs floating point tensors")
        outputs = tensors if in_place else _empty(own)
        results = own if in_place else _some(c.ALLREDUCE, outputs, True)
        scale = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _begin(c.ALLREDUCE, own, name, process_set, lambda _: outputs, results, op=op, **scale)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduces tensors in place, together, in the background.

    Args:
        tensors: not to be touched until :func:`synchronize` has returned.
        average: deprecated; use ``op``.
        name: matches the operation with those of the other ranks.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the tensors before.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.

    Returns:
        A handle for :func:`synchronize`.

    Raises:
        ValueError: an operation of this name is pending.
    """
    scale = prescale_factor, postscale_factor
    return _allreduce(tensors, True, average, name, op, *scale, process_set)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As :func:`grouped_allreduce_async_`, into new tensors."""
    scale = prescale_factor, postscale_factor
    return _allreduce(tensors, False, average, name, op, *scale, process_set)


_Reduction = tuple[int, float, float, ProcessSet]
"""Operation, factors before and after, and the ranks."""


def _reduced(name: str | None, more: _Reduction, *tensors: Tensor) -> Results:
    results = synchronize(_allreduce(tensors, False, None, name, *more))
    return results, lambda *grads: Collective.apply(partial(_reduced, None, more), *grads)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The reduced tensors, with gradients: those are reduced in the same way.

    Args:
        compression: ``Compression.fp16`` sends half precision.

    The others are those of :func:`grouped_allreduce_async_`.
    """
    with telling(c.ALLREDUCE, name, process_set):
        more = _op(op, average), prescale_factor, postscale_factor, process_set
        plain = compression is Compression.none
        sent = [(t, None) if plain else compression.compress(t) for t in tensors]
    results = Collective.apply(partial(_reduced, name, more), *[tensor for tensor, _ in sent])
    if plain:
        return list(results)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent)]


_doc = "Reduces tensors in place, together; see :func:`grouped_allreduce_async_`."
grouped_allreduce_ = _waiting(grouped_allreduce_async_, _doc)
_doc = "Reduces a tensor in place, in the background; see :func:`grouped_allreduce_async_`."
allreduce_async_ = _alone(grouped_allreduce_async_, _doc)
_doc = "As :func:`allreduce_async_`, into a new tensor."
allreduce_async = _alone(grouped_allreduce_async, _doc)
_doc = "Reduces a tensor in place; see :func:`grouped_allreduce_async_`."
allreduce_ = _waiting(allreduce_async_, _doc)
_doc = "The reduced tensor, with a gradient; see :func:`grouped_allreduce`."
allreduce = _alone(grouped_allreduce, _doc)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Adds up, or averages, sparse tensors, by all-gathers of what they have.

    Returns:
        A function that waits and returns the result.
    """
    with telling(c.ALLGATHER, f"{name}.sparse", process_set):
        if op not in (Average, Sum):
            raise ValueError("hvd: sparse tensors are averaged or summed")
        own = tensor.detach()
        own = own if own.is_coalesced() else own.coalesce()
        parts = [own.indices().t().contiguous(), own.values()]
    handle = grouped_allgather_async(parts, f"{name}.sparse", process_set)

    def finish() -> Tensor:
        indices, values = synchronize(handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    return finish


# --- all-gather -----------------------------------------------------------------------------


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Puts all ranks' tensors one after the other; their first dimensions may differ."""
    with telling(c.ALLGATHER, name, process_set):
        own = _some(c.ALLGATHER, tensors)
        if any(tensor.dim() == 0 for tensor in own):
            raise ValueError("hvd: allgather needs tensors of at least one dimension")
    return _begin(c.ALLGATHER, own, name, process_set, list)


_doc = "Puts all ranks' tensors one after the other; their first dimensions may differ."
allgather_async = _alone(grouped_allgather_async, _doc)


def _gathered(name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Results:
    results = synchronize(grouped_allgather_async(tensors, name, process_set))
    own_rows = [tensor.shape[0] for tensor in tensors]

    def of_gradients(*grads: Tensor) -> list[Tensor]:
        reduced = grouped_allreduce(grads, op=Average, process_set=process_set)
        counts = torch.tensor([own_rows], device="cpu")
        rows = synchronize(allgather_async(counts, None, process_set))
        begins = rows[: process_set.rank()].sum(0).tolist()
        parts = zip(reduced, begins, own_rows)
        return [grad.narrow(0, begin, own) for grad, begin, own in parts]

    return results, of_gradients


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All ranks' tensors, with gradients: averages of all ranks' gradients."""
    return list(Collective.apply(partial(_gathered, name, process_set), *tensors))


_doc = "All ranks' tensors one after the other, with a gradient."
allgather = _alone(grouped_allgather, _doc)


# --- broadcast ------------------------------------------------------------------------------


def _broadcast(
    tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    ranks = engine().set_of(membership(process_set))
    with telling(c.BROADCAST, name, process_set):
        if ranks is None or root_rank not in ranks:
            raise ValueError(f"hvd: root_rank {root_rank} is not in {process_set}")
        own = _some(c.BROADCAST, [tensor], in_place)
        outputs = [tensor] if in_place else _empty(own)
        results = own if in_place else _some(c.BROADCAST, outputs, True)
        root = int(root_rank)
    return _begin(c.BROADCAST, own, name, process_set, lambda _: outputs[0], results, root=root)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a broadcast into a new tensor; ``root_rank`` is a global rank."""
    return _broadcast(tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a broadcast in place."""
    return _broadcast(tensor, True, root_rank, name, process_set)


broadcast_ = _waiting(broadcast_async_, "Overwrites a tensor by the root's.")


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The root's tensor, with a gradient: the average on the root, zero elsewhere."""

    def collective(tensor: Tensor) -> Results:
        def of_gradient(grad: Tensor) -> list[Tensor]:
            reduced = allreduce(grad, op=Average, process_set=process_set)
            return [reduced if rank() == root_rank else reduced * 0]

        return [synchronize(broadcast_async(tensor, root_rank, name, process_set))], of_gradient

    (result,) = Collective.apply(collective, tensor)
    return result


# --- all-to-all -----------------------------------------------------------------------------

Splits = Sequence[int] | Tensor | None
"""Rows for each rank; None: as many for each."""


def _splits(tensor: Tensor, splits: Splits, process_set: ProcessSet) -> tuple[int, ...]:
    """An all-to-all's splits as numbers; empty for equal ones."""
    count = process_set.size()
    assert count is not None
    if tensor.dim() == 0:
        raise ValueError("hvd: alltoall needs a tensor of at least one dimension")
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if tensor.shape[0] % count:
            raise ValueError(
                f"hvd: without splits, the rows ({tensor.shape[0]}) must be a multiple of {count}"
            )
        return ()
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"hvd: splits must be int32, got {splits.dtype}")
    numbers = tuple(splits.tolist()) if isinstance(splits, Tensor) else tuple(map(int, splits))
    if len(numbers) != count or min(numbers) < 0:
        raise ValueError(f"hvd: splits must be {count} numbers of rows, got {numbers}")
    if sum(numbers) > tensor.shape[0]:
        raise ValueError(f"hvd: the splits {numbers} are more than the {tensor.shape[0]} rows")
    return numbers


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Sends rows to every rank; the result is the received rows and how many are whose.

    Args:
        splits: rows for each rank of the set, int32; by default equal shares. Then the result of
            ``synchronize`` is the rows alone.
    """
    membership(process_set)
    with telling(c.ALLTOALL, name, process_set):
        (own,) = _some(c.ALLTOALL, [tensor])
        numbers = _splits(own, splits, process_set)

    def finish(result: tuple[Tensor, list[int]]) -> Tensor | tuple[Tensor, Tensor]:
        rows, received = result
        if splits is None:
            return rows
        return rows, torch.tensor(received, dtype=torch.int32, device="cpu")

    return _begin(c.ALLTOALL, [own], name, process_set, finish, numbers=numbers)


def _exchanged(
    splits: Splits, name: str | None, process_set: ProcessSet, tensor: Tensor
) -> Results:
    if splits is None:
        with telling(c.ALLTOALL, name, process_set):
            splits = _splits(tensor, None, process_set)
        ranks = process_set.size() or 1
        splits = splits or (tensor.shape[0] // ranks,) * ranks
    rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    count = tensor.shape[0]

    def of_gradients(grad: Tensor, _: object) -> list[Tensor]:
        back, _ = Collective.apply(partial(_exchanged, received, None, process_set), grad)
        if back.shape[0] < count:  # rows that were sent to nobody
            back = torch.cat([back, back.new_zeros((count - back.shape[0], *back.shape[1:]))])
        return [back]

    return [rows, received], of_gradients


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The received rows and, where splits are given, how many are whose; with a gradient."""
    membership(process_set)
    rows, received = Collective.apply(partial(_exchanged, splits, name, process_set), tensor)
    return rows if splits is None else (rows, received)


# --- reduce-scatter -------------------------------------------------------------------------


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduces, and gives each rank its rows; the first ranks one more where they do not divide."""
    with telling(c.REDUCESCATTER, name, process_set):
        own = _some(c.REDUCESCATTER, tensors)
        if op == Adasum:
            raise HorovodInternalError("hvd: reducescatter has no Adasum")
        if any(tensor.dim() == 0 for tensor in own):
            raise ValueError("hvd: reducescatter needs tensors of at least one dimension")
        op, before, after = _op(op, None), float(prescale_factor), float(postscale_factor)
    return _begin(
        c.REDUCESCATTER, own, name, process_set, list, op=op, prescale=before, postscale=after
    )


_doc = "Reduces a tensor, and gives each rank its rows; see :func:`grouped_reducescatter_async`."
reducescatter_async = _alone(grouped_reducescatter_async, _doc)


def _scattered(name: str | None, more: _Reduction, *tensors: Tensor) -> Results:
    op, prescale, postscale, process_set = more
    results = synchronize(
        grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale)
    )

    def of_gradients(*grads: Tensor) -> list[Tensor]:
        factor = prescale * postscale * (len(process_set.ranks) if op == Sum else 1)
        scaled = [grad if factor == 1 else grad * factor for grad in grads]
        return grouped_allgather(scaled, process_set=process_set)

    return results, of_gradients


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of the reduced tensors, with gradients."""
    with telling(c.REDUCESCATTER, name, process_set):
        sent = [compression.compress(tensor) for tensor in tensors]
    more = op, prescale_factor, postscale_factor, process_set
    results = Collective.apply(partial(_scattered, name, more), *(tensor for tensor, _ in sent))
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent)]


_doc = "This rank's rows of the reduced tensor, with a gradient."
reducescatter = _alone(grouped_reducescatter, _doc)


# --- meeting --------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so.

    Until then it takes part in all-reduces of the others, with zeros; their averages still divide
    by the number of all ranks. Operations that need its data raise on the others. So do the
    steps of optimizers with ``fused=True``, which it takes part in with gradients of zeros.

    Args:
        device: ignored.

    Returns:
        The rank that joined last, on all ranks.

    Raises:
        HorovodInternalError: what another rank does needs this rank's data. It has not joined then.
    """
    here = state()
    signature = Signature(c.JOIN, numbers=(here.counter + 1,))

    def serve(turn: int) -> None:
        from fusedpg.hvd._fused import serve_turn

        serve_turn(turn)

    operation = Operation(c.JOIN_KEY, signature)
    handle = begin(operation, tuple)
    try:
        last, counter = here.engine.wait_serving(operation, serve)
    finally:
        here.handles.pop(handle, None)
    # Ranks have called different numbers of operations: unnamed ones match again from here on.
    here.counter = max(here.counter, counter)
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set are here."""
    key = membership(process_set), c.BARRIER
    synchronize(begin(Operation(key, Signature(c.BARRIER)), lambda _: None))
