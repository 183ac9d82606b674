"""The summation order is a promise: every path gives the reference's bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import harness
from checks import cases, numerics
from checks.cases import Case, logical, reference, same
from harness import Context

pytestmark = pytest.mark.fused_only

# One for each algorithm and for the seams between them, in elements.
SIZES = [1, 1000, 16 << 10, (1 << 20) + 13, 3 << 20]


@pytest.mark.parametrize("memory", cases.MEMORY)
@pytest.mark.parametrize("numel", SIZES)
def test_left_fold(workers: harness.Workers, numel: int, memory: str) -> None:
    for redop in ("SUM", "AVG")[: 1 if numel > 1 << 20 else 2]:
        case = Case("all_reduce", numel=numel, memory=memory, redop=redop, seed=numel)
        first = workers.agree(numerics.all_reduce, case)
        assert workers.agree(numerics.all_reduce, case) == first


@pytest.mark.parametrize("memory", cases.MEMORY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_left_fold_of_other_types(
    workers: harness.Workers, dtype: torch.dtype, memory: str
) -> None:
    for numel in (1000, 40_013, (1 << 20) + 13):
        for redop in ("SUM", "AVG", "PREMUL_SUM")[: 1 if numel > 1 << 20 else 3]:
            case = Case("all_reduce", dtype, numel, memory=memory, redop=redop, seed=numel)
            workers.agree(numerics.all_reduce, case)


@pytest.mark.parametrize("memory", cases.MEMORY)
@pytest.mark.parametrize("numel", [1000, 16 << 10, (1 << 20) + 13])
def test_reduce_scatter_then_all_gather(workers: harness.Workers, numel: int, memory: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case("reduce_scatter", dtype, numel, memory=memory, seed=numel)
        workers.agree(numerics.reduce_scatter, case)


@pytest.mark.parametrize("memory", cases.MEMORY)
def test_memory_makes_no_difference(trio: harness.Workers, memory: str) -> None:
    case = Case("all_reduce", numel=300_007, memory=memory, seed=1)
    plain = Case("all_reduce", numel=300_007, seed=1)
    assert trio.agree(numerics.all_reduce, case) == trio.agree(numerics.all_reduce, plain)


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_size_makes_no_difference(context: Context) -> None:
    """An element's bits do not depend on the size of the message around it."""
    sizes = [1, 33, 1000, 16 << 10, 65537, 300001, (1 << 20) + 13]
    largest = max(sizes)
    inputs = [
        numerics.spread(Case("", torch.float32, largest, seed=11), rank)
        for rank in range(context.world_size)
    ]
    want = reference("SUM", inputs)
    for size in sizes:
        tensor = inputs[context.rank][:size].clone()
        dist.all_reduce(tensor)
        assert same(tensor, want[:size]), size


@pytest.mark.parametrize("redop", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", cases.FLOATS, ids=str)
def test_special_values(workers: harness.Workers, dtype: torch.dtype, redop: str) -> None:
    # NaN bits must be the same on all ranks too, so digests are compared.
    workers.agree(numerics.special, dtype, redop, 10_007)
    workers.agree(numerics.special, dtype, redop, 200_003)


@pytest.mark.parametrize("dtype", cases.HALF, ids=str)
@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_half_types_round_once(context: Context, dtype: torch.dtype) -> None:
    """Half types lose nothing between ranks: 1 + eps/2 + eps/2 is 1 + eps."""
    eps = torch.finfo(dtype).eps
    mine = 1.0 if context.rank == 0 else eps / 2
    for numel in (7, 5000, 300_001):
        tensor = torch.full((numel,), mine, dtype=dtype)
        dist.all_reduce(tensor)
        want = torch.tensor(1 + (context.world_size - 1) * eps / 2).to(dtype)
        assert bool((tensor == want).all()), (tensor[0], want)


@harness.on_ranks(2)
def test_two_ranks_give_the_bits_of_gloo(context: Context) -> None:
    """Two ranks leave no choice of order: our bits are Gloo's bits."""
    case = Case("all_reduce", numel=100_003, seed=2)
    mine = logical(case, context.rank)
    theirs = mine.clone()
    dist.all_reduce(mine)
    dist.all_reduce(theirs, group=context.oracle)
    assert same(mine, theirs)
