"""C++ source of a fused collective with sums over all elements inside, like the norms of LAMB.

The function has phases. Each adds up numbers of this rank's elements, which the ranks combine, and
the next phase computes with the totals. A value that a later phase needs is read again where it is
an operand or a result, computed again where that takes nothing else, and else kept. Expressions are
those of `codegen`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusedpg.fusion.codegen import (
    FOLDED,
    MATH,
    Phases,
    Source,
    Unsupported,
    computed_type,
    stored_type,
)
from fusedpg.fusion.codegen_collective import AS_IS, CollectiveWriter
from fusedpg.fusion.codegen_loop import Sink, operands_of
from fusedpg.fusion.ir import LOCAL_REDUCTIONS, REPLICATE, SHARD, Group, Node, Program

_MOST_SUMS = 64  # behind a phase
_MOST_AGAIN = 12  # operations that a phase computes again rather than read what was kept


def of_phases(nodes: tuple[Node, ...]) -> bool:
    """Whether a group has a sum over all elements inside."""
    return not LOCAL_REDUCTIONS.keys().isdisjoint({node.op for node in nodes})


class _PhaseWriter(CollectiveWriter):
    def __init__(self, group: Group, nodes: tuple[Node, ...], program: Program) -> None:
        super().__init__(group, nodes, program)
        self._phase: dict[Node, int] = {}  # in which a value is computed
        self._numbered: dict[Node, int] = {}  # sums, in the order in which ranks combine them
        self._kept: dict[Node, int] = {}
        self._read_last: dict[Node, int] = {}  # operands, and the last phase that reads each
        self._current = 0
        for node in self._nodes:
            self._add(node)
        self._last = max(self._phase.values())
        self._written = self._results()

    # --- what is computed when ------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        before = max((self._phase.get(x, 0) for x in node.operands), default=0)
        self._phase[node] = before
        for operand in node.operands:
            self._name(operand)
        self._name(node)
        domain = self._scatter.shape
        if node is self._scatter or node.op == "all_gather":
            fits = node.shape == domain
        elif node.op in LOCAL_REDUCTIONS:
            users = self._program.users[node]
            fits = node.numel == 1 and node.operands[0].shape == domain
            fits &= all(user in self._inside for user in users)
        elif node.op == "all_reduce":
            self._phase[node] = before + 1
            fits = node.operands[0].op in LOCAL_REDUCTIONS
        elif self._is_number(node):
            fits = all(x.scalar or self._is_number(x) for x in node.operands)
        else:
            fits = node.pointwise and node.layout == SHARD and node.shape == domain
            fits &= self._alias(node) or not self._of_inside(node)
        if not fits:
            raise Unsupported(f"`{node.op}` beside a sum over the ranks")

    def _is_number(self, node: Node) -> bool:
        """Whether it is one number, which all ranks have."""
        return node.layout == REPLICATE and node.numel == 1 and node.op != "all_gather"

    def _outer(self, node: Node) -> bool:
        """Whether a value along the slice is an operand, or a slice of one."""
        return node not in self._inside or node.op == "slice"

    def _alias(self, node: Node) -> bool:
        """A slice of one number is that number."""
        return self._of_inside(node) and self._is_number(node.operands[0])

    def _sums(self, phase: int) -> list[Node]:
        return [x for x in self._nodes if x.op in LOCAL_REDUCTIONS and self._phase[x] == phase]

    def _sinks_of(self, phase: int) -> list[tuple[int, Node, Node]]:
        """Results of a phase, and what it keeps."""
        results = [
            (number, node, value)
            for number, node, value in self._written
            if self._phase.get(value, 0) == phase and not self._is_number(node)
        ]
        return results + [
            (len(self._written) + number, node, node)
            for node, number in self._kept.items()
            if self._phase[node] == phase
        ]

    def _result_of(self, node: Node) -> int | None:
        """The result in which this rank's elements of a value are."""
        return next((number for number, _, value in self._written if value is node), None)

    def _plan(self, phase: int) -> list[Node]:
        """What a phase computes of elements, operands first: its own, and again what it needs."""
        wanted: set[Node] = set()
        stack = self._ends(phase)
        while stack:
            node = stack.pop()
            if node in wanted or self._outer(node) or node.scalar or self._is_number(node):
                continue
            if self._phase[node] < phase and not self._again(node, phase):
                continue
            wanted.add(node)
            stack += operands_of(node)
        return [node for node in self._nodes if node in wanted]

    def _again(self, node: Node, phase: int) -> bool:
        """Whether a phase computes a value of an earlier one, rather than to read it."""
        if self._result_of(node) is not None or node in self._kept:
            return False
        steps: set[Node] = set()
        stack = [node]
        while stack:
            step = stack.pop()
            if step in steps or step.scalar or self._is_number(step) or self._outer(step):
                continue
            if step is not node and self._result_of(step) is not None:
                continue
            if step is self._scatter or step.op in MATH or step.op == "dropout":
                return False
            steps.add(step)
            stack += step.operands
        return len(steps) <= _MOST_AGAIN

    def _keep(self) -> None:
        """Finds what has to be kept: later phases first, as that is computed by earlier ones."""
        for phase in range(self._last, -1, -1):
            values = [x for node in self._plan(phase) for x in operands_of(node)]
            values += self._ends(phase)
            for x in self._fetched(values, phase):
                if self._result_of(x) is None:
                    self._kept.setdefault(x, len(self._kept))

    def _ends(self, phase: int) -> list[Node]:
        """The values along the slice for whose sake the phase is computed."""
        values = [value for _, _, value in self._sinks_of(phase)]
        return values + [node.operands[0] for node in self._sums(phase)]

    def _fetched(self, nodes: list[Node], phase: int) -> Iterator[Node]:
        """Values of earlier phases that a phase reads from memory."""
        for x in nodes:
            along = not (x.scalar or self._is_number(x) or self._outer(x))
            if along and self._phase[x] < phase and not self._again(x, phase):
                yield x

    # --- what the function gets -----------------------------------------------------------------

    def _operand(self, value: Node, kind: int) -> int:
        number = super()._operand(value, kind)
        if self._operands[value][1] != kind:
            raise Unsupported("an operand that is read in two ways")
        self._read_last[value] = self._current
        return number

    def _value(self, node: Node) -> None:
        """Loads an operand of what the phase computes, unless it computes that."""
        if node in self._ready or node.scalar:
            return
        if self._alias(node):
            self._value(node.operands[0])
            self._before.append(
                f"const auto {self._names[node]} = {self._names[node.operands[0]]};"
            )
            self._ready[node] = 0
        elif self._is_number(node) or (not node.shape and node not in self._inside):
            self._number_of_all(node)
        elif self._outer(node):
            self._read(node)
        else:
            self._load_kept(node)

    def _number_of_all(self, node: Node) -> None:
        """One number: an operand, a total, or computed of such."""
        self._ready[node] = 0
        name, kind = self._names[node], computed_type(node.dtype)
        assert node.dtype is not None
        if node not in self._inside:
            self._pointer(node, self._operand(node, AS_IS))
            self._load_number(node)
            return
        if node.op == "all_reduce":
            total = f"{kind}(a->totals[{self._numbered[node.operands[0]]}])"
            text = self._rounded(total, node.dtype)
        else:
            for operand in node.operands:
                self._value(operand)
            text = self._one_call(node) if node.op in MATH else self._expression(node)
        self._before.append(f"const {kind} {name} = {text};")

    def _load_kept(self, node: Node) -> None:
        """This rank's elements of a value of an earlier phase."""
        self._ready[node] = 0
        number = self._result_of(node)
        if number is None:
            number = len(self._written) + self._kept[node]
        name, kind = self._names[node], stored_type(node)
        self._before.append(
            f"const {kind}* {name}in = static_cast<const {kind}*>(a->outputs[{number}].to[0]);"
        )
        self._load_elements(node)

    # --- the function ---------------------------------------------------------------------------

    def source(self) -> Source:
        for phase in range(self._last):
            for node in self._sums(phase):
                self._numbered[node] = len(self._numbered)
        if any(len(self._sums(phase)) > _MOST_SUMS for phase in range(self._last)):
            raise Unsupported("so many sums over the ranks")
        self._keep()
        text = self._file([self._phase_body(phase) for phase in range(self._last + 1)])
        phases = Phases(
            tuple(
                tuple(LOCAL_REDUCTIONS[node.op] for node in self._sums(phase))
                for phase in range(self._last)
            ),
            tuple(node.dtype for node in self._kept if node.dtype is not None),
            tuple(self._phase.get(value, 0) for _, _, value in self._written),
            tuple(self._is_number(node) for _, node, _ in self._written),
            tuple(self._read_last[value] for value in self._operands),
        )
        return self._source(text, phases=phases)

    def _phase_body(self, phase: int) -> list[str]:
        self._current = phase
        self._begin_loop()
        order, sums = self._plan(phase), self._sums(phase)
        computed = set(order)
        for x in [x for node in order for x in operands_of(node)] + self._ends(phase):
            if x not in computed:
                self._value(x)
        for node in order:
            self._compute(node)
        singles = [
            (number, node)
            for number, node, _ in self._written
            if self._is_number(node) and self._phase[node] == phase
        ]
        for _, node in singles:
            self._value(node)
        for number, node, value in self._sinks_of(phase):
            self._deliver(number, node, value)
        for number, node in enumerate(sums):
            self._sum_up(node, f"a->sums[at / kTile * {len(sums)} + {number}]")
        body = self._passes(order)
        stores = [
            f"  store(static_cast<{stored_type(node)}*>(a->outputs[{number}].to[0]), "
            f"{self._names[node]});"
            for number, node in singles
        ]
        return self._function_body(body, ["if (count == 0) {", *stores, "  return;", "}"])

    def _sum_up(self, node: Node, total: str) -> None:
        """Adds up a tile's elements, or the like."""
        (value,) = node.operands
        tile = f"{self._names[node]}summed"
        self._buffer(computed_type(value.dtype), tile)
        fold = f"{total} = {FOLDED[LOCAL_REDUCTIONS[node.op]]}({tile}, n);"
        self._sinks.setdefault(value, []).append(Sink(f"{tile}[i] = {self._names[value]};", fold))


def generate_phases(group: Group, nodes: tuple[Node, ...], program: Program) -> Source:
    """The source of a group that is `of_phases`.

    Raises:
        Unsupported: for what is not generated.
    """
    return _PhaseWriter(group, nodes, program).source()
