"""fusedpg.tensor_parallel: layers and styles."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

import fusedpg
import harness
from checks.compiled import compiles
from checks.fusion import reference_dropout
from checks.refused import refused
from checks.tensor_parallel import Block, close, draw
from fusedpg import tensor_parallel
from fusedpg.tensor_parallel import _epilogue
from fuzz import core
from fuzz.layers import same_everywhere, whole_of, without_compiler
from harness import Context, on_ranks

HIDDEN, OUT = 48, 40


def overlapped(context: Context, rows: int) -> None:
    """Chunks of rows have the mask of the whole, and the bits where products have."""
    block = HIDDEN // context.world_size
    x = draw(rows, HIDDEN, seed=1)[:, context.rank * block :][:, :block].contiguous()
    r = draw(rows, OUT, seed=2)
    for p in (0.0, 0.4):
        for residual in (None, r):
            for bias in (True, False):
                whole = nn.Linear(HIDDEN, OUT, bias)
                results = []
                for overlap in (False, True):
                    row = tensor_parallel.RowParallelLinear.from_linear(
                        whole, dropout=p, overlap=overlap
                    )
                    with compiles(context), torch.no_grad():
                        results.append(row(x, residual, seed=5))
                close(results[1], results[0], f"{p} {bias}", torch.float32)
                unmasked = results[0] - r if residual is not None else results[0]
                if p and residual is None:
                    assert torch.equal(unmasked == 0, results[1] == 0)


@pytest.mark.fused_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(3)
def test_small_and_large(context: Context, dtype: torch.dtype) -> None:
    """What each rank computes for itself has the bits of what is computed in slices."""
    place = _epilogue.Place(None)
    x = draw(3000, 40, dtype=dtype, seed=context.rank)
    bias, residual = draw(40, dtype=dtype, seed=7), draw(3000, 40, dtype=dtype, seed=8)
    results, paths = [], []
    for rows in (3000, 4):
        fusedpg.stats(reset=True)
        epilogue = _epilogue.Epilogue(bias, residual[:rows], 0.25, 99)
        with compiles(context):
            results.append(place.finish(x[:rows].clone(), epilogue))
        paths.append(list(fusedpg.stats()["fused_program"]["paths"]))
    assert paths == [["staged"], ["one_shot"]], paths
    assert torch.equal(results[0][:4], results[1])
    everyone = [torch.empty_like(x) for _ in range(context.world_size)]
    dist.all_gather(everyone, x, group=context.oracle)
    total = sum(part.float() for part in everyone).to(dtype)
    assert torch.equal(residual + reference_dropout(total + bias, 0.25, 99), results[0])


@on_ranks(2)
def test_what_does_not_fit(context: Context) -> None:
    """What does not fit raises, and says what to do."""
    size = context.world_size
    column, row = fusedpg.ColumnParallelLinear, fusedpg.RowParallelLinear
    whole, parts, of_parts = row(8 * size, 4), row(8 * size, 4, sequence_dim=0), torch.ones(2, 8)
    gathers, many = column(4, size, sequence_dim=1), size * 8 + 1
    for call, *words in (
        (lambda: row(many, 4), f"in_features={many}", f"pad it to {size * 9}"),
        (lambda: column(4, many), "out_features", "pad it to"),
        (lambda: row(size, 4, dropout=1.5), "probability"),
        (lambda: whole(torch.ones(2, 8 * size)), "chunk", "ColumnParallelLinear"),
        (lambda: whole(of_parts, torch.ones(1, 4)), "residual"),
        (lambda: column(4, size)(torch.ones(2, 5)), "in_features"),
        (lambda: parts(torch.ones(2 * size + 1, 8)), "dimension 0", f"pad it to {3 * size}"),
        (lambda: parts(torch.ones(2 * size, 8), torch.ones(2 * size, 4)), "residual", "part of"),
        (lambda: parts(torch.ones(8)), "sequence_dim=0"),
        (lambda: gathers(torch.ones(5, 4)), "sequence_dim=1", "features"),
        (lambda: gathers(torch.ones(5, 2, 3)), "in_features"),
    ):
        for word in words:
            with refused(word, ValueError):
                call()
    with refused("integer", TypeError):
        row(8 * size, 4, sequence_dim="0")
    assert "sequence_dim=1" in repr(gathers) and "sequence_dim=0" in repr(parts)


class Transformer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(60, 32, dtype=dtype)
        self.blocks = nn.Sequential(*(Block(32, 12, dtype) for _ in range(2)))
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.head = nn.Linear(32, 60, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def plan(styles: Any, sequence: bool = False) -> dict[str, Any]:
    """As torch's documents write one; `sequence`: ranks have parts of the tokens between layers."""
    between = Shard(1) if sequence else REPLICATED
    columns = {
        f"blocks.*.{name}": styles.ColwiseParallel(input_layouts=between)
        for name in ("q", "k", "v", "up")
    }
    rows = {
        f"blocks.*.{name}": styles.RowwiseParallel(output_layouts=between) for name in ("o", "down")
    }
    if not sequence:
        # An embedding, which stays torch's.
        return columns | rows | {"embedding": styles.ColwiseParallel(output_layouts=REPLICATED)}
    norms = {
        name: torch_styles.SequenceParallel()
        for name in ("norm", "blocks.*.norm1", "blocks.*.norm2")
    }
    ends = {
        "embedding": styles.RowwiseParallel(input_layouts=REPLICATED, output_layouts=between),
        "head": styles.ColwiseParallel(input_layouts=between, output_layouts=REPLICATED),
    }
    return columns | rows | norms | ends


