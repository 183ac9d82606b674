"""C++ source of a fused collective's computation: one function over elements of the owned slice.

Its loops are those of `codegen_loop`: over tiles, or, with reductions of rows that lie in the
slice, over whole rows. Behind the seeds are the length of a row, if there are rows, and the
periods. Rows need memory for their buffers, which is one more output.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedpg.fusion.codegen import (
    HALVES,
    NO_PHASES,
    Phases,
    Source,
    Unsupported,
    repetition,
    stored_type,
)
from fusedpg.fusion.codegen_loop import Loop, Sink, indented
from fusedpg.fusion.ir import Group, Node, Program
from fusedpg.fusion.local_rows import LONGEST
from fusedpg.fusion.rows import Rows

FULL, PART, AS_IS, PART_OF_ROWS = 0, 1, 2, 3  # ProgramCall::Operand
_MOST_SOURCES = 8  # kMostProgramSources
_PICKS = {"max": "greater", "min": "lesser"}


def of_rows(nodes: tuple[Node, ...]) -> bool:
    """Whether a group has values of one number a row, or reads them."""
    return any(x.layout.row > 1 for node in nodes for x in (node, *node.operands))


class CollectiveWriter(Loop):
    """The function of a group, and what it gets."""

    _row_index = "first + row"

    def __init__(self, group: Group, nodes: tuple[Node, ...], program: Program) -> None:
        super().__init__(nodes, program)
        self._operands: dict[Node, tuple[int, int]] = {}  # number, kind
        self._materialised: set[Node] = set()
        scatters = [node for node in self._nodes if node.op == "reduce_scatter"]
        if group.kind != "collective" or len(scatters) != 1:
            raise Unsupported("it has no reduce_scatter")
        self._scatter = scatters[0]
        self._domain = self._scatter.shape
        self._rows = self._cut()

    def _cut(self) -> Rows | None:
        lengths = {x.layout.row for node in self._nodes for x in (node, *node.operands)} - {1}
        if not lengths:
            return None
        rows = Rows.cut(self._domain, max(lengths)) if len(lengths) == 1 else None
        if rows is None:
            raise Unsupported("reductions of several kinds of rows")
        return rows

    def _alone(self, node: Node) -> bool:
        return node.layout.row > 1

    def _buffer(self, kind: str, name: str) -> None:
        if self._rows is None:
            self._every.append(f"alignas(64) {kind} {name}[kTile + kLine];")
        else:
            super()._buffer(kind, name)

    # --- sources ---------------------------------------------------------------------------------

    def _operand(self, value: Node, kind: int) -> int:
        if value not in self._operands:
            self._operands[value] = (len(self._operands), kind)
        return self._operands[value][0]

    def _read(self, node: Node, shape: tuple[int, ...] | None = None) -> None:
        if node in self._ready:
            return
        if self._of_inside(node):
            raise Unsupported("a slice of what is gathered")
        self._ready[node] = 0
        single = self._alone(node)
        if single:
            self._single.add(node)
        value = node.operands[0] if node.op == "slice" and node in self._inside else node
        if not value.shape or (single and value.numel == 1 and value is not node):
            self._pointer(node, self._operand(value, AS_IS))
            self._load_number(node)
        elif value is node:
            if not node.layout.parted:
                raise Unsupported("an operand that is not a slice")
            self._read_part(node)
        elif value.layout.parted:
            raise Unsupported("a slice of a slice")
        elif single and value.numel == node.numel:
            self._pointer(node, self._operand(value, AS_IS))
            self._load_row(node, self._row_index)
        elif single:
            self._read_part(node)
        elif value.shape == self._domain:
            self._pointer(node, self._operand(value, FULL))
            self._load_elements(node)
        elif pattern := repetition(value.shape, self._domain):
            self._pointer(node, self._operand(value, AS_IS))
            self._load_repeated(node, *pattern)
        else:
            self._read_part(node)

    def _of_inside(self, node: Node) -> bool:
        """Whether it is a slice of a value of the group."""
        return node.op == "slice" and node.operands[0] in self._inside

    def _read_part(self, node: Node) -> None:
        """This rank's slice, which is there or is made before."""
        if node.op == "slice" and node in self._inside:
            self._materialised.add(node)
        single = node in self._single
        self._pointer(node, self._operand(node, PART_OF_ROWS if single else PART))
        if single:
            self._load_row(node, "row")
        else:
            self._load_elements(node)

    def _expression(self, node: Node) -> str:
        return self._sum() if node is self._scatter else super()._expression(node)

    def _sum(self) -> str:
        op, ranks = self._scatter.attribute("op"), self._program.world_size
        kind, wide = stored_type(self._scatter.operands[0]), self._wide()
        self._before.append(
            f"const {wide}* sum = static_cast<const {wide}*>(a->sources[0]);"
            f"  // over the ranks: {op}"
        )
        text = "load(sum + at + i)"
        if ranks <= _MOST_SOURCES:  # they are added here
            total = ""
            for rank in range(ranks):
                self._before.append(
                    f"const {kind}* part{rank} = "
                    f"static_cast<const {kind}*>(kFolded ? nullptr : a->sources[{rank}]);"
                )
                part = f"load(part{rank} + at + i)"
                if not total:
                    total = part
                elif op in _PICKS:
                    total = f"{_PICKS[op]}({total}, {part})"
                else:
                    total = f"({total} + {part})"
            text = f"(kFolded ? {text} : {total})"
        return self._averaged(text)

    def _wide(self) -> str:
        """The type in memory of the sum over the ranks."""
        given = self._scatter.operands[0]
        if given.dtype in HALVES and self._scatter.attribute("op") not in _PICKS:
            return "float"
        return stored_type(given)

    def _averaged(self, total: str) -> str:
        """The reduction, of the sum over the ranks."""
        assert self._scatter.dtype is not None
        if self._scatter.attribute("op") == "mean":
            total = f"{total} / {self._program.world_size}"
        return self._rounded(total, self._scatter.dtype)

    # --- sinks -----------------------------------------------------------------------------------

    def _outputs(self) -> tuple[tuple[Node, bool], ...]:
        outputs: list[tuple[Node, bool]] = []
        for node in self._nodes:
            users = self._program.users[node]
            needed = node in self._program.outputs or not self._inside.issuperset(users)
            if node.op == "all_gather":
                if node.operands[0] not in self._inside:
                    raise Unsupported("an all_gather of something else")
                outputs.append((node, True))
            elif needed:
                outputs.append((node, False))
        return tuple(outputs)

    def _results(self) -> list[tuple[int, Node, Node]]:
        """The number of each output, the node that names it, and the value that goes there."""
        outputs = enumerate(self._outputs())
        return [(k, node, node.operands[0] if whole else node) for k, (node, whole) in outputs]

    def _deliver(self, number: int, node: Node, value: Node) -> None:
        """Sends a value to an output."""
        kind, name = stored_type(node), f"{node.name}_to_"
        self._before.append(f"const Output {name}to = a->outputs[{number}];")
        index, deliver = "i", f"deliver({name}to, {name}out, at, n);"
        if self._alone(value):
            index, deliver = "row", ""
            self._before.append(f"{kind}* {name}out = static_cast<{kind}*>({name}to.to[0]);")
        else:
            self._buffer(kind, f"{name}results")
            self._every.append(f"{kind}* {name}out = place({name}to, {name}results, at);")
        store = f"store({name}out + {index}, {self._names[value]});"
        self._sinks.setdefault(value, []).append(Sink(store, deliver))

    # --- the function ----------------------------------------------------------------------------

    def _check(self, node: Node) -> None:
        if self._rows is not None:
            super()._check(node)
            return
        moved = node.op in ("slice", "reduce_scatter", "all_gather")
        if not moved and node.layout.kind != "Shard":
            raise Unsupported(f"`{node.op}` is not on slices")
        if node.shape != self._domain:
            raise Unsupported("shapes differ")

    def source(self) -> Source:
        order = self._ordered()
        results = self._results()
        if not results:
            raise Unsupported("nobody uses it")
        for number, node, value in results:
            self._deliver(number, node, value)
        return self._source(self._file([self._function_body(self._passes(order))]))

    def _source(self, text: str, phases: Phases = NO_PHASES) -> Source:
        """The text, and what has been taken in while it was written."""
        row, scratch = 1, 0
        if self._rows is not None:
            row = self._rows.length
            values = [self._scatter, *(value for _, _, value in self._results())]
            longest = row * max(x.dtype.itemsize for x in values if x.dtype is not None)
            if longest > LONGEST:
                raise Unsupported(f"a row of more than {LONGEST} bytes")
            scratch = 64 + len(self._buffers) * (8 * (row + 64) + 64)
        return Source(
            text,
            self._scatter,
            tuple((value, kind) for value, (_, kind) in self._operands.items()),
            frozenset(self._materialised),
            self._outputs(),
            tuple(self._numbers),
            tuple(self._seeds),
            tuple(self._dropouts),
            (*((row,) if row > 1 else ()), *self._periods),
            "\n".join([*self._given(), *self._described()]),
            row,
            scratch,
            phases,
        )

    def _given(self) -> list[str]:
        adds = f"  adds {self._scatter.operands[0].type}"
        return [adds, *(f"  takes {value.name}: {value.type}" for value in self._operands)]

    def _described(self) -> list[str]:
        rows = [f"  rows of {self._rows.length}"] if self._rows is not None else []
        return rows + super()._described()

    def _comment(self) -> list[str]:
        comment = [f"// {self._program.name}, on {self._program.world_size} ranks"]
        return comment + [f"// {line}" for line in self._given() + self._described()]

    def _function_body(self, body: list[str], empty: Sequence[str] = ()) -> list[str]:
        """The statements of a function, around those for a row.

        Args:
            empty: what is done first, also in a call of no elements.
        """
        loop = [
            "for (uint64_t at = 0; at < count; at += kTile) {",
            "  const uint64_t n = count - at < kTile ? count - at : kTile;",
        ]
        rows: list[str] = []
        if self._rows is not None:
            rows = [
                f"const uint64_t length = a->seeds[{len(self._seeds)}];",
                f"char* scratch = static_cast<char*>(a->outputs[{len(self._outputs())}].to[0]);",
                "const uint64_t n = length, first = begin / length;",
                "(void)first, (void)scratch;",
            ]
            loop = [
                "for (uint64_t row = 0; row < count / length; ++row) {",
                "  const uint64_t at = row * length;",
            ]
        return [
            *rows,
            *self._before,
            *self._buffers,
            *empty,
            *loop,
            *indented([*self._every, *body]),
            "}",
            "fence();",
        ]

    def _file(self, bodies: list[list[str]]) -> str:
        """The text: a function for each phase, the first one for contributions and their sum."""
        arguments = "(const Args* a, uint64_t begin, uint64_t count)"
        direct = "phase0<false>(a, begin, count)"
        if self._program.world_size > _MOST_SOURCES:
            direct = "void()"
        calls = [f"a->num_sources == 0 ? phase0<true>(a, begin, count) : {direct};"]
        calls += [f"phase{phase}(a, begin, count);" for phase in range(1, len(bodies))]
        periods = len(self._seeds) + (self._rows is not None)
        head = [
            f"const double* more = a->numbers + {len(self._numbers)};",
            f"const uint64_t* periods = a->seeds + {periods};",
            "const uint64_t offset = begin;",
            "(void)more, (void)periods, (void)offset;",
        ]
        lines = [*self._comment(), "", self._headers(), "template <bool kFolded>"]
        for phase, body in enumerate(bodies):
            lines += [f"void phase{phase}{arguments} {{"]
            lines += [*indented([*head, *body]), "}", ""]
        lines += [f'extern "C" void fusedpg_epilogue_2{arguments} {{', "  switch (a->phase) {"]
        for phase, call in enumerate(calls):
            lines += [f"    case {phase}:", f"      {call}", "      return;"]
        return "\n".join([*lines, "  }", "}", ""])


def generate(group: Group, nodes: tuple[Node, ...], program: Program) -> Source:
    """The source of a group without sums over all elements inside.

    Raises:
        Unsupported: for what is not generated.
    """
    return CollectiveWriter(group, nodes, program).source()
