"""A call like an earlier one, without what a call looks up first.

Of a call of a few megabytes Python is a tenth, since the data have driven it out of the caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.fusion.captured import Captured
from fusedpg.fusion.compiled import Kernel, begin, kernel
from fusedpg.fusion.ir import Node, Program
from fusedpg.fusion.ops import SCALAR_OPS
from fusedpg.fusion.scalars import scalars
from fusedpg.fusion.trace import ambient

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KEPT = 256
_SHORTCUT = object()  # by it a program has the kernel that its shortcuts call, or None


class Shortcut:
    """A program that is one fused collective on a CPU, and what a call of it was given.

    It is taken where tensors are of the same kind as in that call. Targets of `into` are written
    where they lie at the same places, too: then results can be computed at the same places.
    """

    def __init__(
        self,
        found: Kernel,
        backend: Any,
        program: Program,
        captured: Captured,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
        places: Sequence[int],
        made: Sequence[torch.Tensor],
    ) -> None:
        source = found.source
        assert source is not None
        self._kernel = found
        self._captured = captured
        self._reads = captured(), ambient("cpu")
        self._backend = backend
        self._source = source
        inputs = {node.name: node for node in program.inputs}
        self._inputs = [inputs.get(name) for name in values]
        self._read = source.scatter.operands[0], [node for node, _ in source.operands]
        self._scalars = [
            node
            for unit, nodes in program.units
            if unit is None
            for node in nodes
            if node.op != "input"
        ]
        self._places = places
        self._single = program.single
        # Of a call without targets: its new tensors, and which of them it returns.
        computed = [node for node, _ in source.outputs]
        self._made = [(result.shape, result.dtype) for result in made]
        self._order = [computed.index(node) for node in program.outputs] if made else []
        self._types = [*map(type, values.values())]
        self._tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        # Of each of these values there is a program.
        self._flags = [
            (name, value)
            for name, value in values.items()
            if isinstance(value, (bool, str, type(None)))
        ]
        tensors = [*(values[name] for name in self._tensors), *targets]
        self._requires_grad = any(tensor.requires_grad for tensor in tensors)
        self._same = load_extension()._SameTensors(tensors, bool(targets))

    @staticmethod
    def of(
        program: Program,
        group: dist.ProcessGroup,
        captured: Captured,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> Shortcut | None:
        """After a call; None where calls like it do more than the one operation."""
        if _SHORTCUT not in program.made:
            program.made[_SHORTCUT] = only_kernel(program)
        found: Kernel | None = program.made[_SHORTCUT]
        if found is None or not found.compiled:
            return None
        source = found.source
        assert source is not None
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        if not all(map(_ordinary, (*tensors, *targets))):
            return None
        by_node: dict[Node, Any] = {node: values[node.name] for node in program.inputs}
        read = [source.scatter.operands[0], *(node for node, _ in source.operands)]
        if any(not by_node[node].is_contiguous() for node in read):
            return None
        backend = found.backend(group, by_node)
        if backend is None:
            return None
        by_output = dict(zip(program.outputs, results))
        if not targets:
            if by_output.keys() != dict(source.outputs).keys():
                return None
            made = [by_output[node] for node, _ in source.outputs]
            return Shortcut(found, backend, program, captured, values, (), (), made)
        places = found.written(by_node, tensors, targets, torch.device("cpu"))
        # Each target is a result that is computed there.
        if sorted(places) != list(range(len(targets))):
            return None
        return Shortcut(found, backend, program, captured, values, targets, places, ())

    def take(
        self,
        group: dist.ProcessGroup,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """What a call returns that is like that one, and on the same group; None for another."""
        if [*map(type, values.values())] != self._types:
            return None
        if self._flags and any(values[name] != flag for name, flag in self._flags):
            return None
        if self._requires_grad and torch.is_grad_enabled():
            return None
        if not self._same.are([*map(values.__getitem__, self._tensors), *targets]):
            return None
        if (self._captured(), ambient("cpu")) != self._reads:
            return None
        if not self._kernel.usable(group):
            return None
        by_node: dict[Any, Any] = dict(zip(self._inputs, values.values()))
        for node in self._scalars:
            if node.op == "constant":
                by_node[node] = node.attribute("value")
            else:
                by_node[node] = SCALAR_OPS[node.op](*(by_node[x] for x in node.operands))
        source, (contribution, operands) = self._source, self._read
        results = (
            [*map(targets.__getitem__, self._places)]
            if targets
            else [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in self._made]
        )
        done = torch.zeros(1, dtype=torch.uint8, device="cpu")
        begin(
            self._backend,
            self._kernel.compiled,
            source,
            by_node[contribution],
            [*map(by_node.__getitem__, operands)],
            results,
            *scalars(source, by_node.__getitem__),
            done,
            False,
        )
        if not done.item():
            # All ranks go on operation by operation, also those that did not come this way.
            self._kernel.leave(group)
            return None
        returned = targets or [*map(results.__getitem__, self._order)]
        return returned[0] if self._single else tuple(returned)


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


def _ordinary(tensor: torch.Tensor) -> bool:
    """Whether a CPU's memory has the elements as they are, and not to be negated."""
    return type(tensor) in _PLAIN and tensor.device.type == "cpu" and not tensor.is_neg()


class Shortcuts:
    """Those of a function: by where the first target lies, or what the first argument is.

    A shortcut has the group's backend, with its shared memory: so it goes with the group.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[
            dist.ProcessGroup, dict[Hashable, Shortcut | None]
        ] = weakref.WeakKeyDictionary()

    def take(
        self,
        group: dist.ProcessGroup | None,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """What the call returns, where a shortcut has carried it out; else None."""
        group = dist.GroupMember.WORLD if group is None else group
        # There may be no default group, and a rank that is in none has a number in its place.
        if not isinstance(group, dist.ProcessGroup):
            return None
        known = self._found.get(group)
        if not known:
            return None
        found = known.get(_place(values, targets))
        return None if found is None else found.take(group, values, targets)

    def add(
        self,
        program: Program,
        group: dist.ProcessGroup | None,
        captured: Captured,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        """After a call that came by no shortcut; the first one at a place may be the only one."""
        place = _place(values, targets)
        if group is None or place is None:
            return
        found = self._found.setdefault(group, {})
        if place in found:
            found[place] = Shortcut.of(program, group, captured, values, targets, results)
        else:
            if len(found) >= _KEPT:
                found.clear()
            found[place] = None


def _place(values: Mapping[str, Any], targets: Sequence[torch.Tensor]) -> Hashable:
    """What a shortcut is found by; None where there can be none."""
    tensors = targets or [value for value in values.values() if isinstance(value, torch.Tensor)]
    if not tensors or type(first := tensors[0]) not in _PLAIN:
        return None
    if not targets:
        return first.shape, first.dtype
    return first.data_ptr() if first.layout is torch.strided else None


__all__ = ["Shortcuts", "only_kernel"]
