"""DDP, its hooks and ZeRO run unchanged and give what they give on Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import harness
from checks import ddp
from harness import Context


def identical(digests: list[str]) -> None:
    assert len(set(digests)) == 1, "ranks hold different parameters"


@pytest.fixture(params=[2, 3], ids=lambda size: f"world{size}")
def ranks(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool(request.param)


@pytest.mark.parametrize("name", ddp.VARIANTS)
def test_variants(ranks: harness.Workers, name: str) -> None:
    identical(ranks.run(ddp.variant, name))


def test_one_and_four_ranks() -> None:
    for size in (1, 4):
        identical(harness.pool(size).run(ddp.variant, "view"))


@pytest.mark.fused_only
@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_buckets_lie_in_the_arena(context: Context) -> None:
    """The buckets DDP reduces lie in the arena, before and after the rebuild."""
    import os

    import fusedpg

    assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"
    seen = []

    def observe(ddp: DistributedDataParallel, step: int) -> None:
        assert all(fusedpg.in_arena(param.grad) for param in ddp.parameters()), step
        seen.append(step)

    ddp.train(context, None, gradient_as_bucket_view=True, observe=observe)
    assert seen == list(range(6))

    buffers = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffers.append(fusedpg.in_arena(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / context.world_size)

    ddp.train(context, None, hook=lambda ddp: ddp.register_comm_hook(None, hook))
    assert len(buffers) > 6
    assert all(buffers)


def test_gradients_outlive_the_group(pair: harness.Workers) -> None:
    pair.run(ddp.gradients_outlive)


def test_join_with_uneven_inputs(ranks: harness.Workers) -> None:
    identical(ranks.run(ddp.join))


@pytest.mark.parametrize("name", ddp.HOOKS)
def test_upstream_hooks(ranks: harness.Workers, name: str) -> None:
    identical(ranks.run(ddp.comm_hook, name))


def test_zero_redundancy_optimizer(ranks: harness.Workers) -> None:
    identical(ranks.run(ddp.zero_redundancy))


@pytest.mark.fused_only
def test_fused_step_equals_ddp_and_adamw(workers: harness.Workers) -> None:
    identical(workers.run(ddp.fused_step))
