"""The kinds of steps that a plan consists of.

A step reads and writes the slots of a call, one slot for each value. It returns None where it is
done, else an iterator that stops at each Work which has to be waited for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedpg._agreement import Answer, answer
from fusedpg.functional import shard_range
from fusedpg.fusion import alike
from fusedpg.fusion.chunks import ChunkedCollective
from fusedpg.fusion.codegen_rows import BROADCAST, SLICE
from fusedpg.fusion.compiled import Kernel, begin, with_mark
from fusedpg.fusion.ir import Group, Node
from fusedpg.fusion.local import LocalKernel
from fusedpg.fusion.ops import POINTWISE, SCALAR_OPS
from fusedpg.fusion.places import held
from fusedpg.fusion.scalars import scalars
from fusedpg.fusion.torch_ops import TorchOps, as_rows, matmul

if TYPE_CHECKING:
    from fusedpg.fusion.plan import Call

_log = logging.getLogger("fusedpg")
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# Newer names of the same functions, where torch has them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Stops = Iterator[Any] | None
Numbers = Mapping[Node, int]  # of the slots in which values are


class Step:
    """A part of a plan."""

    meets = False  # whether it is an operation of the group, in which ranks wait for each other

    def run(self, call: Call) -> Stops:
        raise NotImplementedError


# --- what a rank computes for itself -------------------------------------------------------------


class Scalar(Step):
    """A number that is computed from numbers."""

    def __init__(self, node: Node, number: Numbers) -> None:
        self._function = SCALAR_OPS[node.op]
        self._at, self._read = number[node], [number[operand] for operand in node.operands]

    def run(self, call: Call) -> Stops:
        slots = call.slots
        slots[self._at] = self._function(*[slots[at] for at in self._read])
        return None


class Torch(Step):
    """An operation that torch's functions compute."""

    def __init__(self, node: Node, number: Numbers, torch_ops: TorchOps) -> None:
        self._node, self._compute = node, torch_ops.compute
        self._at, self._read = number[node], [number[operand] for operand in node.operands]
        # A number may be one that no float64 holds, and dropout has a mask to make.
        scalar = any(operand.scalar for operand in node.operands)
        self._quick = None if scalar else POINTWISE.get(node.op)
        self._attributes = dict(node.attributes)

    def run(self, call: Call) -> Stops:
        slots, node = call.slots, self._node
        given = [slots[at] for at in self._read]
        value = None if self._quick is None else self._quick(*given, **self._attributes)
        if value is None or value.dtype is not node.dtype:
            value = self._compute(node, given)
        slots[self._at] = value
        return None


class LocalRows(Step):
    """A group of kind "compute" as generated code, where all ranks have it."""

    def __init__(self, call: Call, kernel: LocalKernel, nodes: tuple[Node, ...]) -> None:
        self._kernel, self._nodes = kernel, nodes
        assert kernel.source is not None
        self._source, number = kernel.source, call.plan.number
        self._operands = [
            (number[node.operands[0] if how == SLICE else node], how, shape)
            for node, how, shape in kernel.source.operands
        ]
        self._written = [number[node] for node in kernel.source.outputs]

    def run(self, call: Call) -> Stops:
        plan, slots = call.plan, call.slots
        usable = plan.rows_usable(call)
        if usable is None:
            return self._asked(call)
        if not usable:
            return plan.instead(call, self._nodes, of_a_group=True)
        given = []
        for at, how, shape in self._operands:
            value = slots[at]
            if how == SLICE:
                value = plan.torch.slice(value, shape)
            elif how == BROADCAST:
                value = value.expand(shape)
            given.append(value.contiguous())
        numbers = scalars(self._source, lambda node: slots[plan.number[node]])
        results = self._kernel.compute(given, *numbers, plan.rank)
        for at, value in zip(self._written, results):
            slots[at] = value
        return None

    def _asked(self, call: Call) -> Iterator[object]:
        yield from call.plan.ask(call)
        yield from self.run(call) or ()


# --- operations of the group ---------------------------------------------------------------------


class Generated(Step):
    """An operation of the group as generated code; on ranks of which one has none, node by node.

    The operation tells whether all ranks have the function: it does nothing where one has not.
    """

    meets = True
    answer: Answer
    _nodes: tuple[Node, ...]  # those that it carries out
    _alone = False  # whether that is a reduction with nothing around it

    def _instead(self, call: Call) -> Stops:
        return call.plan.instead(call, self._nodes, of_a_group=not self._alone)

    def _lost(self, call: Call, unmarked: bool) -> Stops:
        """A rank of the group has no function: no rank uses its own again."""
        self.answer.all_have_it = False
        call.unmarked = unmarked  # node by node it is compared again
        name = call.plan.program.name
        _log.info("%s runs operation by operation: a rank has no compiled function", name)
        return self._instead(call)


