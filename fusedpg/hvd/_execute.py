"""Carries out operations that all ranks are ready for, on the process groups of their sets."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from fusedpg._registration import loaded_extension
from fusedpg.hvd import _controller as c
from fusedpg.hvd._controller import Response, Signature

_log = logging.getLogger("fusedpg")

_OPS: dict[int, Any] = {
    c.SUM: dist.ReduceOp.SUM,
    c.AVERAGE: dist.ReduceOp.AVG,
    c.MIN: dist.ReduceOp.MIN,
    c.MAX: dist.ReduceOp.MAX,
    c.PRODUCT: dist.ReduceOp.PRODUCT,
}
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
# Torch's Gloo reduces these types. It refuses others in its threads, as it reports a lost peer.
_GLOO_REDUCES = {torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64, torch.float16}
_GLOO_REDUCES |= {torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
# Adasum leaves an operand as it is whose squared norm is below the root of the smallest double.
_TINY = math.sqrt(2.2250738585072014e-308)


@functools.lru_cache(maxsize=512)
def _impossible(dtype: torch.dtype, op: int, scaled: bool, divides: bool) -> str:
    """Torch's error for a reduction's own arithmetic in a type; empty if it can be done."""
    try:
        one = [torch.zeros(1, dtype=dtype)]
        scale_(one, 0.5 if scaled else 1.0)
        if divides:
            divide_(one[0], 2)
        if op == c.ADASUM:
            one[0].double().to(dtype)
    except Exception as error:
        return str(error)
    return ""


class _Options(Protocol):
    """The options of any collective of torch."""

    asyncOp: bool


class Refused(Exception):
    """An error that all ranks of a set raise alike: their next operation works."""


def _is_ours(group: dist.ProcessGroup) -> bool:
    extension = loaded_extension()
    backend = group._get_backend(torch.device("cpu"))
    return extension is not None and isinstance(backend, extension.ProcessGroupFused)


def nbytes(signature: Signature) -> int:
    """The bytes of one rank's tensors."""
    sizes = zip(signature.dtypes, signature.shapes)
    return sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in sizes)


