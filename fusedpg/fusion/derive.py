"""The backward of a program, as a program.

Gradients are those of logical values: a collective that sums passes its result's gradient on, and
so do the conversions between layouts. What each rank gets is in the layout of the input: a
Replicate input's gradient is Replicate, a Shard's a slice, a block's a block; a Partial input's is
Replicate, as each contribution counts alike.

Elementwise values that derivatives read are computed again; inputs, results, and what collectives,
reductions and products gave are kept from the forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from fusedpg.fusion.build import Builder
from fusedpg.fusion.derivatives import RULES, Calculus, smooth
from fusedpg.fusion.ir import (
    LOCAL_REDUCTIONS,
    PARTIAL,
    REPLICATE,
    SHARD,
    Layout,
    Node,
    Program,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A backward program, and what its inputs are."""

    program: Program
    forward: Program  # the program, whose results are followed by what must be kept
    kept: tuple[tuple[str, Node], ...]  # inputs of the backward: values of forward's nodes
    numbers: tuple[tuple[str, str], ...]  # inputs of the backward: the forward's numbers
    seeds: tuple[tuple[str, int], ...]  # inputs of the backward: the gradient of which result
    gradients: tuple[str, ...]  # the inputs whose gradients the results are; then come tokens
    differentiable: tuple[bool, ...]  # of the forward's results
    single: bool  # the function returns one tensor and not a tuple


def derive(program: Program, wrt: Sequence[str]) -> Derived:
    """The backward with respect to inputs, from gradients of all results that depend on them.

    Raises:
        IllegalProgram: where there is no derivative, with the node.
    """
    return _Derivation(program, frozenset(wrt)).result()