class Fused(Generated):
    """A fused collective."""

    def __init__(
        self,
        call: Call,
        kernel: Kernel,
        backend: Any,
        number: Numbers,
        nodes: tuple[Node, ...],
        alone: bool = False,
    ) -> None:
        """`number`: of what the kernel reads and gives."""
        source, plan = kernel.source, call.plan
        assert source is not None
        self.kernel, self._backend, self._nodes, self._alone = kernel, backend, nodes, alone
        # The operation of a program that is one group says all that ranks have to compare.
        self._marked = alone or not plan.program.one_group
        self.answer = answer(call.group, (source.key, call.device.type))
        self.function: int | None = None  # the compiled function's address; 0: there is none
        self._on_gpu = bool(backend.on_gpu(torch.empty(0, device=call.device)))
        self._prepared: Any = None  # the operation on a CPU, by the thread that calls
        if self._on_gpu:
            assert kernel.cuda_source is not None
            source = kernel.cuda_source
        else:
            self._prepared = kernel.prepared(backend, plan.rank)
        self._source, self._number = source, number
        self._read: list[int] = []
        self._slices: list[tuple[int, int, Node]] = []  # where in what is read, of which value
        for node in (source.scatter.operands[0], *(node for node, _ in source.operands)):
            if node in source.materialised:
                self._slices.append((len(self._read), number[node.operands[0]], node))
                self._read.append(-1)
            else:
                self._read.append(number[node])
        self._written = [number[node] for node, _ in source.outputs]
        self._bare = not (source.numbers or source.seeds or source.dropouts)

    @property
    def usable(self) -> bool:
        """Whether a call that has run would take the function again."""
        return bool(self.function) and self.answer.all_have_it is not False

    def run(self, call: Call) -> Stops:
        if not call.compiles or self.answer.all_have_it is False:
            return self._instead(call)
        slots = call.slots
        given = [slots[at].contiguous() if at >= 0 else None for at in self._read]
        for at, whole, node in self._slices:
            value = call.plan.torch.slice(slots[whole], node.shape, node.layout.row)
            given[at] = value.contiguous()
        numbers: Sequence[float] = ()
        seeds: Sequence[int] = ()
        if not self._bare:
            numbers, seeds = scalars(self._source, lambda node: slots[self._number[node]])
        mark, unmarked = alike.NO_MARK, call.unmarked
        if unmarked:
            call.unmarked = False
            mark = call.plan.mark(slots) if self._marked else mark
        results = self._results(call) if call.targets and not self._alone else []
        if self._prepared is None or call.async_op:
            return self._begin(call, given, results, numbers, seeds, mark, unmarked)
        made = self._prepared.run(
            self._function(), given, results, with_mark(numbers, mark), seeds, mark.program
        )
        if made is None:
            return self._lost(call, unmarked)
        for at, value in zip(self._written, made):
            slots[at] = value
        return None

    def _function(self) -> int:
        if self.function is None:
            self.function = self.kernel.function()
        return self.function

    def _results(self, call: Call) -> list[torch.Tensor]:
        """The targets that this writes, and new tensors; nothing where all are new."""
        if not call.repeats:
            call.places = self.kernel.written(call, self._number)
        places = call.places
        if max(places) < 0:
            return []
        return [
            call.targets[place] if place >= 0 else self._new(call, number)
            for number, place in enumerate(places)
        ]

    def _new(self, call: Call, number: int) -> torch.Tensor:
        """Memory for the result of this number."""
        node, _ = self._source.outputs[number]
        shape = held(node, call.plan.size, call.plan.rank)
        return torch.empty(shape, dtype=node.dtype, device=call.device)

    def _begin(
        self,
        call: Call,
        given: list[Any],
        results: list[torch.Tensor],
        numbers: Sequence[float],
        seeds: Sequence[int],
        mark: alike.Mark,
        unmarked: bool,
    ) -> Iterator[object]:
        """On a GPU, or with another thread's help."""
        results = results or [self._new(call, n) for n in range(len(self._written))]
        first = False
        if self._on_gpu:
            function = self.kernel.on_gpu(self._source, self._backend, given[0])
            # A rank that failed to load it again reports that instead of leaving the call out.
            first = not function or self.answer.all_have_it is None
            # Whether a rank has none; known, it is not asked again: the host would wait.
            done = torch.full((int(first),), float(not function), device=call.device)
        else:
            function = self._function()
            done = torch.zeros(1, dtype=torch.uint8, device="cpu")
        # What ranks know must not depend on when each of them waits.
        later = call.async_op and not first
        read = given[0], given[1:], results, numbers, seeds, done, later
        work = begin(self._backend, function, self._source, *read, mark=mark)
        if work is not None:
            yield work
        if first and not done.item():
            self.answer.all_have_it = True
        elif first or not (self._on_gpu or done.item()):
            yield from self._lost(call, unmarked) or ()
            return
        for at, value in zip(self._written, results):
            call.slots[at] = value


