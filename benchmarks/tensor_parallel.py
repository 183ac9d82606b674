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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import parallel as styles

import _harness as harness
from _harness import Bar, Context, Row
from model_parallel import WIDTH, Model, spread

VOCABULARY = 1024
CASE = "decode"
COLUMNS, ROWS = ("q", "k", "v", "up"), ("o", "down")
BY_HAND, NO_COMM, ALONE = "fused by hand", "no communication", "shards alone"
CHECKED_TOKENS = 8
SIZE = 4 * WIDTH  # bytes of one all-reduce

BARS = [Bar(2, CASE, "fused", SIZE, "gloo", at_least=1.6)]


class Transformer(nn.Module):
    """Layers between the embedding of a token and the choice of the next."""

    def __init__(self, layers: Model) -> None:
        super().__init__()
        self.layers = layers
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.requires_grad_(False)

    def forward(self, token: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layers(self.embedding(token))))
        return logits


class Share(nn.Module):
    """A rank's part of a linear layer, and its sum over a group where that is all it needs."""

    def __init__(self, weight: Tensor, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(weight, requires_grad=False), group

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        return y


def by_hand(layers: int, context: Context, group: dist.ProcessGroup | None) -> Model:
    model = Model(layers)
    for layer in model.layers:
        for names, dim in ((COLUMNS, 0), (ROWS, 1)):
            for name in names:
                share = getattr(layer, name).weight.chunk(context.world_size, dim)[context.rank]
                setattr(layer, name, Share(share.clone(), group if dim else None))
    return model


class Decoder:
    """Chooses token after token."""

    def __init__(self, layers: Model) -> None:
        self._model = Transformer(layers)
        self._token = torch.zeros(1, dtype=torch.int64)
        self.logits = torch.empty(0)

    @torch.no_grad()
    def step(self) -> int:
        self.logits = self._model(self._token)
        choice = int(self.logits.argmax())
        self._token.fill_(choice)
        return choice


def main() -> int:
    parser = harness.Parser(__doc__, rounds=31)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    rows = harness.run(measure, args, [CASE])
    harness.finish("tensor_parallel", rows, args, limit=ALONE, bars=BARS)
    explain(rows)
    return 0


def measure(context: Context, args: argparse.Namespace, case: str) -> list[Row]:
    decoders = {
        backend: Decoder(spread(args.layers, group, styles, False))
        for backend, group in context.groups.items()
    }
    if "fused" in context.groups:
        decoders[BY_HAND] = Decoder(by_hand(args.layers, context, context.groups["fused"]))
    check(decoders, args.layers)
    decoders[NO_COMM] = Decoder(spread(args.layers, harness.fake_group(), styles, False))
    decoders[ALONE] = Decoder(by_hand(args.layers, context, None))
    for _ in range(CHECKED_TOKENS):
        for decoder in decoders.values():
            decoder.step()
    arms = {name: decoder.step for name, decoder in decoders.items()}
    return harness.measure(context, arms, case=case, size=SIZE, rounds=args.rounds)


def check(decoders: dict[str, Decoder], layers: int) -> None:
    """Every arm chooses the tokens that one process chooses with the whole model."""
    reference = Decoder(Model(layers))
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
