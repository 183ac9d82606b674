"""The functional steps on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from checks.fused_ops import BF16, FP32, FP64, OPS, OWN_RUNS, RUNS, Run, bert
from gpu_checks import device, fused
from ranks import Ranks, pool

pytestmark = pytest.mark.timeout(900)

COMMON: dict[str, dict[str, Any]] = {
    "plain": {"steps": 20},
    "fp64 weighted": {"dtypes": (FP64,), "weighted": True},
    **RUNS,
}
OWN: dict[str, dict[str, Any]] = {
    **OWN_RUNS,
    # Above what is reduced where it lies, with and without a remainder.
    "large": {"op": "adamw", "shapes": ((1 << 20,), (1_000_003,), (33,), (768, 1024)), "steps": 3},
    "large sgd": {"op": "sgd", "shapes": ((1 << 20,), (1_000_003,)), "steps": 3},
    "large lamb": {"op": "lamb", "shapes": ((1 << 20,), (200_003,), (1,)), "steps": 3},
}
# At all world sizes; ranks take turns on the GPU, so the rest is left to two of them.
BASIC = ("plain", "weighted", "bf16", "bf16 with masters", "types mixed")
CHUNKS = (4096, 65_536)
SEVERAL: tuple[tuple[int, ...], ...] = ((20_011,), (7,), (310, 330), (1,), (65_536,), (4099,))
# Where gradients cancel by chance, a small eps shows how their sum was rounded.
NOISE_FREE = (("eps", 1e-3),)


def agree(answers: list[str]) -> None:
    assert len(set(answers)) == 1, "ranks hold different parameters"


def test_ranks_share_the_device(ranks: Ranks) -> None:
    found = ranks.run(device.is_available)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [
        pytest.param(size, variant, id=f"world{size}-{variant}")
        for variant in COMMON
        for size in ((1, 2, 3, 4) if variant in BASIC else (2, 3))
    ],
    indirect=["ranks"],
)
def test_parity(ranks: Ranks, variant: str) -> None:
    for op in OPS:
        agree(ranks.run(fused.parity, Run(op, **COMMON[variant])))


@pytest.mark.parametrize("variant", OWN)
def test_own_options(trio: Ranks, variant: str) -> None:
    agree(trio.run(fused.parity, Run(**OWN[variant])))


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("op", OPS)
def test_several_chunks(ranks: Ranks, op: str, chunk_bytes: int) -> None:
    run = Run(op, shapes=SEVERAL, steps=4)
    agree(ranks.run(fused.parity, run, chunk_bytes))
    agree(ranks.run(fused.parity, Run(op, shapes=SEVERAL, steps=2, weighted=True), chunk_bytes))


@pytest.mark.parametrize("op", ["sgd", "adam", "adamw"])
def test_chunks_make_no_difference(pair: Ranks, op: str) -> None:
    # Two ranks' sums have one order; LAMB's norms follow the tiles.
    run = Run(op, shapes=SEVERAL, steps=3)
    answers = [pair.run(fused.digests, run, chunk) for chunk in (0, *CHUNKS)]
    assert all(one == answers[0] for one in answers)


@pytest.mark.parametrize("op", OPS)
def test_two_runs_give_the_same_bits(trio: Ranks, op: str) -> None:
    run = Run(op, shapes=SEVERAL, steps=3)
    assert trio.run(fused.digests, run) == trio.run(fused.digests, run)


@pytest.mark.parametrize("op", OPS)
def test_overflow_on_one_rank_stops_all(ranks: Ranks, op: str) -> None:
    ranks.run(fused.overflow, Run(op))
    ranks.run(fused.overflow, Run(op, dtypes=(BF16,), master=True))
    ranks.run(fused.overflow, Run(op, dtypes=(BF16, FP32), async_op=True))


@pytest.mark.parametrize("op", OPS)
def test_learning_rates(pair: Ranks, op: str) -> None:
    pair.run(fused.learning_rates, op)
    pair.run(fused.no_learning, Run(op, hyper=(("lr", 0.0),), dtypes=(FP32, BF16)))


@pytest.mark.parametrize("op", ["sgd", "adamw"])
def test_many_tensors_as_one(pair: Ranks, op: str) -> None:
    pair.run(fused.like_flat, op, bert(hidden=16, vocabulary=477))
    pair.run(fused.like_flat, op, tuple((1 + i * 37 % 41,) for i in range(8501)))


def test_lamb_of_many_tensors(pair: Ranks) -> None:
    run = Run("lamb", NOISE_FREE, shapes=bert(hidden=16, vocabulary=477), steps=2)
    agree(pair.run(fused.parity, run))


def test_wrong_arguments(pair: Ranks) -> None:
    pair.run(fused.wrong_arguments)


@pytest.mark.parametrize("op", ["sgd", "adamw"])
@pytest.mark.parametrize("types", [(FP32,), (BF16,)], ids=["fp32", "bf16"])
def test_direct_path(op: str, types: tuple[Any, ...]) -> None:
    ranks = pool(2, FUSEDPG_CUDA_ARENA_BYTES=str(64 << 20))
    run = Run(op, dtypes=types, shapes=SEVERAL)
    found = ranks.run(fused.direct, run)
    if not all(one["bytes"] for one in found):
        pytest.skip("no arena: the ranks do not reach each other's memory")
    assert [one["path"] for one in found] == ["direct"] * 2
    agree([one["digest"] for one in found])