REPLICATED = torch.distributed.tensor.Replicate()


def train(model: nn.Module, steps: int, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(60, (3, 13), generator=generator)
        loss = F.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1).double(), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def agree(mine: nn.Module, other: nn.Module, what: str) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in mine.named_parameters():
        close(parameter, theirs[name], f"{what}: {name}", parameter.dtype)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, harness.slow(torch.float64)], ids=str
)
@on_ranks(1, 2, *map(harness.slow, (3, 4)))
def test_styles(context: Context, dtype: torch.dtype, sequence: bool) -> None:
    """The same plan with torch's styles on Gloo, with ours, and one process."""
    ours, theirs, whole = Transformer(dtype), Transformer(dtype), Transformer(dtype)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch_styles.parallelize_module(ours, mesh, plan(tensor_parallel, sequence))
    gloo = DeviceMesh.from_group(context.oracle, "cpu")
    torch_styles.parallelize_module(theirs, gloo, plan(torch_styles, sequence))
    assert isinstance(ours.blocks[0].o, fusedpg.RowParallelLinear)
    assert isinstance(ours.blocks[0].q, fusedpg.ColumnParallelLinear)
    states = ours.state_dict(), theirs.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        other = states[1][name]
        assert getattr(value, "placements", None) == getattr(other, "placements", None), name
    with compiles(context):
        losses = train(ours, 6)
    expected, alone = train(theirs, 6), train(whole, 6)
    limit = {torch.float32: 1e-4, torch.float64: 1e-10}.get(dtype, 3e-2)
    for mine, other, one in zip(losses, expected, alone):
        assert abs(mine - other) < limit and abs(mine - one) < limit, (losses, expected, alone)
    if dtype != torch.bfloat16:
        agree(ours, theirs, "torch's styles")
        agree(ours, whole, "one process")


