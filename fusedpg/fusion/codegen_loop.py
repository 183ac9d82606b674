"""C++ loops over the elements of rows, in as few passes as the operations allow.

A pass ends where a transcendental function (a call on vectors) or a reduction of the row needs all
elements first. A value that a later pass reads is kept in a buffer of one row, which stays in the
cache. A value comes from a *source*: an operand, or the sum over the ranks. It goes to *sinks*.
Rows have the length that reductions ask for; without any they are tiles of fixed length.
"""

from __future__ import annotations

from typing import NamedTuple

from fusedpg.fusion.codegen import (
    FOLDED,
    HALVES,
    MATH,
    Expressions,
    Unsupported,
    computed_type,
    header,
    stored_type,
)
from fusedpg.fusion.ir import REDUCTIONS, Node, Program
from fusedpg.fusion.rows import Rows


class Sink(NamedTuple):
    """What is done with a value: a statement for each element, and one behind the pass."""

    store: str
    deliver: str = ""


def indented(lines: list[str]) -> list[str]:
    return ["  " + line for line in lines]


def operands_of(node: Node) -> tuple[Node, ...]:
    """The values that a node's expression reads; the sum over the ranks is a source itself."""
    return () if node.op == "reduce_scatter" else node.operands


class Loop(Expressions):
    """The statements of one function that goes over rows.

    A subclass says where operands lie (`_read`) and fills `_sinks`.
    """

    _suffix = "h"  # of the headers in generated/
    _rows: Rows | None = None  # None: rows are tiles
    _row_index = "row"  # the number of a row, in the whole

    def __init__(self, nodes: tuple[Node, ...], program: Program) -> None:
        super().__init__(nodes, program)
        self._periods: list[int] = []
        self._begin_loop()

    def _begin_loop(self) -> None:
        self._taken.clear()
        self._before: list[str] = []  # statements that run once a call
        self._buffers: list[str] = []
        self._every: list[str] = []  # statements that run once a row
        self._loads: dict[Node, str] = {}
        self._ready: dict[Node, int] = {}  # the pass that has a value
        self._single: set[Node] = set()  # values that are one number a row
        self._sinks: dict[Node, list[Sink]] = {}

    def _alone(self, node: Node) -> bool:
        """Whether a node of the group has one number a row."""
        raise NotImplementedError

    def _buffer(self, kind: str, name: str) -> None:
        self._buffers.append(f"{kind}* {name} = take<{kind}>(scratch, length);")

    # --- sources ---------------------------------------------------------------------------------

    def _read(self, node: Node, shape: tuple[int, ...] | None) -> None:
        """Reads a value from outside of the group, or a slice of one.

        Args:
            shape: what a value that is one number a row is broadcast to; None: it has elements.
        """
        raise NotImplementedError

    def _pointer(self, node: Node, number: int) -> None:
        kind = stored_type(node)
        self._before.append(
            f"const {kind}* {self._names[node]}in = "
            f"static_cast<const {kind}*>(a->inputs[{number}]);"
        )

    def _load_number(self, node: Node) -> None:
        """One number for the whole call."""
        name = self._names[node]
        self._before.append(f"const {computed_type(node.dtype)} {name} = load({name}in);")

    def _load_row(self, node: Node, index: str) -> None:
        """One number a row."""
        name = self._names[node]
        self._every.append(f"const {computed_type(node.dtype)} {name} = load({name}in + {index});")

    def _load_elements(self, node: Node) -> None:
        self._loads[node] = f"load({self._names[node]}in + at + i)"

    def _load_repeated(self, node: Node, function: str, period: int) -> None:
        """A smaller value, which `function` (rows or columns) repeats along the elements."""
        name = self._names[node]
        if self._rows is None or period != self._rows.length:
            self._buffer(stored_type(node), f"{name}row")
            start = f"periods[{len(self._periods)}], offset + at"
            self._every.append(f"{function}({name}row, {name}in, {start}, n);")
            self._periods.append(period)
            self._loads[node] = f"load({name}row + i)"
        elif function == "columns":
            self._load_row(node, self._row_index)
        else:
            self._loads[node] = f"load({name}in + i)"

    def _random(self, node: Node, number: int, first: int) -> str:
        if self._alone(node):
            raise Unsupported("`dropout` of one number a row")
        name = self._names[node]
        self._before += [
            f"const auto {name}_least = static_cast<uint32_t>(more[{first}]);",
            f"const double {name}_scale = more[{first + 1}];",
        ]
        self._buffer("uint32_t", f"{name}_words")
        self._every.append(
            f"const uint32_t* {name}_bits = "
            f"philox({name}_words, a->seeds[{number}], offset + at, n);"
        )
        return f"{name}_bits[i]"

    # --- computation -----------------------------------------------------------------------------

    def _number(self, node: Node) -> str:
        # The divisor of a mean: one text serves rows of all lengths.
        if self._rows is not None and node.op == "constant":
            value = node.attribute("value")
            if isinstance(value, float) and value == self._rows.length:
                return "double(length)"
        return super()._number(node)

    def _expression(self, node: Node) -> str:
        if node.op in ("view", "expand"):
            return self._names[node.operands[0]]
        return super()._expression(node)

    def _check(self, node: Node) -> None:
        if node.layout.dim is not None:
            raise Unsupported("blocks of a dimension")

    def _ordered(self) -> list[Node]:
        """The nodes that are computed, operands first."""
        order: list[Node] = []
        for node in self._nodes:
            self._check(node)
            if node.op == "all_gather":
                continue
            self._name(node)
            single = self._alone(node)
            if node.op == "slice":
                self._read(node, node.shape if single else None)
                continue
            for operand in operands_of(node):
                self._name(operand)
                if operand not in self._inside and not operand.scalar:
                    of_rows = single and node.op not in REDUCTIONS
                    self._read(operand, node.shape if of_rows else None)
            order.append(node)
            if single:
                self._single.add(node)
            self._compute(node)
        return order

    def _compute(self, node: Node) -> None:
        """Finds the pass in which a value is ready."""
        latest = 0
        for operand in operands_of(node):
            if not operand.scalar:
                latest = max(latest, self._ready[operand])
        self._ready[node] = latest + (node.op in REDUCTIONS or self._on_vectors(node))

    def _on_vectors(self, node: Node) -> bool:
        """Whether it is a call on a buffer, behind the pass that fills it."""
        return node.op in MATH and node not in self._single

    def _stored_in(self, value: Node, last: int) -> int:
        """The pass in which a value goes to its sinks.

        Tiles are stored by the last pass: a result may lie in the memory of an operand, which
        earlier passes still read.
        """
        return last if self._rows is None else self._ready[value]

    def _passes(self, order: list[Node]) -> list[str]:
        """The loops over one row."""
        last = max((self._ready[value] for value in self._sinks), default=-1)
        uses: dict[Node, set[int]] = {}  # the passes along the row that read a value
        for node in order:
            if node in self._single and node.op not in REDUCTIONS:
                continue
            if node.op in REDUCTIONS and self._buffered(node.operands[0]):
                uses.setdefault(node.operands[0], set()).add(self._ready[node])  # keeps it
                continue
            in_pass = self._ready[node] - (node.op in MATH or node.op in REDUCTIONS)
            for operand in operands_of(node):
                uses.setdefault(operand, set()).add(in_pass)
        stored: dict[int, list[Node]] = {}
        for value in self._sinks:
            in_pass = self._stored_in(value, last)
            uses.setdefault(value, set()).add(in_pass)
            stored.setdefault(in_pass, []).append(value)
        lines: list[str] = []
        for number in range(last + 1):
            for node in order:
                if node in self._single and self._ready[node] == number:
                    lines += self._row_number(node)
            body, after = self._pass(number, order, uses, stored.get(number, []))
            if body:
                lines += ["VECTORISE", "for (uint64_t i = 0; i < n; ++i) {"]
                lines += [*indented(body), "}", *after]
        for value in self._sinks.keys() & self._single:  # an operand, which nothing stores
            if value not in order:
                raise Unsupported(f"`{value.name}` as a result")
        return lines

    def _buffered(self, node: Node) -> bool:
        """Whether a value along the row can be in a buffer as it is."""
        inside = node in self._inside and node.op != "slice" and node not in self._single
        return inside and not (node.op in MATH and node.dtype in HALVES)

    def _row_number(self, node: Node) -> list[str]:
        """One number of the row, before the pass in which it is ready."""
        name = self._names[node]
        if node.op in REDUCTIONS:
            given = node.operands[0]
            tile = self._names[given] if self._buffered(given) else name
            text = f"{FOLDED[node.op]}({tile}tile, n)"
        elif node.op in MATH:
            text = self._one_call(node)
        else:
            text = self._expression(node)
        line = f"const {computed_type(node.dtype)} {name} = {text};{self._where(node)}"
        return [line, *(sink.store for sink in self._sinks.get(node, []))]

    def _one_call(self, node: Node) -> str:
        """A transcendental function of one number."""
        assert node.dtype is not None
        call = f"one_of({self._names[node.operands[0]]}, {self._function(node)})"
        return self._rounded(call, node.dtype)

    def _pass(
        self, number: int, order: list[Node], uses: dict[Node, set[int]], stored: list[Node]
    ) -> tuple[list[str], list[str]]:
        """The statements for each element, and those behind that."""
        body: list[str] = []
        after: list[str] = []
        for node, text in self._loads.items():
            if number in uses.get(node, ()):
                body.append(f"const {computed_type(node.dtype)} {self._names[node]} = {text};")
        for node in order:
            if node in self._single:
                continue
            name, kind, ready = self._names[node], computed_type(node.dtype), self._ready[node]
            if node.op in MATH and ready == number + 1:
                self._buffer(kind, f"{name}tile")
                after.append(f"apply({name}tile, n, {self._function(node)});")
            elif ready == number and node.op not in MATH:
                body.append(f"const {kind} {name} = {self._expression(node)};{self._where(node)}")
                if any(later > ready for later in uses.get(node, ())):
                    self._buffer(kind, f"{name}tile")
                    body.append(f"{name}tile[i] = {name};")
            elif ready <= number and number in uses.get(node, ()):
                assert node.dtype is not None
                text = f"{name}tile[i]"
                text = self._rounded(text, node.dtype) if node.op in MATH else text
                body.append(f"const {kind} {name} = {text};")
        for node in order:  # values for calls and reductions behind this pass
            if self._ready[node] != number + 1:
                continue
            reduced = node.op in REDUCTIONS and not self._buffered(node.operands[0])
            if reduced:
                self._buffer(computed_type(node.operands[0].dtype), f"{self._names[node]}tile")
            if reduced or self._on_vectors(node):
                body.append(f"{self._names[node]}tile[i] = {self._names[node.operands[0]]};")
        for value in stored:
            if value not in self._single:
                body += [sink.store for sink in self._sinks[value]]
                after += [sink.deliver for sink in self._sinks[value] if sink.deliver]
        return body, after

    @staticmethod
    def _where(node: Node) -> str:
        return f"  // {node.source}" if node.source else ""

    # --- the text --------------------------------------------------------------------------------

    def _described(self) -> list[str]:
        return [f"  {node.name} = {node}: {node.type}" for node in self._nodes]

    def _headers(self) -> str:
        """The text that stands before generated functions."""
        text = header(f"program.{self._suffix}")
        if not MATH.isdisjoint([node.op for node in self._nodes]):
            text += header(f"math.{self._suffix}")
        return text
