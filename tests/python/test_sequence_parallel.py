"""fusedpg.tensor_parallel with sequence_dim: layers and styles."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.utils.checkpoint import checkpoint as recomputed

import fusedpg
import harness
from checks.compiled import compiles
from checks.compiled import done as operations
from checks.fusion import reference_dropout
from checks.refused import refused
from checks.tensor_parallel import Block
from checks.tensor_parallel import draw as rand
from fusedpg import tensor_parallel
from fusedpg.tensor_parallel._blocks import Blocks
from fusedpg.tensor_parallel._epilogue import Epilogue, Place
from fusedpg.tensor_parallel._sequence import normed
from fuzz import core
from fuzz.core import Choices, Pair, done, world_of
from fuzz.layers import agree, whole_of, without_compiler
from harness import Context, on_ranks

SIZES = [2, harness.slow(1), harness.slow(3)]


WHERE = ("2", "1", "3", "4", "two and one")
EXAMPLES = 4
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def close(got: Any, want: Any, what: str, dtype: torch.dtype, plain: Any = None) -> None:
    """`plain`: what torch makes of the same numbers in one process in the type of `got`."""
    got, want = whole_of(got), whole_of(want)
    agree(got, want, want if plain is None else whole_of(plain), BOUNDS[dtype], what)


def norm_of(kind: str | None, features: int, dtype: torch.dtype) -> Any:
    """With weights that are not those that it begins with."""
    if kind is None:
        return None
    norm = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[kind](features, eps=1e-5, dtype=dtype)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.add_(rand(features, seed=70 + number).to(dtype))
    return norm


def draw(choose: Choices, where: str) -> SimpleNamespace:
    """A case of two layers."""
    case, size = SimpleNamespace(), world_of(where)
    case.dtype = choose.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    dims = choose.choice([1, 2, 2, 3])
    case.lead = [choose.choice([1, 2, 3, 5, 8]) for _ in range(dims)]
    case.dim = choose.randrange(dims)
    case.lead[case.dim] = size * choose.choice([0, 1, 2, 5, 40, 130])
    if choose.random() < 0.05:
        case.lead[choose.randrange(dims)] = 0
    case.given = case.dim - dims - 1 if choose.random() < 0.3 else case.dim
    case.residual = choose.random() < 0.7
    case.width = choose.choice([1, 3, 8, 17, 40])
    case.out = case.width if case.residual else choose.choice([1, 5, 16, 33])
    case.hidden = size * choose.choice([1, 2, 5, 16])
    case.biases = choose.random() < 0.6, choose.random() < 0.6
    case.p = choose.choice([0.0, 0.0, 0.1, 0.6, 1.0])
    case.seed = choose.choice([0, 11, 1 << 63])
    case.norm = choose.choice([None, "rms", "layer"])
    case.overlap = choose.choice([None, True, False])
    case.mode = choose.choice(["compiled", "compiled", "eager", "no compiler", "gloo"])
    case.frozen = choose.choice([(), (), ("up.weight",), ("down.weight", "norm.weight")])
    case.frozen += choose.choice([(), ("up.bias", "norm.bias"), ("down.bias", "x")])
    case.again = choose.random() < 0.2
    case.strided = choose.random() < 0.2
    case.broken = choose.randrange(size)  # has no compiler in that mode
    return case


def run(case: SimpleNamespace, context: Context) -> Iterator[Pair]:
    """Values and all gradients of a random case."""
    broken = context.rank == case.broken and case.mode == "no compiler"
    group = context.oracle if case.mode == "gloo" else dist.group.WORLD
    env = contextlib.nullcontext() if case.mode == "eager" else compiles(context)
    with env, without_compiler(broken):
        _both(context, case, group)
    yield done("values and gradients")


def cut(case: SimpleNamespace, tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """This rank's part."""
    return tensor.chunk(size, case.dim)[rank] if tensor.shape[case.dim] else tensor


def reference(case: SimpleNamespace, model: nn.ModuleDict, x: torch.Tensor) -> dict[str, Any]:
    """What one process makes of it."""
    x = x.clone().requires_grad_("x" not in case.frozen)
    y = model["down"](F.silu(model["up"](x)))
    if case.p:
        y = reference_dropout(y, case.p, case.seed) if case.p < 1 else y * 0
    y = y + x if case.residual else y
    value = model["norm"](y) if case.norm else y
    if value.requires_grad:
        (value.double() * rand(*value.shape, seed=5)).sum().backward()
    found = {"value": value, "sum": y, "gradient of x": x.grad}
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters()}