@on_ranks(1, 2)
def test_checkpoint(context: Context) -> None:
    """Saved from ours, loaded into torch's, and the other way; training goes on as if unbroken."""
    import torch.distributed.checkpoint as dcp

    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    made = {}
    for name, kind in (("ours", tensor_parallel), ("torch", torch_styles)):
        made[name] = torch_styles.parallelize_module(Transformer(), mesh, plan(kind))
    train(made["ours"], 2)
    for source, target in (("ours", "torch"), ("torch", "ours")):
        folder = Path(context.scratch) / f"checkpoint-{source}-{context.world_size}"
        dcp.save(made[source].state_dict(), checkpoint_id=folder)
        state = made[target].state_dict()
        dcp.load(state, checkpoint_id=folder)
        made[target].load_state_dict(state)
        agree(made["ours"], made["torch"], f"{source} to {target}")
        train(made["torch"], 1, first=9)
    copied = copy.deepcopy(made["ours"])
    train(copied, 1, first=20)
    train(made["ours"], 1, first=20)
    agree(copied, made["ours"], "a copy")


@on_ranks(2)
def test_masks(context: Context) -> None:
    """Seeds are drawn alike, another in each call, and again where a forward is computed again."""

    row = fusedpg.RowParallelLinear(8 * context.world_size, 64, dropout=0.5)
    x, y = (draw(9, 8, seed=context.rank).requires_grad_() for _ in range(2))
    torch.manual_seed(5)
    first, second = row(x), row(x)
    assert not torch.equal(first == 0, second == 0)
    share = float((first == 0).float().mean())
    assert 0.3 < share < 0.7
    row.eval()
    assert not bool((row(x) == 0).any())
    row.train()
    torch.manual_seed(6)
    plain = row(x)
    plain.sum().backward()
    torch.manual_seed(6)
    again = recomputed(row, y, use_reentrant=False)
    torch.manual_seed(99)
    again.sum().backward()
    assert torch.equal(plain, again) and torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("source", [0, None])
@on_ranks(1, 2)
def test_from_linear_shares_nothing(context: Context, source: int | None) -> None:
    """The Linear that a layer was made of stays as it is, and so does the layer."""
    for kind in (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear):
        linear = torch.nn.Linear(16, 16)
        with torch.no_grad():
            for p in linear.parameters():
                p.fill_(context.rank)
        layer = kind.from_linear(linear, src_data_rank=source)
        wanted = [p.to_local().clone() for p in layer.parameters()]
        for p in linear.parameters():
            assert bool((p == context.rank).all()), "overwritten by the source rank's"
        with torch.no_grad():
            for p in linear.parameters():
                p.add_(1)
        for p, value in zip(layer.parameters(), wanted, strict=True):
            assert torch.equal(p.to_local(), value)
            assert bool((value == (context.rank if source is None else 0)).all())
            assert p.stride() == (16, 1)[-p.dim() :]


@on_ranks(2, harness.slow(1))
def test_without_gradients(context: Context) -> None:
    """The calls from `forward` itself have the bits of the general way, which modes still take."""
    size, rank, half = context.world_size, context.rank, torch.bfloat16
    types = itertools.product((torch.float32, half), (None, torch.float32, half), (False, True))
    for seed, (dtype, other, casts) in enumerate(types):
        linear = nn.Linear(8 * size, 4 * size, other is not None, dtype=dtype)
        column = tensor_parallel.ColumnParallelLinear.from_linear(linear)
        row = tensor_parallel.RowParallelLinear.from_linear(linear)
        x = draw(3, 5, 8 * size, dtype=dtype, seed=seed)
        part = x.chunk(size, -1)[rank].contiguous()
        residual = None if other is None else draw(3, 5, 4 * size, dtype=other, seed=9)
        with torch.autocast("cpu", dtype=half, enabled=casts):
            wanted = row(part, residual), column(x)
            with torch.no_grad():
                results = row(part, residual), column(x)
                with CommDebugMode() as seen:
                    watched = row(part, residual), column(x)
        assert seen.get_total_counts() == 1
        for want, *others in zip(wanted, results, watched):
            assert all(torch.equal(want, got) and want.dtype == got.dtype for got in others)
    with torch.no_grad():
        for call, word in (
            (lambda: row(torch.ones(2, 9 * size)), "chunk"),
            (lambda: row(part, torch.ones(1, 4)), "residual"),
            (lambda: column(torch.ones(2, 5)), "in_features"),
        ):
            with refused(word, ValueError):
                call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [None, 0])
