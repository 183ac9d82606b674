"""How a program is run on a group: prepared steps over numbered slots, made once.

The first call makes the plan and runs it; a call like an earlier one finds the plan by its
arguments, without what a call looks up first. A small program takes as long as its collective, so
that little of Python may stand around it.
"""

from __future__ import annotations

import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedpg import _fork
from fusedpg._agreement import Answer, answer
from fusedpg._registration import load_extension
from fusedpg.functional import _backend, _is_ours
from fusedpg.fusion import alike
from fusedpg.fusion.captured import Captured, Reads
from fusedpg.fusion.chunks import ChunkedCollective
from fusedpg.fusion.compiled import Alone, kernel
from fusedpg.fusion.derivatives import smooth
from fusedpg.fusion.ir import Group, Node, Program
from fusedpg.fusion.local import LocalKernel, local_kernel
from fusedpg.fusion.messages import End, Messages, Transfer
from fusedpg.fusion.places import Ranks, with_memory
from fusedpg.fusion.signature import Signature
from fusedpg.fusion.steps import (
    Fused,
    LocalRows,
    Overlapped,
    OverlappedProgram,
    ReceiveInChunks,
    Reduction,
    Scalar,
    SendProduct,
    Step,
    Stops,
    Torch,
    compare_numbers,
    step_of,
)
from fusedpg.fusion.torch_ops import TorchOps, own

_log = logging.getLogger("fusedpg")
_lock = _fork.lock()
_KEPT = 256  # calls of a function on a group

Run = Generator[Any, None, list[torch.Tensor]]
_Plans = weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, "Plan"]]


def complete(run: Iterator[object]) -> Any:
    """The results of a run, waiting for each of its collectives.

    A program has its own types and backward, which torch's modes must not change.
    """
    with torch.no_grad(), torch._C._DisableAutocast():
        return _driven(run)


def _driven(run: Iterator[object]) -> Any:
    try:
        while True:
            wait(next(run), run)
    except StopIteration as stop:
        return stop.value


def wait(work: Any, run: Iterator[object]) -> None:
    """For what a run has stopped at. The run hears of an error, and tells whom it concerns."""
    try:
        work.wait()
    except Exception as error:
        if isinstance(run, Generator):
            run.throw(error)
        raise


