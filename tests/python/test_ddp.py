"""DDP, its hooks and ZeRO run unchanged and give what they give on Gloo."""

from __future__ import annotations

import pytest

import harness
from checks import ddp


@pytest.fixture(params=[2, 3], ids=lambda size: f"world{size}")
def ranks(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool(request.param)


@pytest.mark.parametrize("name", ddp.VARIANTS)
def test_variants(ranks: harness.Workers, name: str) -> None:
    ranks.agree(ddp.variant, name)


def test_one_and_four_ranks() -> None:
    for size in (1, 4):
        harness.pool(size).agree(ddp.variant, "view")


@pytest.mark.fused_only
def test_buckets_lie_in_the_arena(workers: harness.Workers) -> None:
    workers.run(ddp.buckets_in_arena)


def test_gradients_outlive_the_group(pair: harness.Workers) -> None:
    pair.run(ddp.gradients_outlive)


def test_join_with_uneven_inputs(ranks: harness.Workers) -> None:
    ranks.agree(ddp.join)


@pytest.mark.parametrize("name", ddp.HOOKS)
def test_upstream_hooks(ranks: harness.Workers, name: str) -> None:
    ranks.agree(ddp.comm_hook, name)


def test_zero_redundancy_optimizer(ranks: harness.Workers) -> None:
    ranks.agree(ddp.zero_redundancy)
