"""Gradients of calls: what a call keeps, and its backward as a run of the derived program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg._refusal import telling
from fusedpg.fusion.derive import Derived
from fusedpg.fusion.messages import End
from fusedpg.fusion.plan import complete, start
from fusedpg.fusion.schedule import Schedule

Place = tuple[dist.ProcessGroup, int]  # a group, and this rank's number in it
# The group of the stages, and the numbers of a call's messages.
Crossing = tuple[dist.ProcessGroup, Mapping[End, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiable:
    """A program with its backward, and how both are carried out."""

    derived: Derived
    forward: Schedule  # gives the results, and then what the backward needs
    backward: Schedule
    number: int = dataclasses.field(default_factory=itertools.count().__next__)  # its own

    @property
    def results(self) -> int:
        return len(self.derived.differentiable)


def kept_values(
    plan: Differentiable, values: Mapping[str, Any], results: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What the backward reads, of the arguments and of what the forward gave."""
    given = dict(zip(plan.derived.forward.outputs, results))
    return [
        values[node.name] if node.op == "input" else given[node] for _, node in plan.derived.kept
    ]


def numbers_of(plan: Differentiable, values: Mapping[str, object]) -> dict[str, object]:
    return {name: values[source] for name, source in plan.derived.numbers}


def run_backward(
    plan: Differentiable,
    place: Place,
    kept: Sequence[torch.Tensor],
    numbers: Mapping[str, object],
    gradients: Sequence[torch.Tensor],
    crossing: Crossing | None = None,
) -> dict[str, torch.Tensor]:
    """The gradients of the forward's inputs by name; `gradients` are those of all its results."""
    derived, program = plan.derived, plan.backward.program
    arguments = dict(numbers)
    arguments |= {name: value for (name, _), value in zip(derived.kept, kept)}
    arguments |= {name: gradients[number] for name, number in derived.seeds}
    device = gradients[0].device if gradients else None
    stages, forward = crossing or (None, {})
    call, run = start(program, place[0], arguments, stages=stages, device=device, forward=forward)
    with telling(place[0], *gradients, when=call.meets):
        results = complete(run)
    return dict(zip(derived.gradients, results))


class Attach(torch.autograd.Function):
    """Gives results that a run has computed their backward."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Differentiable,
        place: Place,
        crossing: Crossing | None,
        values: Mapping[str, object],
        names: tuple[str, ...],
        results: Sequence[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.place, ctx.crossing, ctx.names = plan, place, crossing, names
        ctx.numbers = numbers_of(plan, values)
        # As autograd knows them: the arguments are its own inputs.
        values = {**values, **dict(zip(names, tensors))}
        ctx.save_for_backward(*kept_values(plan, values, results))
        own = tuple(results[: plan.results])
        ctx.mark_non_differentiable(
            *(result for result, smooth in zip(own, plan.derived.differentiable) if not smooth)
        )
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            # The gradients would be constants to what differentiates them, unnoticed.
            raise RuntimeError(
                f"{ctx.plan.derived.program.name}: fused functions are differentiated once: leave "
                "create_graph=True out, or write this part without fusedpg.fuse"
            )
        found = run_backward(
            ctx.plan, ctx.place, ctx.saved_tensors, ctx.numbers, gradients, ctx.crossing
        )
        return None, None, None, None, None, None, *(found.get(name) for name in ctx.names)


def attach(
    plan: Differentiable,
    place: Place,
    values: Mapping[str, object],
    results: list[torch.Tensor],
    crossing: Crossing | None = None,
) -> list[torch.Tensor]:
    """The results of a run of the plan's forward, with their backward."""
    names = tuple(name for name, value in values.items() if isinstance(value, torch.Tensor))
    # A result that is returned twice is one to autograd.
    distinct = [
        r if all(r is not s for s in results[:n]) else r.clone() for n, r in enumerate(results)
    ]
    own = [*distinct[: plan.results], *results[plan.results :]]
    with torch.enable_grad():
        given: tuple[torch.Tensor, ...] = Attach.apply(
            plan, place, crossing, values, names, own, *(values[name] for name in names)
        )
    return list(given)
