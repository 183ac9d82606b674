"""Builds programs: the shape, type and layout of every node, and the conversions between layouts.

What an operation gives follows from what it takes:

- a collective takes a Partial value, linear operations keep one Partial, nothing else takes it;
- what an all-reduce gives is there as Replicate or Shard, as its users like (*flexible*);
- elementwise operands of the result's own shape join by (flexible < Shard < Replicate), smaller
  ones, like a row of biases or a norm, do not decide;
- a reduction of a Shard value is that of the slices and a small all-reduce.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import (
    DTYPES,
    FLOATS,
    PARTIAL,
    REPLICATE,
    SCALAR,
    SHARD,
    TAGS,
    Layout,
    Names,
    Node,
    Source,
)
from fusedpg.fusion.ops import POINTWISE, SCALAR_OPS, exact

NO_SLICES = "all_gather takes a Shard value: leave it out, or reduce_scatter first"
REDUCE_OPS = ("sum", "mean", "max", "min")
_LOGICAL = ("logical_and", "logical_or", "logical_not")


@dataclasses.dataclass
class _Domain:
    """Shard inputs that are combined with each other, whose full shape is not known yet."""

    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


class Builder:
    """Makes nodes. A first pass over a program may find the shapes of its Shard inputs."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.names = Names()
        self.flexible: set[Node] = set()
        self.to_slice: set[Node] = set()  # all_gathers of values that are still Replicate
        self._source: Source | None = None
        self._base = ""
        self._converted: dict[tuple[Node, Layout, tuple[int, ...]], Node] = {}
        self._open: dict[Node, _Domain] = {}

    @contextlib.contextmanager
    def at(self, source: Source | None, base: str) -> Iterator[None]:
        """Nodes made now come from this line, and the last of them has this name."""
        before = self._source, self._base
        self._source, self._base = source, base
        try:
            yield
        finally:
            self._source, self._base = before

    def fail(self, reason: str, node: Node | None = None) -> NoReturn:
        where = f"{self._source}: " if self._source else ""
        about = f"; {node.described()}" if node is not None else ""
        raise IllegalProgram(f"{where}`{self._base}`: {reason}{about}")

    def make(
        self,
        op: str,
        operands: Sequence[Node],
        layout: Layout,
        shape: Sequence[int],
        dtype: torch.dtype | None,
        /,
        *,
        name: str | None = None,
        **attributes: object,
    ) -> Node:
        node = Node(
            op,
            tuple(operands),
            layout,
            tuple(shape),
            dtype,
            self.names.new(name or self._base or op),
            tuple(attributes.items()),
            self._source,
        )
        if layout != SCALAR:
            domains = [self._open[operand] for operand in operands if operand in self._open]
            if domains:
                self._open[node] = domains[0]
        return node

    # --- inputs and scalars ------------------------------------------------------------------

    def input(
        self, name: str, layout: Layout, shape: tuple[int, ...] | None, dtype: torch.dtype
    ) -> Node:
        """A parameter; without a shape its domain is open."""
        if dtype not in DTYPES or (dtype == torch.bool and layout == PARTIAL):
            self.fail(
                f"{dtype} cannot be computed with here: pass float32, float64, bfloat16 or "
                "float16 (or a bool mask that is Replicate or Shard)"
            )
        node = self.make("input", (), layout, (1,) if shape is None else shape, dtype, name=name)
        if shape is None:
            self._open[node] = _Domain()
        return node

    def scalar(self, name: str, kind: type) -> Node:
        return self.make("input", (), SCALAR, (), None, name=name, kind=kind.__name__)

    def constant(self, value: float | None) -> Node:
        kind = type(value).__name__
        return self.make("constant", (), SCALAR, (), None, name="c", value=value, kind=kind)

    def scalar_op(self, op: str, operands: Sequence[Node]) -> Node:
        if op not in SCALAR_OPS:
            self.fail(f"`{op}` of numbers is not known here: compute it before the call")
        if all(node.op == "constant" for node in operands):
            values = [node.attribute("value") for node in operands]
            try:
                return self.constant(SCALAR_OPS[op](*values))
            except (ArithmeticError, TypeError, ValueError) as error:
                self.fail(str(error))
        integer = op in ("add", "sub", "mul", "neg", "abs")
        integer = integer and all(node.attribute("kind") == "int" for node in operands)
        return self.make(op, operands, SCALAR, (), None, kind="int" if integer else "float")

    # --- shapes that are found out -----------------------------------------------------------

    def open(self, node: Node) -> bool:
        """Whether the shape is still to be found."""
        return node in self._open

    def domain(self, node: Node) -> tuple[int, ...] | None:
        """The full shape of a Shard input, from what it is combined with."""
        shapes = self._open[node].shapes
        try:
            return tuple(torch.broadcast_shapes(*shapes)) if shapes else None
        except RuntimeError:
            self.fail(f"a Shard is combined with tensors of shapes {shapes}", node)

    def _unite(self, tensors: Sequence[Node]) -> None:
        opened = [self._open[node] for node in tensors if node in self._open]
        if not opened:
            return
        first = opened[0]
        first.shapes += [node.shape for node in tensors if node not in self._open and node.shape]
        for other in opened[1:]:
            if other is not first:
                first.shapes += other.shapes
                for node, domain in self._open.items():
                    if domain is other:
                        self._open[node] = first

    # --- elementwise -------------------------------------------------------------------------

    def pointwise(self, op: str, operands: Sequence[Node], **attributes: Any) -> Node:
        tensors = [node for node in operands if not node.scalar]
        if not tensors:
            return self.scalar_op(op, operands)
        self._unite(tensors)
        for node in operands:
            value = node.attribute("value") if node.op == "constant" and op != "dropout" else None
            if not exact(value):
                self.fail(f"{value} is no float64: write float({value})")
        shape, dtype = self._infer(op, operands, attributes)
        for node in tensors:
            if node.layout.dim is not None and op == "cast":  # of a block, a block
                return self.make(op, operands, node.layout, shape, dtype, **attributes)
            if node.layout.dim is not None:
                self.fail("only matmul and linear take a block of a dimension", node)
        if any(node.layout == PARTIAL for node in tensors):
            self._check_linear(op, operands)
            return self.make(op, operands, PARTIAL, shape, dtype, **attributes)
        layout, flexible = self._join(tensors, shape)
        converted = [
            node if node.scalar else self._as_operand(node, layout, shape) for node in operands
        ]
        result = self.make(op, converted, layout, shape, dtype, **attributes)
        if flexible:
            self.flexible.add(result)
        return result

    def _infer(
        self, op: str, operands: Sequence[Node], attributes: dict[str, object]
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type, by asking torch."""
        if op == "dropout":
            x = operands[0]
            if x.scalar or x.dtype not in FLOATS or not all(node.scalar for node in operands[1:]):
                self.fail("dropout takes a floating-point tensor, a number p and a number seed")
            return x.shape, x.dtype
        if op in _LOGICAL and any(node.dtype != torch.bool for node in operands):
            self.fail("`&`, `|` and `~` are for the results of comparisons")
        metas = [self.example(node) for node in operands]
        try:
            result = POINTWISE[op](*metas, **attributes)
        except (RuntimeError, TypeError, ValueError) as error:
            types = ", ".join(node.type for node in operands)
            self.fail(f"{str(error).splitlines()[0]} (operands: {types})")
        if result.dtype not in DTYPES:
            self.fail(f"the result would be {result.dtype}; fuse computes with floats and bools")
        return tuple(result.shape), result.dtype

    @staticmethod
    def example(node: Node) -> Any:
        """What torch is asked with about a node: a number, or a tensor without contents."""
        if node.op == "constant":
            return node.attribute("value")
        if node.scalar:
            return 1 if node.attribute("kind") == "int" else 1.0
        return torch.empty(node.shape, dtype=node.dtype, device="meta")

    def _check_linear(self, op: str, operands: Sequence[Node]) -> None:
        """Raises unless f(sum of contributions) is the sum of f(contribution)."""
        partial = [node.layout == PARTIAL for node in operands]
        node = operands[partial.index(True)]
        advice = "all_reduce it first"
        if any(operand.layout == SHARD for operand in operands):
            self.fail(f"a Partial operand beside a Shard: {advice}", node)
        if op in ("add", "sub"):
            if not all(partial):
                self.fail(
                    "what is added to a Partial operand would be added once for each rank: "
                    f"{advice}, and add to the result",
                    node,
                )
        elif op == "mul":
            if sum(partial) > 1:
                self.fail(f"a product of Partial operands is not linear: {advice}", node)
        elif op == "div":
            if partial[1]:
                self.fail(f"a division by a Partial operand is not linear: {advice}", node)
        elif op not in ("neg", "cast"):
            self.fail(f"`{op}` of a Partial operand is not the sum of the ranks': {advice}", node)

    def _join(self, tensors: Sequence[Node], shape: tuple[int, ...]) -> tuple[Layout, bool]:
        full = [node for node in tensors if node in self._open or node.shape == shape]
        for node in tensors:
            if node.layout == SHARD and node not in full:
                self.fail(
                    f"a Shard operand of shape {list(node.shape)} in a result of {list(shape)} "
                    "is needed by other ranks: all_gather it first",
                    node,
                )
        voters = full or tensors
        if any(node.layout == REPLICATE and node not in self.flexible for node in voters):
            return REPLICATE, False
        if any(node.layout == SHARD for node in voters):
            return SHARD, False
        return REPLICATE, True

    def _as_operand(self, node: Node, layout: Layout, shape: tuple[int, ...]) -> Node:
        """An operand in the result's layout; one without dimensions is whole everywhere."""
        if layout == SHARD and not node.shape:
            return node
        return self.convert(node, layout, shape if layout == SHARD else node.shape)

    def convert(self, node: Node, layout: Layout, shape: tuple[int, ...] | None = None) -> Node:
        """A whole value as a slice (of its broadcast to a shape), or a slice as a whole value."""
        shape = node.shape if shape is None else shape
        if node.layout == layout:
            return node
        if {node.layout, layout} != {REPLICATE, SHARD}:
            self.fail(f"this is {node.layout} and cannot become {layout}", node)
        if not node.shape:
            self.fail("a tensor without dimensions has no slices", node)
        key = (node, layout, shape)
        if key not in self._converted:
            op = "slice" if layout == SHARD else "all_gather"
            name = f"{node.name}_{'slice' if layout == SHARD else 'whole'}"
            self._converted[key] = self.make(op, (node,), layout, shape, node.dtype, name=name)
        return self._converted[key]

    # --- collectives -------------------------------------------------------------------------

    def all_reduce(self, x: Node, op: str) -> Node:
        self._check_sum("all_reduce", x, op)
        result = self.make("all_reduce", (x,), REPLICATE, x.shape, x.dtype, op=op)
        self.flexible.add(result)
        return result

    def reduce_scatter(self, x: Node, op: str) -> Node:
        self._check_sum("reduce_scatter", x, op)
        if not x.shape:
            self.fail("a tensor without dimensions has no slices: all_reduce it", x)
        return self.make("reduce_scatter", (x,), SHARD, x.shape, x.dtype, op=op)

    def _check_sum(self, name: str, x: Node, op: str) -> None:
        if not isinstance(x, Node) or x.scalar:
            self.fail(f"{name} takes a tensor")
        if op not in REDUCE_OPS:
            self.fail(f"{name} knows the operations {', '.join(REDUCE_OPS)}, not {op!r}")
        if x.layout != PARTIAL:
            self.fail(
                f"{name} combines the contributions of a Partial value, and this is {x.layout}: "
                "annotate the input as Partial, or leave the collective out",
                x,
            )

    def all_gather(self, x: Node) -> Node:
        """Of a value that is Replicate by its operands alone, `lower` computes slices then."""
        if not isinstance(x, Node) or x.layout not in (SHARD, REPLICATE):
            self.fail(NO_SLICES, x if isinstance(x, Node) else None)
        result = self.make("all_gather", (x,), REPLICATE, x.shape, x.dtype)
        if x.layout == REPLICATE:
            self.to_slice.add(result)
        return result

    @property
    def implicit_gathers(self) -> frozenset[Node]:
        """The all_gathers that a Shard operand got beside a Replicate one, and nobody wrote."""
        return frozenset(node for node in self._converted.values() if node.op == "all_gather")

    def broadcast(self, x: Node, src: object) -> Node:
        if not isinstance(x, Node) or x.layout not in (PARTIAL, REPLICATE):
            self.fail("broadcast takes a tensor that is Partial or Replicate: each rank's own")
        if type(src) is not int or not 0 <= src < self.world_size:
            self.fail(f"src is a rank of the group, from 0 to {self.world_size - 1}, got {src!r}")
        result = self.make("broadcast", (x,), REPLICATE, x.shape, x.dtype, src=src)
        self.flexible.add(result)
        return result

    # --- messages to other stages ------------------------------------------------------------

    def send(self, x: Node, dst: object, tag: object, **attributes: Any) -> Node:
        if not isinstance(x, Node) or x.scalar:
            self.fail("send takes a tensor")
        if x.layout not in (REPLICATE, SHARD):
            self.fail(f"send takes a value that is Replicate or Shard, and this is {x.layout}", x)
        place = self._stage("dst", dst, "next")
        self._check_tag(tag)
        return self.make(
            "send", (x,), REPLICATE, (), torch.float32, dst=place, tag=tag, **attributes
        )

    def recv(self, like: Node, src: object, tag: object) -> Node:
        if not isinstance(like, Node) or like.op != "input" or like.layout != REPLICATE:
            self.fail("recv takes an argument that is Replicate, for shape and type of what comes")
        place = self._stage("src", src, "previous")
        self._check_tag(tag)
        return self._received((like,), like.shape, like.dtype, src=place, tag=tag)

    def recv_gradient(self, sent: Node) -> Node:
        """The gradient of the operand of a `send`, from where that went."""
        (x,) = sent.operands
        src, tag = sent.attribute("dst"), sent.attribute("tag")
        return self._received((), x.shape, x.dtype, src=src, tag=tag, gradient=True)

    def _received(
        self,
        operands: Sequence[Node],
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        **attributes: Any,
    ) -> Node:
        result = self.make("recv", operands, REPLICATE, shape, dtype, **attributes)
        self.flexible.add(result)
        return result

    def _stage(self, key: str, given: object, usual: str) -> int | str:
        if given in (None, "next", "previous"):
            return given or usual
        if type(given) is not int or given < 0:
            self.fail(f"{key} is a stage, from 0, that is known while tracing, got {given!r}")
        return given

    def _check_tag(self, tag: object) -> None:
        if type(tag) is not int or not 0 <= tag < TAGS:
            self.fail(f"a tag is a number below {TAGS} that is known while tracing, got {tag!r}")

    # --- reductions and products -------------------------------------------------------------

    def dims(self, x: Node, dim: Any) -> tuple[int, ...]:
        """The dimensions of a reduction: None means all."""
        count = len(x.shape)
        if x in self._open and dim is not None:
            return (0,)  # any: only the next pass knows
        if dim is None or (isinstance(dim, (tuple, list)) and not dim):
            return tuple(range(count))
        given = list(dim) if isinstance(dim, (tuple, list)) else [dim]
        if not all(type(d) is int and -count <= d < count for d in given):
            self.fail(f"dim={dim!r} of a tensor with {count} dimensions", x)
        result = tuple(sorted({d % count for d in given}))
        if len(result) != len(given):
            self.fail(f"dim={dim!r} names a dimension twice", x)
        return result

    def reduce(self, kind: str, x: Node, dims: tuple[int, ...], keepdim: bool) -> Node:
        """sum, max or min over dimensions."""
        if x.scalar or x.dtype not in FLOATS:
            self.fail(f"`{kind}` takes a floating-point tensor", x)
        if x.layout not in (REPLICATE, SHARD):
            self.fail(f"`{kind}` of a {x.layout} value: all_reduce it first", x)
        shape = tuple(
            1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims
        )
        count = 1
        for d in dims:
            count *= x.shape[d]
        if kind != "sum" and count == 0:
            self.fail(f"the {kind} of nothing", x)
        if x.layout == REPLICATE:
            result = self.make(kind, (x,), REPLICATE, shape, x.dtype, dims=dims, keepdim=keepdim)
            if x in self.flexible:
                self.flexible.add(result)
        else:
            name = f"{self._base}_local"
            local = self.make(
                f"local_{kind}",
                (x,),
                PARTIAL,
                shape,
                x.dtype,
                name=name,
                dims=dims,
                keepdim=keepdim,
            )
            result = self.all_reduce(local, kind)
        if x in self._open:
            domain = _Domain()
            self._open.pop(result)
            if keepdim or len(dims) < len(x.shape):
                self._open[result] = domain
        return result

    def matmul(self, a: Node, b: Node, transposed: bool) -> Node:
        """a @ b, or with b transposed."""
        for node in (a, b):
            if not isinstance(node, Node) or node.scalar or node.dtype not in FLOATS:
                self.fail("matmul takes floating-point tensors")
        if a in self._open or b in self._open:
            result = self.make("matmul", (a, b), REPLICATE, (1,), a.dtype)
            self._open[result] = _Domain()
            return result
        if len(a.shape) < 2 or len(b.shape) != 2:
            self.fail(
                f"matmul takes a matrix (or a batch of rows) and a matrix, "
                f"got shapes {list(a.shape)} and {list(b.shape)}"
            )
        inner = 1 if transposed else 0
        if a.shape[-1] != b.shape[inner] or a.dtype != b.dtype:
            self.fail(f"matmul of {a.type} and {b.type}: sizes and types must fit")
        layout = self._product_layout(a, b, inner)
        shape = (*a.shape[:-1], b.shape[1 - inner])
        result = self.make("matmul", (a, b), layout, shape, a.dtype, transposed=transposed)
        if layout == REPLICATE and a in self.flexible:
            self.flexible.add(result)
        return result

    def _product_layout(self, a: Node, b: Node, inner: int) -> Layout:
        blocks = [node.layout.dim for node in (a, b)]
        if blocks[0] in (-1, len(a.shape) - 1) and blocks[1] in (inner, inner - 2):
            return PARTIAL
        if a.layout == REPLICATE and b.layout == REPLICATE:
            return REPLICATE
        if {a.layout, b.layout} == {PARTIAL, REPLICATE}:
            return PARTIAL  # linear
        self.fail(
            f"matmul of {a.layout} and {b.layout}: it takes whole operands (Replicate), one "
            f"Partial operand, or blocks of the dimension that it sums over, "
            f"Shard({len(a.shape) - 1}) and Shard({inner}), whose product is Partial"
        )
