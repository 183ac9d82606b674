"""Programs: immutable graphs of operations on logical tensors.

A value is logically one full tensor, of the node's shape. Its layout says what a rank holds of it:

- Partial: a contribution of the full shape, which a collective must still combine;
- Replicate: all of it;
- Shard: the elements that `fusedpg.shard_range` gives the rank, as a 1-d tensor;
- Shard(d): the rank's block along dimension d, for operands of matmul; the shape is that block's;
- Rows(n): of a value with one number for each n elements of another one, those of its Shard, which
  is of whole such rows; as a 1-d tensor;
- Scalar: a Python number, the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from fusedpg import _fork
from fusedpg.fusion.errors import FusionError

Made = TypeVar("Made")
_lock = _fork.rlock()  # what is made may be made of something else


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a rank holds of a value."""

    kind: str
    dim: int | None = None
    row: int = 1  # of Rows: elements

    def __str__(self) -> str:
        if self.row > 1:
            return f"{self.kind}({self.row})"
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"

    @property
    def parted(self) -> bool:
        """Whether each rank has a part of the elements, as a 1-d tensor."""
        return self.kind in ("Shard", "Rows") and self.dim is None


PARTIAL = Layout("Partial")
REPLICATE = Layout("Replicate")
SHARD = Layout("Shard")
SCALAR = Layout("Scalar")

COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "broadcast"})
# From one pipeline stage to another. What `send` gives is a token, `recv` takes its shape from its
# operand, if it has one.
MESSAGES = frozenset({"send", "recv"})
TAGS = 1 << 14
LOCAL_REDUCTIONS = {"local_sum": "sum", "local_max": "max", "local_min": "min"}
REDUCTIONS = frozenset(LOCAL_REDUCTIONS.values())
# What is neither computed element by element nor free.
# `outer` is the sum over rows of their outer products, `expand` broadcasts to a shape, `view` gives
# the same elements another shape: backward programs have them.
_BARRIERS = COLLECTIVES | MESSAGES | REDUCTIONS | LOCAL_REDUCTIONS.keys() | {"matmul", "input"}
_BARRIERS |= {"outer", "expand", "view"}

