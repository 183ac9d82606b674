"""From torch.fx's graph to a program: which of our operations each call is."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from fusedpg.fusion import autocast, functions
from fusedpg.fusion.build import NO_SLICES, Builder
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.ir import FLOATS, PARTIAL, REPLICATE, SHARD, Layout, Node, Program
from fusedpg.fusion.messages import End
from fusedpg.fusion.ops import FUNCTIONS, METHODS, UNARY
from fusedpg.fusion.trace import IN_PLACE
from fusedpg.fusion.transformations import Gathered

_COLLECTIVES = (functions.all_reduce, functions.reduce_scatter, funcol.all_reduce)
# What torch's functions are not: autocast leaves these alone.
_OURS = frozenset(
    {
        funcol.all_reduce,
        functions.all_reduce,
        functions.reduce_scatter,
        functions.all_gather,
        functions.broadcast,
        functions.send,
        functions.recv,
        functions.dropout,
    }
)
_DTYPE_METHODS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
_ADVICE = {
    "view": "programs keep shapes: reshape before the call or after it",
    "reshape": "programs keep shapes: reshape before the call or after it",
    "flatten": "programs keep shapes: reshape before the call or after it",
    "transpose": "programs keep shapes: transpose before the call; linear(x, w) is x @ w.T",
    "t": "programs keep shapes: transpose before the call; linear(x, w) is x @ w.T",
    "T": "programs keep shapes: transpose before the call; linear(x, w) is x @ w.T",
    "getitem": "programs compute with whole tensors: take parts before the call",
    "setitem": "programs have no assignments to parts: use torch.where",
    "dropout": "use fusedpg.fusion.dropout(x, p, seed), whose mask does not depend on the rank",
    "cat": "return the parts as results of their own",
    "softmax": "write torch.exp(x - torch.amax(x, -1, True)), divided by its sum",
    "item": "a number is known only when the program runs: keep it as a tensor",
    "addcmul": "write x + value * a * b",
    "addcdiv": "write x + value * a / b",
    "lerp": "write a + weight * (b - a)",
    "var": "write ((x - x.mean()) ** 2).mean()",
    "std": "write ((x - x.mean()) ** 2).mean().sqrt()",
    "batch_norm": "it has sums over ranks of its own: write them with all_reduce",
}
KNOWN = (
    "arithmetic, comparisons, where, sqrt, rsqrt, exp, log, tanh, sigmoid, erf, gelu, silu, relu, "
    "clamp, casts, sum, mean, amax, amin, norm, layer_norm, rms_norm, matmul, linear, and "
    "fusedpg.fusion's collectives and dropout"
)


# A size of a Shard argument, in the pass that finds out its shape: any that is no special case.
_SOME = 5


class _SomeShape(tuple[int, ...]):
    """The shape of such an argument, of which any dimension may be asked for."""

    def __getitem__(self, key: object) -> Any:
        return self if isinstance(key, slice) else _SOME


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What the program knows of an argument."""

    layout: Layout | None  # None: from how it is used; SCALAR: a number
    kind: type = float
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


