"""Collectives whose results have gradients.

A collective is a function of tensors that returns `Results`. Those of process groups are below;
fusedpg.hvd writes its own where it uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Results = tuple[Sequence[Tensor], Callable[..., Sequence[Tensor]]]
"""The results, and what takes their gradients to those of the tensors."""


class Collective(torch.autograd.Function):
    """A collective whose backward can be differentiated again: it is made of such functions."""

    @staticmethod
    def forward(
        ctx: Any, collective: Callable[..., Results], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results, ctx.of_gradients = collective(*tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.of_gradients(*gradients)


class _Once(Collective):
    """Its backward sends gradients by operations that have none."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return Collective.backward(ctx, *gradients)


class _InPlace(Collective):
    """The results are the tensors themselves."""

    @staticmethod
    def forward(
        ctx: Any, collective: Callable[..., Results], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.mark_dirty(*tensors)
        return Collective.forward(ctx, collective, *tensors)


def paired(
    x: Tensor,
    there: Callable[[Tensor], Tensor],
    back: Callable[[Tensor], Tensor],
    function: type[Collective] = _Once,
) -> Tensor:
    """`there(x)`; `back` takes its gradient to that of `x`."""

    def collective(x: Tensor) -> Results:
        return [there(x)], lambda gradient: [back(gradient)]

    (result,) = function.apply(collective, x)
    return result


def sums(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """New tensors, the sums over the ranks, by one operation for each type. Without gradients."""
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [n for n, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[n].reshape(-1) for n in places])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[n].numel() for n in places])
        for n, part in zip(places, parts, strict=True):
            results[n] = part.view(tensors[n].shape)
    return results


def sum_(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks; a contiguous `x` is overwritten.

    Ranks use the sum alike. So each has its whole gradient, and that is the gradient of every `x`.
    """

    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    return paired(x.contiguous(), total, lambda gradient: gradient, _InPlace)


def sum_gradients(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The same tensors. Ranks have them alike, and each computes a part of their gradients."""

    def collective(*tensors: Tensor) -> Results:
        same = [tensor.view_as(tensor) for tensor in tensors]
        return same, lambda *gradients: sums(gradients, group)

    same: tuple[Tensor, ...] = _Once.apply(collective, *tensors)
    return same


def sum_both(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks. Each uses it differently, and so gradients are summed, too."""

    def total(x: Tensor) -> Tensor:
        return sums([x], group)[0]

    return paired(x, total, total)


def _whole(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim)


def _part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Joins the ranks' parts of a dimension. Ranks use the whole alike and have its gradient."""
    return paired(x, lambda x: _whole(x, dim, group), lambda g: _part(g, dim, group))


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a dimension of what all ranks have: the opposite of `gather`."""
    return paired(x, lambda x: _part(x, dim, group).contiguous(), lambda g: _whole(g, dim, group))
