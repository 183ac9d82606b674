"""C++ source of a fused collective's computation with reductions of whole rows.

It is that of `codegen_rows`, row by row, on the slice that a rank owns: one of the values along the
row is the sum over the ranks, and results go where `codegen` writes them. Behind the seeds are the
length of a row and the periods.
"""

from __future__ import annotations

from fusedpg.fusion.codegen import (
    _MATH,
    AS_IS,
    FULL,
    PART,
    PART_OF_ROWS,
    Source,
    Unsupported,
    _computed,
    _pattern,
    _stored,
    _Writer,
)
from fusedpg.fusion.codegen_rows import _RowWriter, rows_header
from fusedpg.fusion.ir import Group, Node, Program
from fusedpg.fusion.own_rows import LONGEST
from fusedpg.fusion.rows import Rows


def of_rows(nodes: tuple[Node, ...]) -> bool:
    """Whether a group has values of one number a row, or reads them."""
    return any(x.layout.row > 1 for node in nodes for x in (node, *node.operands))


class _OwnRowWriter(_RowWriter):
    _at = "i"

    def __init__(self, group: Group, nodes: tuple[Node, ...], program: Program) -> None:
        _Writer.__init__(self, group, nodes, program)
        lengths = {x.layout.row for node in nodes for x in (node, *node.operands)} - {1}
        self._domain = self._scatter.shape
        self._rows = Rows.cut(self._domain, max(lengths)) if len(lengths) == 1 else None
        if self._rows is None:
            raise Unsupported("reductions of several kinds of rows")
        self._begin_rows()

    def _alone(self, node: Node) -> bool:
        return node.layout.row > 1

    # --- what the function gets ----------------------------------------------------------------

    def _read(self, node: Node, shape: tuple[int, ...] | None) -> None:
        """A value from outside of the group, or a slice of one, which has been broadcast."""
        if node in self._single:
            return
        self._single[node] = self._alone(node)
        self._ready[node] = 0
        value = node.operands[0] if node.op == "slice" and node in self._inside else node
        if not value.shape or (self._alone(node) and value.numel == 1 and value is not node):
            self._load_one(node, self._operand(value, AS_IS))
        elif value is node:
            if not node.layout.parted:
                raise Unsupported("an operand that is not a slice")
            self._read_part(node)
        elif value.layout.parted:
            raise Unsupported("a slice of a slice")
        elif self._alone(node):
            if value.numel != node.numel:
                self._read_part(node)
            else:
                self._pointer(node, self._operand(value, AS_IS))
                self._row_number(node, "first + row")
        elif value.shape == self._domain:
            self._pointer(node, self._operand(value, FULL))
            self._loads[node] = f"load({self._names[node]}in + at + i)"
        else:
            self._read_repeated(node, value)

    def _pointer(self, node: Node, place: int) -> None:
        kind = _stored(node)
        self._before.append(
            f"const {kind}* {self._names[node]}in = static_cast<const {kind}*>(a->inputs[{place}]);"
        )

    def _row_number(self, node: Node, at: str) -> None:
        name = self._names[node]
        self._every.append(f"const {_computed(node.dtype)} {name} = load({name}in + {at});")

    def _read_part(self, node: Node) -> None:
        """This rank's slice, which is there or is made before."""
        if node.op == "slice" and node in self._inside:
            self._materialised.add(node)
        if self._alone(node):
            self._pointer(node, self._operand(node, PART_OF_ROWS))
            self._row_number(node, "row")
        else:
            self._pointer(node, self._operand(node, PART))
            self._loads[node] = f"load({self._names[node]}in + at + i)"

    def _read_repeated(self, node: Node, value: Node) -> None:
        """A smaller value than the whole, along the rows."""
        function, period = _pattern(value.shape, self._domain) or ("", 0)
        assert self._rows is not None
        if not function:
            self._read_part(node)
            return
        name = self._names[node]
        self._pointer(node, self._operand(value, AS_IS))
        if period == self._rows.length:
            if function == "columns":
                self._row_number(node, "first + row")
            else:
                self._loads[node] = f"load({name}in + i)"
            return
        self._buffer(_stored(node), f"{name}row")
        period_at = f"periods[{len(self._periods)}]"
        self._every.append(f"{function}({name}row, {name}in, {period_at}, begin + at, n);")
        self._periods.append(period)
        self._loads[node] = f"load({name}row + i)"

    # --- the function --------------------------------------------------------------------------

    def _expression(self, node: Node) -> str:
        return self._sum(node) if node is self._scatter else super()._expression(node)

    def _declare(self, outputs: tuple[Node, ...]) -> None:
        for number, (node, whole) in enumerate(self._outputs()):
            value, kind = node.operands[0] if whole else node, _stored(node)
            name = f"{node.name}_to_"
            self._targets.setdefault(value, []).append(name)
            self._before.append(f"const Output {name}to = a->outputs[{number}];")
            if self._alone(value):
                self._before.append(f"{kind}* {name}out = static_cast<{kind}*>({name}to.to[0]);")
            else:
                self._buffer(kind, f"{name}results")
                self._every.append(f"{kind}* {name}out = place({name}to, {name}results, at);")

    def _delivers(self, node: Node) -> list[str]:
        return [f"deliver({name}to, {name}out, at, n);" for name in self._targets[node]]

    def _described(self) -> list[str]:
        assert self._rows is not None
        return [f"  rows of {self._rows.length}", *super()._described()]

    def source(self) -> Source:
        assert self._rows is not None
        order = self._ordered()
        outputs = self._outputs()
        values = tuple(
            dict.fromkeys(node.operands[0] if whole else node for node, whole in outputs)
        )
        sizes = [x.dtype.itemsize for x in (*values, self._scatter) if x.dtype is not None]
        if self._rows.length * max(sizes) > LONGEST:
            raise Unsupported(f"a row of more than {LONGEST} bytes")
        body = self._passes(order, values)
        length = self._rows.length
        text = self._text_of_rows(body, order, len(outputs))
        return self._source(text, length, 64 + len(self._buffers) * (8 * (length + 64) + 64))

    def _text_of_rows(self, body: list[str], order: list[Node], scratch: int) -> str:
        seeds = len(self._seeds)
        before = [
            f"const double* more = a->numbers + {len(self._numbers)};",
            f"const uint64_t length = a->seeds[{seeds}];",
            f"const uint64_t* periods = a->seeds + {seeds + 1};",
            f"char* scratch = static_cast<char*>(a->outputs[{scratch}].to[0]);",
            "const uint64_t n = length, offset = begin, first = begin / length;",
            "(void)more, (void)offset, (void)first, (void)periods, (void)scratch;",
            *self._before,
            *self._buffers,
        ]
        rows = [
            "for (uint64_t row = 0; row < count / length; ++row) {",
            "  const uint64_t at = row * length;",
            *("  " + line for line in [*self._every, *body]),
            "}",
            "fence();",
        ]
        math_needed = any(node.op in _MATH for node in order)
        head = rows_header(math_needed)
        return "\n".join([*self._comment(), "", head, *self._function_text([*before, *rows]), ""])


def generate_own_rows(group: Group, nodes: tuple[Node, ...], program: Program) -> Source:
    """The source of a group that is `of_rows`.

    Raises:
        Unsupported: for what is not generated.
    """
    return _OwnRowWriter(group, nodes, program).source()


__all__ = ["generate_own_rows", "of_rows"]
