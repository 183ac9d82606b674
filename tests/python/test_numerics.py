"""The summation order is a promise: every path gives the reference's bits."""

from __future__ import annotations

import pytest
import torch

import harness
from checks import cases, numerics
from checks.cases import Case

pytestmark = pytest.mark.fused_only

# One for each algorithm and for the seams between them, in elements.
SIZES = [1, 1000, 16 << 10, (1 << 20) + 13, 3 << 20]


def identical(digests: list[str]) -> str:
    assert len(set(digests)) == 1, "ranks hold different bits"
    return digests[0]


@pytest.mark.parametrize("memory", cases.MEMORY)
@pytest.mark.parametrize("numel", SIZES)
def test_left_fold(workers: harness.Workers, numel: int, memory: str) -> None:
    for redop in ("SUM", "AVG")[: 1 if numel > 1 << 20 else 2]:
        case = Case("all_reduce", numel=numel, memory=memory, redop=redop, seed=numel)
        first = identical(workers.run(numerics.all_reduce, case))
        assert identical(workers.run(numerics.all_reduce, case)) == first


@pytest.mark.parametrize("memory", cases.MEMORY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_left_fold_of_other_types(
    workers: harness.Workers, dtype: torch.dtype, memory: str
) -> None:
    for numel in (1000, 40_013, (1 << 20) + 13):
        for redop in ("SUM", "AVG", "PREMUL_SUM")[: 1 if numel > 1 << 20 else 3]:
            case = Case("all_reduce", dtype, numel, memory=memory, redop=redop, seed=numel)
            identical(workers.run(numerics.all_reduce, case))


@pytest.mark.parametrize("memory", cases.MEMORY)
@pytest.mark.parametrize("numel", [1000, 16 << 10, (1 << 20) + 13])
def test_reduce_scatter_then_all_gather(workers: harness.Workers, numel: int, memory: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case("reduce_scatter", dtype, numel, memory=memory, seed=numel)
        identical(workers.run(numerics.reduce_scatter, case))


@pytest.mark.parametrize("memory", cases.MEMORY)
def test_memory_makes_no_difference(trio: harness.Workers, memory: str) -> None:
    case = Case("all_reduce", numel=300_007, memory=memory, seed=1)
    plain = Case("all_reduce", numel=300_007, seed=1)
    digests = trio.run(numerics.all_reduce, case)
    assert identical(digests) == identical(trio.run(numerics.all_reduce, plain))


def test_size_makes_no_difference(workers: harness.Workers) -> None:
    workers.run(numerics.sizes_agree, [1, 33, 1000, 16 << 10, 65_537, 300_001, (1 << 20) + 13])


@pytest.mark.parametrize("redop", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", cases.FLOATS, ids=str)
def test_special_values(workers: harness.Workers, dtype: torch.dtype, redop: str) -> None:
    # NaN bits must be the same on all ranks too, so digests are compared.
    identical(workers.run(numerics.special, dtype, redop, 10_007))
    identical(workers.run(numerics.special, dtype, redop, 200_003))


@pytest.mark.parametrize("dtype", cases.HALF, ids=str)
def test_half_types_round_once(workers: harness.Workers, dtype: torch.dtype) -> None:
    workers.run(numerics.one_rounding, dtype)


def test_two_ranks_give_the_bits_of_gloo(pair: harness.Workers) -> None:
    pair.run(numerics.gloo_agrees)
