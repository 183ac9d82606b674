"""The derivative of each elementwise operation, written with operations of programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fusedpg._registration import minor_release
from fusedpg.fusion.build import Builder
from fusedpg.fusion.ir import FLOATS, REPLICATE, SHARD, Node, Program

# Without a gradient: results that are bool, or constant between jumps.
FLAT = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "sign"))
FLAT |= {"logical_and", "logical_or", "logical_not"}


def smooth(program: Program, wrt: Collection[str]) -> set[Node]:
    """What depends on inputs smoothly, with these inputs."""
    found: set[Node] = set()
    for node in program.nodes:
        chosen = node.op == "input" and node.name in wrt
        from_them = chosen or any(operand in found for operand in node.operands)
        if from_them and node.op not in FLAT and node.dtype in FLOATS:
            found.add(node)
    return found


class Calculus:
    """Elementwise arithmetic on nodes; numbers become constants."""

    def __init__(self, build: Builder) -> None:
        self.build = build

    def node(self, value: Any) -> Node:
        return value if isinstance(value, Node) else self.build.constant(value)

    def op(self, name: str, *values: object, **attributes: object) -> Node:
        nodes = [self.node(value) for value in values]
        tensors = [node for node in nodes if not node.scalar]
        if tensors:
            shape = torch.broadcast_shapes(*[node.shape for node in tensors])
            partial = any(node.layout.kind == "Partial" for node in tensors)
            # A slice goes with slices of its own shape alone.
            nodes = [
                self.build.convert(node, REPLICATE)
                if node.layout == SHARD and (partial or node.shape != tuple(shape))
                else node
                for node in nodes
            ]
        return self.build.pointwise(name, nodes, **attributes)

    def cast(self, x: Node, dtype: torch.dtype | None) -> Node:
        return x if x.dtype == dtype else self.op("cast", x, dtype=dtype)

    def wide(self, x: Node) -> Node:
        return x if x.dtype == torch.float64 else self.cast(x, torch.float32)

    def add(self, x: object, y: object) -> Node:
        return self.op("add", x, y)

    def mul(self, x: object, y: object) -> Node:
        return self.op("mul", x, y)

    def where(self, condition: Node, x: object, y: object) -> Node:
        return self.op("where", condition, x, y)


Values = Callable[[Node], Node]
Gradients = Sequence["Node | None"]
Rule = Callable[[Calculus, Node, Node, Values], Gradients]


def _mul(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    a, b = node.operands
    return [
        None if a.scalar else c.mul(g, v(b)),
        None if b.scalar else c.mul(g, v(a)),
    ]


def _div(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    a, b = node.operands
    over = c.op("div", g, v(b))
    if b.scalar:
        return [over, None]
    quotient = c.op("div", v(a), v(b))
    return [None if a.scalar else over, c.op("neg", c.mul(g, c.op("div", quotient, v(b))))]


def _pow(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    base, exponent = node.operands
    if exponent.op == "constant":
        power = exponent.attribute("value")
        if power == 0:
            return [None, None]
        if power == 1:
            return [g, None]
        rest = v(base) if power == 2 else c.op("pow", v(base), power - 1)
        return [c.mul(g, c.mul(rest, power)), None]
    if exponent.scalar:
        c.build.fail(
            "the derivative of a power takes an exponent that is a constant or a tensor: write the "
            "number into the function, or take it from a closure",
            node,
        )
    x, y = v(base), v(exponent)
    gx = None
    if not base.scalar:
        slope = c.mul(y, c.op("pow", x, c.op("sub", y, 1)))
        gx = c.mul(g, c.where(c.op("eq", y, 0), 0.0, slope))
    growth = c.mul(v(node), c.op("log", x))
    if not base.scalar:
        still = c.op("logical_and", c.op("eq", x, 0), c.op("ge", y, 0))
        growth = c.where(still, 0.0, growth)
    elif base.op != "constant" or base.attribute("value") <= 0:
        c.build.fail("the derivative of a power takes a base that is a positive constant", node)
    return [gx, c.mul(g, growth)]


def _extremum(lower: str) -> Rule:
    def rule(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
        x, y = map(v, node.operands)
        shared = c.where(c.op("eq", x, y), c.mul(g, 0.5), g)
        return [
            c.where(c.op(lower, x, y), 0.0, shared),
            c.where(c.op(lower, y, x), 0.0, shared),
        ]

    return rule


def _where(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    condition = v(node.operands[0])
    return [None, c.where(condition, g, 0.0), c.where(condition, 0.0, g)]


# At an element that equals a bound, torch's gradient of clamp is 1; since torch 2.14 it is 0.
INSIDE = ("gt", "lt") if minor_release(str(torch.__version__)) >= (2, 14) else ("ge", "le")


def _clamp(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    x, low, high = node.operands
    bounded = [n for n in (low, high) if not (n.op == "constant" and n.attribute("value") is None)]
    if any(not bound.scalar for bound in bounded):
        c.build.fail(
            "the derivative of clamp takes bounds that are numbers: write torch.maximum and "
            "torch.minimum",
            node,
        )
    result = g
    for bound, relation in zip((low, high), INSIDE):
        if bound in bounded:
            result = c.where(c.op(relation, v(x), v(bound)), result, 0.0)
    return [result, None, None]


def _gelu(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    x, wide = c.wide(v(node.operands[0])), c.wide(g)
    if node.attribute("approximate") == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        square = c.mul(x, x)
        t = c.op("tanh", c.mul(c.mul(x, c.add(c.mul(square, kappa), 1)), beta))
        slope = c.mul(c.add(c.mul(square, 3 * kappa), 1), beta)
        inner = c.mul(c.mul(x, 0.5), c.mul(c.op("sub", 1, c.mul(t, t)), slope))
        return [c.mul(wide, c.add(c.mul(c.add(t, 1), 0.5), inner))]
    share = c.mul(c.add(c.op("erf", c.mul(x, math.sqrt(0.5))), 1), 0.5)
    density = c.mul(c.op("exp", c.mul(c.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return [c.mul(wide, c.add(share, c.mul(x, density)))]


def _silu(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    x, wide = c.wide(v(node.operands[0])), c.wide(g)
    s = c.op("sigmoid", x)
    return [c.mul(wide, c.mul(s, c.add(c.mul(x, c.op("sub", 1, s)), 1)))]


def _dropout(c: Calculus, node: Node, g: Node, v: Values) -> Gradients:
    _, p, seed = node.operands
    return [c.op("dropout", g, v(p), v(seed)), None, None]


def _of_operand(rule: Callable[[Calculus, Node, Node], Node]) -> Rule:
    return lambda c, node, g, v: [rule(c, g, v(node.operands[0]))]


def _of_result(rule: Callable[[Calculus, Node, Node], Node]) -> Rule:
    return lambda c, node, g, v: [rule(c, g, v(node))]


RULES: dict[str, Rule] = {
    "add": lambda c, node, g, v: [g, g],
    "sub": lambda c, node, g, v: [g, None if node.operands[1].scalar else c.op("neg", g)],
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "neg": lambda c, node, g, v: [c.op("neg", g)],
    "abs": _of_operand(lambda c, g, x: c.mul(g, c.op("sign", x))),
    "square": _of_operand(lambda c, g, x: c.mul(g, c.mul(x, 2))),
    "reciprocal": _of_result(lambda c, g, y: c.op("neg", c.mul(g, c.mul(y, y)))),
    "maximum": _extremum("lt"),
    "minimum": _extremum("gt"),
    "where": _where,
    "sqrt": _of_result(lambda c, g, y: c.op("div", g, c.mul(y, 2))),
    "rsqrt": _of_result(lambda c, g, y: c.mul(c.mul(g, -0.5), c.mul(y, c.mul(y, y)))),
    "exp": _of_result(lambda c, g, y: c.mul(g, y)),
    "log": _of_operand(lambda c, g, x: c.op("div", g, x)),
    "tanh": _of_result(lambda c, g, y: c.mul(g, c.op("sub", 1, c.mul(y, y)))),
    "sigmoid": _of_result(lambda c, g, y: c.mul(g, c.mul(y, c.op("sub", 1, y)))),
    "erf": _of_operand(
        lambda c, g, x: c.mul(g, c.mul(c.op("exp", c.op("neg", c.mul(x, x))), 2 / math.pi**0.5))
    ),
    "relu": _of_operand(lambda c, g, x: c.where(c.op("le", x, 0), 0.0, g)),
    "gelu": _gelu,
    "silu": _silu,
    "clamp": _clamp,
    "cast": lambda c, node, g, v: [g if node.operands[0].dtype in FLOATS else None],
    "dropout": _dropout,
}
