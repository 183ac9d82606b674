"""fusedpg.tensor_parallel with sequence_dim: layers and styles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as torch_styles

import fusedpg
import harness
from checks.compiled import compiles
from checks.compiled import done as operations
from checks.refused import refused
from checks.tensor_parallel import close
from checks.tensor_parallel import draw as rand
from fusedpg import tensor_parallel
from fusedpg.tensor_parallel._blocks import Blocks
from fusedpg.tensor_parallel._epilogue import Epilogue, Place
from fusedpg.tensor_parallel._sequence import normed
from fuzz.layers import without_compiler
from harness import Context, on_ranks

SIZES = [2, harness.slow(1), harness.slow(3)]
make = tensor_parallel.RowParallelLinear.from_linear


def norm_of(kind: str | None, features: int, dtype: torch.dtype) -> Any:
    """With weights that are not those that it begins with."""
    if kind is None:
        return None
    norm = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[kind](features, eps=1e-5, dtype=dtype)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.add_(rand(features, seed=70 + number).to(dtype))
    return norm


def masks(context: Context, dtype: torch.dtype) -> None:
    """The bits of the layer without sequence_dim, on each way through the engine."""
    size, rank = context.world_size, context.rank
    for lead, dim in (((6 * size, 3), 0), ((3, 2 * size), 1), ((2, 5, 100 * size), 2)):
        for width in (16, 33):
            whole = nn.Linear(4 * size, width, dtype=dtype)
            x = rand(*lead, 4 * size, seed=2).to(dtype).chunk(size, -1)[rank]
            residual = rand(*lead, width, seed=3).to(dtype)
            with compiles(context), torch.no_grad():
                want = make(whole, dropout=0.4, overlap=False)(x, residual, seed=8)
                want = want.chunk(size, dim)[rank]
                for overlap in (False, True):
                    row = make(whole, dropout=0.4, overlap=overlap, sequence_dim=dim)
                    before = operations() if context.fused else 0
                    got = row(x, residual.chunk(size, dim)[rank], seed=8)
                    if context.fused and size > 1:
                        assert operations() > before, "not compiled"
                    if overlap or not context.exact:  # products of fewer rows may differ
                        close(got, want, f"{lead}", dtype)
                    else:
                        assert torch.equal(got, want), (lead, dim, width)


@pytest.mark.fused_only
@on_ranks(2, *map(harness.slow, (3, 9)))
def test_small_and_large(context: Context) -> None:
    """Each way through the engine gives a part the bits that the whole has."""
    size, rank, place = context.world_size, context.rank, Place(None)
    bias = rand(40, seed=7)
    for lead, paths in ((1, {"one_shot"}), (1500, {"staged", "direct"})):
        for dim, arena in ((0, False), (0, True), (1, False), (1, True)):
            shape = (size * lead, 3) if dim == 0 else (3, size * lead)
            x = context.empty(3 * size * lead, 40, arena=arena)
            x.copy_(rand(*x.shape, seed=rank))
            residual = rand(*x.shape, seed=9)
            blocks = Blocks.of(shape, dim, size)
            part = blocks.by_rank(residual).chunk(size)[rank]
            with compiles(context):
                want = place.finish(x.clone(), Epilogue(bias, residual, 0.3, 5))
                fusedpg.stats(reset=True)
                got = place.finish(x, Epilogue(bias, part, 0.3, 5, blocks=blocks))
                found = set(fusedpg.stats()["fused_program"]["paths"])
            assert torch.equal(got, blocks.by_rank(want).chunk(size)[rank]), (lead, dim, arena)
            assert torch.equal(blocks.in_order(blocks.by_rank(want)), want)
            assert found and found <= paths, found


def norms(context: Context) -> None:
    """Gradients of a norm's parameters where it is used twice, frozen in part, or of DTensors."""
    size, rank = context.world_size, context.rank
    x = rand(3 * size, 4 * size, 4 * size, seed=1).double()
    plain = nn.Linear(4 * size, 6).double()
    meshes = init_device_mesh("cpu", (1, size), mesh_dim_names=("other", "tp"))
    mesh = meshes["tp"]
    for kind, frozen in (("layer", None), ("layer", "bias"), ("rms", None), ("layer", "sequence")):
        want, mine = (norm_of(kind, 6, torch.float64) for _ in range(2))
        if frozen == "sequence":
            torch_styles.parallelize_module(mine, mesh, torch_styles.SequenceParallel())
        for norm in (want, mine) if frozen == "bias" else ():
            norm.bias.requires_grad_(False)
        rows = [make(plain, norm=mine, sequence_dim=dim) for dim in (0, -2)]
        for row in rows:
            dim = 0 if row.sequence_dim == 0 else 1
            normed, _ = row(x.chunk(size, -1)[rank])
            normed.square().sum().backward()
            assert normed.shape[dim] * size == x.shape[dim]
            want(plain(x)).square().sum().backward()
        for name, parameter in want.named_parameters():
            got = getattr(mine, name).grad
            if name == frozen:
                assert got is None
            else:
                close(got, parameter.grad, f"{kind}, {frozen}: {name}", torch.float64)
    elsewhere = norm_of("layer", 6, torch.float64)
    torch_styles.parallelize_module(elsewhere, meshes["other"], torch_styles.SequenceParallel())
    row = make(plain, norm=elsewhere, sequence_dim=0)
    if size > 1:
        with refused("a norm of plain tensors", ValueError):
            row(x.chunk(size, -1)[rank])


