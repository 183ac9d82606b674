"""Carries out a program operation by operation, with torch and the group's collectives.

A run is a generator that stops at each collective with its Work, so that a call with async_op ends
where the first collective has begun, and what follows is done by wait(): in the order of the
program, on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg.functional import shard_range
from fusedpg.fusion import alike
from fusedpg.fusion.compiled import Alone, kernel
from fusedpg.fusion.derivatives import smooth
from fusedpg.fusion.here import Here, matmul, own
from fusedpg.fusion.ir import COLLECTIVES, Group, Node, Program
from fusedpg.fusion.local import local_kernel
from fusedpg.fusion.messages import Messages, Transfer
from fusedpg.fusion.ops import SCALAR_OPS
from fusedpg.fusion.places import Ranks, with_memory

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
_said = False

Run = Generator[Any, None, list[torch.Tensor]]


def say_once() -> None:
    global _said
    if not _said:
        _said = True
        _log.info(
            'fused collectives run as generated code on tensors of the backend "fused", all '
            "else operation by operation: %s",
            "docs/guides/fusion.md",
        )


class Executor:
    """One run of a program on one rank."""

    def __init__(
        self,
        program: Program,
        group: dist.ProcessGroup | None,
        rank: int,
        targets: Sequence[torch.Tensor] = (),
        *,
        async_op: bool = False,
        stages: dist.ProcessGroup | None = None,
        wrt: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        """`wrt`: the arguments whose gradients will be asked for. `device`: of what comes."""
        self._device = device
        self._stages = stages
        self._wrt = wrt
        self._targets = targets
        self._async_op = async_op  # what runs it does something else meanwhile
        self._program = program
        self._group = group
        self._world_size = program.world_size
        self._rank = rank
        self._here = Here(self._world_size, rank)
        self._values: dict[Node, Any] = {}
        self._messages: Messages | None = None
        self._arguments: Mapping[str, Any] = {}
        self._mark: alike.Mark | None = None  # of this call, until ranks have compared theirs
        self._at = 0  # the unit of the program that is being done

    def meets(self) -> bool:
        """Whether an operation of the group is still to come, in which its ranks wait."""
        left = self._program.units[self._at :]
        if any(node.op in COLLECTIVES for _, nodes in left for node in nodes):
            return True
        # Without a reduction numbers and flags are compared by one of their own.
        reduces = any(node.op in ("all_reduce", "reduce_scatter") for node in self._program.nodes)
        tensors = all(isinstance(value, torch.Tensor) for value in self._arguments.values())
        return bool(left) and not reduces and not tensors

    def run(self, arguments: Mapping[str, Any]) -> Run:
        """The results, in the layouts of the program's outputs."""
        self._arguments = arguments
        if not self._program.messages:
            return self._run(arguments)
        if self._stages is None:
            raise ValueError(
                f"`{self._program.name}` sends to another stage or receives from it: call it with "
                "stages=, the group of the ranks that have this rank's place in their stages"
            )
        return self._with_messages(self._run(arguments))

    def _with_messages(self, run: Run) -> Run:
        """Stops at messages alone: what takes longest, and goes on while others compute."""
        try:
            while True:
                try:
                    work = next(run)
                except StopIteration as stop:
                    results: list[torch.Tensor] = stop.value
                    return results
                if isinstance(work, Transfer):
                    yield work
                else:
                    work.wait()
        except Exception as error:
            if self._messages is not None:
                self._messages.give_up(error)
            raise

    def _run(self, arguments: Mapping[str, Any]) -> Run:
        values = self._values
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        device = self._device or (given[0].device if given else torch.device("cpu"))
        if self._stages is not None and self._program.messages:
            active = smooth(self._program, self._wrt) if self._wrt else ()
            place = self._stages, self._rank
            self._messages = Messages(self._program, *place, device, active)
        arguments = with_memory(arguments)  # who waits for a message is told of what it raises
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        for node in self._program.inputs:
            values[node] = arguments[node.name]
        if self._world_size > 1 and not _capturing(device):
            self._arguments, self._mark = arguments, alike.mark(self._program, arguments)
        units = zip(self._program.units, self._program.released)
        for self._at, ((group, nodes), released) in enumerate(units):
            if group is not None and group.kind == "overlap":
                yield from self._overlap(group, nodes)
            elif group is None or not (yield from self._compiled(group, nodes, given)):
                for node in nodes:
                    if node.op != "input":
                        values[node] = yield from self._evaluate(node)
            for node in released:
                values.pop(node, None)  # a compiled group keeps some to itself
        if self._mark is not None and len(given) < len(arguments):
            # There was no reduction, and there are numbers or flags.
            work, total = self._begin_sum("max", torch.zeros(0, dtype=torch.float32, device=device))
            yield from _waited(work)
            self._end_sum("max", total, (0,))
        self._at = len(self._program.units)
        if self._messages is not None:
            yield from self._messages.finish()
        return [self._own(node, given) for node in self._program.outputs]

    def _own(self, node: Node, given: list[torch.Tensor]) -> torch.Tensor:
        """A result that does not share memory with an argument, unless it is the argument."""
        value: torch.Tensor = self._values[node]
        if node.op == "input" or any(value is target for target in self._targets):
            return value
        return own(value, given)

    def _compiled(
        self, group: Group, nodes: tuple[Node, ...], given: list[torch.Tensor]
    ) -> Generator[Any, None, bool]:
        """Whether a group has been carried out as generated code."""
        if group.kind == "compute":
            here = local_kernel(group, nodes, self._program)
            return (yield from here.run(self._values, self._here.slice, self._group, self._rank))
        if group.kind != "collective":
            return False
        found = kernel(group, nodes, self._program)
        backend = found.backend(self._group, self._values)
        if backend is None or self._group is None:
            return False
        return (
            yield from found.run(
                self._group,
                backend,
                self._values,
                self._here.slice,
                self._rank,
                given,
                self._targets,
                self._async_op,
                self._take_mark(program=True),
            )
        )

    def _evaluate(self, node: Node) -> Generator[Any, None, Any]:
        if node.op == "constant":
            return node.attribute("value")
        values = [self._values[operand] for operand in node.operands]
        if node.scalar:
            return SCALAR_OPS[node.op](*values)
        if node.op in ("all_reduce", "reduce_scatter"):
            return (yield from self._reduce(node, values[0]))
        if node.op == "all_gather":
            return (yield from self._gather(node, values[0]))
        if node.op == "broadcast":
            return (yield from self._broadcast(node, values[0]))
        if node.op == "recv":
            assert self._messages is not None
            return (yield from self._messages.receive(node))
        if node.op == "send":
            assert self._messages is not None
            self._messages.send(node, values[0])
            return torch.zeros((), device=values[0].device)
        return self._here.compute(node, values)

    # --- with the group ----------------------------------------------------------------------

    def _reduce(self, node: Node, value: torch.Tensor) -> Generator[Any, None, torch.Tensor]:
        op = node.attribute("op")
        done = yield from self._reduce_as_program(node, value)
        if done is not None:
            return done
        if node.op == "all_reduce":
            work, total = self._begin_sum(op, value)
            yield from _waited(work)
            return self._end_sum(op, total, node.shape).to(node.dtype)
        length = self._here.range(node.shape)[1]
        wide = self._widened(value).reshape(-1)
        if self._world_size == 1 or not node.numel:
            return self._end_sum(op, wide.clone(), (length,)).to(node.dtype)
        chunk = shard_range(node.numel, self._world_size, 0)[1]
        whole = _padded(wide, chunk * self._world_size).view(self._world_size, chunk)
        words = self._words(op, whole)
        if len(words):
            whole = torch.cat([whole, words.expand(self._world_size, -1)], 1)
        part = whole.new_empty(whole.shape[1])
        work = _reduce_scatter(
            part, whole.view(-1), op=_REDUCE_OPS[op], group=self._group, async_op=self._async_op
        )
        yield from _waited(work)
        self._compare(op, part[chunk:])
        return self._end_sum(op, part[:length], (length,)).to(node.dtype)

    def _reduce_as_program(
        self, node: Node, value: torch.Tensor
    ) -> Generator[Any, None, torch.Tensor | None]:
        """As a fused collective of its own, on CPUs of one host; None where that is none."""
        if value.device.type != "cpu" or self._group is None:
            return None
        alone = Alone.of(node, self._program) if Ranks.of(self._group).one_host else None
        if alone is None:
            return None
        inner: dict[Node, Any] = {alone.given: value}
        backend = alone.kernel.backend(self._group, inner, on_gpus=False)
        if backend is None:
            return None
        mark = self._mark
        done = yield from alone.kernel.run(
            self._group,
            backend,
            inner,
            self._here.slice,
            self._rank,
            (),
            (),
            self._async_op,
            self._take_mark(),
        )
        if not done:
            self._mark = mark  # operation by operation it is compared again
            return None
        result: torch.Tensor = inner[alone.result]
        return result

    # --- whether all ranks call alike ---------------------------------------------------------

    def _take_mark(self, *, program: bool = False) -> alike.Mark | None:
        """This call's mark, where ranks have not compared theirs; who takes it has it compared.

        Args:
            program: whether it goes with a generated program. One that is all of the call has its
                numbers compared anyway, and calls of it may take a shortcut.
        """
        if program and self._program.one_group:
            self._mark = None
        found, self._mark = self._mark, None
        return found

    def _words(self, op: str, like: torch.Tensor) -> torch.Tensor:
        """The mark as elements that travel behind those of a reduction; none where it is known."""
        mark = self._take_mark()
        found = [] if mark is None else alike.words(mark, self._world_size, op)
        return torch.tensor(found, dtype=like.dtype, device=like.device)

    def _compare(self, op: str, words: torch.Tensor) -> None:
        if len(words) and not alike.equal(words.tolist(), self._world_size, op):
            assert self._group is not None
            raise alike.difference(self._program, self._arguments, self._group)

    @staticmethod
    def _widened(value: torch.Tensor) -> torch.Tensor:
        """16-bit types are summed in float32, whatever the backend does."""
        return value.float() if value.dtype.itemsize == 2 else value

    def _begin_sum(
        self, op: str, value: torch.Tensor, *, async_op: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """A sum over the ranks that has begun, flat, with the mark's words behind it."""
        wide = self._widened(value)
        words = self._words(op, wide)
        total = torch.empty(wide.numel() + len(words), dtype=wide.dtype, device=wide.device)
        total[: wide.numel()].view(wide.shape).copy_(wide)
        total[wide.numel() :] = words
        if self._world_size == 1 or not total.numel():
            return None, total
        work = dist.all_reduce(
            total, op=_REDUCE_OPS[op], group=self._group, async_op=async_op or self._async_op
        )
        return work, total

    def _end_sum(self, op: str, total: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        self._compare(op, total[count:])
        total = total[:count].view(shape)
        return total / self._world_size if op == "mean" else total

    def _gather(self, node: Node, part: torch.Tensor) -> Generator[Any, None, torch.Tensor]:
        work, whole = begin_gather(node, part, self._world_size, self._group, self._async_op)
        yield from _waited(work)
        return whole[: node.numel].reshape(node.shape)

    def _broadcast(self, node: Node, value: torch.Tensor) -> Generator[Any, None, torch.Tensor]:
        work, result = begin_broadcast(node, value, self._world_size, self._group, self._async_op)
        yield from _waited(work)
        return result

    def _overlap(self, group: Group, nodes: tuple[Node, ...]) -> Generator[Any, None, None]:
        """Rows of a product are summed while the next rows are multiplied."""
        collective = next(node for node in nodes if node.op == "all_reduce")
        product = collective.operands[0]
        a, b = (self._values[operand] for operand in product.operands)
        transposed = product.attribute("transposed")
        begun = []
        op = collective.attribute("op")
        for rows in a.reshape(-1, a.shape[-1]).tensor_split(group.chunks):
            part = matmul(rows, b, transposed)
            begun.append((*self._begin_sum(op, part, async_op=True), part.shape))
        totals = []
        for work, total, shape in begun:
            yield from _waited(work)
            totals.append(self._end_sum(op, total, shape).to(collective.dtype))
        self._values[product] = None
        self._values[collective] = torch.cat(totals).reshape(collective.shape)
        for node in nodes:
            if node.op == "constant":
                self._values[node] = node.attribute("value")


def begin_gather(
    node: Node, part: torch.Tensor, size: int, group: dist.ProcessGroup | None, async_op: bool
) -> tuple[Any, torch.Tensor]:
    """The Work, None where it is done; and all ranks' slices, behind which memory may be left."""
    if size == 1 or not node.numel:
        return None, part.clone()
    row = node.operands[0].layout.row
    chunk = shard_range(node.numel * row, size, 0)[1] // row
    whole = part.new_empty(chunk * size)
    given = _padded(part, chunk).contiguous()
    return _all_gather(whole, given, group=group, async_op=async_op), whole


def begin_broadcast(
    node: Node, value: torch.Tensor, size: int, group: dist.ProcessGroup | None, async_op: bool
) -> tuple[Any, torch.Tensor]:
    result = value.clone(memory_format=torch.contiguous_format)
    if size == 1 or not result.numel():
        return None, result
    src = node.attribute("src")
    return dist.broadcast(result, group=group, group_src=src, async_op=async_op), result


def _waited(work: Any) -> Generator[Any, None, None]:
    """Stops at what has begun; None has been done by this thread."""
    if work is not None:
        yield work


def _capturing(device: torch.device) -> bool:
    """Whether a graph of the GPU is being made, for which the host cannot wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _padded(flat: torch.Tensor, count: int) -> torch.Tensor:
    if flat.numel() == count:
        return flat.contiguous()
    result = flat.new_zeros(count)
    result[: flat.numel()] = flat
    return result
