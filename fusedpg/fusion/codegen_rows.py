"""C++ source of a group that a rank computes for itself, row by row.

The function gets some of the rows, and its loops are those of `codegen_loop`. A group without
reductions has rows of its own making, of `CHUNK` elements.

`Args::outputs` has one more at the end: memory for the buffers. Behind the seeds are the length of
a row, the elements in all, the index of the first of them (of a slice), and the periods.
"""

from __future__ import annotations

import dataclasses

from fusedpg.fusion.codegen import Unsupported, repetition, stored_type
from fusedpg.fusion.codegen_loop import Loop, Sink, indented
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


class _RowWriter(Loop):
    def __init__(self, nodes: tuple[Node, ...], program: Program) -> None:
        super().__init__(nodes, program)
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
        self._operands: list[tuple[Node, int, tuple[int, ...]]] = []
        self._broadcast: dict[Node, tuple[int, ...] | None] = {}  # `_read`'s shapes

    def _alone(self, node: Node) -> bool:
        return self._rows is not None and (node.op in REDUCTIONS or self._rows.single(node.shape))

    def _stored_in(self, value: Node, last: int) -> int:
        return self._ready[value]  # results have memory of their own

    # --- sources ---------------------------------------------------------------------------------

    def _take(self, node: Node, how: int, shape: tuple[int, ...]) -> None:
        self._pointer(node, len(self._operands))
        self._operands.append((node, how, shape))

    def _read(self, node: Node, shape: tuple[int, ...] | None) -> None:
        """A value from outside of the group, along the rows.

        With a shape it has one number of each row, broadcast to that: with the rows' dimensions or
        without them, where it means another row.
        """
        if node in self._broadcast:
            constant = node.numel == 1 and node.layout != SHARD
            if self._broadcast[node] != shape and not constant:
                raise Unsupported(f"`{node.name}` in rows and of rows")
            return
        self._broadcast[node] = shape
        if shape is not None:
            self._single.add(node)
        self._ready[node] = 0
        if self._sliced:
            self._read_slice(node)
        elif node.layout not in (REPLICATE, PARTIAL) and node.shape != self._domain:
            raise Unsupported("a block of another shape")
        else:
            self._read_whole(node, shape)

    def _read_slice(self, node: Node) -> None:
        """A value of a group that computes this rank's slice."""
        inside = node.op == "slice" and node in self._inside
        if inside or (node.layout == SHARD and node.shape == self._domain):
            self._take(node, SLICE if inside else AS_IS, node.shape)
            self._load_elements(node)
        elif node.shape:
            raise Unsupported("an operand that is not a slice")
        else:
            self._take(node, AS_IS, node.shape)
            self._load_number(node)

    def _read_whole(self, node: Node, shape: tuple[int, ...] | None) -> None:
        """A value of a group that computes all elements."""
        if node.numel == 1:
            self._take(node, AS_IS, node.shape)
            self._load_number(node)
        elif shape is not None:
            assert self._rows is not None
            whole = node.numel == self._rows.number
            self._take(node, AS_IS if whole else BROADCAST, shape)
            self._load_row(node, self._row_index)
        elif node.shape == self._domain:
            self._take(node, AS_IS, node.shape)
            self._load_elements(node)
        elif pattern := repetition(node.shape, self._domain):
            self._take(node, AS_IS, node.shape)
            self._load_repeated(node, *pattern)
        else:
            self._take(node, BROADCAST, self._domain)
            self._load_elements(node)

    # --- the function ----------------------------------------------------------------------------

    def row_source(self) -> RowSource:
        order = self._ordered()
        users = self._program.users
        outputs = tuple(
            node
            for node in self._nodes
            if node in self._program.outputs or not self._inside.issuperset(users[node])
        )
        if not outputs:
            raise Unsupported("nobody uses it")
        for number, node in enumerate(outputs):
            kind, name = stored_type(node), self._names[node]
            self._before.append(
                f"{kind}* {name}out = static_cast<{kind}*>(a->outputs[{number}].to[0]);"
            )
            index = "row" if node in self._single else "at + i"
            self._sinks[node] = [Sink(f"store({name}out + {index}, {name});")]
        body = self._passes(order)
        return RowSource(
            self._file(body, len(outputs)),
            tuple(self._operands),
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

    def _file(self, body: list[str], scratch: int) -> str:
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
            *indented(lines),
            "  for (uint64_t row = begin; row < begin + count; ++row) {",
            "    const uint64_t at = row * length;",
            "    const uint64_t n = total - at < length ? total - at : length;",
            *indented(indented([*self._every, *body])),
            "  }",
            "}",
        ]
        comment = [f"// {self._program.name}: of each row", *map("// {}".format, self._described())]
        return "\n".join([*comment, "", self._headers(), *function, ""])


def generate_rows(nodes: tuple[Node, ...], program: Program) -> RowSource:
    """The source of a group of kind "compute".

    Raises:
        Unsupported: for what is not generated.
    """
    return _RowWriter(nodes, program).row_source()
