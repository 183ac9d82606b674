"""Gradients of fused functions on each rank, and of the same function on one process."""

from __future__ import annotations

from typing import Any

import torch

from checks.fusion import (
    REFERENCE,
    Case,
    Contributions,
    agree,
    compiled,
    shard,
)
from harness import Context

NUMBERS = {"lr": 0.25, "seed": 7}


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def weights(shape: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    """What a result is multiplied with in the loss, alike on all ranks."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def reference(case: Case, drawn: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the logical tensors, by torch alone."""
    whole = {
        key: [leaf(x) for x in value] if isinstance(value, list) else leaf(value)
        for key, value in drawn.items()
    }
    arguments = {
        key: Contributions(value) if isinstance(value, list) else value
        for key, value in whole.items()
    }
    results = compiled(case.text, REFERENCE)(**arguments, **NUMBERS)
    loss = sum((y * weights(y.shape, y.dtype, n)).sum() for n, y in enumerate(results))
    if loss.requires_grad:
        loss.backward()

    def of(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) if x.grad is None else x.grad

    return {
        key: [of(x) for x in value] if isinstance(value, list) else of(value)
        for key, value in whole.items()
    }


def own(context: Context, drawn: dict[str, Any]) -> dict[str, torch.Tensor]:
    size, rank = context.world_size, context.rank
    mine = {key: value[rank] if isinstance(value, list) else value for key, value in drawn.items()}
    mine["m"] = shard(drawn["m"], size, rank)
    return mine


def derivative(fused: Any, mine: dict[str, torch.Tensor], group: Any) -> Any:
    return fused.derivative(
        **{key: leaf(value) for key, value in mine.items()}, **NUMBERS, group=group
    )


def compare(
    context: Context,
    case: Case,
    run: Any,
    derived: Any,
    mine: dict[str, torch.Tensor],
    expected: dict[str, Any],
    group: Any,
    text: str,
) -> None:
    size, rank = context.world_size, context.rank
    given = {key: leaf(value) for key, value in mine.items()}
    results = run(**given, **NUMBERS, group=group)
    nodes = derived.forward.outputs[: len(results)]
    loss = torch.zeros((), dtype=case.dtype)
    for number, (node, result) in enumerate(zip(nodes, results)):
        weight = weights(node.shape, result.dtype, number)
        if str(node.layout) == "Shard":
            weight = shard(weight, size, rank)
        loss = loss + (result * weight).sum()
    if loss.requires_grad:
        loss.backward()
    for key, value in given.items():
        want = expected[key]
        want = want[rank] if isinstance(want, list) else want
        want = shard(want, size, rank) if key == "m" else want
        got = torch.zeros_like(value) if value.grad is None else value.grad
        what = f"{case}\ngradient of {key}\n{text}\n{derived.program}"
        agree(got, want, case, False, what)