class Call:
    """A run of a plan: the values of a call, and what its steps share."""

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        slots: list[Any],
        targets: Sequence[torch.Tensor] = (),
        places: Sequence[int] = (),
        *,
        repeats: bool = False,
        async_op: bool = False,
    ) -> None:
        """`places`: of a call that `repeats` an earlier one, for each result its target."""
        self.plan, self.group, self.device = plan, group, device
        self.slots, self.targets, self.places = slots, targets, places
        self.repeats = repeats
        self.async_op = async_op  # the caller does something else meanwhile
        self.compiles = True  # whether code is generated at all
        self.differentiable = False  # what the backward keeps may be a result, and attach() knows
        self.unmarked = plan.size > 1  # ranks have still to compare what they call
        self.given: Sequence[torch.Tensor] = ()  # the tensors among the arguments
        self.numbers = False  # there are other arguments
        self.messages: Messages | None = None
        self.at = 0  # the step that is being done

    def meets(self) -> bool:
        """Whether an operation of the group is still to come, in which its ranks wait."""
        if any(step.meets for step, _ in self.plan.steps[self.at :]):
            return True
        return self.at <= len(self.plan.steps) and not self.plan.reduces and self.numbers

    def met(self) -> None:
        """The step that is being done has no operation of the group any more."""
        self.at += 1

    def run(self) -> Run:
        """The results, in the layouts of the program's outputs."""
        plan, slots = self.plan, self.slots
        for self.at, (step, free) in enumerate(plan.steps):
            stops = step.run(self)
            if stops is not None:
                yield from stops
            for number in free:
                slots[number] = None
        if self.numbers and self.unmarked:  # there was no reduction
            yield from compare_numbers(self)
        self.at = len(plan.steps) + 1
        if self.messages is not None:
            yield from self.messages.finish()
        results = [slots[number] for number in plan.outputs]
        if plan.views:
            results = [self._own(*result) for result in zip(plan.outputs, results)]
        if self.targets:
            return self._into(results)
        if not self.differentiable:
            for place in plan.repeated:
                results[place] = results[place].clone()
        return results

    def _own(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """A result that does not share memory with an argument, unless it is the target."""
        if number not in self.plan.views or _is_any(value, self.targets):
            return value
        return own(value, self.given)

    def _into(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The targets, in which most results have been computed already."""
        targets = list(self.targets)
        if not all(map(operator.is_, results, targets)):
            with torch.no_grad():
                # A result may be an argument that is a target of another one.
                safe = [
                    result.clone()
                    if result is not target and _is_any(result, self.given)
                    else result
                    for target, result in zip(targets, results)
                ]
                for target, result in zip(targets, safe):
                    if target is not result:
                        target.copy_(result.reshape(target.shape))
        return targets


class Plan:
    """The steps of a program on a group, for tensors of one device.

    A plan does not keep the group, with which it goes.
    """

    def __init__(self, program: Program, group: dist.ProcessGroup, device: torch.device) -> None:
        self.program, self.device = program, device
        ranks = Ranks.of(group)
        self.size, self.rank, self._one_host = ranks.size, ranks.rank, ranks.one_host
        self.torch = TorchOps(self.size, self.rank)
        # True if all_gather takes slices of several lengths and compares them. Gloo's and torch's
        # wrapper for debugging take none, and NCCL compares nothing.
        self.uneven = (
            _is_ours(group)
            and not _backend(group).on_gpu(torch.empty(0, device=device))
            and dist.get_debug_level() != dist.DebugLevel.DETAIL
        )
        self.number = {node: number for number, node in enumerate(program.nodes)}
        self.outputs = [self.number[node] for node in program.outputs]
        # Results that are one value are tensors of their own, as a program may write to one.
        self.repeated = [n for n, at in enumerate(self.outputs) if at in self.outputs[:n]]
        self.views: set[int] = set()  # results of torch's functions: they may be views
        self.reduces = any(node.op in ("all_reduce", "reduce_scatter") for node in program.nodes)
        # Constants are there from the beginning.
        self.template = [
            node.attribute("value") if node.op == "constant" else None
            for node in program.nodes[len(program.inputs) :]
        ]
        used = [node for node in program.inputs if node.scalar and program.users[node]]
        self._used = [(node.name, self.number[node]) for node in used]
        self._mark: tuple[list[str], alike.Mark] = [], alike.NO_MARK
        self._rows: list[LocalKernel] = []
        self._answers: dict[bool, Answer] = {}  # of all of `_rows`, by whether code is wanted
        self._instead: dict[object, list[Step]] = {}
        self.steps: list[tuple[Step, tuple[int, ...]]] = []
        call = Call(self, group, device, [])
        for (unit, nodes), released in zip(program.units, program.released):
            steps = self._unit(call, unit, nodes)
            free = tuple(self.number[node] for node in released if not node.scalar)
            self.steps += [(step, ()) for step in steps[:-1]]
            self.steps += [(step, free) for step in steps[-1:]]
        if self._rows and self.size > 1:
            code = tuple(kernel.code for kernel in self._rows)
            # By whether code is wanted: a rank that does not want it has to be asked, too.
            self._answers = {yes: answer(group, ("rows", yes, code)) for yes in (True, False)}
        kinds = [step for step, _ in self.steps]
        self.fused = [step for step in kinds if isinstance(step, Fused)]
        self.plain = any(isinstance(step, Torch) for step in kinds)
        # Between hosts, and by other backends' collectives, calls are no shorter.
        self._repeats = self._one_host and device.type == "cpu" and not program.messages
        unknown = Overlapped, OverlappedProgram, Reduction
        self._repeats &= not any(isinstance(step, unknown) for step in kinds)
        # The results of the only collective may be written where the caller wants them.
        self._only = len(self.fused) == 1 and all(isinstance(x, (Fused, Scalar)) for x in kinds)

    @staticmethod
    def of(program: Program, group: dist.ProcessGroup, device: torch.device) -> Plan:
        """It is made once, and kept by the program as long as there is the group."""
        with _lock:
            plans: _Plans = program.once("plans", weakref.WeakKeyDictionary)
            of_group = plans.setdefault(group, {})
        found = of_group.get(device)
        if found is None:
            found = of_group[device] = Plan(program, group, device)
        return found

    # --- steps -------------------------------------------------------------------------------

    def _unit(self, call: Call, unit: Group | None, nodes: tuple[Node, ...]) -> list[Step]:
        kind = None if unit is None else unit.kind
        if unit is not None and kind == "overlap":
            return self._overlap(call, unit, nodes)
        if unit is not None and kind == "collective":
            found = kernel(unit, nodes, self.program)
            backend = found.backend(call.group, self.device)
            if backend is not None:
                return [Fused(call, found, backend, self.number, nodes)]
        if unit is not None and kind == "compute":
            rows = local_kernel(unit, nodes, self.program)
            if rows.source is not None and self.device.type == "cpu":
                self._rows.append(rows)
                return [LocalRows(call, rows, nodes)]
        return self._each(call, nodes, alone=True)

    def _overlap(self, call: Call, unit: Group, nodes: tuple[Node, ...]) -> list[Step]:
        chunked = ChunkedCollective.of(unit, self.program)
        if chunked is not None:
            step = OverlappedProgram.of(call, chunked)
            if step is not None:
                return [step]
            steps = self._each(call, chunked.products, alone=True)
            steps += self._unit(call, chunked.collective, chunked.nodes)
            return steps + self._each(call, chunked.sends, alone=True)
        if any(node.op == "recv" for node in nodes):
            if len(nodes) == 1:
                return self._each(call, nodes, alone=True)
            return [ReceiveInChunks(unit, nodes[1], self.number)]
        if any(node.op == "send" for node in nodes):
            return [SendProduct(unit, nodes, self.number)]
        return [Overlapped(unit, nodes, self.number)]

    def _each(self, call: Call, nodes: tuple[Node, ...], alone: bool) -> list[Step]:
        """A step for each node. `alone`: reductions may be fused collectives of their own."""
        steps: list[Step | None] = []
        for node in nodes:
            step = self._alone(call, node) if alone else None
            overlap = self.program.overlap_of(node) if node.op == "send" else None
            step = step or step_of(node, self.number, self.torch, overlap)
            if isinstance(step, Torch) and node in self.program.outputs:
                self.views.add(self.number[node])
            steps.append(step)
        return [step for step in steps if step is not None]

    def _alone(self, call: Call, node: Node) -> Step | None:
        """On CPUs of one host the step of a reduction that is generated."""
        reduces = node.op in ("all_reduce", "reduce_scatter")
        if not reduces or self.device.type != "cpu" or not self._one_host:
            return None
        found = Alone.of(node, self.program)
        if found is None:
            return None
        backend = found.kernel.backend(call.group, self.device, on_gpus=False)
        if backend is None:
            return None
        number = {found.given: self.number[node.operands[0]], found.result: self.number[node]}
        return Fused(call, found.kernel, backend, number, (node,), alone=True)

    def instead(self, call: Call, nodes: tuple[Node, ...], of_a_group: bool) -> Stops:
        """Carries out nodes one by one whose generated code cannot run."""
        key = nodes, of_a_group
        if key not in self._instead:
            self._instead[key] = self._each(call, nodes, alone=of_a_group)
        run = _run_each(self._instead[key], call)
        if call.async_op:
            return run  # whoever waits for it has set torch's modes
        complete(run)
        return None

    # --- what ranks know of each other ---------------------------------------------------------

    def mark(self, slots: list[object]) -> alike.Mark:
        """The mark of a call."""
        numbers = [repr(slots[at]) for _, at in self._used]  # as 0.0 is equal to -0.0
        known, mark = self._mark
        if mark is alike.NO_MARK or numbers != known:
            mark = alike.mark(self.program, self.numbers(slots))
            self._mark = numbers, mark
        return mark

    def numbers(self, slots: list[object]) -> dict[str, object]:
        """The numbers that are used, by their names."""
        return {name: slots[at] for name, at in self._used}

    def rows_usable(self, call: Call) -> bool | None:
        """Whether the rank computes its rows with generated code; None: ranks have to be asked.

        Where one rank cannot, none does, or values that are alike on all ranks would not be.
        """
        if self.size > 1:
            known = self._answers[call.compiles].all_have_it
            if not known:
                return known
        return call.compiles and all(kernel.function() for kernel in self._rows)

    def ask(self, call: Call) -> Iterator[object]:
        """Asks the group once for all rows of the program."""
        able = float(call.compiles and all(kernel.function() for kernel in self._rows))
        flag = torch.tensor([able], dtype=torch.float32, device="cpu")
        yield dist.all_reduce(flag, dist.ReduceOp.MIN, group=call.group, async_op=True)
        self._answers[call.compiles].all_have_it = bool(flag.item())
        if not flag.item():
            _log.info("%s: a rank has no compiled function", self.program.name)

    # --- calls -------------------------------------------------------------------------------

    def run(
        self,
        call: Call,
        arguments: Mapping[str, object],
        stages: dist.ProcessGroup | None,
        wrt: Collection[str],
        forward: Mapping[End, int],
    ) -> Run:
        if stages is not None and self.program.messages:
            active = smooth(self.program, wrt) if wrt else ()
            call.messages = Messages(self.program, stages, self.rank, self.device, active, forward)
        try:
            call.compiles = bool(load_extension()._fusion_settings()[0])
            # A graph of the GPU is being made, for which the host cannot wait.
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                call.unmarked = False
            arguments = with_memory(arguments)  # who waits for a message is told what it raises
            call.given = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
            call.slots += [*(arguments[x.name] for x in self.program.inputs), *self.template]
            if call.messages is None:
                return (yield from call.run())
            return (yield from _at_messages(call.run()))
        except Exception as error:
            if call.messages is not None:
                call.messages.give_up(error)
            raise

    def repeatable(self, call: Call) -> bool:
        """Whether a call like one that has run can do without what a call looks up first.

        Only steps that tell other ranks of what they find wrong can.
        """
        if not self._repeats or not all(step.usable for step in self.fused):
            return False
        if self._rows and not self.rows_usable(call):
            return False
        if call.numbers and not self.fused:
            return False  # no reduction tells whether ranks have the same numbers
        # Each target is a result that is computed there.
        written = self._only and sorted(call.places) == list(range(len(call.targets)))
        return written or not call.targets


def _is_any(value: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def start(
    program: Program,
    group: dist.ProcessGroup,
    arguments: Mapping[str, object],
    targets: Sequence[torch.Tensor] = (),
    *,
    async_op: bool = False,
    stages: dist.ProcessGroup | None = None,
    wrt: Collection[str] = (),
    device: torch.device | None = None,
    forward: Mapping[End, int] = MappingProxyType({}),
) -> tuple[Call, Run]:
    """A call of a program with these arguments, and its run.

    Args:
        wrt: the arguments whose gradients will be asked for.
        device: of the results; None: that of the arguments.
        forward: of a backward, the numbers of its forward's messages.
    """
    if program.messages and stages is None:
        raise ValueError(
            f"`{program.name}` sends to another stage or receives from it: call it with "
            "stages=, the group of the ranks that have this rank's place in their stages"
        )
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    device = device or (tensors[0].device if tensors else torch.device("cpu"))
    plan = Plan.of(program, group, device)
    # A call that sends stops at messages alone.
    call = Call(plan, group, device, [], targets, async_op=async_op and not program.messages)
    call.numbers = len(tensors) < len(arguments)
    call.differentiable = bool(wrt)
    return call, plan.run(call, arguments, stages, wrt, forward)


def _run_each(steps: list[Step], call: Call) -> Iterator[object]:
    for step in steps:
        yield from step.run(call) or ()


def _at_messages(run: Run) -> Run:
    """Stops at messages alone: what takes longest, and goes on while others compute."""
    try:
        while True:
            work = next(run)
            if isinstance(work, Transfer):
                yield work
            else:
                work.wait()
    except StopIteration as stop:
        results: list[torch.Tensor] = stop.value
        return results


class _Known(NamedTuple):
    """A call that has run, without its values."""

    plan: Plan
    reads: Reads  # of the function, from outside
    inputs: list[int]  # the places of the program's inputs among the values
    tensors: list[int]
    places: Sequence[int]


class _OfGroup:
    """The calls of a function on a group."""

    def __init__(self, signature: Signature) -> None:
        self.earlier = load_extension()._EarlierCalls(signature.parameters)
        self.known: dict[int, _Known] = {}
        # Numbers are never used again: another thread may hold one for a while.
        self.numbers = itertools.count()


class EarlierCalls:
    """Finds the plan of a call by what an earlier call of the function was given.

    A plan has the group's backend, with its shared memory: so it goes with the group.
    """

    def __init__(self, signature: Signature, captured: Captured) -> None:
        self._signature = signature
        self._captured: Callable[[], Reads] = captured
        self._of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _OfGroup] = (
            weakref.WeakKeyDictionary()
        )

    def repeat(
        self,
        group: dist.ProcessGroup | None,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """What a call returns that is like an earlier one; None where none is known."""
        group = dist.GroupMember.WORLD if group is None else group
        # There may be no default group, and a rank that is in none has a number in its place.
        if not isinstance(group, dist.ProcessGroup):
            return None
        of_group = self._of_groups.get(group)
        found = None if of_group is None else of_group.earlier.find(args, kwargs, targets)
        if of_group is None or found is None:
            return None
        number, values = found
        known = of_group.known.get(number)
        if known is None:
            return None
        plan, reads, inputs, tensors, places = known
        now = self._captured()
        # Mostly it is the same object, which is quicker to see than that it is equal.
        if now is not reads and now != reads:
            return None
        for step in plan.fused:
            if step.answer.all_have_it is False:
                return None
        slots = [*map(values.__getitem__, inputs), *plan.template]
        call = Call(plan, group, plan.device, slots, targets, places, repeats=True)
        if plan.views or targets:
            call.given = [values[number] for number in tensors]
        run = call.run()
        results = complete(run) if plan.plain else _driven(run)
        return results[0] if plan.program.single else tuple(results)

    def add(self, call: Call, values: Mapping[str, object]) -> None:
        """After a call that was looked up, with its arguments by name."""
        if not call.plan.repeatable(call):
            return
        of_group = self._of_groups.get(call.group)
        if of_group is None:
            of_group = self._of_groups[call.group] = _OfGroup(self._signature)
        if len(of_group.earlier) >= _KEPT:
            of_group.earlier.clear()
            of_group.known.clear()
        place = {name: number for number, name in enumerate(values)}
        number = next(of_group.numbers)
        try:
            before = of_group.earlier.add([*values.values()], call.targets, number)
        except ValueError:  # tensors of another kind, which are not known again by their looks
            return
        of_group.known.pop(before, None)
        of_group.known[number] = _Known(
            call.plan,
            self._captured(),
            [place[node.name] for node in call.plan.program.inputs],
            [n for n, value in enumerate(values.values()) if isinstance(value, torch.Tensor)],
            call.places,
        )