_DTYPES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bool: "bool",
}
FLOATS = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point)
DTYPES = frozenset(_DTYPES)


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation and the value it gives. Compared by identity."""

    op: str
    operands: tuple[Node, ...]
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for scalars
    name: str
    attributes: tuple[tuple[str, object], ...] = ()
    source: Source | None = None

    def attribute(self, key: str) -> Any:
        return dict(self.attributes)[key]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def scalar(self) -> bool:
        return self.layout == SCALAR

    @property
    def pointwise(self) -> bool:
        """Whether each element of the value depends on the same element of the operands alone."""
        return not self.scalar and self.op not in _BARRIERS

    @property
    def type(self) -> str:
        if self.dtype is None:
            return "scalar"
        return f"{self.layout} {_DTYPES[self.dtype]}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        """The right-hand side, as the program prints it."""
        arguments = [_argument(operand) for operand in self.operands]
        shown = self.attributes if not self.scalar else ()
        arguments += [f"{key}={value!r}" for key, value in shown]
        return f"{self.op}({', '.join(arguments)})"

    def described(self) -> str:
        """For messages: the node, and where the user wrote it."""
        where = f"{self.source}: " if self.source else ""
        value = "" if self.op == "input" else f" = {self}"
        return f"{where}`{self.name}{value}` ({self.type})"


def _argument(node: Node) -> str:
    return repr(node.attribute("value")) if node.op == "constant" else node.name


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Nodes that are carried out as one."""

    kind: str  # "compute", "collective" or "overlap"
    nodes: frozenset[Node]
    chunks: int = 1

    def __str__(self) -> str:
        title = {"compute": "fused", "collective": "fused collective", "overlap": "overlap"}
        return title[self.kind] + (f" in {self.chunks} chunks" if self.kind == "overlap" else "")

    def spans(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """The first row of each chunk of a value of this shape, and the row behind its last."""
        rows = math.prod(shape[:-1])
        ends = [rows * number // self.chunks for number in range(self.chunks + 1)]
        return list(itertools.pairwise(ends))


Unit = tuple["Group | None", tuple[Node, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Inputs, outputs, and the groups that are carried out as one."""

    name: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    world_size: int
    single: bool  # the function returns one tensor and not a tuple
    groups: tuple[Group, ...] = ()

    @functools.cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All that the outputs need, operands first."""
        order: dict[Node, None] = dict.fromkeys(self.inputs)
        # Without recursion: a program may be longer than Python's stack.
        for output in self.outputs:
            stack: list[tuple[Node, Iterator[Node]]] = [(output, iter(output.operands))]
            while stack:
                node, operands = stack[-1]
                following = next((operand for operand in operands if operand not in order), None)
                if following is not None:
                    stack.append((following, iter(following.operands)))
                else:
                    order.setdefault(node)
                    stack.pop()
        return tuple(order)

    @functools.cached_property
    def users(self) -> dict[Node, tuple[Node, ...]]:
        """Who reads a node's value."""
        found: dict[Node, dict[Node, None]] = {node: {} for node in self.nodes}
        for node in self.nodes:
            for operand in node.operands:
                found[operand][node] = None
        return {node: tuple(users) for node, users in found.items()}

    @functools.cached_property
    def released(self) -> tuple[tuple[Node, ...], ...]:
        """Of each unit, the values that nobody needs after it."""
        last: dict[Node, int] = {}
        for place, (_, nodes) in enumerate(self.units):
            for node in nodes:
                last.update(dict.fromkeys(node.operands, place))
        found: list[list[Node]] = [[] for _ in self.units]
        for node, place in last.items():
            if node not in self.outputs:
                found[place].append(node)
        return tuple(map(tuple, found))

    @functools.cached_property
    def _made(self) -> dict[object, Any]:
        return {}

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` gives; of a key it is made once, and lives as long as the program."""
        with _lock:
            if key not in self._made:
                self._made[key] = make()
            made: Made = self._made[key]
            return made

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """Groups and single nodes in an order in which each finds its operands.

        Raises:
            FusionError: when groups need each other's results.
        """
        home: dict[Node, Group] = {node: group for group in self.groups for node in group.nodes}
        members: dict[Group | Node, list[Node]] = {}
        received: set[Group | Node] = set()
        for node in self.nodes:
            unit = home.get(node, node)
            members.setdefault(unit, []).append(node)
            if node.op == "recv":
                received.add(unit)
        needs = {
            unit: {home.get(operand, operand) for node in nodes for operand in node.operands}
            - {unit}
            for unit, nodes in members.items()
        }
        result: list[Unit] = []
        done: set[Group | Node] = set()
        waiting = list(members)
        awaited = [unit for unit in members if unit in received]
        while waiting:
            # Another stage may send only when it has received: all else comes before a recv.
            order = (*(u for u in waiting if u not in awaited), *awaited) if awaited else waiting
            ready = next((unit for unit in order if needs[unit] <= done), None)
            if ready is None:
                raise FusionError(f"{self.name}: groups need each other's results")
            waiting.remove(ready)
            done.add(ready)
            if ready in awaited:
                awaited.remove(ready)
            group = ready if isinstance(ready, Group) else None
            result.append((group, tuple(members[ready])))
        return tuple(result)

    @functools.cached_property
    def one_group(self) -> bool:
        """Whether all tensors that are computed are those of one group."""
        alone = [nodes[0] for group, nodes in self.units if group is None]
        groups = len(self.units) - len(alone)
        return groups == 1 and all(node.scalar or node.op == "input" for node in alone)

    @functools.cached_property
    def structure(self) -> tuple[object, ...]:
        """What is computed and how it is grouped, whatever names and lines values have."""
        numbers = {node: number for number, node in enumerate(self.nodes)}

        def places(nodes: Iterable[Node]) -> tuple[int, ...]:
            return tuple(numbers[node] for node in nodes)

        return (
            tuple(
                (
                    *(node.op, places(node.operands), node.layout, node.shape, node.dtype),
                    repr(node.attributes),  # as 1 is equal to True and 1.0
                )
                for node in self.nodes
            ),
            places(self.outputs),
            frozenset(
                (group.kind, group.chunks, frozenset(places(group.nodes))) for group in self.groups
            ),
        )

    def find(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)

    @functools.cached_property
    def messages(self) -> tuple[Node, ...]:
        """What goes from one pipeline stage to another."""
        return tuple(node for node in self.nodes if node.op in MESSAGES)

    def overlap_of(self, message: Node) -> Group | None:
        """The group by which a message goes in chunks, if it does."""
        found = (g for g in self.groups if g.kind == "overlap" and message in g.nodes)
        return next(found, None)

    def crossing(self) -> int:
        """The bytes of its messages, of a rank that has as much as any other."""
        total = 0
        for value in map(carried, self.messages):
            if value.dtype is not None:
                parts = self.world_size if value.layout.parted else 1
                total += -(-value.numel // parts) * value.dtype.itemsize
        return total

    def bytes(self, least: int = 0) -> int:
        """What a rank sends to its group in a run, of values of at least so many elements.

        By the usual count: n (P - 1) / P a half of an all-reduce. Sums of 16-bit types travel in
        float32.
        """
        total = 0
        for node in self.nodes:
            if node.op in COLLECTIVES and node.dtype is not None and node.numel >= least:
                sums = node.op in ("all_reduce", "reduce_scatter")
                size = max(node.dtype.itemsize, 4 if sums else 1)
                halves = 2 if node.op == "all_reduce" else 1
                total += halves * node.numel * size * (self.world_size - 1) // self.world_size
        return total

    def __str__(self) -> str:
        parameters = ", ".join(
            f"{node.name}: {node.attribute('kind') if node.scalar else node.type}"
            for node in self.inputs
        )
        lines = [f"{self.name}({parameters})"]
        body: list[tuple[str, str]] = []
        for group, nodes in self.units:
            if group is not None:
                body.append((f"  {group}:", ""))
            for node in nodes:
                if node.op not in ("input", "constant"):
                    indent = "  " if group is None else "    "
                    where = f"  {node.source}" if node.source else ""
                    body.append((f"{indent}{node.name} = {node}", f"# {node.type}{where}"))
        width = min(max((len(left) for left, right in body if right), default=0), 56)
        lines += [f"{left:{width}}  {right}".rstrip() for left, right in body]
        lines.append("  return " + ", ".join(f"{n.name}: {n.layout}" for n in self.outputs))
        return "\n".join(lines)


class Names:
    """Names that a program does not have yet."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def new(self, base: str) -> str:
        name, number = base, 0
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name


def delayed(program: Program) -> Node | None:
    """A `send` that waits, for the sake of a group, for a `recv` that its value does not need."""
    if {"send", "recv"} > {node.op for node in program.messages}:
        return None
    needed: dict[Node, frozenset[Node]] = {}
    awaited: dict[Node, frozenset[Node]] = {}

    def add(found: dict[Node, frozenset[Node]], nodes: Iterable[Node]) -> None:
        inside = set(nodes)
        before = (found[x] for node in inside for x in node.operands if x not in inside)
        own = (node for node in inside if node.op == "recv")
        found.update(dict.fromkeys(inside, frozenset(own).union(*before)))

    for node in program.nodes:
        add(needed, [node])
    for _, nodes in program.units:
        add(awaited, nodes)
    return next((x for x in program.messages if x.op == "send" and needed[x] != awaited[x]), None)


def carried(message: Node) -> Node:
    """The value that a `send` or a `recv` is about."""
    return message.operands[0] if message.op == "send" else message


def rewrite(program: Program, change: Callable[[Node, tuple[Node, ...]], Node | None]) -> Program:
    """The program with nodes replaced by what `change(node, new operands)` returns.

    None keeps a node, on its new operands.
    """
    new: dict[Node, Node] = {}
    for node in program.nodes:
        operands = tuple(new[operand] for operand in node.operands)
        changed = change(node, operands)
        if changed is None:
            same = operands == node.operands
            changed = node if same else dataclasses.replace(node, operands=operands)
        new[node] = changed
    return dataclasses.replace(
        program,
        inputs=tuple(new[node] for node in program.inputs),
        outputs=tuple(new[node] for node in program.outputs),
    )


def escape(nodes: frozenset[Node], program: Program) -> Node | None:
    """A node outside of a set that lies between two of its nodes; None if the set is convex."""
    after: set[Node] = set()  # outside, and reached from the set
    for node in program.nodes:
        for operand in node.operands:
            if node not in nodes and (operand in nodes or operand in after):
                after.add(node)
            elif node in nodes and operand in after:
                return operand
    return None
