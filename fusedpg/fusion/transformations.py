"""Rewrites of programs that keep their results, each with the check that it does.

They are values: compare them, print them, apply them to a program. With a node's name they are
about that node, without one about all that they fit.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection
from typing import NoReturn

from fusedpg.fusion.errors import FusionError, IllegalTransformation
from fusedpg.fusion.ir import (
    LOCAL_REDUCTIONS,
    MESSAGES,
    PARTIAL,
    REDUCTIONS,
    REPLICATE,
    SHARD,
    Group,
    Layout,
    Names,
    Node,
    Program,
    carried,
    delayed,
    escape,
    rewrite,
)
from fusedpg.fusion.rows import Rows, levels, passes


@dataclasses.dataclass(frozen=True)
class Transformation(abc.ABC):
    """A rewrite of a program."""

    node: str | None = None

    @abc.abstractmethod
    def apply(self, program: Program) -> Program:
        """The new program.

        Raises:
            IllegalTransformation: when it would not compute the same, with the node that is why.
        """

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.node or ''})"

    def refuse(self, reason: str, node: Node | None = None) -> NoReturn:
        about = f"; {node.described()}" if node is not None else ""
        raise IllegalTransformation(f"{self}: {reason}{about}")

    def _named(self, program: Program, name: str | None) -> Node:
        found = program.find(name or "")
        if found is None:
            names = ", ".join(node.name for node in program.nodes if node.op != "constant")
            self.refuse(f"the program has no node {name!r}; there are {names}")
        return found

    def _all(self, program: Program, *ops: str) -> list[Node]:
        """The named node, or all of these operations."""
        if self.node is None:
            return [node for node in program.nodes if node.op in ops]
        found = self._named(program, self.node)
        if found.op not in ops:
            self.refuse(f"it is about {' or '.join(ops)}", found)
        return [found]

    def _fitting(self, program: Program, *ops: str, none: str) -> list[Node]:
        """The named node, or all of these operations that nothing is in the way of.

        Args:
            none: why it is refused where there is none.
        """
        found = self._all(program, *ops)
        if self.node is None:
            found = [node for node in found if self._obstacle(program, node) is None]
            if not found:
                self.refuse(none)
        for node in found:
            obstacle = self._obstacle(program, node)
            if obstacle is not None:
                self.refuse(*obstacle)
        return found

    @staticmethod
    def _obstacle(program: Program, node: Node) -> tuple[str, Node] | None:
        """Why a node has to stay as it is, and which node is in the way."""
        raise NotImplementedError

    def _ungrouped(self, program: Program) -> None:
        if program.groups:
            self.refuse("fused groups are fixed: apply it before what fuses")


@dataclasses.dataclass(frozen=True)
class Split(Transformation):
    """all_reduce becomes reduce_scatter and all_gather."""

    def apply(self, program: Program) -> Program:
        self._ungrouped(program)
        found = self._all(program, "all_reduce")
        if self.node is None:
            found = [node for node in found if node.shape and not _small(node)]
        if not found:
            self.refuse("the program has no all_reduce that can be split")
        for node in found:
            if not node.shape:
                self.refuse("a tensor without dimensions has no slices", node)
        names = Names(node.name for node in program.nodes)

        def change(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node not in found:
                return None
            scattered = dataclasses.replace(
                node,
                op="reduce_scatter",
                operands=operands,
                layout=SHARD,
                name=names.new(f"{node.name}_scattered"),
            )
            return dataclasses.replace(node, op="all_gather", operands=(scattered,), attributes=())

        return rewrite(program, change)


def _small(node: Node) -> bool:
    """An all_reduce that was inserted for a reduction."""
    return node.operands[0].op.startswith("local_")


@dataclasses.dataclass(frozen=True)
class Reorder(Transformation):
    """all_gather moves behind the elementwise operations that use it; these work on slices.

    Their other operands that are whole get a slice, reductions a small all_reduce, and what must
    be whole in the end an all_gather of its own.
    """

    def apply(self, program: Program) -> Program:
        self._ungrouped(program)
        none = "the program has no all_gather with elementwise operations behind it"
        found = self._fitting(program, "all_gather", none=none)
        return Moved(program, frozenset(found)).result()

    @staticmethod
    def _obstacle(program: Program, gather: Node) -> tuple[str, Node] | None:
        users = program.users[gather]
        if not users:
            return "no operation uses it", gather
        if gather.operands[0].layout != SHARD:
            return "it gathers one number for each row", gather
        for user in users:
            reads_slices = user.pointwise and user.shape == gather.shape
            reads_slices &= user.layout == (SHARD if user.op == "slice" else REPLICATE)
            if not reads_slices and user.op not in REDUCTIONS:
                return f"{user.name} needs the whole tensor `{gather.name}`", user
        return None


class Moved:
    """A program in which what depends on gathered values is computed on slices."""

    def __init__(self, program: Program, gathers: frozenset[Node]) -> None:
        self._names = Names(node.name for node in program.nodes)
        self._program = program
        self._gathers = gathers
        self._new: dict[Node, Node] = {}  # a node's value, in the node's own layout
        self._slices: dict[Node, Node] = {}  # this rank's slice of a node's value
        self._sliced: dict[tuple[Node, tuple[int, ...], Layout], Node] = {}

    def result(self) -> Program:
        for node in self._program.nodes:
            self._visit(node)
        return dataclasses.replace(
            self._program,
            inputs=tuple(self._new[node] for node in self._program.inputs),
            outputs=tuple(self._whole(node) for node in self._program.outputs),
        )

    def _visit(self, node: Node) -> None:
        if node in self._gathers:
            self._slices[node] = self._whole(node.operands[0])
        elif not any(operand in self._slices for operand in node.operands):
            operands = tuple(self._new[operand] for operand in node.operands)
            same = operands == node.operands
            self._new[node] = node if same else dataclasses.replace(node, operands=operands)
        elif node.operands and _slices(node, node.operands[0]):
            self._new[node] = self._slices[node.operands[0]]
        elif node.op in REDUCTIONS and node.operands[0] in self._slices:
            self._new[node] = _by_slices(node, self._slices[node.operands[0]], self._names)
        elif node.pointwise and node.op != "slice" and self._on_slices(node):
            operands = tuple(self._operand(operand, node.shape) for operand in node.operands)
            self._slices[node] = dataclasses.replace(node, operands=operands, layout=SHARD)
        else:
            operands = tuple(self._whole(operand) for operand in node.operands)
            self._new[node] = dataclasses.replace(node, operands=operands)

    def _on_slices(self, node: Node) -> bool:
        return node.layout == REPLICATE and all(
            operand.shape == node.shape for operand in node.operands if operand in self._slices
        )

    def _operand(self, operand: Node, shape: tuple[int, ...], layout: Layout = SHARD) -> Node:
        if operand in self._slices:
            return self._slices[operand]
        value = self._new[operand]
        if value.scalar or not value.shape:
            return value
        key = (value, shape, layout)
        if key not in self._sliced:
            self._sliced[key] = _slice(value, shape, self._names, layout)
        return self._sliced[key]

    def _whole(self, node: Node) -> Node:
        """The value in its own layout; gathered once, where somebody needs it."""
        if node not in self._new:
            part = self._slices[node]
            if node in self._gathers:
                self._new[node] = dataclasses.replace(node, operands=(part,))
            else:
                name = self._names.new(f"{node.name}_whole")
                self._new[node] = dataclasses.replace(
                    node, op="all_gather", operands=(part,), name=name, attributes=()
                )
        return self._new[node]


class Gathered(Moved):
    """A program in which values that are gathered explicitly are computed on slices.

    As written they are Replicate, because a Shard operand beside a Replicate one is gathered.
    """

    def __init__(
        self, program: Program, gathers: frozenset[Node], explicit: Collection[Node]
    ) -> None:
        """`gathers`: those of such operands. `explicit`: those that the user wrote."""
        super().__init__(program, gathers)
        self._explicit = explicit
        self.whole: list[Node] = []  # explicit ones of values that no slices lead to

    def _visit(self, node: Node) -> None:
        if node not in self._explicit:
            super()._visit(node)
            return
        (x,) = node.operands
        if x not in self._slices:
            self.whole.append(node)
            self._new[node] = node
            return
        if x not in self._new:  # else the value has been gathered for another use
            self._new[x] = dataclasses.replace(node, operands=(self._slices[x],))
        self._new[node] = whole = self._new[x]
        self._sliced[whole, node.shape, SHARD] = self._slices[x]  # for who takes slices of it


def _slices(node: Node, value: Node) -> bool:
    """Whether a node is the ranks' slices of a value, and of nothing that it is broadcast to."""
    return node.op == "slice" and node.shape == value.shape and node.layout == SHARD


