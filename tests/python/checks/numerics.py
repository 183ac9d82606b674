"""Bits: order of summation, special values, the same on all ranks and runs."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from checks.cases import HALF, Case, Placed, digest, logical, reduce_op, reference, same
from harness import Context


def spread(case: Case, rank: int) -> torch.Tensor:
    """Contributions of very different size, so that every other order shows."""
    contents = logical(case, rank)
    scale = logical(Case("", torch.float32, case.numel, seed=case.seed + 17), rank)
    if case.dtype in HALF or case.dtype == torch.float32 or case.dtype == torch.float64:
        return (contents.float() * torch.exp2((scale * 3).round())).to(case.dtype)
    return contents


def all_reduce(context: Context, case: Case) -> str:
    """One all_reduce against the left fold, on rank 0; the digest of every rank's result.

    Whoever calls this compares the digests: the reference costs more than the operation.
    """
    placed = Placed(context, case, spread(case, context.rank))
    dist.all_reduce(placed.tensor, reduce_op(case.redop))
    if context.rank == 0:
        inputs = [spread(case, rank) for rank in range(context.world_size)]
        want = reference(case.redop, inputs)
        assert same(placed.tensor, want), (
            f"{case}: {int((placed.tensor != want).sum())} of {case.numel} elements differ"
        )
    return digest([placed.tensor])


def reduce_scatter(context: Context, case: Case) -> str:
    """reduce_scatter and all_gather give what all_reduce gives, bit by bit."""
    ranks = context.world_size
    numel = case.numel // ranks * ranks
    inputs = [spread(case, rank)[:numel] for rank in range(ranks)]
    placed = Placed(context, case, inputs[context.rank], layout="contiguous")
    shard = Placed(context, case, torch.zeros(numel // ranks, dtype=case.dtype)).tensor
    dist.reduce_scatter_tensor(shard, placed.tensor, reduce_op(case.redop))
    placed.untouched()
    whole = torch.empty(numel, dtype=case.dtype)
    dist.all_gather_into_tensor(whole, shard)
    assert same(whole, reference(case.redop, inputs))
    dist.all_reduce(placed.tensor, reduce_op(case.redop))
    assert same(whole, placed.tensor)
    rooted = inputs[context.rank].clone()
    dist.reduce(rooted, 0, reduce_op(case.redop))
    if context.rank == 0:
        assert same(rooted, whole)
    return digest([whole])


def special(context: Context, dtype: torch.dtype, redop: str, numel: int) -> str:
    """Signed zeros, infinities, NaN, subnormals and overflow, in every lane."""
    largest = torch.finfo(dtype).max
    smallest = torch.finfo(dtype).smallest_normal / 2
    specials = [0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, smallest, 1.0, -1.0]
    table = torch.tensor(specials, dtype=torch.float64).to(dtype)
    index = torch.arange(numel)
    inputs = [
        table[(index // len(specials) ** rank) % len(specials)]
        for rank in range(context.world_size)
    ]
    tensor = inputs[context.rank].clone()
    dist.all_reduce(tensor, reduce_op(redop))
    want = reference(redop, inputs)
    assert torch.equal(tensor.isnan(), want.isnan())
    zero = want == 0
    # MIN and MAX of two zeros may be either of them.
    if redop in ("MIN", "MAX"):
        assert torch.equal(tensor[zero], want[zero])
    else:
        assert torch.equal(torch.signbit(tensor[zero]), torch.signbit(want[zero]))
    rest = ~zero
    assert same(tensor[rest], want[rest])
    return digest([tensor])