@on_ranks(2)
def test_autocast(context: Context, dim: int | None, dtype: torch.dtype) -> None:
    """As nn.Linear, whose float64 autocast leaves as it is."""
    size, rank = context.world_size, context.rank
    torch.manual_seed(3)
    up, down = nn.Linear(24, 12 * size, dtype=dtype), nn.Linear(12 * size, 24, dtype=dtype)
    column = tensor_parallel.ColumnParallelLinear.from_linear(up, sequence_dim=dim)
    row = tensor_parallel.RowParallelLinear.from_linear(down, sequence_dim=dim)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return whole if dim is None else whole.chunk(size)[rank]

    y = draw(5 * size, 24, dtype=dtype, seed=1).requires_grad_()
    part = cut(y.detach()).clone().requires_grad_()
    bound = torch.float64 if dtype == torch.float64 else torch.bfloat16
    for residual in (False, True):
        part.grad = y.grad = row.weight.grad = down.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = row(column(part), part if residual else None), down(up(y))
            with torch.no_grad():
                again = row(column(part), part if residual else None)
        want = want + y if residual else want
        assert got.dtype == again.dtype == want.dtype
        close(got, cut(want), "value", bound)
        close(again, cut(want), "value without gradients", bound)
        got.sum().backward()
        want.sum().backward()
        close(part.grad, cut(y.grad), "input", bound)
        close(row.weight.grad, down.weight.grad, "weight", bound)
        assert row.weight.grad.dtype == dtype


@pytest.mark.parametrize("seed", [0, 1, 2, *map(harness.slow, range(3, 60))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, "134")])
def test_random_layers(where: str, seed: int) -> None:
    core.search("layers", where, core.seed(seed))


@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
def test_overlap(world_size: int) -> None:
    for rows in (2, 37, 600):
        harness.pool(world_size).run(overlapped, rows)


@pytest.mark.fused_only
@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 20))])
def test_between_hosts(seed: int) -> None:
    core.search("layers", "two and one", core.seed(seed))


@pytest.mark.fused_only
@on_ranks(2)
def test_other_numbers_of_threads(context: Context) -> None:
    """Ranks with other numbers of threads multiply in as many parts all the same."""
    kept_threads, kept_cores = torch.get_num_threads(), os.sched_getaffinity
    size = context.world_size
    whole = nn.Linear(size * 8, 1024)
    x, r = torch.randn(600, size * 8), torch.randn(600, 1024)
    for tensor in (x, r, whole.weight.data, whole.bias.data):
        dist.broadcast(tensor, 0, group=context.oracle)
    row = fusedpg.RowParallelLinear.from_linear(whole)
    mine = x.chunk(size, -1)[context.rank]
    torch.set_num_threads(1 + context.rank)
    os.sched_getaffinity = lambda pid: set(range(size * 2))  # one to spare on the first alone
    try:
        with torch.no_grad(), compiles(context):
            for _ in range(2):
                torch.testing.assert_close(row(mine, r), whole(x) + r, rtol=1e-4, atol=1e-4)
    finally:
        os.sched_getaffinity = kept_cores
        torch.set_num_threads(kept_threads)