def _both(context: Context, case: SimpleNamespace, group: Any) -> None:
    size, rank, dtype = context.world_size, context.rank, case.dtype
    torch.manual_seed(3)
    up = nn.Linear(case.width, case.hidden, case.biases[0], dtype=dtype)
    down = nn.Linear(case.hidden, case.out, case.biases[1], dtype=dtype)
    norm = norm_of(case.norm, case.out, dtype)
    whole = nn.ModuleDict({"up": up, "down": down} | ({"norm": norm} if norm else {}))
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    options: dict[str, Any] = {"sequence_dim": case.given, "overlap": case.overlap, "group": group}
    column = tensor_parallel.ColumnParallelLinear.from_linear(
        copy.deepcopy(up), activation=F.silu, **options
    )
    row = tensor_parallel.RowParallelLinear.from_linear(
        copy.deepcopy(down), dropout=case.p, norm=copy.deepcopy(norm), **options
    )
    x = rand(*case.lead, case.width, seed=1).to(dtype)
    usual = reference(case, copy.deepcopy(whole), x)
    want = reference(case, whole.double(), x.double())
    part = cut(case, x, size, rank)
    if case.strided and part.dim() > 1:
        part = part.transpose(0, -1).contiguous().transpose(0, -1)
    part = part.clone().requires_grad_("x" not in case.frozen)

    def ours(x: torch.Tensor) -> Any:
        found = row(column(x), x if case.residual else None, seed=case.seed)
        return found if case.norm else (found, found)

    if case.again:
        value, total = recomputed(ours, part, use_reentrant=False)
    else:
        value, total = ours(part)
    if value.requires_grad:
        weights = rand(*want["value"].shape, seed=5)
        (value.double() * cut(case, weights, size, rank)).sum().backward()
    got = {"value": value, "sum": total, "gradient of x": part.grad}
    for title, layer in (("up", column), ("down", row), ("norm", row.norm)):
        for name, parameter in () if layer is None else layer.named_parameters():
            if not name.startswith("norm."):  # which is listed for itself
                got[f"gradient of {title}.{name}"] = parameter.grad
    assert got.keys() == want.keys()
    for what, tensor in got.items():
        expected, plain = want[what], usual[what]
        assert (tensor is None) == (expected is None), what
        if expected is not None:
            if "." not in what:
                expected, plain = (cut(case, t, size, rank) for t in (expected, plain))
            close(tensor, expected, what, dtype, plain)
    if dist.get_backend(group) == "gloo":
        return
    with torch.no_grad():
        again = row(column(part), part if case.residual else None, seed=case.seed)
        assert torch.equal(again[1] if case.norm else again, total), "another without gradients"


def masks(context: Context, dtype: torch.dtype) -> None:
    """The bits of the layer without sequence_dim, on each way through the engine."""
    size, rank = context.world_size, context.rank
    for lead, dim in (((6 * size, 3), 0), ((3, 2 * size), 1), ((2, 5, 100 * size), 2)):
        for width in (16, 33):
            whole = nn.Linear(4 * size, width, dtype=dtype)
            x = rand(*lead, 4 * size, seed=2).to(dtype).chunk(size, -1)[rank]
            residual = rand(*lead, width, seed=3).to(dtype)
            make = tensor_parallel.RowParallelLinear.from_linear
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


@on_ranks(2)
def test_what_does_not_fit(context: Context) -> None:
    """What does not fit raises, and says what to do."""
    size = context.world_size
    row = fusedpg.RowParallelLinear(8 * size, 4, sequence_dim=0)
    column = fusedpg.ColumnParallelLinear(4, size, sequence_dim=1)
    for call, *words in (
        (lambda: row(torch.ones(2 * size + 1, 8)), "dimension 0", f"pad it to {3 * size}"),
        (lambda: row(torch.ones(2 * size, 8), torch.ones(2 * size, 4)), "residual", "part of"),
        (lambda: row(torch.ones(8)), "sequence_dim=0"),
        (lambda: column(torch.ones(5, 4)), "sequence_dim=1", "features"),
        (lambda: column(torch.ones(5, 2, 3)), "in_features"),
    ):
        for word in words:
            with refused(word, ValueError):
                call()
    with refused("integer", TypeError):
        fusedpg.RowParallelLinear(8 * size, 4, sequence_dim="0")
    assert "sequence_dim=1" in repr(column) and "sequence_dim=0" in repr(row)


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
        rows = [
            tensor_parallel.RowParallelLinear.from_linear(plain, norm=mine, sequence_dim=dim)
            for dim in (0, -2)
        ]
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
    row = tensor_parallel.RowParallelLinear.from_linear(plain, norm=elsewhere, sequence_dim=0)
    if size > 1:
        with refused("a norm of plain tensors", ValueError):
            row(x.chunk(size, -1)[rank])


