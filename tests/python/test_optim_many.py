"""Fused optimizers on many parameters: lists instead of one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import harness
from checks import optim_many
from fusedpg._registration import load_extension


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "check",
    [
        optim_many.clipped_at_once,
        optim_many.clipped_with_others,
        optim_many.gradients_again,
        optim_many.gradients_again_clipped,
        optim_many.gradients_that_are_kept,
        optim_many.groups_of_several_kinds,
        optim_many.norms_of_slices_that_change,
    ],
)
def test_many(check: Callable[[harness.Context], None], world_size: int) -> None:
    harness.pool(world_size).run(check)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduced_at_once(world_size: int) -> None:
    harness.pool(world_size).run(optim_many.reduced_at_once)


@pytest.mark.parametrize("mode", ["ddp", "overlap", "manual"])
def test_edited_state(mode: str) -> None:
    harness.pool(2).run(optim_many.edited_state, mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.3, 1e-40, 1e38, 1e300, -0.0, float("inf"), float("nan")])
def test_scaled_as_by_torch(dtype: torch.dtype, factor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (0, 1, 31, 1000)]
    ours = [
        (t * 10.0 ** torch.randint(-40, 38, t.shape, generator=generator)).to(dtype) for t in wide
    ]
    expected = [t.clone() for t in ours]
    before = [t._version for t in ours]
    scaled = load_extension().scale_slices(ours, factor)
    assert scaled == (dtype.itemsize >= 4)
    assert [t._version - v for t, v in zip(ours, before, strict=True)] == [int(scaled)] * len(ours)
    if scaled:
        torch._foreach_mul_(expected, factor)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        bits = [t.masked_fill(t.isnan(), 0).view(torch.uint8) for t in (mine, theirs)]
        assert torch.equal(*bits)


def test_not_scaled_past_autograd() -> None:
    scale = load_extension().scale_slices
    plain, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    for other in (leaf, torch.ones(3, 2)[:, 0], torch.ones(3, dtype=torch.int64)):
        assert not scale([plain, other], 2.0)
        assert plain.eq(1).all() and plain._version == 0
    with torch.no_grad():
        assert scale([leaf], 2.0)
