"""C++ source of a group that a rank computes for itself, row by row.

The function gets some of the rows. In each it makes as many passes as there are reductions and
transcendental functions one behind the other: what a later pass reads is kept in buffers of one
row, which stay in the cache. Expressions are those of `codegen`. A group without reductions has
rows of its own making, of `CHUNK` elements.

`Args::outputs` has one more at the end: memory for the buffers. Behind the seeds are the length of
a row, the elements in all, the index of the first of them (of a slice), and the periods.
"""

from __future__ import annotations

import dataclasses

from fusedpg.fusion.codegen import (
    _HALVES,
    _MATH,
    FOLDED,
    Unsupported,
    _computed,
    _pattern,
    _stored,
    _Writer,
    header,
)
from fusedpg.fusion.ir import PARTIAL, REDUCTIONS, REPLICATE, SHARD, Node, Program
from fusedpg.fusion.rows import Rows

CHUNK = 1024
# How an operand is passed: as it is, broadcast to a shape, or this rank's slice of it.
AS_IS, BROADCAST, SLICE = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class RowSource:
    """The generated text, and what its function gets in which order."""

    text: str
    operands: tuple[tuple[Node, int, tuple[int, ...]], ...]  # how it is passed, in which shape
    outputs: tuple[Node, ...]
    numbers: tuple[Node, ...]
    seeds: tuple[Node, ...]
    dropouts: tuple[Node, ...]
    periods: tuple[int, ...]
    buffers: int  # of a row
    rows: Rows | None
    shape: tuple[int, ...]  # of what is computed
    sliced: bool


