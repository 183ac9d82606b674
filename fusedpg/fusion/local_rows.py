"""Reductions of rows that lie in one rank's slice: no other rank has to be asked for them."""

from __future__ import annotations

import dataclasses

from fusedpg.functional import shard_range
from fusedpg.fusion.ir import LOCAL_REDUCTIONS, REPLICATE, SHARD, Layout, Node, Program
from fusedpg.fusion.rows import Rows
from fusedpg.fusion.transformations import Moved, Transformation

# So many bytes of a row travel as one, whatever else does: ways between hosts and staging buffers
# have room for them.
LONGEST = 1 << 16


@dataclasses.dataclass(frozen=True)
class LocalRowReduction(Transformation):
    """A reduction over the last dimensions of a slice of whole rows is the rank's own.

    The node is the all_reduce that combines the ranks' reductions. What is computed from one number
    a row stays with the rank that has the row; where somebody needs all of them, they are gathered.
    """

    def apply(self, program: Program) -> Program:
        self._ungrouped(program)
        none = "the program has no reduction of slices of whole rows"
        found = self._fitting(program, "all_reduce", none=none)
        return _OnRows(program, frozenset(found)).result()

    @staticmethod
    def _obstacle(program: Program, node: Node) -> tuple[str, Node] | None:
        reason = _needed(program, node)
        return None if reason is None else (reason, node)


def _needed(program: Program, node: Node) -> str | None:
    """Why an all_reduce is needed."""
    local = node.operands[0]
    if local.op not in LOCAL_REDUCTIONS or node.op != "all_reduce":
        return "it combines no reductions of slices"
    (x,) = local.operands
    rows = Rows.over(x.shape, local.attribute("dims"))
    if rows is None or x.dtype is None:
        return "it is not over the last dimensions, of 2 to 65,536 elements"
    if len(rows.domain) == rows.count:
        return "it is over all dimensions: a slice of one row is no row"
    if rows.length * x.dtype.itemsize > LONGEST:
        return f"rows of {rows.length * x.dtype.itemsize} bytes are longer than {LONGEST}"
    if not rows.whole(program.world_size):
        part = shard_range(x.numel, program.world_size, 0)[1]
        return f"slices of {part} elements are not whole rows of {rows.length}"
    return None


class _OnRows(Moved):
    """Of what has one number a row there are two: this rank's (`_slices`), and all (`_new`).

    The latter is computed again from gathered reductions, and gone where nobody reads it.
    """

    def _visit(self, node: Node) -> None:
        if node in self._gathers:
            local = node.operands[0]
            rows = Rows.over(local.operands[0].shape, local.attribute("dims"))
            assert rows is not None
            self._slices[node] = part = dataclasses.replace(
                node,
                op=LOCAL_REDUCTIONS[local.op],
                operands=(self._new[local.operands[0]],),
                layout=rows.layout,
                attributes=local.attributes,
            )
            self._add_whole(node, "all_gather", (part,))
            return
        given = [operand for operand in node.operands if operand in self._slices]
        kept = self._of_rows(node, given[0]) if given else None
        if kept is not None and node.layout.parted:
            self._new[node] = kept
            return
        operands = tuple(self._new[operand] for operand in node.operands)
        if kept is not None:
            self._slices[node] = kept
            self._add_whole(node, node.op, operands)
        else:
            same = operands == node.operands
            self._new[node] = node if same else dataclasses.replace(node, operands=operands)

    def _add_whole(self, node: Node, op: str, operands: tuple[Node, ...]) -> None:
        name = self._names.new(f"{node.name}_whole")
        attributes = () if op == "all_gather" else node.attributes
        self._new[node] = dataclasses.replace(
            node, op=op, operands=operands, name=name, attributes=attributes
        )

    def _of_rows(self, node: Node, first: Node) -> Node | None:
        """The node for this rank's rows alone; `first`: of its operands, one that there is so."""
        part = self._slices[first]
        if node.op == "slice" and node.layout == part.layout and node.shape == first.shape:
            return part
        if node.op in ("slice", "expand"):
            if part.layout == SHARD or node.layout.row > 1:
                return None
            rows = Rows.cut(node.shape, part.layout.row)
            if rows is None or not rows.spread(first.shape):
                return None
            return dataclasses.replace(node, op="expand", operands=(part,), layout=SHARD)
        if node.layout != REPLICATE or part.layout == SHARD or node.numel != first.numel:
            return None
        if node.op == "view":
            return dataclasses.replace(node, operands=(part,), layout=part.layout)
        alike = all(
            self._slices[operand].layout == part.layout and operand.shape == node.shape
            for operand in node.operands
            if operand in self._slices
        )
        if not node.pointwise or node.op == "dropout" or not alike:
            return None
        operands = tuple(self._row_operand(x, node.shape, part.layout) for x in node.operands)
        return dataclasses.replace(node, operands=operands, layout=part.layout)

    def _row_operand(self, operand: Node, shape: tuple[int, ...], layout: Layout) -> Node:
        if operand in self._slices:
            return self._slices[operand]
        return self._operand(operand, shape, layout)
