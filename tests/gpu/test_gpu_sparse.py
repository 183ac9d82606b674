"""All-reduces of CUDA tensors that skip blocks of zeros."""

from __future__ import annotations

import random

import pytest

from checks.sparse import DTYPES, Case
from gpu_checks import sparse
from ranks import Ranks, pool

pytestmark = pytest.mark.timeout(900)


def draw(rng: random.Random, dtype: str, arena: bool) -> list[Case]:
    return [
        Case(
            numel=int(2 ** rng.uniform(0, 21)),
            block=rng.choice((32, 100, 256, 4096, 65536)),
            density=rng.choice((0.0, 0.01, 0.1, 0.5, 1.0)),
            overlap=rng.choice(("random", "full", "none")),
            dtype=dtype,
            op=rng.choice(("SUM", "AVG")) if "int" not in dtype else "SUM",
            offset=rng.choice((0, 0, 1, 3)),
            arena=arena,
            seed=seed,
        )
        for seed in range(12)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_cases(ranks: Ranks, dtype: str) -> None:
    cases = draw(random.Random(f"{dtype} {ranks.world_size}"), dtype, arena=False)
    ranks.run(sparse.all_reduces, cases, {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_over_arenas(dtype: str) -> None:
    """Where ranks reach each other's memory; else the group has no arena."""
    two = pool(2)
    cases = draw(random.Random(dtype), dtype, arena=True)
    two.run(sparse.all_reduces, cases, {"cuda_arena_bytes": 256 << 20})


def test_adapts(pair: Ranks) -> None:
    for paths in pair.run(sparse.adapts):
        assert paths["block_sparse"] == 20


def test_residuals(trio: Ranks) -> None:
    trio.run(sparse.residuals)


def test_unchanged_ddp(pair: Ranks) -> None:
    pair.run(sparse.unchanged_ddp)


@pytest.mark.real_gpu
def test_refuses_graphs(pair: Ranks) -> None:
    pair.run(sparse.refuses_graphs)
