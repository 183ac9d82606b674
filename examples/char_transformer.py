"""Train a character-level transformer on the sources of Python's standard library.

    torchrun --standalone --nproc-per-node 2 examples/char_transformer.py

About 10 million parameters; --width and --layers change that. Every tenth file is held out, and
the figure at the end is bits per character of these files: 7 for somebody who knows nothing.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import _common as common
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

LEARNING_RATES = {"adamw": 3e-4, "adam": 3e-4, "sgd": 0.1, "lamb": 0.01}
CHARACTERS = 128  # ASCII; anything else is read as "?"
HEAD = 32  # width of an attention head


def load_text(context: int, test_blocks: int) -> tuple[Tensor, TensorDataset]:
    """Blocks of context + 1 characters to train on, and held-out inputs and targets."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))

    def blocks(paths: list[Path]) -> Tensor:
        text = "".join(path.read_text("utf-8", errors="replace") for path in paths)
        characters = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
        whole = len(characters) // (context + 1) * (context + 1)
        return characters[:whole].view(-1, context + 1)

    test = blocks(files[::10])
    test = test[:: max(1, len(test) // test_blocks)][:test_blocks].long()
    train = blocks([path for i, path in enumerate(files) if i % 10 != 0])
    return train, TensorDataset(test[:, :-1], test[:, 1:])


class Block(nn.Module):
    """Attention to earlier characters, then a network for each character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # (batch, context, width) to (3, batch, heads, context, width of a head)
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the stream of all layers starts smaller.
                layer_end = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if layer_end else 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions.weight)))


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets, reduction="none") / math.log(2)


def main() -> None:
    parser = common.argument_parser(__doc__, steps=300, batch_size=16)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=128, help="characters")
    parser.add_argument("--test-blocks", type=int, default=512, help="of one context each")
    small = {"steps": 30, "width": 64, "layers": 2, "context": 64, "test_blocks": 64}
    args = common.parse_args(parser, LEARNING_RATES, quick=small)
    if args.width % HEAD != 0:
        parser.error(f"--width must be a multiple of {HEAD}")
    if not common.launched(args.nproc):
        return
    common.start(args)

    blocks, test = load_text(args.context, args.test_blocks)
    batches = common.Batches(args, len(blocks))
    model = CharTransformer(args.width, args.layers, args.context)
    ddp = DistributedDataParallel(model)
    optimizer = common.make_optimizer(args, model, ddp)

    training = common.Training(args, model, optimizer, batches.steps)
    for step in training.steps():
        text = blocks[batches[step]].long()
        optimizer.zero_grad()
        loss = cross_entropy(ddp(text[:, :-1]), text[:, 1:])
        loss.backward()
        optimizer.step()
        training.record(loss)

    per_character = common.evaluate(model, test, bits, batch_size=16)
    training.finish(**{"held-out bits/character": f"{per_character:.3f}"})


if __name__ == "__main__":
    main()
