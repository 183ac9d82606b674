"""Train a small CNN on handwritten digits with fusedpg, on the processors of one machine.

The same training runs three times, from the same seeds and on the same batches:

* ``fused DDP``: DistributedDataParallel, unchanged, on the backend "fused";
* ``fused step``: no DDP; parameters and gradients lie in two flat arena buffers, and one
  `fusedpg.fused_adamw_` call a step reduces, updates and gathers;
* ``gloo DDP``: the first script on Gloo, for comparison.

Start it in any of these ways; the first starts two ranks by itself:

    python examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py
    mpirun -n 2 python examples/train_digits.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import _common as common  # before torch: sets OMP_NUM_THREADS
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_cnn import build_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import fusedpg

REQUIRED_ACCURACY = 0.97
# A folder that git ignores. `--plot docs/evidence/train_digits.png` makes the figure of
# docs/evidence/benchmarks.md.
PLOT = Path(__file__).resolve().parent.parent / "runs" / "train_digits.png"


@dataclass
class Result:
    name: str
    accuracy: float
    steps_per_second: float
    losses: list[float]  # of every step, averaged over the ranks
    checksum: str  # of the trained parameters, the same on every rank


class DDPTraining:
    """DistributedDataParallel and torch.optim.AdamW as in any script; only the group differs."""

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float, group: dist.ProcessGroup
    ) -> None:
        self.forward = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.forward(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class FusedStepTraining:
    """One flat buffer of parameters, one of gradients, one collective call a step."""

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float, group: dist.ProcessGroup
    ) -> None:
        self.forward = model
        self.lr, self.weight_decay, self.group = lr, weight_decay, group

        parameters = list(model.parameters())
        numel = sum(p.numel() for p in parameters)
        self.params = fusedpg.empty(numel, group=group)
        self.grads = fusedpg.empty(numel, group=group).zero_()
        offset = 0
        for p in parameters:
            window = slice(offset, offset + p.numel())
            self.params[window].copy_(p.detach().flatten())
            p.data = self.params[window].view_as(p)
            p.grad = self.grads[window].view_as(p)
            offset += p.numel()
        dist.broadcast(self.params, src=0, group=group)

        # Each rank keeps the moments of the slice that it owns, and of nothing else.
        _, owned = fusedpg.shard_range(numel, dist.get_world_size(group), dist.get_rank(group))
        self.exp_avg = torch.zeros(owned)
        self.exp_avg_sq = torch.zeros(owned)
        self.steps = torch.zeros(())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.grads.zero_()  # in place: p.grad must stay a view of the flat buffer
        loss = F.cross_entropy(self.forward(x), y)
        loss.backward()
        fusedpg.fused_adamw_(
            [self.params],
            [self.grads],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.steps],
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.weight_decay,
            eps=1e-8,
            group=self.group,
        )
        return loss.detach()


Training = Callable[[nn.Module, float, float, dist.ProcessGroup], "DDPTraining | FusedStepTraining"]


def parameter_checksum(model: nn.Module, group: dist.ProcessGroup) -> str:
    """Hash of all parameters, after checking that every rank holds the same bits."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    different = [rank for rank, other in enumerate(everyone) if not torch.equal(own, other)]
    if different:
        raise RuntimeError(f"ranks {different} hold other parameters than this rank")
    return digest.hexdigest()


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Over the whole test set on every rank; equal parameters give equal figures."""
    x, y = test.tensors
    return (model(x).argmax(dim=1) == y).double().mean().item()


def train(
    name: str, training: Training, group: dist.ProcessGroup, args: argparse.Namespace
) -> Result:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    train_set, test_set = common.digits(args.seed)
    sampler: DistributedSampler[int] = DistributedSampler(
        train_set, world_size, rank, seed=args.seed
    )
    batches = BatchSampler(sampler, args.batch_size // world_size, drop_last=True)
    # The batch sampler takes the sampler's place: a whole batch is one indexing of the tensors.
    loader = DataLoader(train_set, sampler=batches, batch_size=None)

    torch.manual_seed(args.seed)
    model = build_model()
    trainer = training(model, args.lr, args.weight_decay, group)
    losses: list[Tensor] = []
    seconds = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        title = f"{name:10}  epoch {epoch + 1:2}/{args.epochs}"
        with tqdm(loader, desc=title, unit="step", disable=rank != 0, ncols=90) as bar:
            start = time.perf_counter()
            for x, y in bar:
                losses.append(trainer.step(x, y))
            if epoch > 0:  # the first one warms up
                seconds += time.perf_counter() - start
            bar.set_postfix(loss=f"{losses[-1].item():.3f}")

    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses, group=group)
    return Result(
        name=name,
        accuracy=accuracy(model, test_set),
        steps_per_second=len(batches) * (args.epochs - 1) / seconds,
        losses=(mean_losses / world_size).tolist(),
        checksum=parameter_checksum(model, group),
    )


def save_plot(results: list[Result], world_size: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.8), width_ratios=(2, 1), layout="constrained"
    )
    for result, style in zip(results, ("-", "--", ":"), strict=False):
        left.plot(result.losses, style, label=f"{result.name} ({result.accuracy:.1%})")
    left.set(xlabel="step", ylabel="training loss", yscale="log", title="Loss (test accuracy)")
    left.legend()
    bars = right.bar([r.name for r in results], [r.steps_per_second for r in results])
    right.bar_label(bars, fmt="%.0f")
    right.set(ylabel="steps/s", title=f"Throughput, {world_size} ranks")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(results: list[Result], world_size: int, args: argparse.Namespace) -> None:
    print(f"\n{'':10} {'test accuracy':>14} {'steps/s':>9}")
    for result in results:
        print(f"{result.name:10} {result.accuracy:14.2%} {result.steps_per_second:9.1f}")
    if args.plot is not None:
        save_plot(results, world_size, args.plot)
        print(f"plot: {os.path.relpath(args.plot)}")
    if args.json is not None:
        report = {"world_size": world_size, "runs": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start without a launcher")
    parser.add_argument("--backends", default="fused,gloo", help="the first one is the default")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=PLOT, help="PNG to write")
    parser.add_argument("--json", type=Path, help="results as JSON")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs: the first epoch warms up, at least 2 are needed")
    return args


def main() -> int:
    args = parse_args()
    if not common.launched(args.nproc):
        return 0

    torch.set_num_threads(1)
    backends = args.backends.split(",")
    dist.init_process_group(backends[0])
    world_size = dist.get_world_size()
    results = []
    for index, backend in enumerate(backends):
        group = dist.group.WORLD if index == 0 else dist.new_group(backend=backend)
        assert group is not None  # this rank is in all of them
        results.append(train(f"{backend} DDP", DDPTraining, group, args))
        if backend == "fused":
            results.append(train("fused step", FusedStepTraining, group, args))
    failed = [result.name for result in results if result.accuracy < REQUIRED_ACCURACY]
    if dist.get_rank() == 0:
        report(results, world_size, args)
        for name in failed:
            print(f"{name}: test accuracy is below {REQUIRED_ACCURACY:.0%}", file=sys.stderr)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
