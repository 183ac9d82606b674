"""C++ source of a fused collective's computation: one function over elements of the owned slice.

The source holds the operations in their order as plain loops, which the compiler vectorises, and
torch's at::vec for transcendental functions. 16-bit values are computed in float and rounded after
each operation, as torch does. What is not known here is `Unsupported`, and runs as eager.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fusedpg.fusion.ir import LOCAL_REDUCTIONS, Group, Node, Program

FULL, PART, AS_IS, PART_OF_ROWS = 0, 1, 2, 3  # ProgramCall::Operand
_MOST_SOURCES = 8  # kMostProgramSources

_STORED = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.bool: "bool",
}
_COMPUTED = {torch.float64: "double", torch.bool: "bool"}
_HALVES = (torch.bfloat16, torch.float16)
_PICKS = ("min", "max")
FOLDED = {"sum": "sum_of", "max": "max_of", "min": "min_of"}  # generated/rows.h
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_MATH = frozenset({"exp", "log", "tanh", "sigmoid", "erf", "gelu", "silu"})
_CALLS: dict[str, str] = {
    "abs": "std::abs({0})",
    "neg": "-{0}",
    "sign": "{T}({0} > 0) - {T}({0} < 0)",
    "square": "{0} * {0}",
    "reciprocal": "1 / {0}",
    "sqrt": "std::sqrt({0})",
    "rsqrt": "1 / std::sqrt({0})",
    "relu": "maximum({0}, {T}(0))",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "!{0}",
}
_POWERS: dict[float, str] = {
    2.0: "{0} * {0}",
    0.5: "std::sqrt({0})",
}


class Unsupported(Exception):
    """Why a group runs operation by operation."""


@dataclasses.dataclass(frozen=True)
class Phases:
    """Of a function between whose phases ranks combine numbers; without any there is one phase."""

    sums: tuple[tuple[str, ...], ...] = ()  # how, behind each phase but the last
    kept: tuple[torch.dtype, ...] = ()  # of this rank's elements, for later phases
    written: tuple[int, ...] = ()  # for each output the phase that writes it
    single: tuple[bool, ...] = ()  # whether it is one number
    read: tuple[int, ...] = ()  # for each operand the last phase that reads it

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `fused_program_` takes them."""
        return self.sums, [dtype.itemsize for dtype in self.kept], self.written, self.single


_ONE_PHASE = Phases()


@dataclasses.dataclass(frozen=True)
class Source:
    """The generated text, and what its function gets in which order."""

    text: str
    scatter: Node
    operands: tuple[tuple[Node, int], ...]  # values of the program, and how they are passed
    materialised: frozenset[Node]  # slices that are made before: their values are passed
    outputs: tuple[tuple[Node, bool], ...]  # nodes of the program; whether gathered
    numbers: tuple[Node, ...]
    seeds: tuple[Node, ...]
    dropouts: tuple[Node, ...]  # for each two more numbers: threshold, scale
    periods: tuple[int, ...]  # behind the seeds: how operands repeat
    shapes: str
    row: int = 1  # elements of which the function takes whole rows
    scratch: int = 0  # bytes of memory that it needs
    phases: Phases = _ONE_PHASE

    @functools.cached_property
    def code(self) -> str:
        """The text without its comments."""
        return code(self.text)

    @functools.cached_property
    def op(self) -> str:
        """How contributions are added up: what a mean divides by is in the text."""
        op: str = self.scatter.attribute("op")
        return "sum" if op == "mean" else op

    @functools.cached_property
    def kinds(self) -> list[int]:
        """How each operand is passed."""
        return [kind for _, kind in self.operands]

    @functools.cached_property
    def gathered(self) -> list[bool]:
        """Of each output."""
        return [whole for _, whole in self.outputs]

    @functools.cached_property
    def reads(self) -> list[int]:
        """Of each operand, how many elements the function is made for, in all ranks' slices."""
        return [node.numel for node, _ in self.operands]

    @functools.cached_property
    def made_for(self) -> list[Node]:
        """The contribution, the operands and the results: in these types, the code reads memory."""
        given = [node for node, _ in self.operands]
        return [self.scatter.operands[0], *given, *(node for node, _ in self.outputs)]

    @functools.cached_property
    def key(self) -> int:
        """What all ranks must have: what is computed, of which types and shapes."""
        text = f"{self.code}\n{self.shapes}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@functools.cache
