"""C++ source of a fused collective with sums over all elements inside, like the norms of LAMB.

The function has phases. Each adds up numbers of this rank's elements, which the ranks combine, and
the next phase computes with the totals. A value that a later phase needs is read again where it is
an operand or a result, computed again where that takes nothing else, and else kept. Expressions are
those of `codegen`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusedpg.fusion.codegen import (
    _MATH,
    _MOST_SOURCES,
    AS_IS,
    Phases,
    Source,
    Unsupported,
    _computed,
    _stored,
    _Writer,
    header,
)
from fusedpg.fusion.ir import LOCAL_REDUCTIONS, REPLICATE, SHARD, Group, Node, Program

_MOST_SUMS = 64  # behind a phase
_MOST_AGAIN = 12  # operations that a phase computes again rather than read what was kept


def of_phases(nodes: tuple[Node, ...]) -> bool:
    """Whether a group has a sum over all elements inside."""
    return not LOCAL_REDUCTIONS.keys().isdisjoint({node.op for node in nodes})


class _PhaseWriter(_Writer):
    def __init__(self, group: Group, nodes: tuple[Node, ...], program: Program) -> None:
        super().__init__(group, nodes, program)
        self._phase: dict[Node, int] = {}  # in which a value is computed
        self._numbered: dict[Node, int] = {}  # sums, in the order in which ranks combine them
        self._kept: dict[Node, int] = {}
        self._read_last: dict[Node, int] = {}  # operands, and the last phase that reads each
        self._single_outputs: dict[Node, int] = {}
        self._current = 0
        for node in self._nodes:
            self._add(node)
        self._last = max(self._phase.values())
        self._written = self._outputs()

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
        elif self._single(node):
            fits = all(x.scalar or self._single(x) for x in node.operands)
        else:
            fits = node.pointwise and node.layout == SHARD and node.shape == domain
            fits &= self._alias(node) or not self._of_inside(node)
        if not fits:
            raise Unsupported(f"`{node.op}` beside a sum over the ranks")

    def _single(self, node: Node) -> bool:
        """Whether it is one number, which all ranks have."""
        return node.layout == REPLICATE and node.numel == 1 and node.op != "all_gather"

    def _outer(self, node: Node) -> bool:
        """Whether a value along the slice is an operand, or a slice of one."""
        return node not in self._inside or node.op == "slice"

    def _alias(self, node: Node) -> bool:
        """A slice of one number is that number."""
        return self._of_inside(node) and self._single(node.operands[0])

    def _sums(self, phase: int) -> list[Node]:
        return [x for x in self._nodes if x.op in LOCAL_REDUCTIONS and self._phase[x] == phase]

    def _sinks(self, phase: int) -> list[tuple[int, Node, Node]]:
        """Results of a phase, and what it keeps."""
        found = []
        for number, (node, whole) in enumerate(self._written):
            value = node.operands[0] if whole else node
            if self._phase.get(value, 0) == phase and not self._single(node):
                found.append((number, node, value))
        found += [
            (len(self._written) + number, node, node)
            for node, number in self._kept.items()
            if self._phase[node] == phase
        ]
        return found

    def _stored_in(self, node: Node) -> int | None:
        """The result in which this rank's elements of a value are."""
        for number, (result, whole) in enumerate(self._written):
            if node is (result.operands[0] if whole else result):
                return number
        return None

    def _plan(self, phase: int) -> list[Node]:
        """What a phase computes of elements, operands first: its own, and again what it needs."""
        wanted: set[Node] = set()
        stack = self._ends(phase)
        while stack:
            node = stack.pop()
            if node in wanted or self._outer(node) or node.scalar or self._single(node):
                continue
            if self._phase[node] < phase and not self._again(node, phase):
                continue
            if node is not self._scatter:
                wanted.add(node)
                stack += node.operands
        return [node for node in self._nodes if node in wanted]

    def _again(self, node: Node, phase: int) -> bool:
        """Whether a phase computes a value of an earlier one, rather than to read it."""
        if self._stored_in(node) is not None or node in self._kept:
            return False
        steps: set[Node] = set()
        stack = [node]
        while stack:
            one = stack.pop()
            if one in steps or one.scalar or self._single(one) or self._outer(one):
                continue
            if one is not node and self._stored_in(one) is not None:
                continue
            if one is self._scatter or one.op in _MATH or one.op == "dropout":
                return False
            steps.add(one)
            stack += one.operands
        return len(steps) <= _MOST_AGAIN

    def _keep(self) -> None:
        """Finds what has to be kept: later phases first, as that is computed by earlier ones."""
        for phase in range(self._last, -1, -1):
            values = [x for node in self._plan(phase) for x in node.operands]
            values += self._ends(phase)
            for x in self._fetched(values, phase):
                if self._stored_in(x) is None:
                    self._kept.setdefault(x, len(self._kept))

    def _ends(self, phase: int) -> list[Node]:
        """The values along the slice for whose sake the phase is computed."""
        values = [value for _, _, value in self._sinks(phase)]
        return values + [node.operands[0] for node in self._sums(phase)]

    def _fetched(self, nodes: list[Node], phase: int) -> Iterator[Node]:
        """Values of earlier phases that a phase reads from memory."""
        for x in nodes:
            along = not (x.scalar or self._single(x) or self._outer(x))
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
        elif self._single(node) or (not node.shape and node not in self._inside):
            self._number_of_all(node)
        elif self._outer(node) or (node is self._scatter and self._current == 0):
            if self._outer(node) and node.op != "slice" and not node.layout.parted:
                raise Unsupported("an operand that is not a slice")
            self._load(node)
        else:
            self._load_kept(node)

    def _number_of_all(self, node: Node) -> None:
        """One number: an operand, a total, or computed of such."""
        self._ready[node] = 0
        name, kind = self._names[node], _computed(node.dtype)
        assert node.dtype is not None
        if node not in self._inside:
            self._load_one(node, self._operand(node, AS_IS))
            return
        if node.op == "all_reduce":
            total = f"{kind}(a->totals[{self._numbered[node.operands[0]]}])"
            text = self._rounded(total, node.dtype)
        else:
            for operand in node.operands:
                self._value(operand)
            if node.op in _MATH:
                call = f"one_of({self._names[node.operands[0]]}, {self._function(node)})"
                text = self._rounded(call, node.dtype)
            else:
                text = self._expression(node)
        self._before.append(f"const {kind} {name} = {text};")

    def _load_kept(self, node: Node) -> None:
        """This rank's elements of a value of an earlier phase."""
        self._ready[node] = 0
        number = self._stored_in(node)
        if number is None:
            number = len(self._written) + self._kept[node]
        name, kind = self._names[node], _stored(node)
        self._before.append(
            f"const {kind}* {name}in = static_cast<const {kind}*>(a->outputs[{number}].to[0]);"
        )
        self._loads[node] = f"load({name}in + at + i)"

    # --- the function ---------------------------------------------------------------------------

    def source(self) -> Source:
        for phase in range(self._last):
            for node in self._sums(phase):
                self._numbered[node] = len(self._numbered)
        if any(len(self._sums(phase)) > _MOST_SUMS for phase in range(self._last)):
            raise Unsupported("so many sums over the ranks")
        self._keep()
        parts = [(self._phase_body(phase), self._before) for phase in range(self._last + 1)]
        text = self._text_of_phases(parts)
        singles = tuple(self._single(node) for node, _ in self._written)
        phases = Phases(
            tuple(
                tuple(LOCAL_REDUCTIONS[node.op] for node in self._sums(phase))
                for phase in range(self._last)
            ),
            tuple(node.dtype for node in self._kept if node.dtype is not None),
            tuple(
                self._phase.get(node.operands[0] if whole else node, 0)
                for node, whole in self._written
            ),
            singles,
            tuple(self._read_last[value] for value in self._operands),
        )
        return self._source(text, phases=phases)

    def _phase_body(self, phase: int) -> list[str]:
        self._current = phase
        self._before, self._prepared, self._loads, self._ready = [], [], {}, {}
        self._taken = set()
        order = self._plan(phase)
        sinks, sums = self._sinks(phase), self._sums(phase)
        computed = set(order)
        for x in [x for node in order for x in node.operands] + self._ends(phase):
            if x not in computed:
                self._value(x)
        for node in order:
            latest = max((self._ready[x] for x in node.operands if not x.scalar), default=0)
            self._ready[node] = latest + (node.op in _MATH)
        singles = [
            (number, node)
            for number, (node, _) in enumerate(self._written)
            if self._single(node) and self._phase[node] == phase
        ]
        for _, node in singles:
            self._value(node)
        body = self._body(order, sinks, sums)
        stores = [
            f"  store(static_cast<{_stored(node)}*>(a->outputs[{number}].to[0]), "
            f"{self._names[node]});"
            for number, node in singles
        ]
        loop = [
            "for (uint64_t at = 0; at < count; at += kTile) {",
            "  const uint64_t n = count - at < kTile ? count - at : kTile;",
            *("  " + line for line in body),
            "}",
            "fence();",
        ]
        return ["if (count == 0) {", *stores, "  return;", "}", *loop]

    def _text_of_phases(self, parts: list[tuple[list[str], list[str]]]) -> str:
        math_needed = any(node.op in _MATH for node in self._nodes)
        names = ["program.h", "rows.h", *(["math.h", "rows_math.h"] if math_needed else [])]
        lines = [*self._comment(), "", *map(header, names)]
        direct = "phase0<false>(a, begin, count)"
        if self._program.world_size > _MOST_SOURCES:
            direct = "void()"
        cases = [f"a->num_sources == 0 ? phase0<true>(a, begin, count) : {direct};"]
        for phase, (body, before) in enumerate(parts):
            if self._dropouts:
                numbers = len(self._numbers)
                before = [f"const double* more = a->numbers + {numbers};", *before]
            if self._periods:
                seeds = len(self._seeds)
                before = [f"const uint64_t* periods = a->seeds + {seeds};", *before]
            lines += ["template <bool kFolded>"] * (phase == 0)
            lines += [
                f"void phase{phase}(const Args* a, uint64_t begin, uint64_t count) {{",
                *("  " + line for line in [*before, *body]),
                "}",
                "",
            ]
            cases += [f"phase{phase}(a, begin, count);"] * (phase > 0)
        lines += [
            'extern "C" void fusedpg_epilogue_2(const Args* a, uint64_t begin, uint64_t count) {',
            "  switch (a->phase) {",
        ]
        for phase, call in enumerate(cases):
            lines += [f"    case {phase}:", f"      {call}", "      return;"]
        return "\n".join([*lines, "  }", "}", ""])


def generate_phases(group: Group, nodes: tuple[Node, ...], program: Program) -> Source:
    """The source of a group that is `of_phases`.

    Raises:
        Unsupported: for what is not generated.
    """
    return _PhaseWriter(group, nodes, program).source()


__all__ = ["generate_phases", "of_phases"]