def _slice(value: Node, shape: tuple[int, ...], names: Names, layout: Layout = SHARD) -> Node:
    name = names.new(f"{value.name}_slice")
    return Node("slice", (value,), layout, shape, value.dtype, name, (), value.source)


def _by_slices(reduction: Node, part: Node, names: Names) -> Node:
    """A reduction of a whole value as those of the ranks' slices, and an all_reduce of these."""
    local = dataclasses.replace(
        reduction,
        op=f"local_{reduction.op}",
        operands=(part,),
        layout=PARTIAL,
        name=names.new(f"{reduction.name}_local"),
    )
    attributes = (("op", reduction.op),)
    return dataclasses.replace(reduction, op="all_reduce", operands=(local,), attributes=attributes)


@dataclasses.dataclass(frozen=True)
class AsShard(Transformation):
    """A whole value of which only slices are used is kept as a slice.

    An all_reduce becomes a reduce_scatter, elementwise operations work on slices. A named input
    becomes a Shard of the program, and a named result is returned as a slice. Without a name
    neither is done, as the call would be another.
    """

    def apply(self, program: Program) -> Program:
        self._ungrouped(program)
        if self.node is not None:
            return self._one(program, self._named(program, self.node))
        changed = program
        while (node := self._next(changed)) is not None:
            changed = self._one(changed, node)
        if changed is program:
            self.refuse("no value is used only by slices of it")
        return changed

    def _next(self, program: Program) -> Node | None:
        return next(
            (
                node
                for node in program.nodes
                if node.op != "input" and self._obstacle(program, node) is None
            ),
            None,
        )

    @staticmethod
    def _obstacle(program: Program, node: Node) -> tuple[str, Node] | None:
        if node.layout != REPLICATE:
            return f"it is {node.layout} and not Replicate", node
        if not node.shape:
            return "a tensor without dimensions has no slices", node
        if node in program.outputs:
            return "it is returned as a whole", node
        for user in program.users[node]:
            if not _slices(user, node):
                return f"{user.name} uses the whole of `{node.name}`", user
        if not program.users[node]:
            return "no slice of it is used", node
        if node.op == "all_gather" and node.operands[0].layout != SHARD:
            return "it gathers one number for each row", node
        if not (node.op in ("input", "all_reduce", "all_gather") or node.pointwise):
            return f"{node.op} does not work on slices", node
        return None

    def _one(self, program: Program, node: Node) -> Program:
        gathered = node.op == "all_gather" and node.operands[0].layout == SHARD
        if gathered and node in program.outputs and not program.users[node]:
            outputs = tuple(out.operands[0] if out is node else out for out in program.outputs)
            return dataclasses.replace(program, outputs=outputs)
        obstacle = self._obstacle(program, node)
        if obstacle is not None:
            self.refuse(*obstacle)
        names = Names(other.name for other in program.nodes)
        part: Node | None = None

        def change(other: Node, operands: tuple[Node, ...]) -> Node | None:
            nonlocal part
            if other is node:
                part = self._part(node, operands, names)
                return part
            if other.op == "slice" and node in other.operands:
                return part
            return None

        return rewrite(program, change)

    @staticmethod
    def _part(node: Node, operands: tuple[Node, ...], names: Names) -> Node:
        if node.op == "all_gather":
            return operands[0]
        if node.op == "all_reduce":
            return dataclasses.replace(node, op="reduce_scatter", operands=operands, layout=SHARD)
        if node.op != "input":
            operands = tuple(
                x if x.scalar or not x.shape or x.layout == SHARD else _slice(x, node.shape, names)
                for x in operands
            )
        return dataclasses.replace(node, operands=operands, layout=SHARD)


