"""fusedpg.tensor_parallel with sequence_dim: layers and styles."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import sequence as checks
from checks.refused import refused
from fusedpg.tensor_parallel._epilogue import Place
from fusedpg.tensor_parallel._sequence import normed
from fuzz import core

SIZES = [2, harness.slow(1), harness.slow(3)]


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 60))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, checks.WHERE[2:4])])
def test_random_cases(where: str, seed: int) -> None:
    core.search("sequence", where, core.seed(seed))


def test_one_rank() -> None:
    core.search("sequence", "1", core.seed(0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, *map(harness.slow, (torch.float64, torch.bfloat16))], ids=str
)
@pytest.mark.parametrize("world_size", SIZES)
def test_masks(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(checks.masks, dtype)


@pytest.mark.parametrize("world_size", SIZES)
def test_norms(world_size: int) -> None:
    harness.pool(world_size).run(checks.norms)


@harness.on_ranks(2)
def test_gradients_of_gradients_are_refused(context: harness.Context) -> None:
    """A norm's gradients are summed by an operation without a gradient."""
    norm, x = torch.nn.LayerNorm(4), torch.randn(3, 4, requires_grad=True)
    y = normed(norm, x, Place(None), 0)
    (first,) = torch.autograd.grad((y**2).sum(), norm.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, harness.slow(torch.float64)], ids=str)
@pytest.mark.parametrize("world_size", SIZES)
def test_styles(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(checks.styles, dtype)


@pytest.mark.fused_only
@pytest.mark.parametrize("world_size", [2, *map(harness.slow, (3, 9))])
def test_small_and_large(world_size: int) -> None:
    harness.pool(world_size).run(checks.ways)


def test_what_does_not_fit() -> None:
    harness.pool(2).run(checks.wrong)


def test_residuals_on_their_way() -> None:
    harness.pool(2).run(checks.on_their_way)


def test_autocast() -> None:
    harness.pool(2).run(checks.autocast)


@pytest.mark.slow
def test_under_compile() -> None:
    harness.pool(2).run(checks.under_compile, timeout=120)


@pytest.mark.fused_only
@pytest.mark.parametrize("names", ["two and one", harness.slow("two")])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names)
    workers.run(checks.masks, torch.float32)
    workers.run(checks.norms)


@pytest.mark.slow
@pytest.mark.fused_only
@pytest.mark.parametrize("seed", range(20))
def test_random_cases_between_hosts(seed: int) -> None:
    core.search("sequence", "two and one", core.seed(seed))


@harness.on_ranks(2)
def test_first_call_that_one_rank_refuses(context: harness.Context) -> None:
    """The others, which ask for spare cores before they gather rows, hear of it."""
    layer = fusedpg.ColumnParallelLinear(8, 8, sequence_dim=0, group=dist.new_group())
    kind = ValueError if context.rank else dist.DistBackendError
    with refused("the input has 9 features", kind):
        layer(torch.ones(2, 8 + context.rank))
    assert layer(torch.ones(2, 8)).shape == (4, 4)


@harness.on_ranks(2)
def test_features_that_one_rank_cannot_split(context: harness.Context) -> None:
    kind = ValueError if context.rank else dist.DistBackendError
    for layer in (fusedpg.ColumnParallelLinear, fusedpg.RowParallelLinear):
        with refused("not divisible by 2 ranks", kind):
            layer(8 + context.rank, 8 + context.rank, group=dist.group.WORLD)
    assert fusedpg.RowParallelLinear(8, 3)(torch.ones(2, 4)).shape == (2, 3)