@pytest.mark.fused_only
@on_ranks(2)
def test_overlap_falls_back(context: Context) -> None:
    """A rank without functions is found out by parts that are on their way: all begin again."""
    size = context.world_size
    torch.manual_seed(8)
    whole = nn.Linear(size * 6, 29, dtype=torch.float64)
    x, r = (torch.randn(37, n, dtype=torch.float64) for n in (size * 6, 29))
    plans = _epilogue._plans
    results = []
    for overlap, here in ((False, False), (True, False), (True, context.rank == size - 1)):
        _epilogue._plans = {}
        row = fusedpg.RowParallelLinear.from_linear(whole, dropout=0.4, overlap=overlap)
        mine, given = x.chunk(size, -1)[context.rank].clone().requires_grad_(), r.clone()
        given.requires_grad_()
        with compiles(context), without_compiler(here):
            for _ in range(2):  # found out, then known
                y = row(mine, given, seed=7)
                y.square().sum().backward()
                grads = mine.grad, given.grad, whole_of(row.weight.grad), whole_of(row.bias.grad)
                results.append((y.detach(), *(grad.clone() for grad in grads)))
                mine.grad = given.grad = row.weight.grad = row.bias.grad = None
        fell_back = [False] * size
        dist.all_gather_object(fell_back, bool(row._place._eager), group=context.oracle)
        assert fell_back == [len(results) == 6] * size
        same_everywhere(context.oracle, y, f"overlap {overlap}")
    _epilogue._plans = plans
    for other in results[1:]:
        for got, want in zip(other, results[0]):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.fused_only
@pytest.mark.parametrize("dim", [None, harness.slow(0)])
@on_ranks(2, timeout=120)
def test_under_torch_compile(context: Context, dim: int | None) -> None:
    """Values and gradients of two layers and what is around them, with dropout and a norm."""
    torch._dynamo.reset()
    torch.manual_seed(9)
    size, own = context.world_size, {"sequence_dim": dim}
    up = fusedpg.ColumnParallelLinear(7, size * 4, activation=F.silu, **own)
    down = fusedpg.RowParallelLinear(size * 4, 7, dropout=0.3, norm=nn.LayerNorm(7), **own)

    def block(x: torch.Tensor) -> torch.Tensor:
        normed, y = down(up(torch.tanh(x)), x, seed=3)
        return (normed * y).sin().sum()

    results = []
    # First what is compiled: layers that have run before know their group.
    for function in (torch.compile(block, backend="aot_eager"), block):
        x = torch.linspace(-1, 1, 35).reshape(5, 7).requires_grad_()
        loss = function(x)
        loss.backward()
        found = [loss.detach(), x.grad, *(whole_of(p.grad) for p in up.parameters())]
        results.append(found + [whole_of(p.grad).clone() for p in down.parameters()])
        for parameter in (*up.parameters(), *down.parameters()):
            parameter.grad = None
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


@pytest.mark.fused_only
@on_ranks(4)
def test_beside_ddp(context: Context) -> None:
    """Each pair of ranks has the model and its own rows; the pairs average gradients."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(5, 14), nn.GELU(), nn.Linear(14, 3)).double()
    plan = {"0": tensor_parallel.ColwiseParallel(), "2": tensor_parallel.RowwiseParallel()}
    mine = parallelize_module(copy.deepcopy(whole), mesh["tp"], plan)
    _pre_dp_module_transform(mine)
    ddp = DistributedDataParallel(mine, process_group=mesh["dp"].get_group())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, ddp)]
    with compiles(context):
        for _ in range(3):
            x = torch.randn(2, 7, 5, dtype=torch.float64)
            whole(x).square().mean().backward()
            y = ddp(x[mesh["dp"].get_local_rank()])
            y.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            x = torch.randn(9, 5, dtype=torch.float64)
            torch.testing.assert_close(mine(x), whole(x), rtol=1e-9, atol=1e-9)
    for parameter, full in zip(mine.parameters(), whole.parameters()):
        other = full.detach()
        size, place = mesh["tp"].size(), mesh["tp"].get_local_rank()
        for dim in range(other.dim()):
            if parameter.shape[dim] != other.shape[dim]:
                other = other.chunk(size, dim)[place]
        torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-9)
    dist.barrier(group=context.oracle)