@dataclasses.dataclass(frozen=True)
class FuseSend(Transformation):
    """Each rank sends its slice to the other stage, which gathers it: 1/P of the bytes.

    The node is a `send`, whose value is then no longer gathered here, or a `recv`, which becomes
    that of a slice and an all_gather. Both stages have to do it; without a node it is about all.
    """

    def apply(self, program: Program) -> Program:
        self._ungrouped(program)
        none = "the program has no send or recv of a whole value"
        found = self._fitting(program, "send", "recv", none=none)
        names = Names(node.name for node in program.nodes)

        def change(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node not in found:
                return None
            if node.op == "recv":
                name = names.new(f"{node.name}_slice")
                part = dataclasses.replace(node, operands=operands, layout=SHARD, name=name)
                return dataclasses.replace(node, op="all_gather", operands=(part,), attributes=())
            (x,) = operands
            gathers = x.op == "all_gather" and x.operands[0].layout == SHARD
            part = x.operands[0] if gathers else _slice(x, x.shape, names)
            return dataclasses.replace(node, operands=(part,))

        return rewrite(program, change)

    @staticmethod
    def _obstacle(program: Program, node: Node) -> tuple[str, Node] | None:
        value = carried(node)
        if value.layout == SHARD:
            return f"{node.name} is of slices already", value
        if not value.shape:
            return "a tensor without dimensions has no slices", value
        if program.world_size == 1:
            return "a stage of one rank has no slices", node
        return None


@dataclasses.dataclass(frozen=True)
class FuseCompute(Transformation):
    """Elementwise operations between collectives become one pass over memory.

    So do reductions of rows (of a Replicate value, over its last dimensions) and what is computed
    around them. `nodes` names those of one group; without them all that fit are fused.
    """

    nodes: tuple[str, ...] = ()

    def __init__(self, *nodes: str) -> None:
        object.__setattr__(self, "node", None)
        object.__setattr__(self, "nodes", nodes)

    def __str__(self) -> str:
        return f"FuseCompute({', '.join(self.nodes)})"

    def apply(self, program: Program) -> Program:
        if self.nodes:
            return _with_groups(self, program, [self._explicit(program)])
        try:
            return self._all_fused(program, with_rows=True)
        except IllegalTransformation:  # groups would need each other's results
            return self._all_fused(program, with_rows=False)

    def _all_fused(self, program: Program, with_rows: bool) -> Program:
        taken = {node for group in program.groups for node in group.nodes}
        groups = []
        if with_rows:
            groups = [nodes for nodes in passes(program, taken) if not escape(nodes, program)]
        taken |= {node for nodes in groups for node in nodes}
        level = levels(program)
        alike: dict[object, set[Node]] = {}
        for node in program.nodes:
            if node.pointwise and node.layout.row == 1 and node not in taken:
                alike.setdefault((level[node], node.layout, node.shape), set()).add(node)
        sets = [frozenset(nodes) for nodes in alike.values() if len(nodes) > 1]
        groups += [nodes for nodes in sets if not escape(nodes, program)]
        groups = [nodes for nodes in groups if not _delays(program, nodes)]
        if not groups:
            self.refuse("the program has no elementwise operations that could be fused")
        return _with_groups(self, program, [Group("compute", nodes) for nodes in groups])

    def _explicit(self, program: Program) -> Group:
        found = [self._named(program, name) for name in self.nodes]
        rows = next((rows for rows in map(Rows.of, found) if rows is not None), None)
        within = rows.take(program.nodes) if rows is not None else set()
        first = found[0]
        for node in found:
            if node in within:
                continue
            if not node.pointwise:
                self.refuse("only elementwise operations are fused", node)
            if node.layout.row > 1:
                self.refuse("it has one number for each row of a slice", node)
            if rows is not None:
                self.refuse("it does not go with the rows of the reduction", node)
            if node.layout != first.layout or node.shape != first.shape:
                self.refuse(f"layout and shape differ from those of `{first.name}`", node)
        if len(set(found)) < 2:
            self.refuse("a group has at least two operations", found[0])
        between = escape(frozenset(found), program)
        if between is not None:
            self.refuse("a cycle: this lies between operations of the group", between)
        return Group("compute", frozenset(found))


def _delays(program: Program, nodes: frozenset[Node]) -> bool:
    """Whether one more group makes a `send` wait for a `recv`."""
    group = Group("compute", nodes)
    try:
        return delayed(dataclasses.replace(program, groups=(*program.groups, group))) is not None
    except FusionError:  # a cycle, which is found where all groups are
        return False


def _with_groups(how: Transformation, program: Program, groups: list[Group]) -> Program:
    kept = list(program.groups)
    for group in groups:
        for other in list(kept):
            common = group.nodes & other.nodes
            if common and other.nodes <= group.nodes:
                kept.remove(other)
            elif common:
                how.refuse("it belongs to a fused group already", next(iter(common)))
    result = dataclasses.replace(program, groups=(*kept, *groups))
    try:
        _ = result.units
    except ValueError as error:
        how.refuse(f"a cycle: {error}", next(iter(groups[0].nodes)))
    late = delayed(result)
    if late is not None:
        how.refuse("it would wait for what another stage may send only after receiving it", late)
    return result


@dataclasses.dataclass(frozen=True)
class FuseCollective(Transformation):
    """A reduce_scatter, the computation on its slices, and their all_gathers become one operation.

    Reductions are part of that where they are of the rank's own rows, see `LocalRowReduction`, or
    of all elements: then ranks exchange the numbers within the operation. The node is the
    reduce_scatter; without one there must be exactly one in the program.
    """

    def apply(self, program: Program) -> Program:
        found = self._all(program, "reduce_scatter")
        if not found:
            self.refuse("the program has no reduce_scatter: Split comes first")
        if len(found) > 1:
            self.refuse("several reduce_scatters: name one", found[1])
        scatter = found[0]
        for node in program.nodes:
            if node.operands and node.operands[0].op == "all_gather" and node.op == "slice":
                program = _without_slices_of_gathered(program)
                (scatter,) = self._all(program, "reduce_scatter")
                break
        inside = {scatter}
        for node in program.nodes:
            if not any(
                operand in inside and operand.op != "all_gather" for operand in node.operands
            ):
                continue
            if node.op == "send" or (node.layout.kind != "Shard" and self._behind(node, inside)):
                continue  # it goes when the group is done
            if not _of_a_rank(node) and node.op != "all_gather" and not _of_all(node):
                self.refuse(
                    "several collectives: this has a sum over the ranks of its own; FuseCompute "
                    "fuses what is computed before and after it",
                    node,
                )
            inside.add(node)
        if not any(node.pointwise for node in inside):
            self.refuse("nothing is computed on its slices", scatter)
        sums = not LOCAL_REDUCTIONS.keys().isdisjoint({node.op for node in inside})
        # What the computation reads besides: slices of whole operands, and what is made of them.
        for node in reversed(program.nodes):
            users = program.users[node]
            alike = node.numel * node.layout.row == scatter.numel and node.layout.parted
            alike &= node.layout.row > 1 or node.shape == scatter.shape
            numbers = sums and (_of_all(node) or (node.pointwise and _single(node)))
            if (
                (numbers or (alike and _of_a_rank(node)))
                and users
                and inside.issuperset(users)
                and node not in program.outputs
            ):
                inside.add(node)
        whole = self._whole(program, scatter, inside) if sums else None
        if whole is not None:
            return self.apply(_on_slices(program, whole))
        between = escape(frozenset(inside), program)
        if between is not None:
            self.refuse("a cycle: this lies between operations of the group", between)
        kinds = {node.layout.row: node for node in inside if node.layout.row > 1}
        if len(kinds) > 1:
            self.refuse("it is of other rows than others in the group", max(kinds.items())[1])
        if kinds and sums:
            self.refuse("rows beside a sum over the ranks", next(iter(kinds.values())))
        return _with_groups(self, program, [Group("collective", frozenset(inside))])

    @staticmethod
    def _whole(program: Program, scatter: Node, inside: set[Node]) -> Node | None:
        """The first reduction of a whole value that the group alone uses.

        As ranks exchange numbers anyway, each reduces its slice.
        """
        found = (
            node
            for node in program.nodes
            if node.op in REDUCTIONS
            and _single(node)
            and not program.groups
            and node.operands[0].layout == REPLICATE
            and node.operands[0].shape == scatter.shape
            and node not in program.outputs
            and inside.issuperset(program.users[node])
        )
        return next(found, None)

    @staticmethod
    def _behind(node: Node, inside: set[Node]) -> bool:
        """Whether it takes no more than numbers of the group, and is not one itself."""
        if node.op == "all_gather":
            return False
        if _single(node) and node.pointwise:
            return not all(x.scalar or _single(x) for x in node.operands)
        taken = [x for x in node.operands if x in inside and x.op != "all_gather"]
        return not node.layout.parted and all(map(_single, taken))


def _without_slices_of_gathered(program: Program) -> Program:
    """The program in which a slice of what slices were gathered to is the slice itself.

    A fused collective that gathers a value has it whole only behind it.
    """
    if program.groups:
        return program

    def change(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if not operands or operands[0].op != "all_gather" or not _slices(node, operands[0]):
            return None
        (part,) = operands[0].operands
        return part if part.layout == SHARD else None

    return rewrite(program, change)


def _on_slices(program: Program, whole: Node) -> Program:
    """The program whose reduction of a whole value is that of slices and an all_reduce.

    Of one, as what others become may be among what its slices are computed from.
    """
    names = Names(node.name for node in program.nodes)
    slices = {x.operands[0]: x for x in program.nodes if x.operands and _slices(x, x.operands[0])}
    gathered = {x: x.operands[0] for x in program.nodes if x.op == "all_gather"}

    def part(value: Node, shape: tuple[int, ...], users: int) -> Node:
        if value.scalar or not value.shape:
            return value
        if value in gathered and value.shape == shape and gathered[value].layout == SHARD:
            return gathered[value]
        if value in slices and value.shape == shape:
            return slices[value]
        own = value.pointwise and value.layout == REPLICATE and value.shape == shape
        if own and len(program.users[value]) <= users and value not in program.outputs:
            operands = tuple(part(x, shape, 1) for x in value.operands)
            slices[value] = dataclasses.replace(value, operands=operands, layout=SHARD)
        else:
            sliced = _slice(value, shape, names)
            if value.shape != shape:
                return sliced
            slices[value] = sliced
        return slices[value]

    (value,) = whole.operands
    summed = part(value, value.shape, 1)

    def change(node: Node, operands: tuple[Node, ...]) -> Node | None:
        return _by_slices(node, summed, names) if node is whole else None

    return rewrite(program, change)


def _single(node: Node) -> bool:
    """Whether it is one number that all ranks have."""
    return node.layout == REPLICATE and node.numel == 1


def _of_all(node: Node) -> bool:
    """Whether it is a reduction over all elements of a slice, or the ranks' sum of such."""
    if node.op == "all_reduce":
        return _of_all(node.operands[0])
    return node.op in LOCAL_REDUCTIONS and node.numel == 1 and node.operands[0].layout == SHARD


def _of_a_rank(node: Node) -> bool:
    """Whether it is computed from the rank's own slices, whole rows of them if rows at all."""
    rows = node.op in REDUCTIONS or node.op in ("expand", "view")
    return node.pointwise or (rows and node.layout.parted)


@dataclasses.dataclass(frozen=True)
class Overlap(Transformation):
    """A matmul and what adds up its product go chunk by chunk of rows, one beside the other.

    That is an all_reduce, or a fused collective that begins with a reduce_scatter. The node is one
    of these; without one there must be exactly one that follows a matmul. In a schedule it is
    applied last, wherever it stands.

    The node may also be a `send`: then the fused collective that gives its value, with the matmul
    before it, or a matmul alone, goes chunk by chunk beside the message. The other stage has to
    take as many chunks: its node is the `recv`, whose slices are gathered beside what still comes.
    """

    chunks: int = 4

    def __str__(self) -> str:
        return f"Overlap({self.node + ', ' if self.node else ''}chunks={self.chunks})"

    def apply(self, program: Program) -> Program:
        message = self.message(program)
        if message is not None:
            nodes = (self._sent if message.op == "send" else self._received)(program, message)
            self._check_chunks(carried(message))
            return _with_groups(self, program, [Group("overlap", nodes, self.chunks)])
        node = self._sum(program)
        product = node.operands[0]
        if product.op != "matmul":
            self.refuse("the collective does not follow a matmul", product)
        if len(program.users[product]) > 1 or product in program.outputs:
            others = [user for user in program.users[product] if user is not node]
            self.refuse("the product has other users", others[0] if others else product)
        self._check_chunks(product)
        inside = self._fused(program, node) if node.op == "reduce_scatter" else frozenset({node})
        group = Group("overlap", inside | {product}, self.chunks)
        return _with_groups(self, program, [group])

    def _check_chunks(self, value: Node) -> None:
        rows = value.numel // value.shape[-1] if value.shape and value.shape[-1] else 0
        if not isinstance(self.chunks, int) or not 2 <= self.chunks <= rows:
            self.refuse(f"{rows} rows do not make {self.chunks} chunks", value)

    def message(self, program: Program) -> Node | None:
        """The `send` or `recv` that it names; a `recv` of slices has the name of the gathered."""
        found = program.find(self.node or "")
        if found is not None and found.op == "all_gather" and found.operands[0].op == "recv":
            return found.operands[0]
        return found if found is not None and found.op in MESSAGES else None

    def _received(self, program: Program, recv: Node) -> frozenset[Node]:
        if recv.layout != SHARD:
            return frozenset({recv})
        users = program.users[recv]
        if len(users) != 1 or users[0].op != "all_gather" or recv in program.outputs:
            self.refuse("its slice is of all rows, and chunks have others", recv)
        return frozenset({recv, *users})

    def _sent(self, program: Program, send: Node) -> frozenset[Node]:
        (value,) = send.operands
        groups = [g for g in program.groups if value in g.nodes and g.kind == "collective"]
        if groups:
            scatter = next(node for node in groups[0].nodes if node.op == "reduce_scatter")
            inside = self._fused(program, scatter, send) | {send}
            (product,) = scatter.operands
            given = [product]
        else:
            inside = frozenset({value, send})
            product = value.operands[0] if value.op == "slice" else value
            given = [product, value]
        taken = all(x not in program.outputs and inside.issuperset(program.users[x]) for x in given)
        if product.op == "matmul" and product.shape == value.shape and taken:
            return inside | {product}
        if not groups:
            self.refuse("no matmul for this alone, and nothing that FuseCollective makes", value)
        return inside

    def _sum(self, program: Program) -> Node:
        if self.node is not None:  # an all_reduce may have been split
            scattered = program.find(f"{self.node}_scattered")
            found = [scattered] if scattered is not None else self._all(program, *_SUMS)
        else:
            found = [n for n in program.nodes if n.op in _SUMS and n.operands[0].op == "matmul"]
        if len(found) != 1:
            self.refuse(f"{len(found)} collectives follow a matmul: name one", *found[1:2])
        return found[0]

    def _fused(self, program: Program, scatter: Node, send: Node | None = None) -> frozenset[Node]:
        """The nodes of the fused collective, if chunks of rows can be computed each for itself.

        Args:
            send: goes in chunks, too.
        """
        groups = [g for g in program.groups if scatter in g.nodes and g.kind == "collective"]
        if not groups:
            self.refuse(
                "a rank's slice of all rows is none of a chunk: make what follows part of the "
                "chunks by FuseCollective, or leave Split out, as an all_reduce has chunks",
                scatter,
            )
        inside = groups[0].nodes
        for node in program.nodes:
            if node in inside:
                if node.layout.row > 1 or node.op in REDUCTIONS:
                    self.refuse("it reduces rows of a rank's slice, and chunks have others", node)
                if _of_all(node):
                    self.refuse("it is over all rows, and chunks have some", node)
                users = [user for user in program.users[node] if user is not send]
                leaves = node in program.outputs or not inside.issuperset(users)
                if leaves and node.layout.parted:
                    if any(user.op == "send" for user in users):
                        self.refuse(
                            "a slice of all rows is sent, and chunks have others: name the send, "
                            "if there is only one, or leave FuseSend out",
                            node,
                        )
                    self.refuse("this slice is needed, and chunks have others: all_gather it", node)
            elif node.layout.parted and inside.intersection(program.users[node]):
                self.refuse("it is a slice of all rows, and chunks have others", node)
        return inside


_SUMS = ("all_reduce", "reduce_scatter")