def scale_(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiplies in place; integers in double precision, and truncated."""
    if factor == 1.0:
        return
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def divide_(buffer: Tensor, size: int) -> None:
    """Makes a mean of a sum; of integers it is truncated."""
    exact = buffer.is_floating_point() or buffer.is_complex()
    buffer.div_(size, rounding_mode=None if exact else "trunc")


class Set:
    """A process set whose member this process is.

    Args:
        group: its process group, used by the engine's thread only.
        ranks: global ranks of its members.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group: Any = group  # None: it was closed
        self.ranks = tuple(ranks)
        self.size: int = group.size()
        self.rank: int = group.rank()
        self.is_fused = _is_ours(group)
        self._control: tuple[Tensor, Tensor] | None = None

    def close(self) -> None:
        """Ends the process group, and thereby the operations of peers that wait for this rank."""
        group, self.group = self.group, None
        if group is not None:
            try:
                dist.destroy_process_group(group)
            except Exception as error:  # of a group that has failed before
                _log.info("fused: hvd: %s", error)

    def _run(
        self, collective: Callable[..., dist.Work | None], options: _Options, *arguments: object
    ) -> None:
        """Does a collective of the process group, and returns when it is done.

        Raises:
            Refused: on "fused", whose ranks compare what they are about to do.
            Exception: another backend failed; other ranks may wait for this one.
        """
        try:
            options.asyncOp = False
            work = collective(*arguments, options)
            if work is not None:  # "fused" returns nothing for what it has done in the call
                work.wait()
        except Exception as error:
            if self.is_fused:
                raise Refused(str(error)) from error
            raise

    # --- bytes ------------------------------------------------------------------------------

    def exchange(self, message: bytes) -> list[bytes]:
        """Everybody's message; all have the same length."""
        if self.size == 1:
            return [message]
        length = len(message)
        if self._control is None or self._control[0].numel() != length:
            mine = torch.empty(length, dtype=torch.uint8)
            self._control = mine, torch.empty(length * self.size, dtype=torch.uint8)
        mine, all_of_them = self._control
        mine.numpy()[:] = memoryview(message)
        self._gather(all_of_them, mine)
        told = all_of_them.numpy().tobytes()
        return [told[rank * length : (rank + 1) * length] for rank in range(self.size)]

    def _raw(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor as rows that the backend can move: not all know all types."""
        if self.is_fused:
            return tensor
        # view() is particular about the strides of dimensions with one element.
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return flat.view(tensor.shape[0], math.prod(tuple(tensor.shape[1:])) * tensor.itemsize)

    def _gather(self, output: Tensor, own: Tensor) -> None:
        output, own = self._raw(output), self._raw(own)
        self._run(self.group._allgather_base, c10d.AllgatherOptions(), output, own)

    # --- reductions -------------------------------------------------------------------------

    def allreduce(self, buffers: list[Tensor], signature: Signature) -> None:
        """Reduces contiguous tensors of one type in place, as one operation."""
        self._check({buffer.dtype for buffer in buffers}, signature)
        scale_(buffers, signature.prescale)
        if signature.op == c.ADASUM:
            for buffer in buffers:
                self._adasum(buffer)
        else:
            self._reduce(buffers, signature.op)
        scale_(buffers, signature.postscale)

    def _check(self, dtypes: set[torch.dtype], signature: Signature) -> None:
        """Before anything is changed or sent, of what all ranks have alike.

        Raises:
            Refused: a type that cannot be scaled, or reduced.
        """
        scaled = (signature.prescale, signature.postscale) != (1.0, 1.0)
        divides = signature.op == c.AVERAGE and not self.is_fused and self.size > 1
        for dtype in sorted(dtypes, key=str):
            why = _impossible(dtype, signature.op, scaled, divides)
            if why:
                raise Refused(f"{dtype} cannot be scaled: {why}")
            if self.size > 1 and not self.is_fused and self.group.name() == "gloo":
                ordered = signature.op in (c.MIN, c.MAX)
                if dtype not in _GLOO_REDUCES or (ordered and dtype.is_complex):
                    raise Refused(f"Gloo does not reduce {dtype}")

    def _reduce(self, buffers: list[Tensor], op: int) -> None:
        if self.size == 1:
            return
        # Gloo has no mean.
        own_mean = op == c.AVERAGE and not self.is_fused
        options = c10d.AllreduceCoalescedOptions()
        options.reduceOp = _OPS[c.SUM if own_mean else op]
        self._run(self.group.allreduce_coalesced, options, buffers)
        if own_mean:
            for buffer in buffers:
                divide_(buffer, self.size)

    def _adasum(self, buffer: Tensor) -> None:
        """Combines all ranks' tensors two by two; every rank computes the same tree."""
        if self.size == 1:
            return
        everything = buffer.new_empty(self.size * buffer.numel())
        if not buffer.numel():
            return
        self._gather(everything, buffer.view(-1))
        terms = [row.double() for row in everything.split(buffer.numel())]
        while len(terms) > 1:
            terms = [_pair(a, b) for a, b in zip(terms[::2], terms[1::2])]
            # Every level rounds to the tensor's type, as if its result had been sent.
            terms = [term.to(buffer.dtype).double() for term in terms]
        buffer.copy_(terms[0].view_as(buffer))

    def reducescatter(self, tensor: Tensor, signature: Signature) -> Tensor:
        """This rank's rows of the reduced tensor."""
        self._check({tensor.dtype}, signature)
        whole = tensor.clone(memory_format=torch.contiguous_format)
        scale_([whole], signature.prescale)
        each, more = divmod(whole.shape[0], self.size)
        rows = [each + (rank < more) for rank in range(self.size)]
        begin = sum(rows[: self.rank])
        if len(set(rows)) == 1 and self.size > 1 and self.is_fused and whole.numel():
            own = whole.new_empty((rows[0], *whole.shape[1:]))
            options = c10d.ReduceScatterOptions()
            options.reduceOp = _OPS[signature.op]
            self._run(self.group._reduce_scatter_base, options, own, whole)
        else:
            self._reduce([whole], signature.op)
            own = whole[begin : begin + rows[self.rank]].clone()
        scale_([own], signature.postscale)
        return own

    # --- moves ------------------------------------------------------------------------------

    def allgather(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """All ranks' rows, one rank's after the other's."""
        own = tensor.contiguous()
        output = own.new_empty((sum(rows), *own.shape[1:]))
        if self.size == 1:
            return output.copy_(own)
        if len(set(rows)) == 1:
            if output.numel():
                self._gather(output, own)
            return output
        # Rows that a rank has too few of are sent as padding; where one has many more than the
        # others, everybody broadcasts.
        most = max(rows)
        if most * self.size <= 4 * sum(rows):
            padded = own.new_zeros((most, *own.shape[1:]))
            padded[: own.shape[0]] = own
            everything = own.new_empty((self.size * most, *own.shape[1:]))
            if everything.numel():
                self._gather(everything, padded)
            for part, target in zip(everything.split(most), output.split(list(rows))):
                target.copy_(part[: target.shape[0]])
            return output
        for root, target in enumerate(output.split(list(rows))):
            if root == self.rank:
                target.copy_(own)
            if target.numel():
                self.broadcast(target, self.ranks[root])
        return output

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """Overwrites a contiguous tensor by that of a global rank."""
        if self.size == 1 or not buffer.numel():
            return
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(root), 0
        self._run(self.group.broadcast, options, [self._raw(buffer.view(-1))])

    def alltoall(self, tensor: Tensor, splits: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Rows from everybody, and how many from each.

        Args:
            tensor: the rows to send.
            splits: each rank's, by rank of the set.
        """
        own = tensor.contiguous()
        received = [splits[rank][self.rank] for rank in range(self.size)]
        output = own.new_empty((sum(received), *own.shape[1:]))
        sent = list(splits[self.rank])
        width = math.prod(tuple(own.shape[1:]))
        own = own[: sum(sent)]
        if self.size == 1:
            output.copy_(own)
        elif any(map(sum, splits)) and width:
            rows = [self._raw(part.view(-1, width)) for part in (output, own)]
            self._run(self.group.alltoall_base, c10d.AllToAllOptions(), *rows, received, sent)
        return output, received


def _pair(a: Tensor, b: Tensor) -> Tensor:
    dot, a_square, b_square = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    a_factor = 1 - dot / (2 * a_square) if a_square >= _TINY else 1.0
    b_factor = 1 - dot / (2 * b_square) if b_square >= _TINY else 1.0
    return a_factor * a + b_factor * b


def splits_of(response: Response, ranks: Sequence[int]) -> list[list[int]]:
    """Each rank's splits of the first tensor of an all-to-all; equal ones by default."""
    told = []
    for rank in ranks:
        signature = response.signatures[rank]
        rows = signature.shapes[0][0]
        told.append(list(signature.numbers) or [rows // len(ranks)] * len(ranks))
    return told


def fused_calls(responses: Iterable[Response], threshold: int) -> list[list[Response]]:
    """Which all-reduces are one call each: those of one set, type, operation and scale.

    Every rank computes the same: it depends on what ranks have told each other alone.
    """
    open_calls: dict[object, tuple[list[Response], int]] = {}
    calls: list[list[Response]] = []
    for response in responses:
        signature = response.any
        types = tuple(sorted(set(signature.dtypes)))
        scale = signature.prescale, signature.postscale
        key, size = (response.key[0], types, signature.op, *scale), nbytes(signature)
        call, sofar = open_calls.get(key, ([], 0))
        if not call or sofar + size > threshold:
            call, sofar = [], 0
            calls.append(call)
        call.append(response)
        open_calls[key] = call, sofar + size
    return calls
