"""Carries out a fused collective as one operation of the group, with generated code."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.fusion import compile, nvrtc
from fusedpg.fusion.alike import NO_MARK, Mark
from fusedpg.fusion.codegen import Source, Unsupported
from fusedpg.fusion.codegen_collective import FULL, PART, generate, of_rows
from fusedpg.fusion.codegen_cuda import generate_cuda
from fusedpg.fusion.codegen_phases import generate_phases, of_phases
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.ir import PARTIAL, REPLICATE, SHARD, Group, Node, Program
from fusedpg.fusion.places import held, span
from fusedpg.fusion.scalars import scalars

if TYPE_CHECKING:
    from fusedpg.fusion.plan import Call

_log = logging.getLogger("fusedpg")
_KEPT = 256  # places of tensors that a kernel remembers


class Kernel:
    """The generated code of a group of a program."""

    def __init__(self, group: Group, nodes: tuple[Node, ...], program: Program) -> None:
        self._name = program.name
        self._inside = frozenset(nodes)
        self._group = group
        self._nodes = nodes
        self._program = program
        # Why it runs operation by operation, as far as the program goes: on a CPU, on a GPU.
        self.reason = self.cuda_reason = ""
        self.source: Source | None = None
        self._loaded: dict[int, object] = {}  # by GPU: what the driver has, or 0
        # What `written` found, by where the tensors of a call lie.
        self._places: dict[tuple[object, ...], tuple[int, ...]] = {}
        try:
            in_phases = of_phases(nodes) and not of_rows(nodes)
            self.source = (generate_phases if in_phases else generate)(group, nodes, program)
        except Unsupported as unsupported:
            self.reason = self.cuda_reason = f"{unsupported} is not generated"
            _log.info("%s runs operation by operation: %s", program.name, self.reason)

    @functools.cached_property
    def cuda_source(self) -> Source | None:
        """For a GPU; None where there is none for a CPU."""
        if self.source is None:
            return None
        try:
            if self.source.phases.sums:
                raise Unsupported("a sum over the ranks inside")
            return generate_cuda(self._group, self._nodes, self._program)
        except Unsupported as unsupported:
            self.cuda_reason = f"{unsupported} is not generated for GPUs"
            _log.info("%s runs operation by operation: %s", self._name, self.cuda_reason)
            return None

    def text(self, device: str) -> str:
        """The source for a kind of device, or why there is none."""
        source = self.cuda_source if device == "cuda" else self.source
        reason = self.cuda_reason if device == "cuda" else self.reason
        return source.text if source else f"// {reason}\n"

    def backend(
        self, group: dist.ProcessGroup, device: torch.device, *, on_gpus: bool = True
    ) -> Any:
        """The group's backend, if this can run there: the same on all ranks. Else None."""
        if self.source is None or not self.source.scatter.numel:
            return None
        if device.type not in ("cpu", "cuda"):
            return None
        try:
            backend = _backend(group)
        except ValueError:
            return None
        on_gpu = backend.on_gpu(torch.empty(0, device=device))
        return None if on_gpu and not (on_gpus and self.cuda_source) else backend

    def prepared(self, backend: object, rank: int) -> Any:
        """The operation on CPU tensors of what the program says, which this thread carries out."""
        source, size = self.source, self._program.world_size
        assert source is not None
        read = [_like(node, size, rank) for node in source.made_for[: 1 + len(source.operands)]]
        return load_extension()._PreparedProgram(
            backend,
            source.key,
            source.op,
            read,
            source.kinds,
            source.reads,
            [_like(node, size, rank) for node, _ in source.outputs],
            source.gathered,
            source.periods,
            (0, 0, 0, source.row, source.scratch),
            source.phases.arguments,
        )

    def function(self) -> int:
        """The address of the function for a CPU; 0 where this rank has none."""
        assert self.source is not None
        return compile.function(self.source.text, self._name)

    def on_gpu(self, source: Source, backend: object, tensor: torch.Tensor) -> Any:
        """What the driver has of the function for the GPU of a tensor, or 0."""
        device = tensor.get_device()
        if device not in self._loaded:
            self._loaded[device] = nvrtc.kernel(source, self._name, backend, tensor)
        return self._loaded[device]

    def written(self, call: Call, number: Mapping[Node, int]) -> tuple[int, ...]:
        """For each result the target in which it is computed; -1: in memory of its own.

        It depends on which tensors of the call are one and where they lie, which in a training
        loop is the same every time.
        """
        key = tuple(
            (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
            for t in (*call.given, *call.targets)
        )
        found = self._places.get(key)
        if found is None:
            assert self.source is not None
            spans = _Spans()
            places = []
            for node, _ in self.source.outputs:
                target = self._target(node, call, number, spans)
                same = (n for n, other in enumerate(call.targets) if other is target)
                places.append(next(same, -1))
            if len(self._places) >= _KEPT:
                self._places.clear()
            found = self._places[key] = tuple(places)
        return found

    def _target(
        self, node: Node, call: Call, number: Mapping[Node, int], spans: _Spans
    ) -> torch.Tensor | None:
        """Where the caller wants a result, if it can be written there while others are computed."""
        source, program, targets = self.source, self._program, call.targets
        assert source is not None
        if not targets or program.outputs.count(node) != 1:
            return None
        target = targets[program.outputs.index(node)]
        if not target.is_contiguous() or target.is_neg() or target.device != call.device:
            return None
        if any(other is not target and spans.overlap(other, target) for other in targets):
            return None
        kinds = dict(source.operands)
        # What travels with the reduction.
        whole_ones = (x for x, whole in source.outputs if whole)
        first = next((x for x in whole_ones if x.numel == source.scatter.numel), None)
        whole = dict(source.outputs)[node]
        phases = source.phases
        at = source.outputs.index((node, whole))
        for argument in program.inputs:
            value = None if argument.scalar else call.slots[number[argument]]
            if value is None or not spans.overlap(value, target):
                continue
            if phases.single and phases.single[at]:
                return None  # it is written before the elements are read
            # It may be what is read element by element, by nobody else.
            same = (
                value.data_ptr() == target.data_ptr()
                and value.numel() == target.numel()
                and value.dtype == target.dtype
                and value.is_contiguous()
            )
            if not same or argument in program.outputs:
                return None
            if not self._inside.issuperset(program.users[argument]):
                return None
            is_source = argument is source.scatter.operands[0]
            kind = kinds.get(argument)
            if is_source and (node is not first or kind is not None):
                return None
            if not is_source and kind != (FULL if whole else PART):
                return None
            # Of a row one pass has written results, and the next one still reads operands.
            if not is_source and source.row > 1:
                return None
            # As is a later phase.
            if phases.sums and (
                is_source or phases.read[list(kinds).index(argument)] > phases.written[at]
            ):
                return None
        # Arguments that are no longer needed have left their slots.
        for value in call.given:
            if spans.overlap(value, target) and not any(value is x for x in call.slots):
                return None
        return target


def begin(
    backend: Any,
    function: object,
    source: Source,
    contribution: torch.Tensor,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    numbers: Sequence[float],
    seeds: Sequence[int],
    done: torch.Tensor,
    async_op: bool,
    first: int = 0,
    runs: int = 0,
    spacing: int = 0,
    mark: Mark = NO_MARK,
) -> Any:
    """The group's operation: its Work, or None where it has been done. `done`: if by all ranks.

    The operation checks sizes and devices.
    """
    for node, tensor in zip(source.made_for, (contribution, *operands, *results), strict=True):
        if tensor.dtype is not node.dtype:
            raise unfit(node, tensor)
    if contribution.numel() != source.scatter.numel:
        raise unfit(source.scatter.operands[0], contribution)
    here = not backend.on_gpu(contribution)
    return backend.fused_program_(
        function,
        source.key ^ mark.program ^ (0 if here else mark.numbers),
        source.op,
        contribution,
        operands,
        source.kinds,
        source.reads,
        results,
        source.gathered,
        with_mark(numbers, mark) if here else numbers,  # a GPU's kernel takes no others
        [*seeds, *source.periods],
        done,
        async_op,
        (first, runs, spacing, source.row, source.scratch),
        source.phases.arguments,
    )


def with_mark(numbers: Sequence[float], mark: Mark) -> Sequence[float]:
    """Ranks compare these numbers; the function does not read the last one."""
    return [*numbers, float(mark.numbers >> 11)] if mark.numbers else numbers


def _like(node: Node, size: int, rank: int) -> torch.Tensor:
    """A tensor of the type and shape that a rank holds of a value; nobody reads its elements."""
    return torch.empty(held(node, size, rank), dtype=node.dtype, device="cpu")


def unfit(node: Node, tensor: torch.Tensor) -> FusionError:
    """What is raised where code would read or write memory that it was not made for."""
    return FusionError(
        f"a program is made for {node.described()}, and got {tensor.dtype} of shape "
        f"{list(tensor.shape)} on {tensor.device}: this is a bug of fusedpg, please report it"
    )


class _Spans:
    """Where tensors lie, looked up once a call."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int]] = {}

    def _of(self, t: torch.Tensor) -> tuple[int, int]:
        found = self._found.get(id(t))
        if found is None:
            found = self._found[id(t)] = span(t)
        return found

    def overlap(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        (a0, a1), (b0, b1) = self._of(a), self._of(b)
        return a0 < b1 and b0 < a1


def kernel(group: Group, nodes: tuple[Node, ...], program: Program) -> Kernel:
    """Of a group of kind "collective"; generated once.

    Groups are kept by transformations, and programs with the same group have other results: so
    it belongs to the program, with which it goes.
    """
    return program.once(group, functools.partial(Kernel, group, nodes, program))


@dataclasses.dataclass(frozen=True, eq=False)
class Alone:
    """A reduction over the ranks with nothing around it, as a program of one fused collective.

    So it says, in the group's operation, what ranks have to have alike, gives a new tensor without
    a copy before it, and adds as other fused collectives do.
    """

    given: Node
    result: Node
    kernel: Kernel

    @staticmethod
    def of(node: Node, program: Program) -> Alone | None:
        """None where it is not generated; of one type and shape alike in all programs."""
        return program.once(("alone", node), lambda: Alone._made(node, program.world_size))

    @staticmethod
    def _made(node: Node, world_size: int) -> Alone | None:
        operand = node.operands[0]
        given = Node("input", (), PARTIAL, node.shape, operand.dtype, "x")
        kind = (SHARD, node.shape, node.dtype)
        result = Node("reduce_scatter", (given,), *kind, "reduced", node.attributes)
        nodes: tuple[Node, ...] = (result,)
        if node.op == "all_reduce":
            result = Node("all_gather", nodes, REPLICATE, *kind[1:], "gathered")
            nodes = (*nodes, result)
        group = Group("collective", frozenset(nodes))
        program = Program("sum", (given,), (result,), world_size, True, (group,))
        found = Kernel(group, nodes, program)
        return Alone(given, result, found) if found.source is not None else None


class Begun:
    """An operation of a group that has begun."""

    def __init__(self, work: Any, done: torch.Tensor) -> None:
        self._work = work
        self._done = done

    def wait(self) -> bool:
        """Whether it has been done: not where a rank has no compiled function."""
        if self._work is not None:
            self._work.wait()
        return bool(self._done.item())


class Direct:
    """The one fused collective of a program, which takes its inputs and gives its results.

    What does not change from call to call is looked up once. Values are given by their names.
    """

    def __init__(self, name: str, source: Source) -> None:
        self._function = compile.function(source.text, name)
        self._source = source
        self._contribution = source.scatter.operands[0].name
        # Weights of a norm are taken in a wider type.
        self._operands = [(_input(node).name, node.dtype) for node, _ in source.operands]

    @staticmethod
    def of(program: Program) -> Direct | None:
        """None where the program is more than that, or is not generated: alike on all ranks."""
        groups = [(group, nodes) for group, nodes in program.units if group is not None]
        others = [node for group, nodes in program.units if group is None for node in nodes]
        if len(groups) != 1 or any(node.op not in ("input", "constant", "cast") for node in others):
            return None
        group, nodes = groups[0]
        source = kernel(group, nodes, program).source if group.kind == "collective" else None
        if source is None or not source.scatter.numel or source.materialised:
            return None
        if source.phases.sums:
            return None
        outputs = tuple(node for node, _ in source.outputs)
        given = [source.scatter.operands[0], *(_input(node) for node, _ in source.operands)]
        given += [*source.numbers, *source.seeds]
        given += [node.operands[1] for node in source.dropouts]
        if outputs != program.outputs:
            return None
        if any(node.op != "input" for node in given):
            return None
        return Direct(program.name, source)

    @property
    def compiled(self) -> bool:
        """Whether this rank has a function; the group's operation finds that out for all."""
        return bool(self._function)

    def _given(self, values: Mapping[str, object]) -> tuple[list[float], list[int]]:
        return scalars(self._source, lambda node: values[node.name])

    def _read(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        return [values[name].to(dtype).contiguous() for name, dtype in self._operands]

    def begin(
        self,
        backend: object,
        values: Mapping[str, Any],
        results: Sequence[torch.Tensor],
        *,
        first: int = 0,
        runs: int = 0,
        spacing: int = 0,
        async_op: bool = False,
    ) -> Begun:
        """Writes the results, as an operation of the group.

        Args:
            first: the index, to dropout, of the first element: for rows of a larger tensor.
            runs: where each rank gets its part: the contribution is so many runs of equal blocks,
                one block for each rank in every run, and the part is this rank's blocks. 0: it is
                shard_range.
            spacing: of the first elements of neighbouring blocks, their distance in that tensor.
        """
        numbers, seeds = self._given(values)
        done = torch.zeros(1, dtype=torch.uint8, device="cpu")
        work = begin(
            backend,
            self._function,
            self._source,
            values[self._contribution].contiguous(),
            self._read(values),
            results,
            numbers,
            seeds,
            done,
            async_op,
            first,
            runs,
            spacing,
        )
        return Begun(work, done)

    def here(self, values: Mapping[str, Any], result: torch.Tensor, *, first: int = 0) -> None:
        """The computation alone, on whole tensors: the contribution is taken for the sum.

        It is given in the type that sums have, which is float for 16-bit types. `first` is as in
        `begin`.
        """
        numbers, seeds = self._given(values)
        total = values[self._contribution].contiguous()
        operands = self._read(values)
        scatter, (of_result, _) = self._source.scatter, self._source.outputs[0]
        assert scatter.dtype is not None
        wide = torch.float32 if scatter.dtype.itemsize == 2 else scatter.dtype
        pairs = [(scatter, total, wide), (of_result, result, of_result.dtype)]
        pairs += [(n, x, n.dtype) for (n, _), x in zip(self._source.operands, operands)]
        for node, tensor, dtype in pairs:
            fits = tensor.dtype is dtype and tensor.numel() == node.numel
            if not fits or tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise unfit(node, tensor)
        load_extension()._call_generated(
            self._function,
            total,
            operands,
            [result],
            numbers,
            [*seeds, *self._source.periods],
            first,
            result.numel(),
        )


def _input(node: Node) -> Node:
    """What a value is, or is cast from."""
    return node.operands[0] if node.op == "cast" else node


def sources(program: Program, device: str = "cpu") -> list[str]:
    """The texts of a program's fused collectives on a kind of device."""
    units = ((group, nodes) for group, nodes in program.units if group is not None)
    return [kernel(*unit, program).text(device) for unit in units if unit[0].kind == "collective"]
