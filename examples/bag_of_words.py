"""Train a bag-of-words classifier, whose gradient is mostly zeros, with unchanged DDP.

    torchrun --standalone --nproc-per-node 2 examples/bag_of_words.py

It tells which file of Python's standard library a snippet is from. Words and pairs of neighbours
are hashed into a table of 262,144 rows of 32, and a batch changes about 1,400 of them, scattered
over 33 MB of gradient. --block-skip off|auto|on is the option of the group that makes all_reduce,
and so DDP, leave out blocks of zeros; --backend gloo is there to compare. Every tenth snippet is
held out.
"""

# No postponed annotations here: DDP inspects those of its hooks.
import argparse
import os
import re
import zlib
from collections import defaultdict
from pathlib import Path

import _common as common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import fusedpg

LEARNING_RATES = {"adamw": 1e-3, "adam": 1e-3, "sgd": 0.3, "lamb": 0.01}
SNIPPET = 16  # words
BLOCK = 256  # elements
DENSITY_STEPS = 4  # whose gradients are looked at, at the end


def load_snippets(rows: int) -> tuple[TensorDataset, TensorDataset, int]:
    """Each snippet's rows of the table and the number of its file; how many files there are."""
    snippets, labels = [], []
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    for label, path in enumerate(files):
        text = re.findall(r"\w+", path.read_text("utf-8", errors="replace"))
        hashes = torch.tensor([zlib.crc32(word.encode()) for word in text], dtype=torch.int64)
        snippets.append(hashes[: len(text) // SNIPPET * SNIPPET].view(-1, SNIPPET))
        labels.append(torch.full((len(snippets[-1]),), label))
    words = torch.cat(snippets)
    pairs = words[:, :-1] * 31 + words[:, 1:]
    x, y = torch.cat([words, pairs], dim=1) % rows, torch.cat(labels)
    test = torch.arange(len(x)) % 10 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test]), len(files)


def build_model(args: argparse.Namespace, classes: int) -> nn.Module:
    table = nn.EmbeddingBag(args.rows, args.width, mode="sum", sparse=args.sparse)
    nn.init.normal_(table.weight, std=0.03)
    return nn.Sequential(
        table,
        nn.Linear(args.width, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, classes),
    )


# --- what of the gradients is not zero, and what is sent ------------------------------


class Densities:
    """A hook for DDP that does what DDP does without one, and counts blocks of each bucket."""

    def __init__(self) -> None:
        # All blocks, those with something on this rank, those with something on any rank.
        self._blocks: dict[int, Tensor] = defaultdict(lambda: torch.zeros(3))
        self._megabytes: dict[int, float] = {}

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        mine = self._nonzero_blocks(buffer)
        dist.all_reduce(buffer.div_(dist.get_world_size()))
        every = self._nonzero_blocks(buffer)
        self._blocks[bucket.index()] += torch.tensor([len(mine), mine.sum(), every.sum()])
        self._megabytes[bucket.index()] = buffer.nbytes / 1e6
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    @staticmethod
    def _nonzero_blocks(buffer: Tensor) -> Tensor:
        return F.pad(buffer, (0, -len(buffer) % BLOCK)).view(-1, BLOCK).any(dim=1)

    def report(self) -> None:
        for index, (blocks, mine, every) in sorted(self._blocks.items()):
            size = f"{self._megabytes[index]:.1f} MB"
            shares = f"{mine / blocks:.1%} on a rank, {every / blocks:.1%} on any"
            print(f"bucket {index}: {size}, blocks that are not zero: {shares}")


def density_hook(state: Densities, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state.hook(bucket)


def sent(model: nn.Module, steps: int) -> str:
    """Megabytes a step that this rank has sent in all_reduce, and what the dense way sends."""
    ranks = dist.get_world_size()
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    done = fusedpg.stats()["all_reduce"]["bytes_sent"] / steps
    return f"{done / 1e6:.2f} of {gradients * 2 * (ranks - 1) / ranks / 1e6:.1f} MB a step"


# --- training -----------------------------------------------------------------------


def main() -> None:
    parser = common.argument_parser(__doc__, steps=400, batch_size=64)
    skip = ("off", "auto", "on")
    parser.add_argument("--block-skip", choices=skip, default="auto", help="with --backend fused")
    parser.add_argument(
        "--sparse", action="store_true", help="the table's gradient is torch.sparse"
    )
    parser.add_argument("--rows", type=int, default=2**18, help="of the table")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    # Gradients go through all_reduce, as those of a fused optimizer do not.
    parser.set_defaults(optimizer="torch", algorithm="sgd", momentum=0.0)
    small = {"steps": 120, "rows": 2**16, "hidden": 256}
    args = common.parse_args(parser, LEARNING_RATES, quick=small)
    if args.sparse and (args.optimizer, args.algorithm) != ("torch", "sgd"):
        parser.error("--sparse needs --optimizer torch --algorithm sgd")
    if not common.launched(args.nproc):
        return
    fused = args.backend == "fused"
    options = fusedpg.Options(block_skip=args.block_skip, block_size=BLOCK) if fused else None
    common.start(args, options)

    train, test, files = load_snippets(args.rows)
    words, labels = train.tensors
    batches = common.Batches(args, len(train))
    model = build_model(args, files)
    ddp = DistributedDataParallel(model)
    optimizer = common.make_optimizer(args, model, ddp)

    def backward(step: int) -> Tensor:
        samples = batches[step]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(words[samples]), labels[samples])
        loss.backward()
        return loss

    training = common.Training(args, model, optimizer, batches.steps)
    done = 0
    for step in training.steps():
        loss = backward(step)
        optimizer.step()
        training.record(loss)
        done += 1

    metrics = {}
    by_all_reduce = args.optimizer == "torch" and not args.sparse
    if fused and by_all_reduce and done:
        metrics["sent"] = sent(model, done)
    accuracy = common.evaluate(model, test, common.correct)
    metrics["held-out accuracy"] = f"{accuracy:.2%}"
    if by_all_reduce:
        densities = Densities()
        ddp.register_comm_hook(densities, density_hook)
        for step in range(DENSITY_STEPS):
            backward(step)
        if dist.get_rank() == 0:
            densities.report()
    training.finish(**metrics)


if __name__ == "__main__":
    main()
