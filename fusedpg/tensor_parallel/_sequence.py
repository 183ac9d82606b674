"""Forward and backward of the layers: one autograd function for columns, and one for rows.

With `Blocks` each rank has a part of the rows of what lies between the layers. Rows are then
gathered before a column-parallel product and again, rather than kept, for the gradient of its
weight; those of a row-parallel product are summed for their owner alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from fusedpg import _collectives
from fusedpg.tensor_parallel._blocks import (
    Blocks,
    Gathering,
    begin_scatter_sum,
    landed,
    multiplied,
)
from fusedpg.tensor_parallel._epilogue import Epilogue, Place, dropped


def _own(place: Place, part: torch.Tensor, overlap: bool | None) -> slice | None:
    """This rank's rows among all, where they are multiplied first."""
    if not place.beside(part, overlap):
        return None
    return slice(place.rank * len(part), (place.rank + 1) * len(part))


def columns(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    place: Place,
    overlap: bool | None,
    blocks: Blocks | None,
) -> torch.Tensor:
    """F.linear; with `blocks` of all ranks' rows, in their order."""
    if blocks is None:
        return F.linear(x, weight, bias)
    x = landed(x)
    # Before anything is under way: its first call is a collective, and a rank that raises tells the
    # others of one.
    own = _own(place, x, overlap)
    gathering = Gathering(x, place.group, place.size)
    return blocks.in_order(multiplied(gathering, x, weight.t(), bias, own))


class Columns(torch.autograd.Function):
    """Each rank has a contribution to the gradient of the whole input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        place: Place,
        overlap: bool | None,
        blocks: Blocks | None,
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        ctx.place, ctx.blocks = place, blocks
        return columns(x, weight, bias, place, overlap, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, place, blocks = ctx.needs_input_grad, ctx.place, ctx.blocks
        grad_x = grad_weight = work = gathering = None
        if blocks is None:
            rows = gradient.reshape(-1, gradient.shape[-1])
        else:
            rows = gradient = blocks.by_rank(landed(gradient))
            # The rows arrive while the gradient of the input is computed.
            gathering = Gathering(landed(x), place.group, place.size) if needs[1] else None
        # The weight's gradient is computed while that of the input is summed.
        if needs[0]:
            grad_x = gradient @ weight
            if blocks is None:
                work = dist.all_reduce(grad_x, group=place.group, async_op=True)
            else:
                grad_x, work = begin_scatter_sum(grad_x, place.group)
        if needs[1]:
            inputs = x.reshape(-1, x.shape[-1]) if gathering is None else gathering.wait()
            grad_weight = torch.mm(rows.t(), inputs)
        grad_bias = rows.sum(0) if needs[2] else None
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


def summed_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    place: Place,
    epilogue: Epilogue,
) -> torch.Tensor:
    """The sum of the ranks' products, with `blocks` this rank's rows of it, and what follows.

    Args:
        epilogue: without the tensors, which autograd has to see.
    """
    return place.sum_products(x, weight, Epilogue(bias, landed(residual), *epilogue[2:]))


class Rows(torch.autograd.Function):
    """Gradients of replicated values are replicated: without `blocks` backward sends nothing.

    With them each rank has the gradient of its rows, and every product needs that of all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        place: Place,
        epilogue: Epilogue,
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        ctx.types = tuple(None if t is None else t.dtype for t in (bias, residual))
        ctx.place, ctx.epilogue, ctx.dtype = place, epilogue, x.dtype
        ctx.firsts = epilogue.firsts(place.rank, weight.shape[0])
        return summed_rows(x, weight, bias, residual, place, epilogue)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, place, epilogue = ctx.needs_input_grad, ctx.place, ctx.epilogue
        blocks, (of_bias, of_residual) = epilogue.blocks, ctx.types
        gradient = landed(gradient)
        given = gradient.to(of_residual) if needs[3] else None
        grad_x = grad_weight = grad_bias = None
        if any(needs[:3]):
            # The mask before the gradient is sent: each rank's on its own rows.
            part = dropped(gradient.to(ctx.dtype), epilogue.p, epilogue.seed, ctx.firsts)
            if blocks is None:
                grad_x = part @ weight if needs[0] else None
                rows = part
            else:
                own = _own(place, part, epilogue.overlap) if needs[0] else None
                gathering = Gathering(part, place.group, place.size)
                if needs[0]:
                    grad_x = blocks.in_order(multiplied(gathering, part, weight, None, own))
                rows = gathering.wait()
            if needs[1]:
                grad_weight = torch.mm(rows.t(), x if blocks is None else blocks.by_rank(x))
            if needs[2]:
                grad_bias = rows.sum(0).to(of_bias)
        return grad_x, grad_weight, grad_bias, given, None, None


def normed(norm: nn.Module, y: torch.Tensor, place: Place, dim: int) -> torch.Tensor:
    """The norm of this rank's rows; its parameters' gradients are summed over the ranks.

    Parameters that are DTensors, as torch's SequenceParallel makes them, get theirs by DTensor.
    """
    named = dict(norm.named_parameters())
    meshes = [p.device_mesh for p in named.values() if isinstance(p, DTensor)]
    if meshes:
        ranks = dist.get_process_group_ranks(place.group)
        if any(mesh.mesh.tolist() != ranks for mesh in meshes):
            raise ValueError(
                f"the norm's parameters lie on {meshes}, and the layer's ranks are {ranks}: their "
                "gradients are summed over the layer's ranks, so give a norm of plain tensors"
            )
        z = norm(DTensor.from_local(y, meshes[0], [Shard(dim)], run_check=False))
        return z.redistribute(placements=[Shard(dim)]).to_local() if isinstance(z, DTensor) else z
    wanting = [name for name, parameter in named.items() if parameter.requires_grad]
    if place.size == 1 or not wanting or not torch.is_grad_enabled():
        return norm(y)
    summed = _collectives.sum_gradients([named[n] for n in wanting], place.group)
    return functional_call(norm, dict(zip(wanting, summed)), (y,))
