"""Any `nn.Module` that torch.fx can trace, as a sequence of operators that pipelines can cut.

Each tensor that the module computes, and that has a row for each sample, is an operator's output.
Tensor parallelism does not split these operators: their `tp` is 1.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from fusedpg import _fx
from fusedpg.plan.config import PlanError
from fusedpg.plan.operators import Model, Operator, OperatorModule, Outputs, Part, Value, Weight

_NORMS_OF_BATCHES = nn.modules.batchnorm._NormBase
_RANDOM = ("dropout", "rand", "bernoulli", "normal")


@dataclass(frozen=True, kw_only=True)
class TracedOperator(Operator):
    """A part of a traced graph that ends in one tensor."""

    graph: fx.GraphModule
    value: Value
    random: bool

    def values(self) -> tuple[Value, ...]:
        return (self.value,)

    def weights(self, algo: int) -> dict[str, Weight]:
        trained = self.graph.named_parameters()
        return {_flat(n): Weight(tuple(p.shape)) for n, p in trained if p.requires_grad}

    def initial(
        self, name: str, weight: Weight, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        found = {_flat(n): p for n, p in self.graph.named_parameters()}
        return found[name].detach().to(dtype)

    def buffers(self) -> dict[str, Tensor]:
        frozen = [(n, p.detach()) for n, p in self.graph.named_parameters() if not p.requires_grad]
        return {_flat(n): t.clone() for n, t in (*frozen, *self.graph.named_buffers())}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        names = [n for n, _ in self.graph.named_parameters()]
        names += [n for n, _ in self.graph.named_buffers()]
        held = {name: getattr(w, _flat(name)) for name in names}
        self.graph.train(part.training)
        if not self.random:
            return functional_call(self.graph, held, tuple(x))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((part.seed, part.dp_rank)))
            return functional_call(self.graph, held, tuple(x))

    def kind(self) -> tuple[object, ...]:
        shapes = tuple(tuple(p.shape) for p in self.graph.parameters())
        return ("Traced", self.graph.code, repr(self.graph), shapes)

    def problem(self, tp: int, algo: int, inputs: Sequence[Value]) -> str | None:
        return None if tp == 1 else f"{self.name} was traced: it needs tp 1, not {tp}"


def trace(module: nn.Module, batch: Mapping[str, Tensor], name: str, size: str) -> Model:
    """A model that computes what the module does.

    Args:
        module: its `forward` takes the batch by name, and returns one loss for each sample.
        batch: an example of its data, with 2 samples or more in dimension 0 of each tensor.
        name, size: of the model, as in plans and databases.

    Raises:
        PlanError: for a module that fx cannot trace, that mixes samples (as batch norms do),
            changes values in place, uses one weight in several operators, or whose result is not
            a loss for each sample.
    """
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(part, _NORMS_OF_BATCHES):
            raise PlanError(f"{type(part).__name__} mixes samples: micro-batches would change it")
        if getattr(part, "inplace", False):
            part.inplace = False  # type: ignore[assignment]
    try:
        graph = _fx.Tracer().trace(module)
    except Exception as error:
        raise PlanError(f"torch.fx cannot trace {type(module).__name__}: {error}") from error
    return _Tracing(module, graph, batch).model(name, size)


class _Tracing:
    def __init__(self, module: nn.Module, graph: fx.Graph, batch: Mapping[str, Tensor]) -> None:
        self.module, self.graph = module, graph
        self.places = [node for node in graph.nodes if node.op == "placeholder"]
        lacking = [n.target for n in self.places if n.target not in batch and not n.args]
        if lacking:
            raise PlanError(f"the batch lacks {', '.join(map(str, lacking))}")
        self.batch = {str(n.target): batch[str(n.target)] for n in self.places if n.target in batch}
        self.samples = next(iter(self.batch.values())).shape[0]
        if self.samples < 2 or any(t.shape[0] != self.samples for t in self.batch.values()):
            raise PlanError("the batch needs as many samples in each tensor, and 2 or more")
        self.found = self._run(slice(None))
        self.one, self.rest = self._run(slice(0, 1)), self._run(slice(1, None))

    def _run(self, rows: slice) -> dict[str, Any]:
        """The results of every node for some of the samples."""
        found: dict[str, Any] = {}

        class Recorder(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                found[n.name] = result = super().run_node(n)
                return result

        self.module.eval()  # dropout cannot be compared
        inputs = [
            self.batch[str(n.target)][rows] if n.target in self.batch else n.args[0]
            for n in self.places
        ]
        with torch.no_grad():
            Recorder(fx.GraphModule(self.module, self.graph)).run(*inputs)
        self.module.train()
        return found

    def _of_samples(self, node: fx.Node) -> bool:
        """True if a node gives a tensor with a row for each sample."""
        whole, one, rest = (run.get(node.name) for run in (self.found, self.one, self.rest))
        if not all(isinstance(t, Tensor) and t.dim() for t in (whole, one, rest)):
            return False
        rows = (whole.shape[0], one.shape[0], rest.shape[0])  # type: ignore[union-attr]
        return rows == (self.samples, 1, self.samples - 1)

    def _check(self, node: fx.Node) -> None:
        target = str(getattr(node.target, "__name__", node.target))
        if node.kwargs.get("inplace") or (target.endswith("_") and not target.endswith("__")):
            raise PlanError(f"{node.name} changes a value in place, which others may use")
        parts = torch.cat([self.one[node.name], self.rest[node.name]])
        whole = self.found[node.name]
        if parts.shape != whole.shape or not torch.allclose(
            parts.double(), whole.double(), rtol=1e-3, atol=1e-4
        ):
            raise PlanError(f"{node.name} mixes samples: micro-batches would change what it gives")

    def model(self, name: str, size: str) -> Model:
        data = {
            key: Value(
                tuple(tensor.shape[1:]),
                tensor.dtype if not tensor.is_floating_point() else None,
                high=0 if tensor.is_floating_point() else int(tensor.max()) + 1,
                differentiable=False,
            )
            for key, tensor in self.batch.items()
        }
        last = next(node for node in self.graph.nodes if node.op == "output").args[0]
        if not isinstance(last, fx.Node) or self.found[last.name].shape != (self.samples,):
            raise PlanError("the module has to return a tensor with one loss for each sample")
        borders = {
            node
            for node in self.graph.nodes
            if node.op not in ("placeholder", "output", "get_attr") and self._of_samples(node)
        }
        operators = []
        owners: dict[int, str] = {}  # by the weight's identity: one may have several names
        trained: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node not in borders:
                continue
            self._check(node)
            operator, inputs = self._operator(node, borders)
            for weight, parameter in operator.graph.named_parameters():
                owner = owners.setdefault(id(parameter), node.name)
                if owner != node.name:
                    raise PlanError(f"{weight} is used by {owner} and {node.name}")
            if trained.intersection(inputs) or operator.weights(0):
                trained.add(node)
            differentiable = node in trained and self.found[node.name].is_floating_point()
            value = dataclasses.replace(operator.value, differentiable=differentiable)
            operators.append(dataclasses.replace(operator, value=value))
            if node is last:  # what follows is not used
                break
        return Model(name, size, tuple(operators), data).check()

    def _operator(
        self, node: fx.Node, borders: set[fx.Node]
    ) -> tuple[TracedOperator, list[fx.Node]]:
        """The operator that gives a node, with all that only passes numbers or constants to it."""
        needed: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}

        def visit(at: fx.Node) -> None:
            for before in at.all_input_nodes:
                if before in borders or before.op == "placeholder":
                    inputs.setdefault(before)
                else:
                    visit(before)
            needed.setdefault(at)

        visit(node)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        taken = [place for place in inputs if place in borders or place.target in self.batch]
        for place in taken:
            copies[place] = graph.placeholder(place.name)
        for place in inputs:
            if place not in copies:  # an argument's default
                copies[place] = place.args[0]  # type: ignore[assignment]
        for each in needed:
            copies[each] = graph.node_copy(each, copies.__getitem__)
        graph.output(copies[node])
        found = self.found[node.name]
        dtype = None if found.is_floating_point() else found.dtype
        traced = fx.GraphModule(self.module, graph)
        text = traced.code + " ".join(repr(part) for part in traced.modules()).lower()
        names = {place: str(place.target) for place in taken if place not in borders}
        operator = TracedOperator(
            name=node.name,
            inputs=tuple(names.get(place, place.name) for place in taken),
            outputs=(node.name,),
            graph=traced,
            value=Value(tuple(found.shape[1:]), dtype),
            random=any(word in text for word in _RANDOM),
        )
        return operator, taken


def _flat(name: str) -> str:
    return name.replace(".", "__")
