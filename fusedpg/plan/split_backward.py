"""A backward pass in two parts: what is sent on first, and the gradients of weights later.

After Qi et al., "Zero Bubble Pipeline Parallelism" (2023). The graph is walked as in
`torch.distributed.pipelining`, whose functions for it are private, and up to torch 2.12 do not give
the gradients of weights that several operations use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Deferred:
    """The gradients of weights that one operation leads to, which are still to be computed.

    Args:
        node: of the operation, which also leads to an input.
        weights: those that it leads to without another such operation between.
        gradients: of its outputs.
    """

    node: Node
    weights: list[nn.Parameter]
    gradients: tuple[Tensor | None, ...] = ()

    def compute(self) -> None:
        """Adds the gradients to the weights' ``grad``."""
        given = [(i, g) for i, g in enumerate(self.gradients) if g is not None]
        if given:
            edges = [GradientEdge(self.node, i) for i, _ in given]
            torch.autograd.backward(edges, [g for _, g in given], inputs=self.weights)


def backward_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Iterable[nn.Parameter],
) -> list[Deferred]:
    """The first part: adds the gradients of inputs to their ``grad``.

    Gradients of a weight to which no operation leads that also leads to an input, or several do,
    are not deferred: they are added to its ``grad`` here.

    Args:
        outputs: of a graph that was computed from inputs and weights.
        gradients: of each output.
        inputs: leaves that require gradients; at least one.
        weights: those that may be in the graph.

    Returns:
        The second part.
    """
    leaves = {get_gradient_edge(tensor).node for tensor in inputs}
    named = {get_gradient_edge(w).node: w for w in weights if w.requires_grad}
    # For each operation: whether it leads to an input, and to which weights beside those ways.
    leads: dict[Node, bool] = {}
    beside: dict[Node, dict[Node, None]] = {}
    roots = [get_gradient_edge(tensor).node for tensor in outputs]
    for node in _upwards(roots):
        below = [each for each, _ in node.next_functions if each is not None]
        leads[node] = node in leaves or any(leads[each] for each in below)
        beside[node] = {node: None} if node in named else {}
        for each in below:
            if not leads[each]:
                beside[node] |= beside[each]
    ways: dict[Node, list[Node]] = {}
    for node in leads:
        for weight in beside[node] if leads[node] or node in roots else ():
            ways.setdefault(weight, []).append(node)
    later: dict[Node, Deferred] = {}
    for weight, nodes in ways.items():
        if len(nodes) == 1 and leads[nodes[0]]:
            later.setdefault(nodes[0], Deferred(nodes[0], [])).weights.append(named[weight])
    deferred = {id(w) for one in later.values() for w in one.weights}
    now = [w for w in named.values() if id(w) not in deferred]
    handles = [one.node.register_prehook(_keeper(one)) for one in later.values()]
    try:
        torch.autograd.backward(
            outputs, gradients, retain_graph=bool(later), inputs=[*inputs, *now]
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(later.values())


def _keeper(one: Deferred) -> Callable[[tuple[Tensor, ...]], None]:
    def keep(gradients: tuple[Tensor, ...]) -> None:
        one.gradients = gradients

    return keep


def _upwards(roots: Sequence[Node]) -> list[Node]:
    """All nodes of a graph, each after those that it leads to."""
    order: dict[Node, None] = {}
    todo = [(root, False) for root in roots]
    while todo:
        node, entered = todo.pop()
        if node in order:
            continue
        if entered:
            order[node] = None
            continue
        todo.append((node, True))
        todo += [(each, False) for each, _ in node.next_functions if each is not None]
    return list(order)