class Lowering:
    """One pass over a graph."""

    def __init__(
        self,
        graph: fx.Graph,
        parameters: Mapping[str, Parameter],
        domains: Mapping[str, tuple[int, ...] | None],
        world_size: int,
        group_matches: Callable[[object], bool],
        device: str,
    ) -> None:
        self.build = Builder(world_size)
        self._device = device
        self._graph = graph
        self._parameters = parameters
        self._domains = domains
        self._group_matches = group_matches
        self._values: dict[fx.Node, object] = {}
        self._casts: dict[tuple[Node, torch.dtype], Node] = {}
        self.inputs: dict[str, Node] = {}
        self.used: set[Node] = set()
        self.messages: list[Node] = []
        self.result: object = None

    def run(self) -> None:
        for node in self._graph.nodes:
            # Parameters are made where the function is called: that is no line of the program.
            line = None if node.op == "placeholder" else node.meta.get("source")
            with self.build.at(line, node.name):
                if node.op == "placeholder":
                    self._values[node] = self._placeholder(node)
                elif node.op == "output":
                    self.result = self._value(node.args[0])
                elif node.op in ("call_function", "call_method"):
                    if node.meta["changed"]:
                        self.build.fail(
                            f"{node.meta['changed']} in a part of the function: of context "
                            "managers inside of a program torch.autocast alone has an effect. "
                            "Compute what shall have no gradient outside, and pass it"
                        )
                    self._values[node] = self._call(node)
                elif isinstance(node.meta["value"], dist.ProcessGroup):
                    self._values[node] = node.meta["value"]
                else:
                    self.build.fail(
                        "a tensor from outside of the function: pass it as an argument, so that "
                        "its layout is known"
                    )

    def _placeholder(self, node: fx.Node) -> Node:
        name = str(node.target)
        known = self._parameters[name]
        layout = known.layout
        if layout is not None and layout.kind == "Scalar":
            result = self.build.scalar(name, known.kind)
        else:
            if layout is None:
                summed = any(user.target in _COLLECTIVES for user in node.users)
                layout = PARTIAL if summed else REPLICATE
            shape = self._domains.get(name) if layout == SHARD else known.shape
            result = self.build.input(name, layout, shape, known.dtype)
        self.inputs[name] = result
        if node.users:
            self.used.add(result)
        return result

    def _value(self, argument: object) -> Any:
        if isinstance(argument, fx.Node):
            return self._values[argument]
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._value(item) for item in argument)
        return argument

    def _node(self, value: object) -> Node:
        """An operand: a node, or a number."""
        if isinstance(value, Node):
            return value
        if value is None or isinstance(value, (int, float)):
            return self.build.constant(value)
        self.build.fail(f"{value!r} is not an operand: operands are tensors and numbers")

    def _call(self, node: fx.Node) -> Any:
        args = tuple(self._value(arg) for arg in node.args)
        kwargs = {key: self._value(value) for key, value in node.kwargs.items()}
        target: Any = node.target
        if target is getattr or target is operator.getitem:
            return self._inspect(args)
        if target in IN_PLACE and isinstance(args[0], Node):
            sign = IN_PLACE[target]
            if not args[0].scalar:
                self.build.fail(
                    f"`x {sign}= y` writes into the tensor x, and programs do not write into "
                    f"tensors: x = x {sign} y, and return x"
                )
            target = getattr(operator, target.__name__[1:], target)  # a number is another one then
        dtype = node.meta["autocast"].get(self._device)
        if dtype is not None and target not in _OURS:
            args, kwargs = self._autocast(node, args, kwargs, dtype)
        if node.op == "call_method":
            name = str(target)
            handler = _METHOD_HANDLERS.get(name)
            pointwise = METHODS.get(name)
        else:
            name = getattr(target, "__name__", str(target))
            handler = _FUNCTION_HANDLERS.get(target)
            pointwise = FUNCTIONS.get(target)
        try:
            if handler is not None:
                return handler(self, *args, **kwargs)
            if pointwise is not None:
                return self._pointwise(pointwise, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise
            self.build.fail(f"arguments that are not known here: {error}")
        self._unknown(name)

    def _autocast(
        self, node: fx.Node, args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments, cast as autocast casts them for this call."""

        def tensor(x: object) -> bool:
            return isinstance(x, Node) and not x.scalar

        tensors = [x for x in tree_leaves((args, kwargs)) if tensor(x)]
        if any(self.build.open(x) for x in tensors):
            return args, kwargs  # this pass finds out shapes

        def example(x: object) -> Any:
            if not isinstance(x, Node):
                return x
            return autocast.Example(x.shape, x.dtype) if tensor(x) else self.build.example(x)

        target: Any = node.target
        function = getattr(torch.Tensor, target, None) if node.op == "call_method" else target
        if function is None:
            return args, kwargs  # which is no operation
        given, named = tree_map(example, (args, kwargs))
        try:
            types = iter(autocast.casts(function, given, named, self._device, dtype))
        except FusionError as error:
            self.build.fail(str(error))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return args, kwargs  # torch refuses it: so do we, with a reason of our own

        def cast(x: Any) -> Any:
            to = next(types) if tensor(x) else None
            if to is None or x.dtype == to:
                return x
            if (x, to) not in self._casts:
                self._casts[x, to] = self._cast(x, to)
            return self._casts[x, to]

        return tree_map(cast, (args, kwargs))

    def _unknown(self, name: str) -> Any:
        if name.endswith("_") and not name.endswith("__"):
            plain = name.rstrip("_")
            advice = f"programs do not write into tensors: x = x.{plain}(...), and return x"
        else:
            advice = _ADVICE.get(name, f"compute it outside, or from what there is: {KNOWN}")
        self.build.fail(f"`{name}` is not an operation of a fused program; {advice}")

    def _inspect(self, args: tuple[Any, ...]) -> Any:
        """x.shape and what is taken from it; nothing else of a tensor is known while tracing."""
        value, key = args
        if isinstance(value, (tuple, torch.Size)):
            return value[key]
        if isinstance(value, Node) and not value.scalar:
            known = {"shape": self._shape(value), "dtype": value.dtype, "ndim": len(value.shape)}
            if isinstance(key, str) and key in known:
                return known[key]
            self._unknown(key if isinstance(key, str) else "getitem")
        self.build.fail(f"`{key}` of a number")

    def _shape(self, x: Node) -> tuple[int, ...]:
        return _SomeShape(x.shape) if self.build.open(x) else x.shape

    # --- handlers: each takes what torch's function takes ------------------------------------

    def _pointwise(self, op: str, *args: object, **kwargs: object) -> Any:
        counts = {"where": (3, 3), "clamp": (1, 3)}.get(op)
        low, high = counts or ((1, 1) if op in UNARY else (2, 2))
        attributes: dict[str, object] = {}
        if op == "gelu":
            attributes["approximate"] = kwargs.pop("approximate", "none")
        elif op in ("silu", "relu"):
            if kwargs.pop("inplace", False):
                self.build.fail("programs do not write into tensors: leave inplace out")
        elif op == "clamp":
            args = (*args, *(None,) * (3 - len(args)))
            args = (args[0], kwargs.pop("min", args[1]), kwargs.pop("max", args[2]))
        elif op in ("add", "sub") and kwargs.get("alpha") is not None and len(args) == 2:
            args = (args[0], self._pointwise("mul", args[1], kwargs.pop("alpha")))
        if kwargs:
            self.build.fail(f"`{op}` is known without {', '.join(kwargs)}")
        if not low <= len(args) <= high:
            self.build.fail(f"`{op}` takes {low} operands here, got {len(args)}")
        return self.build.pointwise(op, [self._node(arg) for arg in args], **attributes)

    def _send(self, x: Node, dst: object = None, tag: object = 0) -> Node:
        self.messages.append(self.build.send(x, dst, tag))
        return self.messages[-1]

    def _recv(self, like: Node, src: object = None, tag: object = 0) -> Node:
        self.messages.append(self.build.recv(like, src, tag))
        return self.messages[-1]

    def _functional_all_reduce(self, x: Node, reduceOp: str, group: object, tag: str = "") -> Node:
        if tag or not self._group_matches(group):
            self.build.fail(
                "a program runs on one group, the one that its call gets as group=: "
                "this all_reduce names another"
            )
        return self.build.all_reduce(x, {"avg": "mean"}.get(reduceOp.lower(), reduceOp.lower()))

    def _dropout(self, x: object, p: object, seed: object) -> Node:
        nodes = [self._node(value) for value in (x, p, seed)]
        if nodes[2].scalar and nodes[2].attribute("kind") != "int":
            self.build.fail("the seed of dropout is an int (annotate the parameter as int)")
        if isinstance(p, (int, float)) and not 0 <= p <= 1:
            self.build.fail(f"p is a probability, got {p}")
        return self.build.pointwise("dropout", nodes)

    def _cast(self, x: Node, dtype: object) -> Node:
        if not isinstance(dtype, torch.dtype):
            self.build.fail("programs convert types alone: x.to(dtype)")
        if x.scalar or dtype not in FLOATS:
            self.build.fail(f"tensors are converted to floating-point types, not {dtype}")
        return x if x.dtype == dtype else self.build.pointwise("cast", [x], dtype=dtype)

    def _wide(self, x: object, name: str) -> Node:
        """Sums are taken in float32, or float64 for that."""
        if not isinstance(x, Node) or x.scalar or x.dtype not in FLOATS:
            self.build.fail(f"`{name}` takes a floating-point tensor")
        return x if x.dtype == torch.float64 else self._cast(x, torch.float32)

    def _named(self, suffix: str) -> Any:
        source, base = self.build._source, self.build._base
        return self.build.at(source, f"{base}_{suffix}")

    def _sum(self, x: Node, dim: object = None, keepdim: bool = False) -> Node:
        with self._named("wide"):
            wide = self._wide(x, "sum")
        result = self.build.reduce("sum", wide, self.build.dims(wide, dim), keepdim)
        return self._cast(result, x.dtype)

    def _mean(self, x: Node, dim: object = None, keepdim: bool = False) -> Node:
        return self._cast(self._wide_mean(x, dim, keepdim), x.dtype)

    def _wide_mean(self, x: Node, dim: object, keepdim: bool) -> Node:
        with self._named("sum"):
            wide = self._wide(x, "mean")
            dims = self.build.dims(wide, dim)
            total = self.build.reduce("sum", wide, dims, keepdim)
        count = math.prod(wide.shape[d] for d in dims)
        if count == 0:
            return self._pointwise("mul", total, math.nan)
        return self._pointwise("div", total, float(count))

    def _norm(
        self, x: Node, ord: object = 2, dim: object = None, keepdim: bool = False
    ) -> Node:  # vector norms of order 2
        if ord not in (2, 2.0, None, "fro"):
            self.build.fail("norms are of order 2: write others as sums of powers")
        with self._named("sum"):
            wide = self._wide(x, "norm")
            square = self._pointwise("square", wide)
            total = self.build.reduce("sum", square, self.build.dims(wide, dim), keepdim)
        return self._cast(self._pointwise("sqrt", total), x.dtype)

    def _extreme(self, kind: str, x: Node, dim: object = None, keepdim: bool = False) -> Node:
        return self.build.reduce(kind, x, self.build.dims(x, dim), keepdim)

    def _amax(self, x: Node, dim: object = (), keepdim: bool = False) -> Node:
        return self._extreme("max", x, dim, keepdim)

    def _amin(self, x: Node, dim: object = (), keepdim: bool = False) -> Node:
        return self._extreme("min", x, dim, keepdim)

    def _max(self, x: object, *args: object, **kwargs: object) -> Any:
        return self._max_or_min("max", x, *args, **kwargs)

    def _min(self, x: object, *args: object, **kwargs: object) -> Any:
        return self._max_or_min("min", x, *args, **kwargs)

    def _max_or_min(self, kind: str, x: Any, *args: object, **kwargs: object) -> Any:
        if not args and not kwargs:
            return self._extreme(kind, x)
        if len(args) == 1 and not kwargs and not isinstance(args[0], int):
            return self._pointwise(f"{kind}imum", x, args[0])
        self.build.fail(f"`{kind}` over a dimension also gives indices: use torch.a{kind}")

    def _trailing(self, x: Node, shape: object, name: str) -> tuple[int, ...]:
        shape = tuple(shape) if isinstance(shape, (tuple, list, torch.Size)) else (shape,)
        count = len(shape)
        if not self.build.open(x) and (not count or x.shape[-count:] != shape):
            self.build.fail(f"`{name}` over {list(shape)} of shape {list(x.shape)}", x)
        return tuple(range(-count, 0))

    def _scaled(self, x: Node, weight: object, bias: object, dtype: torch.dtype | None) -> Node:
        if weight is not None:
            x = self._pointwise("mul", x, self._wide(weight, "weight"))
        if bias is not None:
            x = self._pointwise("add", x, self._wide(bias, "bias"))
        return self._cast(x, dtype)

    def _layer_norm(
        self,
        input: Node,
        normalized_shape: object,
        weight: object = None,
        bias: object = None,
        eps: float = 1e-5,
    ) -> Node:
        wide = self._wide(input, "layer_norm")
        dim = self._trailing(wide, normalized_shape, "layer_norm")
        with self._named("mean"):
            mean = self._wide_mean(wide, dim, True)
        with self._named("centred"):
            centred = self._pointwise("sub", wide, mean)
        with self._named("variance"):
            variance = self._wide_mean(self._pointwise("square", centred), dim, True)
        scale = self._pointwise("rsqrt", self._pointwise("add", variance, eps))
        result = self._pointwise("mul", centred, scale)
        return self._scaled(result, weight, bias, input.dtype)

    def _rms_norm(
        self, input: Node, normalized_shape: object, weight: object = None, eps: float | None = None
    ) -> Node:
        wide = self._wide(input, "rms_norm")
        dim = self._trailing(wide, normalized_shape, "rms_norm")
        if eps is None:
            if input.dtype not in (torch.float32, torch.float64):
                self.build.fail("give rms_norm of 16-bit types its eps: torch's default differs")
            eps = torch.finfo(input.dtype).eps
        with self._named("mean"):
            mean = self._wide_mean(self._pointwise("square", wide), dim, True)
        scale = self._pointwise("rsqrt", self._pointwise("add", mean, eps))
        return self._scaled(self._pointwise("mul", wide, scale), weight, None, input.dtype)

    def _matmul(self, a: Node, b: Node) -> Node:
        return self.build.matmul(a, b, False)

    def _linear(self, input: Node, weight: Node, bias: object = None) -> Node:
        product = self.build.matmul(input, weight, True)
        return product if bias is None else self._pointwise("add", product, bias)

    def _to(self, x: Node, dtype: object) -> Node:
        return self._cast(x, dtype)

    def _size(self, x: Node, dim: int | None = None) -> object:
        return self._shape(x) if dim is None else self._shape(x)[dim]

    def _numel(self, x: Node) -> int:
        return _SOME if self.build.open(x) else x.numel

    def _dim(self, x: Node) -> int:
        return len(x.shape)


def _caster(dtype: torch.dtype) -> Callable[..., object]:
    return lambda lowering, x: lowering._cast(x, dtype)


def _built(name: str) -> Callable[..., object]:
    """A function that calls the Builder's method of this name."""
    return lambda lowering, *args, **kwargs: getattr(lowering.build, name)(*args, **kwargs)


_L = Lowering
_METHOD_HANDLERS: dict[str, Callable[..., object]] = {
    **{name: _caster(dtype) for name, dtype in _DTYPE_METHODS.items()},
    "to": _L._to,
    "type": _L._to,
    "sum": _L._sum,
    "mean": _L._mean,
    "norm": _L._norm,
    "amax": _L._amax,
    "amin": _L._amin,
    "max": _L._max,
    "min": _L._min,
    "matmul": _L._matmul,
    "mm": _L._matmul,
    "size": _L._size,
    "numel": _L._numel,
    "dim": _L._dim,
}
_FUNCTION_HANDLERS: dict[object, Callable[..., object]] = {
    functions.all_reduce: _built("all_reduce"),
    functions.reduce_scatter: _built("reduce_scatter"),
    functions.all_gather: _built("all_gather"),
    functions.broadcast: _built("broadcast"),
    functions.send: _L._send,
    functions.recv: _L._recv,
    functions.dropout: _L._dropout,
    funcol.all_reduce: _L._functional_all_reduce,
    torch.sum: _L._sum,
    torch.mean: _L._mean,
    torch.norm: _L._norm,
    torch.linalg.vector_norm: _L._norm,
    torch.amax: _L._amax,
    torch.amin: _L._amin,
    torch.max: _L._max,
    torch.min: _L._min,
    torch.matmul: _L._matmul,
    torch.mm: _L._matmul,
    operator.matmul: _L._matmul,
    F.linear: _L._linear,
    F.layer_norm: _L._layer_norm,
    torch.layer_norm: _L._layer_norm,
    F.rms_norm: _L._rms_norm,
    torch.rms_norm: _L._rms_norm,
}


def lower(
    name: str,
    graph: fx.Graph,
    parameters: Mapping[str, Parameter],
    results: tuple[Layout | None, ...] | None,
    world_size: int,
    group_matches: Callable[[object], bool],
    device: str,
) -> Program:
    """The program of a graph.

    Args:
        results: the annotated layouts of what it returns, if any.
        device: the type of device that it is for; autocast is for one.
    """

    def run(domains: Mapping[str, tuple[int, ...] | None]) -> Lowering:
        lowering = Lowering(graph, parameters, domains, world_size, group_matches, device)
        lowering.run()
        return lowering

    domains: dict[str, tuple[int, ...] | None] = {}
    lowering = run(domains)
    sharded = [key for key, node in lowering.inputs.items() if lowering.build.open(node)]
    if sharded:
        for key in sharded:
            with lowering.build.at(None, key):
                domain = lowering.build.domain(lowering.inputs[key])
                used = lowering.inputs[key] in lowering.used
                if domain is None and used and world_size > 1:
                    lowering.build.fail(
                        "the full size of this Shard is not known: combine it with a tensor of "
                        "the full shape"
                    )
            domains[key] = parameters[key].shape if domain is None else domain
        lowering = run(domains)
    outputs = _outputs(lowering, graph, results)
    single = isinstance(lowering.result, Node)
    program = Program(name, tuple(lowering.inputs.values()), outputs, world_size, single)
    _check_messages(lowering, program)
    return _on_slices(lowering, program) if lowering.build.to_slice else program


def _on_slices(lowering: Lowering, program: Program) -> Program:
    """What the function gathers is computed on slices, whatever else is Replicate beside them."""
    build = lowering.build
    gathered = Gathered(program, build.implicit_gathers, build.to_slice)
    result = gathered.result()
    for node in gathered.whole:
        with build.at(node.source, node.name):
            build.fail(NO_SLICES, node.operands[0])
    return result


def _check_messages(lowering: Lowering, program: Program) -> None:
    """What is written is sent and received: the other stage waits for it."""
    seen: set[tuple[object, ...]] = set()
    for node in lowering.messages:
        users = program.users.get(node)
        with lowering.build.at(node.source, node.name):
            key = node.op, *node.attributes
            if key in seen:
                lowering.build.fail(f"another {node.op} of this stage and tag: give it a tag")
            seen.add(key)
            if node.op == "recv" and users is None:
                lowering.build.fail("what comes is not used: return it, or leave recv out")
            if node.op == "send" and users:
                lowering.build.fail("its token is only to be returned", users[0])
            if node.op == "send" and node not in program.outputs:
                lowering.build.fail("return what send gives, or nothing is sent")


def _outputs(
    lowering: Lowering, graph: fx.Graph, results: tuple[Layout | None, ...] | None
) -> tuple[Node, ...]:
    value = lowering.result
    values = (value,) if isinstance(value, Node) else value
    output = next(node for node in graph.nodes if node.op == "output")
    source = output.meta.get("source")
    build = lowering.build
    with build.at(source, "return"):
        if not isinstance(values, (tuple, list)) or not values:
            build.fail("a program returns a tensor, or a tuple of tensors")
        if not all(isinstance(node, Node) and not node.scalar for node in values):
            build.fail("a program returns tensors, not numbers, None or nested tuples")
        if results is not None and len(results) != len(values):
            build.fail(f"annotated are {len(results)} results, returned are {len(values)}")
        converted = []
        for node, layout in zip(values, results or (None,) * len(values)):
            if layout is None or layout == node.layout:
                converted.append(node)
            elif layout == PARTIAL:
                build.fail(f"annotated as Partial, and this is {node.layout}", node)
            elif node.layout == PARTIAL:
                build.fail(f"annotated as {layout}: all_reduce it first", node)
            elif node.layout.dim is not None:
                build.fail(f"annotated as {layout}: it is a block of a dimension", node)
            else:
                converted.append(build.convert(node, layout))
        return tuple(converted)


def collective(graph: fx.Graph) -> bool:
    """Whether a call may meet the other ranks of its group; `recv` may gather what comes."""
    ours = _OURS - {functions.send, functions.dropout}
    return any(node.target in ours for node in graph.nodes if node.op == "call_function")


def ends(graph: fx.Graph) -> list[End]:
    """The messages that a graph names, of a call for which there is no program."""
    sides = {functions.send: ("dst", "next"), functions.recv: ("src", "previous")}
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in sides:
            key, usual = sides[node.target]
            stage = node.kwargs[key]
            stage, tag = usual if stage is None else stage, node.kwargs["tag"]
            if isinstance(stage, int | str) and isinstance(tag, int):
                described = f"{node.meta.get('source')}: `{node.name}`"
                found.append(End(node.target is functions.send, stage, tag, described))
    return found