@on_ranks(2)
def test_residuals_on_their_way(context: Context) -> None:
    """Residuals of torch's functional collectives, which have no memory until they are used."""
    size, rank, group = context.world_size, context.rank, dist.group.WORLD
    x, linear = rand(4 * size, size, seed=1), nn.Linear(size, size)
    own = x.chunk(size)[rank]
    for dim, given in ((None, x), (0, own)):
        row = make(linear, sequence_dim=dim)
        with compiles(context):
            want = row(x[:, rank : rank + 1], given)
            if dim is None:
                given = functional.all_gather_tensor(own, 0, group)
            else:
                given = functional.reduce_scatter_tensor(x / size, "sum", 0, group)
            assert isinstance(given, functional.AsyncCollectiveTensor)
            torch.testing.assert_close(row(x[:, rank : rank + 1], given), want)
            mesh = DeviceMesh.from_group(group, "cpu")
            given = DTensor.from_local(x, mesh, [Replicate()])
            torch.testing.assert_close(row(x[:, rank : rank + 1], given), want)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *map(harness.slow, (torch.float64, torch.bfloat16))], ids=str
)
@pytest.mark.parametrize("world_size", SIZES)
def test_masks(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(masks, dtype)


@pytest.mark.parametrize("world_size", SIZES)
def test_norms(world_size: int) -> None:
    harness.pool(world_size).run(norms)


@harness.on_ranks(2)
def test_gradients_of_gradients_are_refused(context: harness.Context) -> None:
    """A norm's gradients are summed by an operation without a gradient."""
    norm, x = torch.nn.LayerNorm(4), torch.randn(3, 4, requires_grad=True)
    y = normed(norm, x, Place(None), 0)
    (first,) = torch.autograd.grad((y**2).sum(), norm.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.fused_only
@on_ranks(2)
def test_hooks(context: Context) -> None:
    """Hooks see the norm's input and output, on one rank as on all; and may change them."""
    size, rank = context.world_size, context.rank
    x, seen = rand(4 * size, 4 * size, seed=1).chunk(size, -1)[rank], []
    norm = nn.RMSNorm(64)
    row = make(nn.Linear(4 * size, 64), norm=norm, sequence_dim=0)
    with compiles(context):
        z, y = row(x)
        if rank == 0:
            norm.register_forward_hook(lambda module, given, got: seen.append((given[0], got)))
        assert torch.equal(row(x)[0], z)
        assert len(seen) == (rank == 0)
        for given, got in seen:
            assert torch.equal(given, y) and torch.equal(got, z)
        norm.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        torch.testing.assert_close(row(x)[0], norm.forward(y + 1))
        assert "forward" not in norm.__dict__


@pytest.mark.long
@pytest.mark.fused_only
@on_ranks(2)
def test_norms_behind_the_operation(context: Context) -> None:
    """Any module may be the norm, and computes it."""
    size, rank = context.world_size, context.rank

    class Own(nn.RMSNorm):
        pass

    def check(norm: nn.Module, features: int = 64, dtype: Any = torch.float32, **more: Any) -> None:
        linear = nn.Linear(4 * size, features, dtype=dtype)
        x = rand(3 * size, 4 * size, seed=1).to(dtype).chunk(size, -1)[rank]
        residual = rand(3 * size, features, seed=2).to(dtype)
        for dim in (None, 0):
            row = make(linear, norm=norm, sequence_dim=dim, **more)
            part = residual if dim is None else residual.chunk(size)[rank]
            z, y = row(x, part)
            assert torch.equal(z, norm(y))

    with compiles(context):
        check(Own(64))
        check(nn.RMSNorm(64, dtype=torch.bfloat16), dtype=torch.bfloat16)
        check(nn.RMSNorm((1, 64)[1:]), overlap=True)
        check(nn.Identity())
        check(nn.LayerNorm(64))
        check(nn.RMSNorm(33), features=33)
        check(nn.RMSNorm(1 << 15), features=1 << 15)
        patched = nn.RMSNorm(64)
        patched.forward = lambda x: x * 2  # type: ignore[method-assign]
        check(patched)
        row = make(nn.Linear(4 * size, 64), norm=nn.RMSNorm(64))
        z, y = row(rand(4, 4, seed=1))
        assert torch.equal(z, row.norm(y))
        with without_compiler(rank == size - 1):
            check(nn.RMSNorm(96), features=96)
        options: dict[str, Any] = {"norm": nn.RMSNorm(64), "sequence_dim": 0}
        row = make(nn.Linear(4 * size, 64), group=context.oracle, **options)
        z, y = row(rand(4 * size, 4, seed=1))
        assert torch.equal(z, row.norm(y))
        with torch.autocast("cpu", torch.bfloat16):
            row = make(nn.Linear(4 * size, 64), **options)
            z, y = row(rand(4 * size, 4, seed=1))
            assert y.dtype == torch.bfloat16 and torch.equal(z, row.norm(y))
    dist.barrier(group=context.oracle)


def parts_of_norms(context: Context) -> None:
    """A part's rows are those of the whole, whose norm is computed behind."""
    size, rank = context.world_size, context.rank
    x = rand(8 * size, 4 * size, seed=1).chunk(size, -1)[rank]
    linear = nn.Linear(4 * size, 96)
    results = []
    with compiles(context):
        for dim in (None, 0):
            row = make(linear, norm=nn.RMSNorm(96, eps=1e-5), sequence_dim=dim, overlap=False)
            results.append(row(x))
    for whole, part in zip(*results):
        torch.testing.assert_close(part, whole.chunk(size)[rank])


@pytest.mark.fused_only
@pytest.mark.parametrize("names", ["two and one", harness.slow("two")])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names)
    workers.run(masks, torch.float32)
    workers.run(norms)
    workers.run(parts_of_norms)


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
