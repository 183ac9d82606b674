"""A call like an earlier one, without what a call looks up first.

Of a call of a few megabytes Python is a tenth, since the data have driven it out of the caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
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


class Shortcut:
    """A program that is one fused collective on a CPU, and what a call of it was given.

    It is taken where tensors of the same kind lie at the same places as in that call: then results
    can be computed at the same places, too.
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
        self.single = program.single
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
        self._same = load_extension()._SameTensors(tensors)

    @staticmethod
    def of(
        program: Program,
        group: dist.ProcessGroup,
        captured: Captured,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Shortcut | None:
        """After a call into targets; None where calls like it do more than the one operation."""
        units = [(unit, nodes) for unit, nodes in program.units if unit is not None]
        others = [node for unit, nodes in program.units if unit is None for node in nodes]
        if len(units) != 1 or units[0][0].kind != "collective":
            return None
        if any(not node.scalar and node.op != "input" for node in others):
            return None
        found = kernel(*units[0], program)
        source = found.source
        if source is None or source.materialised or not found.compiled:
            return None
        read = [source.scatter.operands[0], *(node for node, _ in source.operands)]
        if any(node.op != "input" for node in read):
            return None
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
        if any(type(t) not in _PLAIN or t.device.type != "cpu" for t in (*tensors, *targets)):
            return None
        by_node: dict[Node, Any] = {node: values[node.name] for node in program.inputs}
        if any(not by_node[node].is_contiguous() for node in read):
            return None
        backend = found.backend(group, by_node)
        places = found.written(by_node, tensors, targets, torch.device("cpu"))
        # Each target is a result that is computed there.
        if backend is None or sorted(places) != list(range(len(targets))):
            return None
        return Shortcut(found, backend, program, captured, values, targets, places)

    def take(
        self,
        group: dist.ProcessGroup,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> bool:
        """Whether the call, on the same group, is one like it, and has been carried out."""
        if [*map(type, values.values())] != self._types:
            return False
        if self._flags and any(values[name] != flag for name, flag in self._flags):
            return False
        if self._requires_grad and torch.is_grad_enabled():
            return False
        if not self._same.are([*map(values.__getitem__, self._tensors), *targets]):
            return False
        if (self._captured(), ambient("cpu")) != self._reads:
            return False
        if not self._kernel.usable(group):
            return False
        by_node: dict[Any, Any] = dict(zip(self._inputs, values.values()))
        for node in self._scalars:
            if node.op == "constant":
                by_node[node] = node.attribute("value")
            else:
                by_node[node] = SCALAR_OPS[node.op](*(by_node[x] for x in node.operands))
        source, (contribution, operands) = self._source, self._read
        done = torch.zeros(1, dtype=torch.uint8, device="cpu")
        begin(
            self._backend,
            self._kernel.compiled,
            source,
            by_node[contribution],
            [*map(by_node.__getitem__, operands)],
            [*map(targets.__getitem__, self._places)],
            *scalars(source, by_node.__getitem__),
            done,
            False,
        )
        if done.item():
            return True
        # All ranks go on operation by operation, also those that did not come this way.
        self._kernel.leave(group)
        return False


class Shortcuts:
    """Those of a function, by where the first target lies.

    A shortcut has the group's backend, with its shared memory: so it goes with the group.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Shortcut | None]] = (
            weakref.WeakKeyDictionary()
        )

    def take(
        self,
        group: dist.ProcessGroup | None,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Shortcut | None:
        """The one by which the call has been carried out."""
        target = targets[0]
        group = dist.GroupMember.WORLD if group is None else group
        if group is None or type(target) not in _PLAIN or target.layout is not torch.strided:
            return None
        found = self._found.get(group, {}).get(target.data_ptr())
        return found if found is not None and found.take(group, values, targets) else None

    def add(
        self,
        program: Program,
        group: dist.ProcessGroup | None,
        captured: Captured,
        values: Mapping[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> None:
        """After a call that came by no shortcut; the first one at a place may be the only one."""
        if group is None or type(targets[0]) not in _PLAIN:
            return
        place, found = targets[0].data_ptr(), self._found.setdefault(group, {})
        if place in found:
            found[place] = Shortcut.of(program, group, captured, values, targets)
        else:
            if len(found) >= _KEPT:
                found.clear()
            found[place] = None


__all__ = ["Shortcuts"]