class _Derivation:
    def __init__(self, program: Program, wrt: frozenset[str]) -> None:
        self._program = program
        self._build = Builder(program.world_size)
        self._c = Calculus(self._build)
        self._kept: dict[Node, tuple[str, Node]] = {}
        self._numbers: dict[str, str] = {}
        self._inputs: list[Node] = []
        self._values: dict[Node, Node] = {}
        self._gradients: dict[Node, list[Node]] = {}
        self._sent: list[Node] = []
        self._active = smooth(program, wrt)

    def result(self) -> Derived:
        program, build = self._program, self._build
        seeds: dict[str, int] = {}
        outputs = dict.fromkeys(program.outputs)
        for number, node in enumerate(program.outputs):
            if node in self._active and node.op != "send":
                layout = REPLICATE if node.layout == PARTIAL else node.layout
                with build.at(node.source, f"grad_{node.name}"):
                    seed = build.input(f"grad_{node.name}", layout, node.shape, _type(node))
                self._add_input(seed)
                seeds[seed.name] = number
                self._gradients.setdefault(node, []).append(seed)
        for node in program.messages:
            if node in self._active and node.op == "send":
                with build.at(node.source, f"grad_{node.operands[0].name}"):
                    self._give(node.operands[0], build.recv_gradient(node), node.operands[0].shape)
        for node in reversed(program.nodes):
            if node in self._active and node in self._gradients and node.op != "input":
                with build.at(node.source, f"grad_{node.name}"):
                    self._visit(node, self._total(node))
        self._check_received()
        wanted = [n for n in program.inputs if n in self._active and n in self._gradients]
        results = []
        for node in wanted:
            with build.at(None, f"grad_{node.name}"):
                results.append(self._returned(node))
        extra = tuple(n for _, n in self._kept.values() if n.op != "input" and n not in outputs)
        name = f"{program.name}_backward"
        return Derived(
            Program(name, tuple(self._inputs), (*results, *self._sent), program.world_size, False),
            dataclasses.replace(
                program, outputs=program.outputs + tuple(dict.fromkeys(extra)), single=False
            ),
            tuple(self._kept.values()),
            tuple(self._numbers.items()),
            tuple(seeds.items()),
            tuple(node.name for node in wanted),
            tuple(node in self._active for node in program.outputs),
            program.single,
        )

    def _check_received(self) -> None:
        """The stage that sent a value whose gradient it expects must not wait in vain."""
        for node in self._program.messages:
            if node.op == "recv" and node in self._active and node not in self._gradients:
                with self._build.at(node.source, node.name):
                    self._build.fail(
                        "no result depends on what is received here smoothly, so there is no "
                        "gradient to send back: pass an argument that does not require grad",
                        node,
                    )

    def _add_input(self, node: Node) -> None:
        self._inputs.append(node)
        if node.layout == REPLICATE:
            self._build.flexible.add(node)  # a slice of it costs nothing

    # --- values of the forward ---------------------------------------------------------------

    def _value(self, node: Node) -> Node:
        if node not in self._values:
            # Without recursion: a program may be longer than Python's stack.
            stack = [node]
            while stack:
                top = stack[-1]
                missing = [] if self._is_kept(top) else self._missing(top)
                if missing:
                    stack.extend(missing)
                else:
                    stack.pop()
                    if top not in self._values:
                        self._values[top] = self._compute(top)
        return self._values[node]

    def _missing(self, node: Node) -> list[Node]:
        return [operand for operand in node.operands if operand not in self._values]

    def _is_kept(self, node: Node) -> bool:
        return not node.scalar and (
            not node.pointwise or (node.op != "slice" and node in self._program.outputs)
        )

    def _compute(self, node: Node) -> Node:
        build = self._build
        with build.at(node.source, node.name):
            if node.op == "constant":
                return build.constant(node.attribute("value"))
            if self._is_kept(node):
                return self._keep(node)
            if node.scalar and node.op == "input":
                kind = {"int": int, "float": float}[node.attribute("kind")]
                scalar = build.scalar(node.name, kind)
                self._inputs.append(scalar)
                self._numbers[scalar.name] = node.name
                return scalar
            operands = [self._values[operand] for operand in node.operands]
            if node.scalar:
                return build.scalar_op(node.op, operands)
            if node.op == "slice":
                (x,) = operands
                if x.shape == node.shape:
                    return x
                return build.convert(build.convert(x, REPLICATE), SHARD, node.shape)
            if node.op == "dropout":
                operands[0] = self._full(operands[0], node.shape)
            return self._c.op(node.op, *operands, **dict(node.attributes))

    def _keep(self, node: Node) -> Node:
        users = self._program.users[node]
        source = node
        sliced = [user for user in users if user.op == "slice" and user.shape == node.shape]
        if node.op != "input" and node not in self._program.outputs and users == tuple(sliced):
            source = sliced[0]  # a slice of it is all that there need be
        if source in self._kept:
            return self._values[source]
        kept = self._build.input(node.name, source.layout, node.shape, _type(node))
        self._add_input(kept)
        self._kept[source] = kept.name, source
        self._values[source] = kept
        return kept

    # --- gradients ---------------------------------------------------------------------------

    def _total(self, node: Node) -> Node:
        """The gradient of a node; its shape may be one that is broadcast to the node's."""
        first, *others = self._gradients[node]
        for other in others:
            if first.layout.dim is not None:
                first = self._build.make(
                    "add", (first, other), first.layout, first.shape, first.dtype
                )
            else:
                first = self._c.add(first, other)
        return first

    def _give(self, operand: Node, gradient: Node | None, shape: tuple[int, ...]) -> None:
        """Adds to an operand's gradient what is a gradient of its broadcast to a shape."""
        if gradient is None or operand not in self._active:
            return
        if gradient.layout == PARTIAL:
            gradient = self._build.all_reduce(gradient, "sum")
        gradient = self._summed(gradient, shape, operand.shape)
        gradient = self._c.cast(gradient, operand.dtype)
        self._gradients.setdefault(operand, []).append(gradient)

    def _summed(self, g: Node, shape: tuple[int, ...], target: tuple[int, ...]) -> Node:
        if shape == target:
            return g
        g = self._view(g, (1,) * (len(shape) - len(g.shape)) + g.shape)
        wanted = (1,) * (len(shape) - len(target)) + target
        dims = [d for d, (size, to) in enumerate(zip(shape, wanted)) if size != to]
        # What is alike along a dimension is counted, the rest is added.
        count = math.prod(shape[d] for d in dims if g.shape[d] != shape[d])
        dims = [d for d in dims if g.shape[d] == shape[d]]
        if dims:
            wide = self._c.wide(g)
            g = self._c.cast(self._build.reduce("sum", wide, tuple(dims), True), g.dtype)
        if count != 1:
            g = self._c.mul(g, count)
        return self._view(g, g.shape[len(shape) - len(target) :])

    def _view(self, x: Node, shape: tuple[int, ...]) -> Node:
        if x.shape == shape:
            return x
        if not shape and x.layout == SHARD:  # without dimensions there are no slices
            x = self._build.convert(x, REPLICATE)
        result = self._build.make("view", (x,), x.layout, shape, x.dtype)
        if x in self._build.flexible:
            self._build.flexible.add(result)
        return result

    def _full(self, x: Node, shape: tuple[int, ...]) -> Node:
        if x.shape == shape:
            return x
        x = self._build.convert(x, REPLICATE)
        result = self._build.make("expand", (x,), REPLICATE, shape, x.dtype)
        if x in self._build.flexible:
            self._build.flexible.add(result)
        return result

    def _returned(self, node: Node) -> Node:
        gradient = self._total(node)
        if node.layout.dim is not None:
            return gradient
        if node.layout == SHARD:
            return self._build.convert(self._full(gradient, node.shape), SHARD)
        return self._build.convert(self._full(gradient, node.shape), REPLICATE)

    def _visit(self, node: Node, g: Node) -> None:
        op = node.op
        if op in RULES:
            if op == "dropout":
                g = self._full(g, node.shape)
            given = RULES[op](self._c, node, g, self._value)
            for operand, gradient in zip(node.operands, given):
                self._give(operand, gradient, node.shape)
        elif op in ("slice", "all_gather"):
            self._give(node.operands[0], g, node.shape)
        elif op in ("all_reduce", "reduce_scatter"):
            self._visit_sum(node, g)
        elif op == "broadcast" and node.operands[0].layout == REPLICATE:
            self._give(node.operands[0], g, node.shape)
        elif op in ("sum", "local_sum"):
            self._give(node.operands[0], self._view(g, _kept_dims(node)), node.operands[0].shape)
        elif op in ("max", "min"):
            self._visit_extreme(node, node, g)
        elif op == "matmul":
            self._visit_product(node, g)
        elif op == "recv":
            src, tag = node.attribute("src"), node.attribute("tag")
            self._sent.append(self._build.send(self._full(g, node.shape), src, tag, gradient=True))
        else:
            self._build.fail(f"`{op}` of a {node.operands[0].layout} value has no derivative", node)

    def _visit_sum(self, node: Node, g: Node) -> None:
        x, op = node.operands[0], node.attribute("op")
        if op in ("sum", "mean"):
            g = self._c.op("div", g, self._program.world_size) if op == "mean" else g
            self._give(x, g, node.shape)
        elif x.op in LOCAL_REDUCTIONS:
            self._visit_extreme(node, x, g)
        else:
            self._build.fail(
                f"{op} over ranks has no derivative here: its gradient is another on each rank",
                node,
            )

    def _visit_extreme(self, node: Node, reduction: Node, g: Node) -> None:
        """Those that are the extreme share its gradient, as in torch."""
        c, source, shape = self._c, reduction.operands[0], _kept_dims(reduction)
        # Kept, and not computed again: the comparison is one of bits.
        x = self._value(source) if self._is_kept(source) else self._keep(source)
        extreme = self._view(self._value(node), shape)
        mine = c.op("eq", x, extreme)
        ones = c.cast(mine, torch.float64 if node.dtype == torch.float64 else torch.float32)
        # The value may be one that is broadcast to the operand's shape; all count alike then.
        count = self._build.reduce("sum", ones, reduction.attribute("dims"), True)
        share = c.cast(c.op("div", self._view(g, shape), count), node.dtype)
        self._give(source, c.where(mine, share, 0.0), source.shape)

    def _visit_product(self, node: Node, g: Node) -> None:
        build, (a, b) = self._build, node.operands
        transposed = node.attribute("transposed")
        g = build.convert(self._full(g, node.shape), REPLICATE)
        if a in self._active:
            y = self._factor(b)
            # The gradient of a whole operand or a block, unless the other one is a contribution.
            layout = PARTIAL if y.layout == PARTIAL else _logical(a)
            gradient = build.make(
                "matmul", (g, y), layout, a.shape, a.dtype, transposed=not transposed
            )
            self._give(a, gradient, a.shape)
        if b in self._active:
            x = self._factor(a)
            layout = PARTIAL if x.layout == PARTIAL else _logical(b)
            pair = (g, x) if transposed else (x, g)
            self._give(b, build.make("outer", pair, layout, b.shape, b.dtype), b.shape)

    def _factor(self, node: Node) -> Node:
        value = self._value(node)
        if value.layout != SHARD and value.shape == node.shape:
            return value
        return self._full(self._build.convert(value, REPLICATE), node.shape)


def _logical(node: Node) -> Layout:
    return REPLICATE if node.layout == PARTIAL else node.layout


def _type(node: Node) -> torch.dtype:
    assert node.dtype is not None
    return node.dtype


def _kept_dims(reduction: Node) -> tuple[int, ...]:
    dims = reduction.attribute("dims")
    shape = reduction.operands[0].shape
    return tuple(1 if d in dims else size for d, size in enumerate(shape))