class _RowWriter(_Writer):
    _at = "at + i"  # where a result goes

    def __init__(self, nodes: tuple[Node, ...], program: Program) -> None:
        self._begin(nodes, program)
        if any(x.layout.row > 1 for node in nodes for x in (node, *node.operands)):
            raise Unsupported("one number for each row of a slice")
        kinds = {rows for rows in map(Rows.of, self._nodes) if rows is not None}
        if len(kinds) > 1:
            raise Unsupported("reductions of several kinds of rows")
        self._rows = next(iter(kinds), None)
        if self._rows is None:
            self._domain = self._nodes[-1].shape
            if any(node.shape != self._domain for node in self._nodes):
                raise Unsupported("shapes differ")
        else:
            self._domain = self._rows.domain
        self._sliced = self._nodes[-1].layout == SHARD
        if 0 in self._domain:
            raise Unsupported("an empty tensor")
        self._begin_rows()

    def _begin_rows(self) -> None:
        self._buffers: list[str] = []
        self._takes: dict[tuple[Node, int], int] = {}
        self._shapes: list[tuple[Node, int, tuple[int, ...]]] = []
        self._single: dict[Node, bool] = {}  # one number a row, of the group or what it reads
        self._broadcast: dict[Node, tuple[int, ...] | None] = {}  # to which shape what it reads
        self._every: list[str] = []  # once a row
        self._targets: dict[Node, list[str]] = {}  # names of what a value is the result of

    def _alone(self, node: Node) -> bool:
        """Whether a node of the group has one number a row."""
        return self._rows is not None and (node.op in REDUCTIONS or self._rows.single(node.shape))

    def _buffer(self, kind: str, name: str) -> None:
        self._buffers.append(f"{kind}* {name} = take<{kind}>(scratch, length);")

    # --- what the function gets ----------------------------------------------------------------

    def _place(self, node: Node, how: int, shape: tuple[int, ...]) -> str:
        key = (node, how)
        if key not in self._takes:
            self._takes[key] = len(self._shapes)
            self._shapes.append((node, how, shape))
            kind, name = _stored(node), self._names[node]
            self._before.append(
                f"const {kind}* {name}in = "
                f"static_cast<const {kind}*>(a->inputs[{self._takes[key]}]);"
            )
        return f"{self._names[node]}in"

    def _read(self, node: Node, shape: tuple[int, ...] | None) -> None:
        """A value from outside of the group, along the rows.

        With a shape it has one number of each row, broadcast to that: with the rows' dimensions or
        without them, where it means another row.
        """
        single = shape is not None
        if node in self._single:
            constant = node.numel == 1 and node.layout != SHARD
            if (self._single[node] != single or self._broadcast[node] != shape) and not constant:
                raise Unsupported(f"`{node.name}` in rows and of rows")
            return
        self._single[node], self._broadcast[node] = single, shape
        self._ready[node] = 0
        kind, name = _computed(node.dtype), self._names[node]
        if self._sliced:
            if node.op == "slice" and node in self._inside:
                self._loads[node] = f"load({self._place(node, SLICE, node.shape)} + at + i)"
            elif node.layout == SHARD and node.shape == self._domain:
                self._loads[node] = f"load({self._place(node, AS_IS, node.shape)} + at + i)"
            elif node.shape:
                raise Unsupported("an operand that is not a slice")
            else:
                place = self._place(node, AS_IS, node.shape)
                self._before.append(f"const {kind} {name} = load({place});")
            return
        if node.layout not in (REPLICATE, PARTIAL) and node.shape != self._domain:
            raise Unsupported("a block of another shape")
        if node.numel == 1:
            place = self._place(node, AS_IS, node.shape)
            self._before.append(f"const {kind} {name} = load({place});")
        elif shape is not None:
            assert self._rows is not None
            whole = node.numel == self._rows.number
            place = self._place(node, AS_IS if whole else BROADCAST, shape)
            self._every.append(f"const {kind} {name} = load({place} + row);")
        else:
            self._read_along(node)

    def _read_along(self, node: Node) -> None:
        kind, name = _computed(node.dtype), self._names[node]
        if node.shape == self._domain:
            self._loads[node] = f"load({self._place(node, AS_IS, node.shape)} + at + i)"
            return
        function, period = _pattern(node.shape, self._domain) or ("", 0)
        if not function:
            self._loads[node] = f"load({self._place(node, BROADCAST, self._domain)} + at + i)"
            return
        place = self._place(node, AS_IS, node.shape)
        if self._rows is not None and period == self._rows.length:
            if function == "columns":
                self._every.append(f"const {kind} {name} = load({place} + row);")
            else:
                self._loads[node] = f"load({place} + i)"
            return
        self._buffer(_stored(node), f"{name}row")
        self._every.append(f"{function}({name}row, {place}, periods[{len(self._periods)}], at, n);")
        self._periods.append(period)
        self._loads[node] = f"load({name}row + i)"

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

    # --- the function --------------------------------------------------------------------------

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

    def row_source(self) -> RowSource:
        order = self._ordered()
        outputs = tuple(node for node in self._nodes if self._needed(node))
        body = self._passes(order, outputs)
        math_needed = any(node.op in _MATH for node in order)
        return RowSource(
            self._file(body, math_needed, len(outputs)),
            tuple(self._shapes),
            outputs,
            tuple(self._numbers),
            tuple(self._seeds),
            tuple(self._dropouts),
            tuple(self._periods),
            len(self._buffers),
            self._rows,
            self._domain,
            self._sliced,
        )

    def _declare(self, outputs: tuple[Node, ...]) -> None:
        """Where results go."""
        for number, node in enumerate(outputs):
            self._targets[node] = [self._names[node]]
            kind = _stored(node)
            self._before.append(
                f"{kind}* {self._names[node]}out = "
                f"static_cast<{kind}*>(a->outputs[{number}].to[0]);"
            )

    def _needed(self, node: Node) -> bool:
        users = self._program.users[node]
        return node in self._program.outputs or any(x not in self._inside for x in users)

    def _ordered(self) -> list[Node]:
        """The nodes, and in which pass each is ready."""
        order: list[Node] = []
        for node in self._nodes:
            if node.layout.dim is not None:
                raise Unsupported("blocks of a dimension")
            if node.op == "all_gather":
                continue
            self._name(node)
            single = self._alone(node)
            if node.op == "slice":
                self._read(node, node.shape if single else None)
                continue
            given = () if node.op == "reduce_scatter" else node.operands
            for operand in given:
                self._name(operand)
                if operand not in self._inside and not operand.scalar:
                    of_rows = single and node.op not in REDUCTIONS
                    self._read(operand, node.shape if of_rows else None)
            order.append(node)
            self._single[node] = single
            latest = max((self._ready[x] for x in given if not x.scalar), default=0)
            later = node.op in REDUCTIONS or (node.op in _MATH and not single)
            self._ready[node] = latest + later
        return order

    def _passes(self, order: list[Node], outputs: tuple[Node, ...]) -> list[str]:
        along = [node for node in order if not self._single[node]]
        uses: dict[Node, set[int]] = {}  # the passes along the row that read a value
        for node in order:
            if self._single[node] and node.op not in REDUCTIONS:
                continue
            if node.op in REDUCTIONS and self._tiled(node.operands[0]):
                uses.setdefault(node.operands[0], set()).add(self._ready[node])  # keeps it
                continue
            loop = self._ready[node] - (node.op in _MATH or node.op in REDUCTIONS)
            for operand in node.operands:
                uses.setdefault(operand, set()).add(loop)
        for node in outputs:
            uses.setdefault(node, set()).add(self._ready[node])
        if not outputs:
            raise Unsupported("nobody uses it")
        self._declare(outputs)
        lines: list[str] = []
        written = frozenset(outputs)
        for loop in range(max(self._ready.values()) + 1):
            for node in order:
                if self._single[node] and self._ready[node] == loop:
                    lines += self._once(node, written)
            body, after = self._pass(loop, order, along, uses, written)
            if body:
                lines += ["VECTORISE", "for (uint64_t i = 0; i < n; ++i) {"]
                lines += ["  " + line for line in body]
                lines += ["}", *after]
        for node in outputs:  # rather none than one that leaves memory as it finds it
            for name in self._targets[node]:
                if not any(f"store({name}out" in line for line in lines):
                    raise Unsupported(f"`{node.name}` as a result")
        return lines

    def _stores(self, node: Node, written: frozenset[Node]) -> list[str]:
        """An element's result, or a row's."""
        if node not in written:
            return []
        at = "row" if self._single[node] else self._at
        names = self._targets[node]
        return [f"store({name}out + {at}, {self._names[node]});" for name in names]

    def _delivers(self, node: Node) -> list[str]:
        """What is done behind the pass that has stored a result along the row."""
        return []

    def _tiled(self, node: Node) -> bool:
        """Whether a value along the row can be in a buffer as it is."""
        inside = node in self._inside and node.op != "slice" and not self._single[node]
        return inside and not (node.op in _MATH and node.dtype in _HALVES)

    def _once(self, node: Node, written: frozenset[Node]) -> list[str]:
        """One number of the row, before the pass in which it is ready."""
        name, kind = self._names[node], _computed(node.dtype)
        if node.op in REDUCTIONS:
            given = node.operands[0]
            tile = self._names[given] if self._tiled(given) else name
            text = f"{FOLDED[node.op]}({tile}tile, n)"
        elif node.op in _MATH:
            assert node.dtype is not None
            x = self._names[node.operands[0]]
            text = self._rounded(f"one_of({x}, {self._function(node)})", node.dtype)
        else:
            text = self._expression(node)
        lines = [f"const {kind} {name} = {text};{_where(node)}"]
        return lines + self._stores(node, written)

    def _pass(
        self,
        loop: int,
        order: list[Node],
        along: list[Node],
        uses: dict[Node, set[int]],
        written: frozenset[Node],
    ) -> tuple[list[str], list[str]]:
        """What is done for each element, and what behind that."""
        body: list[str] = []
        after: list[str] = []
        for node, text in self._loads.items():
            if loop in uses.get(node, ()):
                body.append(f"const {_computed(node.dtype)} {self._names[node]} = {text};")
                if node in written and loop == self._ready[node]:  # a slice that others use
                    body += self._stores(node, written)
                    after += self._delivers(node)
        for node in along:
            name, kind, ready = self._names[node], _computed(node.dtype), self._ready[node]
            read = loop in uses.get(node, ())
            if node.op in _MATH and ready == loop + 1:
                self._buffer(kind, f"{name}tile")
                after.append(f"apply({name}tile, n, {self._function(node)});")
            elif ready == loop and node.op not in _MATH:
                body.append(f"const {kind} {name} = {self._expression(node)};{_where(node)}")
                if any(other > ready for other in uses.get(node, ())):
                    self._buffer(kind, f"{name}tile")
                    body.append(f"{name}tile[i] = {name};")
            elif ready <= loop and read:
                assert node.dtype is not None
                text = f"{name}tile[i]"
                text = self._rounded(text, node.dtype) if node.op in _MATH else text
                body.append(f"const {kind} {name} = {text};")
            if ready == loop and node in written:
                body += self._stores(node, written)
                after += self._delivers(node)
        for node in order:  # what is given to the next pass
            name, kind = self._names[node], _computed(node.operands[0].dtype)
            if self._ready[node] != loop + 1:
                continue
            own = node.op in REDUCTIONS and not self._tiled(node.operands[0])
            if own:
                self._buffer(kind, f"{name}tile")
            if own or (node.op in _MATH and not self._single[node]):
                body.append(f"{name}tile[i] = {self._names[node.operands[0]]};")
        return body, after

    def _file(self, body: list[str], math_needed: bool, scratch: int) -> str:
        seeds = len(self._seeds)
        lines = [
            f"const double* more = a->numbers + {len(self._numbers)};",
            f"const uint64_t length = a->seeds[{seeds}];",
            f"const uint64_t total = a->seeds[{seeds + 1}];",
            f"const uint64_t offset = a->seeds[{seeds + 2}];",
            f"const uint64_t* periods = a->seeds + {seeds + 3};",
            f"char* scratch = static_cast<char*>(a->outputs[{scratch}].to[0]);",
            "(void)more, (void)offset, (void)periods, (void)scratch;",
            *self._before,
            *self._buffers,
        ]
        function = [
            'extern "C" void fusedpg_epilogue_2(const Args* a, uint64_t begin, uint64_t count) {',
            *("  " + line for line in lines),
            "  for (uint64_t row = begin; row < begin + count; ++row) {",
            "    const uint64_t at = row * length;",
            "    const uint64_t n = total - at < length ? total - at : length;",
            *("    " + line for line in [*self._every, *body]),
            "  }",
            "}",
        ]
        comment = [f"// {self._program.name}: of each row", *map("// {}".format, self._described())]
        head = rows_header(math_needed)
        return "\n".join([*comment, "", head, *function, ""])


def rows_header(math_needed: bool) -> str:
    """What stands before functions of rows."""
    names = ["program.h", "rows.h", *(["math.h", "rows_math.h"] if math_needed else [])]
    return "".join(map(header, names))


def _where(node: Node) -> str:
    return f"  // {node.source}" if node.source else ""


def generate_rows(nodes: tuple[Node, ...], program: Program) -> RowSource:
    """The source of a group of kind "compute".

    Raises:
        Unsupported: for what is not generated.
    """
    return _RowWriter(nodes, program).row_source()


__all__ = ["AS_IS", "BROADCAST", "CHUNK", "SLICE", "RowSource", "generate_rows"]