def header(name: str) -> str:
    """The text of a file in generated/, which stands before generated functions."""
    return (Path(__file__).parent / "generated" / name).read_text("utf-8")


def code(text: str) -> str:
    """A source without its comments, which name lines of the user's file."""
    return "\n".join([line.split("//")[0].rstrip() for line in text.split("\n")])


def _stored(node: Node) -> str:
    """The type of a value's elements in memory."""
    assert node.dtype is not None
    return _STORED[node.dtype]


def _computed(dtype: torch.dtype | None) -> str:
    """The type that values of a type, or scalars, are computed in."""
    return _COMPUTED.get(dtype, "float") if dtype is not None else "double"


class _Writer:
    """What the function of a group gets and computes; the text is C++ for a CPU."""

    calls = _CALLS
    powers = _POWERS

    def __init__(self, group: Group, nodes: tuple[Node, ...], program: Program) -> None:
        self._begin(nodes, program)
        scatters = [node for node in self._nodes if node.op == "reduce_scatter"]
        if group.kind != "collective" or len(scatters) != 1:
            raise Unsupported("it has no reduce_scatter")
        self._scatter = scatters[0]

    def _begin(self, nodes: tuple[Node, ...], program: Program) -> None:
        self._program = program
        self._nodes = tuple(node for node in nodes if not node.scalar)
        self._inside = frozenset(self._nodes)
        self._operands: dict[Node, tuple[int, int]] = {}  # number, kind
        self._materialised: set[Node] = set()
        self._numbers: dict[Node, int] = {}
        self._taken: set[Node] = set()  # numbers that the function has by name
        self._seeds: dict[Node, int] = {}
        self._dropouts: list[Node] = []
        self._periods: list[int] = []
        self._before: list[str] = []  # once a call
        self._prepared: list[str] = []  # once a tile
        self._loads: dict[Node, str] = {}
        self._names: dict[Node, str] = {}
        self._ready: dict[Node, int] = {}  # the loop that has a value

    # --- what the function gets ----------------------------------------------------------------

    def _operand(self, value: Node, kind: int) -> int:
        if value not in self._operands:
            self._operands[value] = (len(self._operands), kind)
        return self._operands[value][0]

    def _load(self, node: Node) -> None:
        """A value that comes from outside of the group, or the sum over the ranks."""
        shape = self._scatter.shape
        self._ready[node] = 0
        if node is self._scatter:
            self._loads[node] = self._sum(node)
            return
        value = node.operands[0] if node.op == "slice" and node in self._inside else node
        if self._of_inside(node):
            raise Unsupported("a slice of what is gathered")
        if not value.shape and node.op != "slice":
            self._load_one(node, self._operand(value, AS_IS))
            return
        if value.layout.kind == "Shard" and value is not node:
            raise Unsupported("a slice of a slice")
        kind = FULL if value is not node else PART
        pattern = _pattern(value.shape, shape) if value is not node else None
        if pattern is not None and value.shape != shape:
            function, period = pattern
            self._load_pattern(node, self._operand(value, AS_IS), function)
            self._periods.append(period)
            return
        if value is not node and value.shape != shape:
            self._materialised.add(node)
            value, kind = node, PART
        self._load_slice(node, self._operand(value, kind))

    def _of_inside(self, node: Node) -> bool:
        """Whether it is a slice of a value of the group."""
        return node.op == "slice" and node.operands[0] in self._inside

    def _load_one(self, node: Node, place: int) -> None:
        """A value without dimensions, once."""
        self._before.append(
            f"const {_computed(node.dtype)} {self._names[node]} = load("
            f"static_cast<const {_stored(node)}*>(a->inputs[{place}]));"
        )

    def _load_pattern(self, node: Node, place: int, function: str) -> None:
        """A smaller value, which `function` (rows or columns) repeats by the next period."""
        name, kind = self._names[node], _stored(node)
        self._prepared.append(
            f"{kind} {name}_row[kTile];\n{function}({name}_row, static_cast<const "
            f"{kind}*>(a->inputs[{place}]), periods[{len(self._periods)}], begin + at, n);"
        )
        self._loads[node] = f"load({name}_row + i)"

    def _load_slice(self, node: Node, place: int) -> None:
        name, kind = self._names[node], _stored(node)
        self._before.append(
            f"const {kind}* {name}_in = static_cast<const {kind}*>(a->inputs[{place}]);"
        )
        self._loads[node] = f"load({name}_in + at + i)"

    def _sum(self, node: Node) -> str:
        op = node.attribute("op")
        kind, wide = _stored(node.operands[0]), self._wide()
        self._before.append(
            f"const {wide}* sum = static_cast<const {wide}*>(a->sources[0]);"
            f"  // over the ranks: {op}"
        )
        ranks = self._program.world_size
        text = "load(sum + at + i)"
        if ranks <= _MOST_SOURCES:  # they are added here
            total = ""
            for rank in range(ranks):
                self._before.append(
                    f"const {kind}* part{rank} = "
                    f"static_cast<const {kind}*>(kFolded ? nullptr : a->sources[{rank}]);"
                )
                one = f"load(part{rank} + at + i)"
                if not total:
                    total = one
                elif op in _PICKS:
                    total = f"{'greater' if op == 'max' else 'lesser'}({total}, {one})"
                else:
                    total = f"({total} + {one})"
            text = f"(kFolded ? {text} : {total})"
        return self._averaged(text)

    def _wide(self) -> str:
        """The type in memory of the sum over the ranks."""
        given = self._scatter.operands[0]
        if given.dtype in _HALVES and self._scatter.attribute("op") not in _PICKS:
            return "float"
        return _stored(given)

    def _averaged(self, total: str) -> str:
        """The reduction, of the sum over the ranks."""
        assert self._scatter.dtype is not None
        if self._scatter.attribute("op") == "mean":
            total = f"{total} / {self._program.world_size}"
        return self._rounded(total, self._scatter.dtype)

    def _number(self, node: Node) -> str:
        """A scalar, as a double."""
        if node.op == "constant":
            value = node.attribute("value")
            if value is None or isinstance(value, bool):
                raise Unsupported(f"the argument {value!r}")
            value = float(value)
            if math.isnan(value):
                return "double(NAN)"
            if math.isinf(value):
                return "double(INFINITY)" if value > 0 else "-double(INFINITY)"
            return repr(value) if value >= 0 and math.copysign(1, value) > 0 else f"({value!r})"
        number = self._numbers.setdefault(node, len(self._numbers))
        if node not in self._taken:
            self._taken.add(node)
            self._take_number(node, number)
        return self._names[node]

    def _take_number(self, node: Node, number: int) -> None:
        self._before.append(f"const double {self._names[node]} = a->numbers[{number}];")

    # --- expressions ---------------------------------------------------------------------------

    @staticmethod
    def _rounded(text: str, dtype: torch.dtype) -> str:
        return f"rounded<{_STORED[dtype]}>({text})" if dtype in _HALVES else text

    def _expression(self, node: Node) -> str:
        tensors = [x for x in node.operands if not x.scalar]
        kinds = {x.dtype for x in tensors}
        if node.op == "where":
            kinds = {x.dtype for x in tensors[1:] if not x.scalar} if tensors else set()
            kinds |= {node.dtype}
            if node.operands[0].scalar or node.operands[0].dtype != torch.bool:
                raise Unsupported(f"`{node.op}` without a mask")
        if node.op != "cast" and len(kinds) != 1:
            raise Unsupported(f"`{node.op}` of several types")
        assert node.dtype is not None
        inner = tensors[0].dtype if node.op != "where" else node.dtype
        assert inner is not None
        real = _computed(inner)

        def plain(x: Node) -> str:
            return self._names[x] if not x.scalar else f"{real}({self._number(x)})"

        def narrow(x: Node) -> str:  # numbers take the tensor's type first
            return self._rounded(plain(x), inner) if x.scalar else self._names[x]

        return self._rounded(self._text(node, inner, real, plain, narrow), node.dtype)

    def _text(
        self,
        node: Node,
        inner: torch.dtype,
        real: str,
        plain: Callable[[Node], str],
        narrow: Callable[[Node], str],
    ) -> str:
        op, given = node.op, node.operands
        if op == "cast":
            if inner == torch.bool:
                return f"{_computed(node.dtype)}({self._names[given[0]]})"
            return f"{_computed(node.dtype)}({self._names[given[0]]})"
        if inner == torch.bool and op not in ("logical_and", "logical_or", "logical_not", "where"):
            raise Unsupported(f"`{op}` of masks")
        if op in _INFIX:
            if given[0].scalar and op == "div":  # as torch does it
                inverse = self._rounded(f"1 / {narrow(given[1])}", inner)
                return f"{inverse} * {plain(given[0])}"
            if op in ("add", "sub"):
                return f"{narrow(given[0])} {_INFIX[op]} {narrow(given[1])}"
            return f"{plain(given[0])} {_INFIX[op]} {plain(given[1])}"
        if op in _COMPARED:
            return f"{narrow(given[0])} {_COMPARED[op]} {narrow(given[1])}"
        if op == "where":
            return f"{self._names[given[0]]} ? {narrow(given[1])} : {narrow(given[2])}"
        if op == "clamp":
            text = narrow(given[0])
            for bound, function in zip(given[1:], ("maximum", "minimum")):
                if bound.op == "constant" and bound.attribute("value") is None:
                    continue
                if not bound.scalar:
                    raise Unsupported("`clamp` with tensors")
                text = f"{function}({text}, {narrow(bound)})"
            return text
        if op == "pow":
            power = given[1].attribute("value") if given[1].op == "constant" else None
            if given[0].scalar or not isinstance(power, (int, float)) or power not in _POWERS:
                raise Unsupported("`pow` but for squares and square roots")
            return self.powers[float(power)].format(self._names[given[0]])
        if op == "dropout":
            return self._dropout(node)
        if op in self.calls:
            return self.calls[op].format(*map(narrow, given), T=real)
        raise Unsupported(f"`{op}`")

    def _dropout(self, node: Node) -> str:
        seed = node.operands[2]
        number = self._seeds.setdefault(seed, len(self._seeds))
        if node not in self._dropouts:
            self._dropouts.append(node)
        bits = self._random(node, number, 2 * self._dropouts.index(node))
        name, x = self._names[node], self._names[node.operands[0]]
        scale = f"{_computed(node.dtype)}({name}_scale)"
        return f"({bits} >> 8) >= {name}_least ? {x} * {scale} : 0"

    def _random(self, node: Node, number: int, first: int) -> str:
        """The bits of an element, by a seed; and who is kept, by two more numbers."""
        name = self._names[node]
        self._before += [
            f"const auto {name}_least = static_cast<uint32_t>(more[{first}]);",
            f"const double {name}_scale = more[{first + 1}];",
        ]
        self._prepared.append(
            f"uint32_t {name}_words[kTile + 8];\n"
            f"const uint32_t* {name}_bits = philox({name}_words, a->seeds[{number}], "
            "begin + at, n);"
        )
        return f"{name}_bits[i]"

    # --- the function --------------------------------------------------------------------------

    def source(self) -> Source:
        domain = self._scatter.shape
        order: list[Node] = []
        for node in self._nodes:
            for operand in node.operands:
                self._name(operand)
                known = operand in self._inside or operand.scalar or operand in self._ready
                if not known and node.op not in ("slice", "reduce_scatter"):
                    self._load(operand)
            self._name(node)
            if node.op in ("slice", "reduce_scatter"):
                self._load(node)
            elif node.op != "all_gather":
                if node.layout.kind != "Shard":
                    raise Unsupported(f"`{node.op}` is not on slices")
                order.append(node)
            if node.shape != domain:
                raise Unsupported("shapes differ")
        outputs = self._outputs()
        if not outputs:
            raise Unsupported("nobody uses it")
        for node in order:
            latest = max((self._ready[x] for x in node.operands if not x.scalar), default=0)
            self._ready[node] = latest + (node.op in _MATH)
        sinks = [
            (number, node, node.operands[0] if whole else node)
            for number, (node, whole) in enumerate(outputs)
        ]
        body = self._body(order, sinks)
        return self._source(self._text_of_file(body, any(node.op in _MATH for node in order)))

    def _source(
        self, text: str, row: int = 1, scratch: int = 0, phases: Phases = _ONE_PHASE
    ) -> Source:
        """The text, and what has been taken in while it was written; of rows their length, too."""
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

    def _name(self, node: Node) -> None:
        self._names.setdefault(node, f"{node.name}_")

    def _outputs(self) -> tuple[tuple[Node, bool], ...]:
        found: list[tuple[Node, bool]] = []
        for node in self._nodes:
            users = self._program.users[node]
            needed = node in self._program.outputs or any(x not in self._inside for x in users)
            if node.op == "all_gather":
                if node.operands[0] not in self._inside:
                    raise Unsupported("an all_gather of something else")
                found.append((node, True))
            elif needed:
                found.append((node, False))
        return tuple(found)

    def _body(
        self, order: list[Node], sinks: list[tuple[int, Node, Node]], sums: Sequence[Node] = ()
    ) -> list[str]:
        """The loops over a tile.

        Args:
            sinks: where values go: the number of the output, the node that names it, the value.
            sums: what is added up, and the like, of a tile's elements.
        """
        values = [*(value for _, _, value in sinks), *(node.operands[0] for node in sums)]
        last = max([self._ready[value] for value in values], default=0)
        uses: dict[Node, set[int]] = {}  # the loops that read a value
        for node in order:
            loop = self._ready[node] - (node.op in _MATH)
            for operand in node.operands:
                uses.setdefault(operand, set()).add(loop)
        for value in values:
            uses.setdefault(value, set()).add(last)
        arrays: list[str] = []
        lines: list[str] = []
        for loop in range(last + 1):
            body: list[str] = []
            after: list[str] = []
            # What is loaded, or was computed by an earlier loop.
            for node, text in self._loads.items():
                if loop in uses.get(node, ()):
                    body.append(f"const {_computed(node.dtype)} {self._names[node]} = {text};")
            for node in order:
                name, kind = self._names[node], _computed(node.dtype)
                ready = self._ready[node]
                later = any(other > ready for other in uses.get(node, ()))
                if node.op in _MATH:
                    if ready == loop + 1:
                        x = node.operands[0]
                        arrays.append(f"alignas(64) {kind} {name}tile[kTile];")
                        body.append(f"{name}tile[i] = {self._names[x]};")
                        after.append(f"apply({name}tile, n, {self._function(node)});")
                    elif loop in uses.get(node, ()) and ready <= loop:
                        assert node.dtype is not None
                        text = self._rounded(f"{name}tile[i]", node.dtype)
                        body.append(f"const {kind} {name} = {text};")
                elif ready == loop:
                    where = f"  // {node.source}" if node.source else ""
                    body.append(f"const {kind} {name} = {self._expression(node)};{where}")
                    if later:
                        arrays.append(f"alignas(64) {kind} {name}tile[kTile];")
                        body.append(f"{name}tile[i] = {name};")
                elif ready < loop and loop in uses.get(node, ()):
                    body.append(f"const {kind} {name} = {name}tile[i];")
            if loop == last:
                for number, node, value in sinks:
                    assert node.dtype is not None
                    stored = _STORED[node.dtype]
                    name = self._names[node]
                    self._before.append(f"const Output {name}to = a->outputs[{number}];")
                    arrays.append(f"alignas(64) {stored} {name}results[kTile];")
                    lines.append(f"{stored}* {name}out = place({name}to, {name}results, at);")
                    body.append(f"store({name}out + i, {self._names[value]});")
                    after.append(f"deliver({name}to, {name}out, at, n);")
                for number, node in enumerate(sums):
                    (value,) = node.operands
                    tile = f"{self._names[node]}summed"
                    arrays.append(f"alignas(64) {_computed(value.dtype)} {tile}[kTile];")
                    body.append(f"{tile}[i] = {self._names[value]};")
                    place = f"a->sums[at / kTile * {len(sums)} + {number}]"
                    after.append(f"{place} = {FOLDED[LOCAL_REDUCTIONS[node.op]]}({tile}, n);")
            lines += ["VECTORISE", "for (uint64_t i = 0; i < n; ++i) {"]
            lines += ["  " + line for line in body]
            lines += ["}", *after]
        prepared = [line for text in self._prepared for line in text.split("\n")]
        return [*arrays, *prepared, *lines]

    @staticmethod
    def _function(node: Node) -> str:
        """Of transcendental operations."""
        name, dtype = node.op, node.operands[0].dtype
        if dtype != node.dtype or dtype == torch.bool:
            raise Unsupported(f"`{name}` of another type")
        if name == "gelu" and node.attribute("approximate") == "tanh":
            name = "gelu_tanh"
        return f"{name}_of<{_computed(node.dtype)}>"

    def _given(self) -> list[str]:
        adds = f"  adds {self._scatter.operands[0].type}"
        return [adds, *(f"  takes {value.name}: {value.type}" for value in self._operands)]

    def _described(self) -> list[str]:
        return [f"  {node.name} = {node}: {node.type}" for node in self._nodes]

    def _text_of_file(self, body: list[str], math_needed: bool) -> str:
        if self._dropouts:
            self._before.insert(0, f"const double* more = a->numbers + {len(self._numbers)};")
        if self._periods:
            self._before.insert(0, f"const uint64_t* periods = a->seeds + {len(self._seeds)};")
        lines = [
            *self._before,
            "for (uint64_t at = 0; at < count; at += kTile) {",
            "  const uint64_t n = count - at < kTile ? count - at : kTile;",
            *("  " + line for line in body),
            "}",
            "fence();",
        ]
        head = header("program.h") + (header("math.h") if math_needed else "")
        return "\n".join([*self._comment(), "", head, *self._function_text(lines), ""])

    def _function_text(self, lines: list[str]) -> list[str]:
        """The function, for contributions and for their sum."""
        direct = "compute<false>(a, begin, count)"
        if self._program.world_size > _MOST_SOURCES:
            direct = "void()"
        return [
            "template <bool kFolded>",
            "void compute(const Args* a, uint64_t begin, uint64_t count) {",
            *("  " + line for line in lines),
            "}",
            "",
            'extern "C" void fusedpg_epilogue_2(const Args* a, uint64_t begin, uint64_t count) {',
            f"  a->num_sources == 0 ? compute<true>(a, begin, count) : {direct};",
            "}",
        ]

    def _comment(self) -> list[str]:
        comment = [f"// {self._program.name}, on {self._program.world_size} ranks"]
        return comment + [f"// {line}" for line in self._given() + self._described()]


def _pattern(shape: tuple[int, ...], domain: tuple[int, ...]) -> tuple[str, int] | None:
    """How a smaller operand is laid out along the elements of the whole, if simply."""
    full = (1,) * (len(domain) - len(shape)) + shape
    lead = next((d for d, size in enumerate(full) if size != 1), len(full))
    if full[lead:] == domain[lead:]:
        return "rows", math.prod(full[lead:])
    tail = max(d for d, size in enumerate(full) if size != 1) + 1
    if full[:tail] == domain[:tail]:
        return "columns", math.prod(domain[tail:])
    return None


def generate(group: Group, nodes: tuple[Node, ...], program: Program) -> Source:
    """The source of a group.

    Raises:
        Unsupported: for what is not generated.
    """
    return _Writer(group, nodes, program).source()