class Reduction(Step):
    """A reduction over the ranks by the group's own collectives."""

    meets = True

    def __init__(self, node: Node, number: Numbers) -> None:
        self._node, self._at, self._read = node, number[node], number[node.operands[0]]

    def run(self, call: Call) -> Iterator[object]:
        node, value, size = self._node, call.slots[self._read], call.plan.size
        op = node.attribute("op")
        if node.op == "all_reduce":
            work, total = begin_sum(call, op, value, call.async_op)
            yield from _waited(work)
            call.slots[self._at] = end_sum(call, op, total, node.shape).to(node.dtype)
            return
        length = call.plan.torch.range(node.shape)[1]
        wide = _widened(value).reshape(-1)
        if size == 1 or not node.numel:
            total = wide.clone()
        else:
            chunk = shard_range(node.numel, size, 0)[1]
            whole = _padded(wide, chunk * size).view(size, chunk)
            words = _words(call, op, whole)
            if len(words):
                whole = torch.cat([whole, words.expand(size, -1)], 1)
            total = whole.new_empty(whole.shape[1])
            yield from _waited(
                _reduce_scatter(
                    total,
                    whole.view(-1),
                    op=_REDUCE_OPS[op],
                    group=call.group,
                    async_op=call.async_op,
                )
            )
            _compare(call, op, total[chunk:])
            total = total[:length]
        call.slots[self._at] = end_sum(call, op, total, (length,)).to(node.dtype)


class Moved(Step):
    """An all_gather or a broadcast."""

    meets = True

    def __init__(self, node: Node, number: Numbers) -> None:
        self._node, self._at, self._read = node, number[node], number[node.operands[0]]

    def run(self, call: Call) -> Stops:
        begin = self._gather if self._node.op == "all_gather" else self._broadcast
        work, result = begin(call, call.slots[self._read])
        call.slots[self._at] = result
        return None if work is None else iter((work,))

    def _gather(self, call: Call, part: torch.Tensor) -> tuple[object, torch.Tensor]:
        node = self._node
        row = node.operands[0].layout.row
        work, whole = begin_gather(call, part, node.numel, row, call.async_op)
        return work, whole.reshape(node.shape)

    def _broadcast(self, call: Call, value: torch.Tensor) -> tuple[object, torch.Tensor]:
        result = value.clone(memory_format=torch.contiguous_format)
        if call.plan.size == 1 or not result.numel():
            return None, result
        given = {"group": call.group, "group_src": self._node.attribute("src")}
        return dist.broadcast(result, **given, async_op=call.async_op), result


class Overlapped(Step):
    """Rows of a product are summed while the next rows are multiplied."""

    meets = True

    def __init__(self, group: Group, nodes: tuple[Node, ...], number: Numbers) -> None:
        self._chunks = group.chunks
        self._sum = next(node for node in nodes if node.op == "all_reduce")
        self._product = self._sum.operands[0]
        self._at = number[self._sum]
        self._read = [number[operand] for operand in self._product.operands]

    def run(self, call: Call) -> Iterator[object]:
        a, b = (call.slots[at] for at in self._read)
        transposed, op = self._product.attribute("transposed"), self._sum.attribute("op")
        work, begun = None, []
        for rows in as_rows(a).tensor_split(self._chunks):
            part = matmul(rows, b, transposed)
            yield from _waited(work)  # one is on its way at a time, as in OverlappedProgram
            work, total = begin_sum(call, op, part, True)
            begun.append((total, part.shape))
        yield from _waited(work)
        totals = [end_sum(call, op, *sums).to(self._sum.dtype) for sums in begun]
        call.slots[self._at] = torch.cat(totals).reshape(self._sum.shape)


