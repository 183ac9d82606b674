"""Generated sources, and the C++ expressions in them.

Sources hold the operations in their order as plain loops (`codegen_loop`), which the compiler
vectorises, and torch's at::vec for transcendental functions. 16-bit values are computed in float
and rounded after each operation, as torch does. An operation without an expression here is
`Unsupported`, and runs as eager.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fusedpg.fusion.ir import Node, Program

_STORED = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.bool: "bool",
}
_COMPUTED = {torch.float64: "double", torch.bool: "bool"}
HALVES = (torch.bfloat16, torch.float16)
FOLDED = {"sum": "sum_of", "max": "max_of", "min": "min_of"}  # generated/program.h
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
MATH = frozenset({"exp", "log", "tanh", "sigmoid", "erf", "gelu", "silu"})
CALLS: dict[str, str] = {
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
POWERS: dict[float, str] = {
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


NO_PHASES = Phases()


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
    phases: Phases = NO_PHASES

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


def stored_type(node: Node) -> str:
    """The type of a value's elements in memory."""
    assert node.dtype is not None
    return _STORED[node.dtype]


def computed_type(dtype: torch.dtype | None) -> str:
    """The type that values of a type, or scalars, are computed in."""
    return _COMPUTED.get(dtype, "float") if dtype is not None else "double"


class Expressions:
    """The values of a group of nodes as expressions over one element, in C++ for a CPU."""

    calls = CALLS
    powers = POWERS

    def __init__(self, nodes: tuple[Node, ...], program: Program) -> None:
        self._program = program
        self._nodes = tuple(node for node in nodes if not node.scalar)
        self._inside = frozenset(self._nodes)
        self._names: dict[Node, str] = {}
        self._numbers: dict[Node, int] = {}
        self._taken: set[Node] = set()  # numbers that the function has by name
        self._seeds: dict[Node, int] = {}
        self._dropouts: list[Node] = []
        self._before: list[str] = []  # statements that run once a call

    def _name(self, node: Node) -> None:
        self._names.setdefault(node, f"{node.name}_")

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

    @staticmethod
    def _rounded(text: str, dtype: torch.dtype) -> str:
        return f"rounded<{_STORED[dtype]}>({text})" if dtype in HALVES else text

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
        real = computed_type(inner)

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
            return f"{computed_type(node.dtype)}({self._names[given[0]]})"
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
            if given[0].scalar or not isinstance(power, (int, float)) or power not in POWERS:
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
        scale = f"{computed_type(node.dtype)}({name}_scale)"
        return f"({bits} >> 8) >= {name}_least ? {x} * {scale} : 0"

    def _random(self, node: Node, number: int, first: int) -> str:
        """The bits of an element, by a seed; and which elements stay, by two more numbers."""
        raise NotImplementedError

    @staticmethod
    def _function(node: Node) -> str:
        """Of transcendental operations."""
        name, dtype = node.op, node.operands[0].dtype
        if dtype != node.dtype or dtype == torch.bool:
            raise Unsupported(f"`{name}` of another type")
        if name == "gelu" and node.attribute("approximate") == "tanh":
            name = "gelu_tanh"
        return f"{name}_of<{computed_type(node.dtype)}>"


def repetition(shape: tuple[int, ...], domain: tuple[int, ...]) -> tuple[str, int] | None:
    """How a smaller operand is laid out along the elements of the whole, if simply."""
    full = (1,) * (len(domain) - len(shape)) + shape
    lead = next((d for d, size in enumerate(full) if size != 1), len(full))
    if full[lead:] == domain[lead:]:
        return "rows", math.prod(full[lead:])
    tail = max(d for d, size in enumerate(full) if size != 1) + 1
    if full[:tail] == domain[:tail]:
        return "columns", math.prod(domain[tail:])
    return None
