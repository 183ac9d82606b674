"""Linear layers that are spread over a group, against one process's and against torch's styles."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.debug import CommDebugMode

import fusedpg
from checks.compiled import compiles, done
from checks.fusion import reference_dropout
from checks.refused import refused
from fusedpg import tensor_parallel
from fusedpg.tensor_parallel import _epilogue
from harness import Context

SHAPES = {"token": (1, 24), "rows": (5, 24), "batch": (2, 35, 24), "large": (300, 24)}
HIDDEN, OUT = 48, 40


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """By the type's precision, of values that are sums of some hundred products."""
    got = (got.full_tensor() if hasattr(got, "full_tensor") else got).detach()
    want = want.detach()
    limit = 3e-2 if got.dtype == torch.bfloat16 else 2e-5
    scale = max(float(want.abs().max()), 1e-3)
    worst = float((got.float() - want.float()).abs().max()) / scale
    assert worst <= limit, f"{what}: {worst} of the largest value"


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def linears(dtype: torch.dtype, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(3)
    return nn.Linear(24, HIDDEN, bias, dtype=dtype), nn.Linear(HIDDEN, OUT, bias, dtype=dtype)


def parameters(*layers: nn.Module) -> list[Any]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def layers(
    context: Context, shape: str, dtype: torch.dtype, bias: bool, residual: bool, norm: bool
) -> None:
    """Column, then row parallel: values, gradients of inputs and of weights."""
    up, down = linears(dtype, bias)
    after = nn.RMSNorm(OUT, eps=1e-5, dtype=dtype) if norm else None
    p, seed = (0.3, 11) if residual else (0.0, None)
    column = tensor_parallel.ColumnParallelLinear.from_linear(up, activation=F.gelu)
    row = tensor_parallel.RowParallelLinear.from_linear(down, dropout=p, norm=copy.deepcopy(after))
    size = SHAPES[shape]
    x, y = (draw(*size, dtype=dtype, seed=1).requires_grad_() for _ in range(2))
    r, s = (draw(*size[:-1], OUT, dtype=dtype, seed=2).requires_grad_() for _ in range(2))
    before = done() if context.fused else 0
    with compiles(context):
        got = row(column(x), r if residual else None, seed=seed)
        value, total = got if norm else (got, got)
        (value.float() * draw(*total.shape, seed=5)).sum().backward()
    if context.fused and context.world_size > 1:
        assert done() == before + (p > 0), "dropout is one operation with the sum"

    want = down(F.gelu(up(y)))
    if p:
        want = reference_dropout(want, p, seed or 0)
    want = want + s if residual else want
    normed = after(want) if after is not None else want
    (normed.float() * draw(*want.shape, seed=5)).sum().backward()
    close(value, normed, "value")
    close(total, want, "sum")
    assert x.grad is not None and y.grad is not None
    close(x.grad, y.grad, "input")
    if residual:
        assert r.grad is not None and s.grad is not None
        close(r.grad, s.grad, "residual")
    for mine, whole in zip(parameters(column, row)[: 4 if bias else 2], parameters(up, down)):
        assert mine.grad.placements == mine.placements
        close(mine.grad, whole.grad, f"{tuple(whole.shape)}")
    with torch.no_grad(), compiles(context):
        again = row(column(x), r if residual else None, seed=seed)
        assert torch.equal(again[1] if norm else again, total), "another sum without gradients"


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
                close(results[1], results[0], f"{p} {bias}")
                unmasked = results[0] - r if residual is not None else results[0]
                if p and residual is None:
                    assert torch.equal(unmasked == 0, results[1] == 0)


def ways(context: Context, dtype: torch.dtype) -> None:
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


def wrong(context: Context) -> None:
    """What does not fit raises, and says what to do."""
    size = context.world_size

    row = fusedpg.RowParallelLinear(8 * size, 4)
    for call, *words in (
        (
            lambda: fusedpg.RowParallelLinear(size * 8 + 1, 4),
            f"in_features={size * 8 + 1}",
            f"pad it to {size * 9}",
        ),
        (lambda: fusedpg.ColumnParallelLinear(4, size * 8 + 1), "out_features", "pad it to"),
        (lambda: fusedpg.RowParallelLinear(size, 4, dropout=1.5), "probability"),
        (lambda: row(torch.ones(2, 8 * size)), "chunk", "ColumnParallelLinear"),
        (lambda: row(torch.ones(2, 8), torch.ones(1, 4)), "residual"),
        (lambda: fusedpg.ColumnParallelLinear(4, size)(torch.ones(2, 5)), "in_features"),
    ):
        for word in words:
            with refused(word, ValueError):
                call()


class Block(nn.Module):
    """Attention and MLP in the way that plans for transformers expect."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head = heads, width // heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6, dtype=dtype) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, dtype=dtype) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if isinstance(self.o, fusedpg.RowParallelLinear):
            x = self.o(z, x)
            return self.down(F.silu(self.up(self.norm2(x))), x)
        x = x + self.o(z)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(60, 32, dtype=dtype)
        self.blocks = nn.Sequential(*(Block(32, 8, dtype) for _ in range(2)))
        self.head = nn.Linear(32, 60, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def plan(styles: Any) -> dict[str, Any]:
    columns = {f"blocks.*.{name}": styles.ColwiseParallel() for name in ("q", "k", "v", "up")}
    rows = {f"blocks.*.{name}": styles.RowwiseParallel() for name in ("o", "down")}
    # An embedding, which stays torch's.
    return columns | rows | {"embedding": styles.ColwiseParallel(output_layouts=REPLICATED)}


REPLICATED = torch.distributed.tensor.Replicate()


def train(model: nn.Module, steps: int, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(60, (3, 17), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def agree(mine: nn.Module, other: nn.Module, what: str) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in mine.named_parameters():
        want = theirs[name]
        want = want.full_tensor() if hasattr(want, "full_tensor") else want
        close(parameter.detach(), want.detach(), f"{what}: {name}")


def styles(context: Context, dtype: torch.dtype) -> None:
    """The same plan with torch's styles on Gloo, with ours, and one process."""
    ours, theirs, whole = Transformer(dtype), Transformer(dtype), Transformer(dtype)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch_styles.parallelize_module(ours, mesh, plan(tensor_parallel))
    gloo = DeviceMesh.from_group(context.oracle, "cpu")
    torch_styles.parallelize_module(theirs, gloo, plan(torch_styles))
    assert isinstance(ours.blocks[0].o, fusedpg.RowParallelLinear)
    states = ours.state_dict(), theirs.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        other = states[1][name]
        assert getattr(value, "placements", None) == getattr(other, "placements", None), name
    with compiles(context):
        losses = train(ours, 6)
    expected, alone = train(theirs, 6), train(whole, 6)
    limit = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for mine, other, one in zip(losses, expected, alone):
        assert abs(mine - other) < limit and abs(mine - one) < limit, (losses, expected, alone)
    if dtype == torch.float32:
        agree(ours, theirs, "torch's styles")
        agree(ours, whole, "one process")


def checkpoint(context: Context) -> None:
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


def masks(context: Context) -> None:
    """Seeds are drawn alike, another in each call, and again where a forward is computed again."""
    from torch.utils.checkpoint import checkpoint as recomputed

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


def shares_nothing(context: Context, src_data_rank: int | None) -> None:
    """The Linear that a layer was made of stays as it is, and so does the layer."""
    for kind in (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear):
        linear = torch.nn.Linear(16, 16)
        with torch.no_grad():
            for p in linear.parameters():
                p.fill_(context.rank)
        layer = kind.from_linear(linear, src_data_rank=src_data_rank)
        wanted = [p.to_local().clone() for p in layer.parameters()]
        for p in linear.parameters():
            assert bool((p == context.rank).all()), "overwritten by the source rank's"
        with torch.no_grad():
            for p in linear.parameters():
                p.add_(1)
        for p, value in zip(layer.parameters(), wanted, strict=True):
            assert torch.equal(p.to_local(), value)
            assert bool((value == (context.rank if src_data_rank is None else 0)).all())
            assert p.stride() == (16, 1)[-p.dim() :]


def without_gradients(context: Context) -> None:
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


def autocast(context: Context) -> None:
    up, down = linears(torch.float32, True)
    column = tensor_parallel.ColumnParallelLinear.from_linear(up)
    row = tensor_parallel.RowParallelLinear.from_linear(down)
    x, y = (draw(5, 24, seed=1).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = row(column(x)), down(up(y))
    assert got.dtype == want.dtype == torch.bfloat16
    close(got, want, "value")
    got.sum().backward()
    want.sum().backward()
    close(x.grad.bfloat16(), y.grad.bfloat16(), "input")
    close(row.weight.grad.full_tensor().bfloat16(), down.weight.grad.bfloat16(), "weight")
    assert row.weight.grad.dtype == torch.float32


def without_compiler(context: Context) -> None:
    """One rank has no compiler: all take the other way, with the same numbers."""
    from fusedpg.fusion import compile as compiling

    _, down = linears(torch.float32, True)
    row = tensor_parallel.RowParallelLinear.from_linear(down)
    block = HIDDEN // context.world_size
    x = draw(7, HIDDEN, seed=1)
    mine = x.chunk(context.world_size, -1)[context.rank]
    assert mine.shape[-1] == block
    kept = compiling.function
    if context.rank == 0:
        compiling.function = lambda text, name: 0
    try:
        with torch.no_grad(), compiles(context):
            for _ in range(2):
                close(row(mine, residual := draw(7, OUT, seed=3)), down(x) + residual, "value")
    finally:
        compiling.function = kept