class OverlappedProgram(Generated):
    """Rows are summed, computed with and gathered or sent beside what is done with the next."""

    def __init__(self, call: Call, chunked: ChunkedCollective, backend: object) -> None:
        self._chunked, self._backend = chunked, backend
        self._number = call.plan.number
        self._kernels = [(span, chunked.of_rows(span[1] - span[0])) for span in chunked.spans]
        source = self._kernels[0][1].source
        assert source is not None
        self.answer = answer(call.group, (source.key, call.device.type))
        self._functions: list[int] = []
        self._nodes = *chunked.products, *chunked.nodes, *chunked.sends

    @staticmethod
    def of(call: Call, chunked: ChunkedCollective) -> OverlappedProgram | None:
        """None where its computation is not generated: the same on all ranks."""
        for first, last in chunked.spans:
            found = chunked.of_rows(last - first)
            backend = found.backend(call.group, call.device, on_gpus=False)
            if backend is None:
                return None
        return OverlappedProgram(call, chunked, backend)

    def run(self, call: Call) -> Iterator[object]:
        if not call.compiles or self.answer.all_have_it is False:
            yield from self._instead(call) or ()
            return
        chunked, slots = self._chunked, call.slots
        contribution = self._contribution(call)
        operands = [self._rows(x, slots[self._number[x]]) for x in chunked.operands]
        gathered = {
            x: torch.empty(x.shape, dtype=x.dtype, device="cpu")
            for x in chunked.results
            if not x.layout.parted
        }
        unmarked, mark = call.unmarked, alike.NO_MARK
        if unmarked:
            call.unmarked, mark = False, call.plan.mark(slots)
        self._functions = self._functions or [found.function() for _, found in self._kernels]
        begun: tuple[object, torch.Tensor, object] | None = None
        to: list[torch.Tensor] = []
        for ((first, last), compiled), function in zip(self._kernels, self._functions):
            rows = contribution(first, last)
            # One is on its way at a time, so that all ranks stop at one that is refused.
            if begun is not None:
                if not (yield from _done(*begun)):
                    break
                self._send(call, to)
            given = [self._cut(x, t, first, last) for x, t in zip(chunked.operands, operands)]
            to = [
                gathered[x].view(-1, x.shape[-1])[first:last]
                if x in gathered
                else self._part(call, x, last - first)
                for x in chunked.results
            ]
            begun = self._begin(call, compiled, function, rows, given, to, first, mark)
            mark = alike.NO_MARK
        else:
            assert begun is not None
            if (yield from _done(*begun)):
                call.met()
                self._send(call, to)
                tokens = {x: torch.zeros((), device=call.device) for x in chunked.sends}
                for node, result in (*gathered.items(), *tokens.items()):
                    slots[self._number[node]] = result
                return
        yield from self._lost(call, unmarked) or ()

    def _contribution(self, call: Call) -> Callable[[int, int], torch.Tensor]:
        """Rows of what this rank adds: they are multiplied when they are asked for."""
        node, slots = self._chunked.contribution, call.slots
        if not self._chunked.products:
            given = as_rows(slots[self._number[node]])
            return lambda first, last: given[first:last].contiguous()
        a, b = (slots[self._number[x]] for x in node.operands)
        rows, transposed = as_rows(a), node.attribute("transposed")
        return lambda first, last: matmul(rows[first:last], b, transposed).contiguous()

    def _part(self, call: Call, node: Node, rows: int) -> torch.Tensor:
        """Memory for this rank's slice of so many rows."""
        count = call.plan.torch.range((rows, node.shape[-1]))[1]
        return torch.empty(count, dtype=node.dtype, device="cpu")

    def _send(self, call: Call, results: Sequence[torch.Tensor]) -> None:
        """Sends of a chunk's results those that another stage takes."""
        for node in self._chunked.sends:
            assert call.messages is not None
            call.messages.sending(node).send(results[self._chunked.results.index(node.operands[0])])

    def _rows(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        """An operand as a matrix, of which chunks take rows; or a row that all of them take."""
        if self._chunked.alike_in_rows(node):
            return value.reshape(node.shape[-1:])
        columns = node.shape[-1]
        return value.expand(*self._chunked.scatter.shape[:-1], columns).reshape(-1, columns)

    def _cut(self, node: Node, value: torch.Tensor, first: int, last: int) -> torch.Tensor:
        if self._chunked.alike_in_rows(node):
            return value.contiguous()
        return value[first:last].expand(-1, self._chunked.scatter.shape[-1]).contiguous()

    def _begin(
        self,
        call: Call,
        compiled: Kernel,
        function: int,
        product: torch.Tensor,
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        row: int,
        mark: alike.Mark,
    ) -> tuple[object, torch.Tensor, object]:
        """The Work, whether all ranks had the function, and what must live until it is done."""
        source = compiled.source
        assert source is not None
        order = {node.name: x for node, x in zip(self._chunked.operands, operands)}
        given = [order[node.name] for node, _ in source.operands]
        numbers, seeds = scalars(source, lambda node: call.slots[self._number[node]])
        done = torch.zeros(1, dtype=torch.uint8, device="cpu")
        work = begin(
            self._backend,
            function,
            source,
            product,
            given,
            results,
            numbers,
            seeds,
            done,
            True,
            row * self._chunked.scatter.shape[-1],
            mark=mark,
        )
        return work, done, (product, given)


def _done(work: object, done: torch.Tensor, alive: object) -> Generator[object, None, bool]:
    """Waits; whether all ranks had the function. `alive`: memory that the operation reads."""
    if work is not None:
        yield work
    return bool(done.item())


# --- messages to other stages --------------------------------------------------------------------


class Send(Step):
    """A value that goes to another stage; the call waits for it at its end."""

    def __init__(self, node: Node, number: Numbers, overlap: Group | None) -> None:
        """`overlap`: that by which it goes in chunks."""
        self._node, self._at, self._read = node, number[node], number[node.operands[0]]
        self._spans = [] if overlap is None else overlap.spans(node.operands[0].shape)
        self.meets = bool(self._spans) and node.operands[0].layout.parted

    def run(self, call: Call) -> Stops:
        value = call.slots[self._read]
        call.slots[self._at] = torch.zeros((), device=value.device)
        if self._spans:
            return self._in_chunks(call, value)
        assert call.messages is not None
        call.messages.sending(self._node).send(value)
        return None

    def _in_chunks(self, call: Call, value: torch.Tensor) -> Iterator[object]:
        """What was computed as a whole; slices of all rows are not those of chunks."""
        assert call.messages is not None
        (sent,) = self._node.operands
        if sent.layout.parted:
            work, value = begin_gather(call, value, sent.numel, 1, call.async_op)
            yield from _waited(work)
            call.met()
        rows, sending = value.reshape(-1, sent.shape[-1]), call.messages.sending(self._node)
        for first, last in self._spans[sending.sent :]:
            part = rows[first:last]
            if sent.layout.parted:
                part = call.plan.torch.slice(part, tuple(part.shape))
            sending.send(part)


class SendProduct(Step):
    """Rows of a product are sent while the next rows are multiplied."""

    def __init__(self, group: Group, nodes: tuple[Node, ...], number: Numbers) -> None:
        self._product = next(node for node in nodes if node.op == "matmul")
        self._send = next(node for node in nodes if node.op == "send")
        self._at = number[self._send]
        self._read = [number[operand] for operand in self._product.operands]
        self._spans = group.spans(self._product.shape)

    def run(self, call: Call) -> Stops:
        assert call.messages is not None
        a, b = (call.slots[at] for at in self._read)
        rows, transposed = as_rows(a), self._product.attribute("transposed")
        for first, last in self._spans:
            part = matmul(rows[first:last], b, transposed)
            if self._send.operands[0].layout.parted:
                part = call.plan.torch.slice(part, tuple(part.shape))
            call.messages.sending(self._send).send(part)
        call.slots[self._at] = torch.zeros((), device=a.device)
        return None


class Receive(Step):
    """A value that comes from another stage."""

    def __init__(self, node: Node, number: Numbers) -> None:
        self._node, self._at = node, number[node]

    def run(self, call: Call) -> Iterator[object]:
        assert call.messages is not None
        call.slots[self._at] = yield from call.messages.receive(self._node)


class ReceiveInChunks(Step):
    """Slices of rows are gathered while those of the next rows arrive."""

    meets = True

    def __init__(self, group: Group, gather: Node, number: Numbers) -> None:
        self._node, self._at = gather, number[gather]
        self._recv, self._spans = gather.operands[0], group.spans(gather.shape)

    def run(self, call: Call) -> Iterator[object]:
        assert call.messages is not None
        columns, work, rows = self._node.shape[-1], None, []
        for first, last in self._spans:
            part = yield from call.messages.receiving(self._recv).part()
            yield from _waited(work)  # one is on its way at a time, as in OverlappedProgram
            work, whole = begin_gather(call, part, (last - first) * columns, 1, True)
            rows.append(whole)
        yield from _waited(work)
        call.slots[self._at] = torch.cat(rows).reshape(self._node.shape)


def step_of(
    node: Node, number: Numbers, torch_ops: TorchOps, overlap: Group | None = None
) -> Step | None:
    """The step of a single node, without generated code; None where its value is there.

    Args:
        overlap: of a message, the group by which it goes in chunks.
    """
    if node.op in ("input", "constant"):
        return None
    if node.scalar:
        return Scalar(node, number)
    if node.op == "send":
        return Send(node, number, overlap)
    kinds: dict[str, Callable[[Node, Numbers], Step]] = {
        "all_reduce": Reduction,
        "reduce_scatter": Reduction,
        "all_gather": Moved,
        "broadcast": Moved,
        "recv": Receive,
    }
    kind = kinds.get(node.op)
    return Torch(node, number, torch_ops) if kind is None else kind(node, number)


def begin_gather(
    call: Call, part: torch.Tensor, numel: int, row: int, async_op: bool
) -> tuple[object, torch.Tensor]:
    """The ranks' slices of a value of so many elements, or of numbers of `row` elements each."""
    size = call.plan.size
    if size == 1 or not numel:
        return None, part.clone()[:numel]
    chunk = shard_range(numel * row, size, 0)[1] // row
    if call.plan.uneven and numel != chunk * size:
        # Padded slices would be alike of several `numel`; of these the group compares the sum.
        whole = part.new_empty(numel)
        lengths = [shard_range(numel * row, size, rank)[1] // row for rank in range(size)]
        slices = list(whole.split(lengths))
        return dist.all_gather(slices, part, group=call.group, async_op=async_op), whole
    whole = part.new_empty(chunk * size)
    given = _padded(part, chunk).contiguous()
    work = _all_gather(whole, given, group=call.group, async_op=async_op)
    return work, whole[:numel]


# --- sums, and behind them what ranks compare ----------------------------------------------------


def begin_sum(
    call: Call, op: str, value: torch.Tensor, async_op: bool
) -> tuple[object, torch.Tensor]:
    """A sum over the ranks that has begun, flat, with the mark's words behind it."""
    wide = _widened(value)
    words = _words(call, op, wide)
    total = torch.empty(wide.numel() + len(words), dtype=wide.dtype, device=wide.device)
    total[: wide.numel()].view(wide.shape).copy_(wide)
    total[wide.numel() :] = words
    if call.plan.size == 1 or not total.numel():
        return None, total
    work = dist.all_reduce(total, op=_REDUCE_OPS[op], group=call.group, async_op=async_op)
    return work, total


def end_sum(call: Call, op: str, total: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    _compare(call, op, total[count:])
    total = total[:count].view(shape)
    return total / call.plan.size if op == "mean" else total


def compare_numbers(call: Call) -> Generator[object, None, None]:
    """Of a call whose program has no reduction, by one of their own."""
    like = torch.zeros(0, dtype=torch.float32, device=call.device)
    work, total = begin_sum(call, "max", like, call.async_op)
    yield from _waited(work)
    end_sum(call, "max", total, (0,))


def _words(call: Call, op: str, like: torch.Tensor) -> torch.Tensor:
    """The mark as elements that travel behind those of a reduction; none where it is known."""
    words: list[float] = []
    if call.unmarked:
        call.unmarked = False
        words = alike.words(call.plan.mark(call.slots), call.plan.size, op)
    return torch.tensor(words, dtype=like.dtype, device=like.device)


def _compare(call: Call, op: str, words: torch.Tensor) -> None:
    if len(words) and not alike.equal(words.tolist(), call.plan.size, op):
        raise alike.difference(call.plan.program, call.plan.numbers(call.slots), call.group)


def _widened(value: torch.Tensor) -> torch.Tensor:
    """16-bit types are summed in float32, whatever the backend does."""
    return value.float() if value.dtype.itemsize == 2 else value


def _waited(work: object) -> Iterator[object]:
    """Stops at what has begun; None has been done by this thread."""
    if work is not None:
        yield work


def _padded(flat: torch.Tensor, count: int) -> torch.Tensor:
    if flat.numel() == count:
        return flat.contiguous()
    result = flat.new_zeros(count)
    result[: flat.numel()] = flat
    return result