class Transformer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(60, 32, dtype=dtype)
        self.blocks = nn.Sequential(*(Block(32, 12, dtype) for _ in range(2)))
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.head = nn.Linear(32, 60, bias=False, dtype=dtype)
        for block in self.blocks:
            block.q, block.k, block.v = (nn.Linear(32, 96, dtype=dtype) for _ in range(3))
            block.o, block.head = nn.Linear(96, 32, dtype=dtype), 8
            block.up, block.down = nn.Linear(32, 48, dtype=dtype), nn.Linear(48, 32, dtype=dtype)
            block.norm1, block.norm2 = (nn.LayerNorm(32, dtype=dtype) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def plan(styles: Any) -> dict[str, Any]:
    """As torch's documents write one."""
    columns = {
        f"blocks.*.{name}": styles.ColwiseParallel(input_layouts=Shard(1))
        for name in ("q", "k", "v", "up")
    }
    rows = {
        f"blocks.*.{name}": styles.RowwiseParallel(output_layouts=Shard(1))
        for name in ("o", "down")
    }
    norms = {
        name: torch_styles.SequenceParallel()
        for name in ("norm", "blocks.*.norm1", "blocks.*.norm2")
    }
    ends = {
        "embedding": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return columns | rows | norms | ends


@pytest.mark.parametrize("dtype", [torch.float32, harness.slow(torch.float64)], ids=str)
@on_ranks(*SIZES)
def test_styles(context: Context, dtype: torch.dtype) -> None:
    """The same plan with torch's styles on Gloo, with ours, and one process."""
    ours, theirs, whole = (Transformer(dtype) for _ in range(3))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    gloo = DeviceMesh.from_group(context.oracle, "cpu")
    torch_styles.parallelize_module(ours, mesh, plan(tensor_parallel))
    torch_styles.parallelize_module(theirs, gloo, plan(torch_styles))
    assert isinstance(ours.blocks[0].o, fusedpg.RowParallelLinear)
    assert isinstance(ours.blocks[0].q, fusedpg.ColumnParallelLinear)
    for step in range(2):
        tokens = torch.randint(60, (3, 13), generator=torch.Generator().manual_seed(step))
        results = []
        for model in (ours, theirs, whole):
            with compiles(context):
                y = model(tokens[:, :12])
                F.cross_entropy(y.flatten(0, 1).double(), tokens[:, 1:].flatten()).backward()
            results.append(y)
        for other in results[1:]:
            close(results[0], other, "output", dtype)
        named = dict(theirs.named_parameters()), dict(whole.named_parameters())
        for name, parameter in ours.named_parameters():
            theirs_grad = named[0][name].grad
            close(parameter.grad, theirs_grad, f"torch's {name}", dtype)
            close(parameter.grad, named[1][name].grad, name, dtype)


@on_ranks(2)
def test_residuals_on_their_way(context: Context) -> None:
    """Residuals of torch's functional collectives, which have no memory until they are used."""
    size, rank, group = context.world_size, context.rank, dist.group.WORLD
    x, linear = rand(4 * size, size, seed=1), nn.Linear(size, size)
    own = x.chunk(size)[rank]
    for dim, given in ((None, x), (0, own)):
        row = tensor_parallel.RowParallelLinear.from_linear(linear, sequence_dim=dim)
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


@on_ranks(2)
def test_autocast(context: Context) -> None:
    size, rank = context.world_size, context.rank
    torch.manual_seed(3)
    up, down = nn.Linear(24, 12 * size), nn.Linear(12 * size, 24)
    column = tensor_parallel.ColumnParallelLinear.from_linear(up, sequence_dim=0)
    row = tensor_parallel.RowParallelLinear.from_linear(down, sequence_dim=0)
    x = rand(5 * size, 24, seed=1)
    part, y = x.chunk(size)[rank].clone().requires_grad_(), x.clone().requires_grad_()
    for residual in (False, True):
        part.grad = y.grad = row.weight.grad = down.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = row(column(part), part if residual else None), down(up(y))
        want = want + y if residual else want
        assert got.dtype == want.dtype
        close(got, want.chunk(size)[rank], "value", torch.bfloat16)
        got.sum().backward()
        want.sum().backward()
        close(part.grad, y.grad.chunk(size)[rank], "input", torch.bfloat16)
        close(row.weight.grad, down.weight.grad, "weight", torch.bfloat16)
        assert row.weight.grad.dtype == torch.float32


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_under_compile(context: Context) -> None:
    torch._dynamo.reset()
    torch.manual_seed(9)
    size = context.world_size
    up = fusedpg.ColumnParallelLinear(7, size * 4, activation=F.silu, sequence_dim=0)
    down = fusedpg.RowParallelLinear(size * 4, 7, dropout=0.3, norm=nn.LayerNorm(7), sequence_dim=0)

    def block(x: torch.Tensor) -> torch.Tensor:
        normed, y = down(up(torch.tanh(x)), x, seed=3)
        return (normed * y).sin().sum()

    results = []
    for function in (torch.compile(block, backend="aot_eager"), block):
        x = torch.linspace(-1, 1, 35).reshape(5, 7).requires_grad_()
        function(x).backward()
        layers = (*up.parameters(), *down.parameters())
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in layers]
        results.append([x.grad, *(grad.clone() for grad in grads)])
        for parameter in layers:
            parameter.grad = None
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 60))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, WHERE[2:4])])
def test_random_cases(where: str, seed: int) -> None:
    core.search("sequence", where, core.seed(seed))


def test_one_rank() -> None:
    core.search("sequence", "1", core.seed(0))


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
@pytest.mark.parametrize("names", ["two and one", harness.slow("two")])
def test_between_hosts(names: str) -> None:
    workers = harness.pool_of_hosts(names)
    workers.run(masks, torch.float32)
    workers.run(norms)


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
