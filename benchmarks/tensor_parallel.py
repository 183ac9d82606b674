"""Time decoding with DTensor tensor parallelism: one token at a time, batch 1.

    python benchmarks/tensor_parallel.py --check-bars
    python benchmarks/tensor_parallel.py --world-size 4 --layers 4

A transformer of 8 layers and width 1024 (fp32) under `parallelize_module`: q, k, v and the first
matrix of the MLP `ColwiseParallel`, the last of attention and MLP `RowwiseParallel`, which is two
all-reduces of 4 KB a layer, through the functional collectives. A token attends to the last 64,
whose keys and values every rank keeps for its heads. A sample is one token, embedding to the choice
of the next, on all ranks. The arms, each with a model of its own, in turn:

    fused, gloo        `parallelize_module` on a mesh of that backend
    fused by hand      the same shards as plain modules and dist.all_reduce: no DTensor
    no communication   `parallelize_module` on torch's "fake" backend, whose operations do nothing
    shards alone       the plain modules with nothing between them: the arithmetic, the limit

So "no communication" - "shards alone" is what DTensor and the functional collectives cost in
Python and dispatch, and "fused" - "no communication" what the backend costs. The tokens that each
communicating arm chooses are compared with those of the whole model in one process first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import _harness as harness
from _harness import Bar, Context, Row

WIDTH, HEADS, CONTEXT, VOCABULARY = 1024, 16, 64, 1024
CASE = "decode"
BY_HAND, NO_COMM, ALONE = "fused by hand", "no communication", "shards alone"
CHECKED_TOKENS = 8
SIZE = 4 * WIDTH  # bytes of one all-reduce

BARS = [Bar(2, CASE, "fused", SIZE, "gloo", at_least=1.6)]


class Layer(nn.Module):
    """A transformer layer, or one share of it by heads and by the width of its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.reduce: Callable[[Tensor], object] = lambda partial: None

    def make_cache(self, parts: int) -> None:
        """Keys and values of the last tokens, for the heads of this rank."""
        self._heads = HEADS // parts
        shape = (1, self._heads, CONTEXT, WIDTH // HEADS)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)

    def forward(self, x: Tensor, position: int) -> Tensor:
        shape = (1, self._heads, 1, WIDTH // HEADS)
        y = self.norm1(x)
        query, key, value = (part(y).view(shape) for part in (self.q, self.k, self.v))
        slot = position % CONTEXT
        self._keys[:, :, slot : slot + 1] = key
        self._values[:, :, slot : slot + 1] = value
        partial = self.o(
            F.scaled_dot_product_attention(query, self._keys, self._values).view(1, -1)
        )
        self.reduce(partial)
        x = x + partial
        partial = self.down(F.gelu(self.up(self.norm2(x))))
        self.reduce(partial)
        return x + partial


class Transformer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.requires_grad_(False)

    def forward(self, token: Tensor, position: int) -> Tensor:
        x = self.embedding(token)
        for layer in self.layers:
            x = layer(x, position)
        logits: Tensor = self.head(self.norm(x))
        return logits


COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")


def whole(layers: int) -> Transformer:
    model = Transformer(layers)
    for layer in model.layers:
        layer.make_cache(1)
    return model


def with_dtensor(layers: int, group: dist.ProcessGroup) -> Transformer:
    model = Transformer(layers)
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = {name: ColwiseParallel() for name in COLUMNS} | {
        name: RowwiseParallel() for name in ROWS
    }
    for layer in model.layers:
        # Every rank has the same weights and keeps its share of them.
        parallelize_module(layer, mesh, plan, src_data_rank=None)
        layer.make_cache(mesh.size())
    return model


def by_hand(
    layers: int, rank: int, world_size: int, reduce: Callable[[Tensor], object] | None
) -> Transformer:
    model = Transformer(layers)
    for layer in model.layers:
        for names, dim in ((COLUMNS, 0), (ROWS, 1)):
            for name in names:
                linear = getattr(layer, name)
                share = linear.weight.chunk(world_size, dim)[rank]
                linear.weight = nn.Parameter(share.clone(), requires_grad=False)
        layer.make_cache(world_size)
        if reduce is not None:
            layer.reduce = reduce
    return model


class Decoder:
    """Chooses token after token; the place in the context goes on."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._token = torch.zeros(1, dtype=torch.int64)
        self._position = 0
        self.logits = torch.empty(0)

    @torch.no_grad()
    def step(self) -> int:
        self.logits = self._model(self._token, self._position)
        self._position += 1
        choice = int(self.logits.argmax())
        self._token.fill_(choice)
        return choice


def main() -> int:
    parser = harness.parser(__doc__, backends="fused,gloo", sizes=None, rounds=31)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    rows = harness.run(worker, args)
    harness.finish("tensor_parallel", rows, args, limit=ALONE, bars=BARS)
    explain(rows)
    return 0


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    # Its backend is registered where it is imported.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    rank, world_size = context.rank, context.world_size
    decoders: dict[str, Decoder] = {}
    for backend, group in context.groups.items():
        decoders[backend] = Decoder(with_dtensor(args.layers, group))
    if "fused" in context.groups:
        group = context.groups["fused"]
        decoders[BY_HAND] = Decoder(
            by_hand(args.layers, rank, world_size, lambda x: dist.all_reduce(x, group=group))
        )
    check(decoders, args.layers)
    fake = dist.new_group(backend="fake")
    decoders[NO_COMM] = Decoder(with_dtensor(args.layers, fake))
    decoders[ALONE] = Decoder(by_hand(args.layers, rank, world_size, None))
    for _ in range(CHECKED_TOKENS):
        for decoder in decoders.values():
            decoder.step()
    arms = {name: decoder.step for name, decoder in decoders.items()}
    return harness.measure(context, arms, case=CASE, size=SIZE, rounds=args.rounds)


def check(decoders: dict[str, Decoder], layers: int) -> None:
    """Every arm chooses the tokens that one process chooses with the whole model."""
    reference = Decoder(whole(layers))
    for i in range(CHECKED_TOKENS):
        token = reference.step()
        for name, decoder in decoders.items():
            harness.require(decoder.step() == token, f"{name}: token {i} differs")
            close = torch.allclose(decoder.logits, reference.logits, atol=1e-3)
            harness.require(close, f"{name}: the logits of token {i} differ")


def explain(rows: list[Row]) -> None:
    """Where a token's time goes on the fused backend."""
    times = {row.arm: 1e3 * row.median for row in rows}
    if "fused" not in times:
        return
    token, silent, alone = times["fused"], times[NO_COMM], times[ALONE]
    print(
        f"a token on fused, {token:.2f} ms: arithmetic {alone:.2f} ({alone / token:.0%}), "
        f"DTensor and dispatch {silent - alone:.2f} ({(silent - alone) / token:.0%}), "
        f"the backend {token - silent:.2f} ({(token - silent) / token:.0%})"
    )
    if "gloo" in times:
        print(
            f"the backend's share on gloo: {times['gloo'] - silent:.2f} ms; "
            f"by hand, without DTensor: {times[BY_HAND]:.2f} ms a token"
        )


if __name__ == "__main__":
    sys.exit(main())
