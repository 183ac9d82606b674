"""A fused collective chunk by chunk of rows, with the matmul before it or a send behind it.

A chunk is a program of its own, of so many rows: it is scattered, computed and gathered or sent
while the next one is multiplied or scattered. Its slices are not those of the whole, so none of
them may leave it but to another stage, which takes them as those of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools

from fusedpg.fusion.compiled import Kernel, kernel
from fusedpg.fusion.ir import PARTIAL, REPLICATE, Group, Layout, Node, Program


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedCollective:
    """A group of kind "overlap" whose sum is a reduce_scatter."""

    group: Group
    program: Program
    _kernels: dict[int, Kernel] = dataclasses.field(default_factory=dict)  # by their rows

    @staticmethod
    def of(group: Group | None, program: Program) -> ChunkedCollective | None:
        """None for a group that is something else."""
        scattered = group is not None and any(x.op == "reduce_scatter" for x in group.nodes)
        if group is None or group.kind != "overlap" or not scattered:
            return None
        chunked = functools.partial(ChunkedCollective, group, program)
        return program.once(("chunks", group), chunked)

    @functools.cached_property
    def scatter(self) -> Node:
        return next(node for node in self.group.nodes if node.op == "reduce_scatter")

    @property
    def contribution(self) -> Node:
        return self.scatter.operands[0]

    @property
    def products(self) -> tuple[Node, ...]:
        """The contribution, if it is a matmul that goes in chunks, too."""
        return (self.contribution,) if self.contribution in self.group.nodes else ()

    @property
    def sends(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.messages if node in self.group.nodes)

    @functools.cached_property
    def collective(self) -> Group:
        """What follows the product, as one operation on all rows."""
        return Group("collective", self.group.nodes - {*self.products, *self.sends})

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.nodes if node in self.collective.nodes)

    @functools.cached_property
    def results(self) -> list[Node]:
        """What is gathered, and slices that are sent."""
        sent = [node.operands[0] for node in self.sends]
        return [node for node in self.nodes if node.op == "all_gather" or node in sent]

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        return self.group.spans(self.scatter.shape)

    @functools.cached_property
    def operands(self) -> list[Node]:
        """The tensors from outside that the computation reads."""
        read = (x for node in self.nodes for x in node.operands if not x.scalar)
        inside = {self.contribution, *self.nodes}
        return [x for x in dict.fromkeys(read) if x not in inside]

    def alike_in_rows(self, operand: Node) -> bool:
        """Whether each row takes the same of it: one number, or one for each column."""
        return operand.numel == (operand.shape[-1] if operand.shape else 1)

    def of_rows(self, count: int) -> Kernel:
        """The computation on so many rows."""
        if count not in self._kernels:
            self._kernels[count] = self._of_rows(count)
        return self._kernels[count]

    def _of_rows(self, count: int) -> Kernel:
        shape = count, self.scatter.shape[-1]
        new: dict[Node, Node] = {}

        def given(value: Node, layout: Layout, shape: tuple[int, ...]) -> None:
            new[value] = Node("input", (), layout, shape, value.dtype, value.name)

        given(self.contribution, PARTIAL, shape)
        for value in self.operands:
            own = value.shape[-1:] if self.alike_in_rows(value) else shape
            given(value, REPLICATE, own)
        inputs = tuple(new.values())
        for node in self.nodes:
            operands = tuple(x if x.scalar else new[x] for x in node.operands)
            new[node] = dataclasses.replace(node, operands=operands, shape=shape)
        group = Group("collective", frozenset(new[node] for node in self.nodes))
        outputs = tuple(new[node] for node in self.results)
        size = self.program.world_size
        program = Program(self.program.name, inputs, outputs, size, False, (group,))
        nodes = tuple(node for node in program.nodes if node in group.nodes)
        return kernel(group, nodes, program)
