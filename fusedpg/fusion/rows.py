"""Groups of nodes that are computed row by row: reductions over trailing dimensions, and what is
computed element by element before and behind them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from fusedpg.functional import shard_range
from fusedpg.fusion.ir import REDUCTIONS, REPLICATE, Layout, Node, Program

_LONGEST = 1 << 16  # elements


@dataclasses.dataclass(frozen=True)
class Rows:
    """How tensors of a shape are cut into rows: one is all elements of the last dimensions."""

    domain: tuple[int, ...]
    count: int  # of those dimensions

    @staticmethod
    def of(node: Node) -> Rows | None:
        """The rows that a reduction is of; None if it is none, or not of such rows.

        Where a row is one element the whole and its reduction would have one shape; a row that
        fits no cache is better reduced by all threads, which torch does.
        """
        if node.op not in REDUCTIONS or node.layout != REPLICATE:
            return None
        return Rows.over(node.operands[0].shape, node.attribute("dims"))

    @staticmethod
    def over(domain: tuple[int, ...], dims: tuple[int, ...]) -> Rows | None:
        """The rows that these dimensions are; None as for `of`."""
        first = len(domain) - len(dims)
        if not dims or dims != tuple(range(first, len(domain))):
            return None
        rows = Rows(domain, len(dims))
        return rows if 1 < rows.length <= _LONGEST and rows.number else None

    @staticmethod
    def cut(domain: tuple[int, ...], length: int) -> Rows | None:
        """Rows of so many elements."""
        found = (Rows(domain, count) for count in range(1, len(domain) + 1))
        return next((rows for rows in found if rows.length == length), None)

    def whole(self, world_size: int) -> bool:
        """Whether each rank's slice of the domain is of whole rows."""
        chunk = shard_range(self.length * self.number, world_size, 0)[1]
        return chunk % self.length == 0  # where it is all, too

    @property
    def layout(self) -> Layout:
        """Of one number for each row of a slice."""
        return Layout("Rows", row=self.length)

    @property
    def length(self) -> int:
        return math.prod(self.domain[len(self.domain) - self.count :])

    @property
    def number(self) -> int:
        return math.prod(self.domain[: len(self.domain) - self.count])

    @property
    def bare(self) -> tuple[int, ...]:
        """The shape of one number a row."""
        return self.domain[: len(self.domain) - self.count]

    @property
    def kept(self) -> tuple[int, ...]:
        """The same with `keepdim`, which is broadcast to the whole."""
        return self.bare + (1,) * self.count

    def single(self, shape: tuple[int, ...]) -> bool:
        """Whether a value of the group has one number a row."""
        return shape in (self.kept, self.bare)

    def spread(self, shape: tuple[int, ...]) -> bool:
        """Whether such a value is broadcast along the rows."""
        return shape == self.kept or (self.number == 1 and self.single(shape))

    def take(self, nodes: Iterable[Node]) -> set[Node]:
        """Those of nodes, operands first, that can be computed in one pass over these rows."""
        found: set[Node] = set()
        for node in nodes:
            if node.layout != REPLICATE:
                continue
            if node.op in REDUCTIONS:
                fits = Rows.of(node) == self
            elif node.op == "expand":
                given = node.operands[0]
                fits = node.shape == self.domain and given in found and self.spread(given.shape)
            elif node.op == "view":
                given = node.operands[0]
                fits = self.single(node.shape) and given in found and self.single(given.shape)
            elif self.single(node.shape):
                # Of another origin it may as well be a row of its own, like biases.
                fits = node.pointwise and any(operand in found for operand in node.operands)
            else:
                fits = node.pointwise and node.shape == self.domain and self._reads(node, found)
            if fits:
                found.add(node)
        return found

    def _reads(self, node: Node, found: set[Node]) -> bool:
        """Whether what it reads of the group lies along the rows."""
        return all(
            self.spread(operand.shape)
            for operand in node.operands
            if operand in found and operand.shape != self.domain
        )


def levels(program: Program, within: frozenset[Node] = frozenset()) -> dict[Node, int]:
    """How many collectives and reductions lie before each node, without those `within` groups.

    What depends on inputs alone is as late as its first user. A node's level is never above its
    users', and below them after a collective: so elementwise nodes of one level can be fused.
    """

    def free(node: Node) -> bool:
        return node.pointwise or node in within

    found: dict[Node, int] = {}
    for node in program.nodes:
        found[node] = max(
            (
                found[operand] + (not free(operand) and operand.op != "input")
                for operand in node.operands
                if not operand.scalar
            ),
            default=0,
        )
    for node in reversed(program.nodes):
        if free(node) and found[node] == 0 and program.users[node]:
            found[node] = min(found[user] for user in program.users[node])
    return found


def passes(program: Program, taken: set[Node]) -> Iterator[frozenset[Node]]:
    """Sets of nodes with reductions, each of which is one pass over rows."""
    taken = set(taken)
    kinds = dict.fromkeys(rows for rows in map(Rows.of, program.nodes) if rows is not None)
    for rows in kinds:
        inside = rows.take(node for node in program.nodes if node not in taken)
        level = levels(program, frozenset(inside))
        alike: dict[int, set[Node]] = {}
        for node in program.nodes:
            if node in inside:
                alike.setdefault(level[node], set()).add(node)
        for nodes in alike.values():
            if len(nodes) > 1 and any(node.op in REDUCTIONS for node in nodes):
                taken |= nodes
                yield frozenset(nodes)
