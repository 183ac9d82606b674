"""A call like an earlier one, without what a call looks up first.

A small program takes as long as its collective, so that little of Python may stand around it. In a
call of a few megabytes Python is a tenth, since the data have driven it out of the caches.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.fusion import alike
from fusedpg.fusion.agreed import agreed, refusals
from fusedpg.fusion.captured import Captured
from fusedpg.fusion.codegen_rows import BROADCAST, SLICE
from fusedpg.fusion.compiled import Alone, Kernel, kernel, with_mark
from fusedpg.fusion.eager import begin_broadcast, begin_gather
from fusedpg.fusion.here import Here, own
from fusedpg.fusion.ir import COLLECTIVES, Group, Node, Program
from fusedpg.fusion.local import LocalKernel, local_kernel
from fusedpg.fusion.ops import POINTWISE, SCALAR_OPS
from fusedpg.fusion.places import Ranks
from fusedpg.fusion.scalars import scalars
from fusedpg.fusion.signature import Signature

_KEPT = 256  # calls of a function on a group, and places of such

Slots = list[Any]  # the values of a call, by their nodes' numbers
# With the call's mark and group, which steps do not keep; whether it has been done.
Step = Callable[[Slots, alike.Mark, dist.ProcessGroup], bool]


_UNFIT = object()  # by it a program that has no shortcut says why


class _Unfit(Exception):
    """Why a program has no shortcut."""


class _Steps:
    """A program on tensors of CPUs of one host, as functions one behind the other.

    They do what `eager.Executor` does with it, which another rank may use in the same call: the
    group's operations are the same, in the same order, and so are the results' bits.
    """

    def __init__(
        self,
        program: Program,
        group: dist.ProcessGroup,
        ranks: Ranks,
        places: Sequence[int],
    ) -> None:
        self._program, self._group, self._ranks = program, group, ranks
        self._here = Here(ranks.size, ranks.rank)
        self.number = {node: number for number, node in enumerate(program.nodes)}
        self._places = places  # of results in the targets, which stand behind the values
        self.kernels: list[Kernel] = []
        self.marked = False  # whether an operation of the group has the call's mark
        self.plain: set[int] = set()  # values that torch's functions give
        # Constants are there from the beginning.
        self.template = [
            node.attribute("value") if node.op == "constant" else None for node in program.nodes
        ]
        self.steps: list[tuple[Step, tuple[int, ...]]] = []
        for (unit, nodes), released in zip(program.units, program.released):
            before = len(self.steps)
            self._unit(unit, nodes)
            if len(self.steps) > before:
                last, _ = self.steps.pop()
                free = tuple(self.number[node] for node in released if node.op != "constant")
                self.steps.append((last, free))

    def _unit(self, unit: Group | None, nodes: tuple[Node, ...]) -> None:
        if unit is not None and unit.kind == "overlap":
            raise _Unfit("it has a thread of its own")
        if unit is not None and unit.kind == "collective":
            found = kernel(unit, nodes, self._program)
            if found.source is not None:
                self._collective(found, self.number, marked=not self._program.one_group)
                return
        if unit is not None and unit.kind == "compute":
            here = local_kernel(unit, nodes, self._program)
            if here.source is not None:
                self._compute(here)
                return
        for node in nodes:
            self._node(node)

    def _add(self, step: Step) -> None:
        self.steps.append((step, ()))

    def _collective(self, found: Kernel, number: Mapping[Node, int], marked: bool) -> None:
        """`number`: of what the kernel reads and gives. `marked`: if it is the first."""
        source = found.source
        assert source is not None
        if not found.compiled:
            raise _Unfit("it is not compiled")
        backend = found.backend(self._group, {source.scatter.operands[0]: torch.empty(0)})
        if backend is None:
            raise _Unfit("it is not generated code that the group runs")
        read: list[int] = []
        slices: list[tuple[int, int, Node]] = []  # where in what is read, of which value
        for node in (source.scatter.operands[0], *(node for node, _ in source.operands)):
            if node in source.materialised:
                slices.append((len(read), number[node.operands[0]], node))
                read.append(-1)
            else:
                read.append(number[node])
        written = [number[node] for node, _ in source.outputs]
        run = found.prepared(backend, self._ranks.rank).run
        marked = marked and not self.kernels
        bare = not (source.numbers or source.seeds or source.dropouts)
        here, targets, name = self._here, [*self._places], self._program.name
        first = not self.kernels
        self.kernels.append(found)
        self.marked |= marked
        behind = len(self.number)

        def step(slots: Slots, mark: alike.Mark, group: dist.ProcessGroup) -> bool:
            given = [slots[place].contiguous() if place >= 0 else None for place in read]
            for place, whole, node in slices:
                value = here.slice(slots[whole], node.shape, node.layout.row)
                given[place] = value.contiguous()
            numbers, seeds = ([], []) if bare else scalars(source, lambda node: slots[number[node]])
            said = mark if marked else alike.NO_MARK
            results = [slots[behind + place] for place in targets]
            made = run(
                found.compiled, given, results, with_mark(numbers, said), seeds, said.program
            )
            if made is None:
                if not first:
                    raise RuntimeError(f"{name}: a rank has lost a compiled function that it had")
                found.leave(group)
                return False
            for place, value in zip(written, made):
                slots[place] = value
            return True

        self._add(step)

    def _compute(self, here: LocalKernel) -> None:
        source = here.source
        assert source is not None
        if not here.usable(self._group):
            raise _Unfit("it is not generated code on all ranks")
        number, rank, place = self.number, self._ranks.rank, self._here
        operands = [
            (number[node.operands[0] if how == SLICE else node], how, shape)
            for node, how, shape in source.operands
        ]
        written = [number[node] for node in source.outputs]

        def step(slots: Slots, _: alike.Mark, __: dist.ProcessGroup) -> bool:
            given = []
            for at, how, shape in operands:
                value = slots[at]
                if how == SLICE:
                    value = place.slice(value, shape)
                elif how == BROADCAST:
                    value = value.expand(shape)
                given.append(value.contiguous())
            results = here.compute(given, *scalars(source, lambda node: slots[number[node]]), rank)
            for at, value in zip(written, results):
                slots[at] = value
            return True

        self._add(step)

    def _node(self, node: Node) -> None:
        if node.op in ("input", "constant"):
            return
        at = self.number[node]
        read = [self.number[operand] for operand in node.operands]
        if node.scalar:
            function = SCALAR_OPS[node.op]

            def number(slots: Slots, _: alike.Mark, __: dist.ProcessGroup) -> bool:
                slots[at] = function(*[slots[place] for place in read])
                return True

            self._add(number)
        elif node.op in ("all_reduce", "reduce_scatter"):
            alone = Alone.of(node, self._program)
            if alone is None:
                raise _Unfit("a reduction is not generated")
            self._collective(alone.kernel, {alone.given: read[0], alone.result: at}, marked=True)
        elif node.op in COLLECTIVES:
            self._moved(node, at, read[0])
        else:
            self._torch(node, at, read)

    def _moved(self, node: Node, at: int, read: int) -> None:
        begin = begin_gather if node.op == "all_gather" else begin_broadcast
        size = self._ranks.size

        def step(slots: Slots, _: alike.Mark, group: dist.ProcessGroup) -> bool:
            _, whole = begin(node, slots[read], size, group, False)
            if node.op == "all_gather":
                whole = whole[: node.numel].reshape(node.shape)
            slots[at] = whole
            return True

        self._add(step)

    def _torch(self, node: Node, at: int, read: list[int]) -> None:
        self.plain.add(at)
        compute = self._here.compute
        # A number may be one that no float64 holds, and dropout has a mask to make.
        quick = POINTWISE.get(node.op) if not any(x.scalar for x in node.operands) else None
        attributes, dtype = dict(node.attributes), node.dtype

        def step(slots: Slots, _: alike.Mark, __: dist.ProcessGroup) -> bool:
            given = [slots[place] for place in read]
            value = quick(*given, **attributes) if quick is not None else None
            slots[at] = (
                value if value is not None and value.dtype is dtype else compute(node, given)
            )
            return True

        self._add(step)


class Shortcut:
    """A program on CPUs of one host, as a call like an earlier one carries it out.

    Values are in the order of the function's parameters. `_EarlierCalls` has compared them with
    those of the earlier call.
    """

    def __init__(
        self,
        program: Program,
        group: dist.ProcessGroup,
        captured: Captured,
        values: Mapping[str, Any],
        places: Sequence[int],
    ) -> None:
        self._refusals = refusals()  # before steps ask what ranks agree on
        steps = _Steps(program, group, Ranks.of(group), places)
        number = {name: number for number, name in enumerate(values)}
        tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        self._tensors = [number[name] for name in tensors]
        if not steps.kernels and len(tensors) < len(values):
            raise _Unfit("no reduction tells whether ranks have the same numbers")
        self._program = program
        self._captured = captured
        self._reads = captured()
        self._kernels = steps.kernels
        self._steps = steps.steps
        self._template = steps.template[len(program.inputs) :]
        self._inputs = [number[node.name] for node in program.inputs]
        self._outputs = [steps.number[node] for node in program.outputs]
        # Results of torch's functions may be views of arguments.
        self._views = steps.plain.intersection(self._outputs)
        self._plain = bool(steps.plain)
        self._codes = [found.code for found in steps.kernels]
        used = [n.name for n in program.inputs if n.scalar and program.users[n]]
        self._used = [(name, number[name]) for name in used]
        # Only the mark tells other ranks of a program of several parts what it was called with.
        self._marked = Ranks.of(group).size > 1 and steps.marked
        self._mark: tuple[list[str], alike.Mark] = [], alike.NO_MARK

    @staticmethod
    def of(
        program: Program,
        group: dist.ProcessGroup,
        captured: Captured,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Shortcut | None:
        """After a call; None where results are not computed in all of the targets.

        Raises:
            _Unfit: where no call of the program has one.
        """
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        if not Ranks.of(group).one_host:
            raise _Unfit("between hosts, and on other backends, calls are no shorter")
        places: Sequence[int] = ()
        if targets:
            found = only_kernel(program)
            if found is None or found.source is None:
                return None
            by_node = {node: values[node.name] for node in program.inputs}
            places = found.written(by_node, tensors, targets, torch.device("cpu"))
            # Each target is a result that is computed there.
            if sorted(places) != list(range(len(targets))):
                return None
        return Shortcut(program, group, captured, values, places)

    def take(
        self, group: dist.ProcessGroup, values: list[Any], targets: Sequence[torch.Tensor]
    ) -> Any:
        """What the call returns; None where it has to be carried out another way."""
        reads = self._captured()
        # Mostly it is the same object, which is quicker to see than that it is equal.
        if (reads is not self._reads and reads != self._reads) or not self._usable(group):
            return None
        slots = [*map(values.__getitem__, self._inputs), *self._template, *targets]
        if not self._plain:
            done = self._run(slots, values, group)
        else:
            # A program has its own types and backward, which torch's modes must not change.
            with torch.no_grad(), torch._C._DisableAutocast():
                done = self._run(slots, values, group)
        if not done:
            return None
        results = [slots[number] for number in self._outputs]
        if self._views:
            given = [values[number] for number in self._tensors]
            results = [
                own(result, given) if number in self._views else result
                for number, result in zip(self._outputs, results)
            ]
        return results[0] if self._program.single else tuple(results)

    def _usable(self, group: dist.ProcessGroup) -> bool:
        """Whether all ranks still have the functions."""
        count = refusals()
        if count != self._refusals:
            if any(agreed(group, code) is False for code in self._codes):
                return False
            self._refusals = count
        return True

    def _run(self, slots: Slots, values: list[Any], group: dist.ProcessGroup) -> bool:
        mark = self._mark_of(values) if self._marked else alike.NO_MARK
        for step, free in self._steps:
            if not step(slots, mark, group):
                # All ranks go on operation by operation, also those that did not come this way.
                return False
            for number in free:
                slots[number] = None
        return True

    def _mark_of(self, values: list[Any]) -> alike.Mark:
        numbers = [repr(values[at]) for _, at in self._used]  # as 0.0 is equal to -0.0
        known, mark = self._mark
        if mark is alike.NO_MARK or numbers != known:
            mark = alike.mark(self._program, {name: values[at] for name, at in self._used})
            self._mark = numbers, mark
        return mark


def only_kernel(program: Program) -> Kernel | None:
    """The one fused collective that a program is, if its arguments are all that it reads."""
    units = [(unit, nodes) for unit, nodes in program.units if unit is not None]
    others = [node for unit, nodes in program.units if unit is None for node in nodes]
    if len(units) != 1 or units[0][0].kind != "collective":
        return None
    if any(not node.scalar and node.op != "input" for node in others):
        return None
    found = kernel(*units[0], program)
    source = found.source
    if source is None or source.materialised:
        return None
    read = [source.scatter.operands[0], *(node for node, _ in source.operands)]
    return found if all(node.op == "input" for node in read) else None


class _OfGroup:
    """The shortcuts of a function on a group."""

    def __init__(self, signature: Signature) -> None:
        self.earlier = load_extension()._EarlierCalls(signature.parameters)
        # By numbers that are never used again: another thread may hold one for a while.
        self.shortcuts: dict[int, Shortcut] = {}
        self.numbers = itertools.count()


class Shortcuts:
    """Those of a function: by what its calls were given.

    A shortcut has the group's backend, with its shared memory: so it goes with the group.
    """

    def __init__(self, signature: Signature, captured: Captured) -> None:
        self._signature = signature
        self._captured = captured
        self._found: weakref.WeakKeyDictionary[dist.ProcessGroup, _OfGroup] = (
            weakref.WeakKeyDictionary()
        )

    def take(
        self,
        group: dist.ProcessGroup | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """What the call returns, where a shortcut has carried it out; else None."""
        group = dist.GroupMember.WORLD if group is None else group
        # There may be no default group, and a rank that is in none has a number in its place.
        if not isinstance(group, dist.ProcessGroup):
            return None
        known = self._found.get(group)
        if known is None:
            return None
        found = known.earlier.find(args, kwargs, targets)
        if found is None:
            return None
        number, values = found
        shortcut = known.shortcuts.get(number)
        return None if shortcut is None else shortcut.take(group, values, targets)

    def add(
        self,
        program: Program,
        group: dist.ProcessGroup | None,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> None:
        """After a call that came by no shortcut; the first one of its kind may be the only one."""
        if group is None or _UNFIT in program.made:
            return
        known = self._found.get(group)
        if known is None:
            known = self._found[group] = _OfGroup(self._signature)
        given = list(values.values())
        if len(known.earlier) >= _KEPT:
            known.earlier.clear()
            known.shortcuts.clear()
        if not known.earlier.seen(given, targets):
            return
        number = next(known.numbers)
        known.shortcuts.pop(known.earlier.add(given, targets, number), None)
        try:
            found = Shortcut.of(program, group, self._captured, values, targets)
        except _Unfit as unfit:
            program.made[_UNFIT] = str(unfit)  # it is of one group
            return
        if found is not None:
            known.shortcuts[number] = found


__all__ = ["Shortcuts", "only_kernel"]
