"""What the examples share: arguments, ranks, optimizer, data order, progress, checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread a rank

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset
from tqdm import tqdm

import fusedpg
from fusedpg.launch import init_from_environment

PROGRAM = Path(sys.argv[0]).stem
ALGORITHMS = ("adamw", "adam", "sgd", "lamb")

# --- arguments and ranks --------------------------------------------------------


def argument_parser(description: str, steps: int, batch_size: int) -> argparse.ArgumentParser:
    """The arguments of every example; a program adds its own to them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start without a launcher")
    parser.add_argument("--backend", choices=("fused", "gloo"), default="fused")
    parser.add_argument("--optimizer", choices=("fused", "torch"), default="fused")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="adamw")
    parser.add_argument("--overlap", action="store_true", help="update during backward")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=steps)
    length.add_argument("--epochs", type=int, help="in place of --steps")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="of all ranks together")
    parser.add_argument("--lr", type=float, help="default: depends on --algorithm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file to save to")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="as if interrupted there")
    parser.add_argument("--quick", action="store_true", help="a few seconds, for tests")
    parser.add_argument("--json", type=Path, help="file for the loss of every step")
    parser.set_defaults(momentum=0.9)  # of --algorithm sgd
    return parser


def parse_args(
    parser: argparse.ArgumentParser, lr: dict[str, float], quick: dict[str, Any]
) -> argparse.Namespace:
    """Reads and checks the command line.

    Args:
        lr: default learning rate of each algorithm.
        quick: what ``--quick`` changes; an argument that is given still counts.
    """
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_args()
    if args.lr is None:
        args.lr = lr[args.algorithm]

    problem = None
    if args.optimizer == "fused" and args.backend == "gloo":
        problem = (
            "--optimizer fused needs --backend fused: its step is a collective of that backend. "
            "For torch's optimizer on Gloo say --backend gloo --optimizer torch"
        )
    elif args.optimizer == "torch" and args.algorithm == "lamb":
        problem = "torch has no LAMB: --algorithm lamb needs --optimizer fused"
    elif args.optimizer == "torch" and args.overlap:
        problem = "--overlap needs --optimizer fused: torch's optimizers wait for backward"
    elif args.overlap and getattr(args, "clip", None):
        problem = "--clip needs the norm of all gradients before the first update: no --overlap"
    elif args.resume and args.checkpoint is None:
        problem = "--resume needs --checkpoint PATH"
    elif args.resume and not args.checkpoint.exists():
        problem = f"--resume: there is no {args.checkpoint}"
    elif min(args.steps, args.save_every, 1 if args.epochs is None else args.epochs) < 1:
        problem = "--steps, --epochs and --save-every must be at least 1"
    if problem is not None:
        parser.exit(2, f"{parser.prog}: error: {problem}\n")
    return args


def launched(nproc: int) -> bool:
    """Whether this process is a rank; otherwise starts the same script once for every rank."""
    if init_from_environment() is not None:
        return True
    command = [f"--nproc-per-node={nproc}", "--standalone", "--local-addr=127.0.0.1"]
    torchrun([*command, *sys.argv])
    return False


def start(args: argparse.Namespace, pg_options: Any = None) -> None:
    """Joins the process group, with an equal share of the processors for each rank."""
    fusedpg.keep_freed_memory()  # gradients are freed in every step
    dist.init_process_group(args.backend, pg_options=pg_options)
    world_size = dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if args.batch_size % world_size != 0:
        sys.exit(f"--batch-size {args.batch_size} is not a multiple of {world_size} ranks")
    torch.manual_seed(args.seed)  # the model is initialised next


# --- the optimizer: what changes from torch to fusedpg ----------------------------


def make_optimizer(
    args: argparse.Namespace, model: nn.Module, ddp: DistributedDataParallel
) -> torch.optim.Optimizer:
    """In a script with one optimizer, this line changes and no other::

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer = fusedpg.optim.AdamW(model.parameters(), lr=lr, ddp=ddp)
    """
    lr, overlap = args.lr, args.overlap
    match args.optimizer, args.algorithm:
        case "torch", "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr)
        case "fused", "adamw":
            return fusedpg.optim.AdamW(model.parameters(), lr=lr, ddp=ddp, overlap=overlap)
        case "torch", "adam":
            return torch.optim.Adam(model.parameters(), lr=lr)
        case "fused", "adam":
            return fusedpg.optim.Adam(model.parameters(), lr=lr, ddp=ddp, overlap=overlap)
        case "torch", "sgd":
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)
        case "fused", "sgd":
            return fusedpg.optim.SGD(
                model.parameters(), lr=lr, momentum=args.momentum, ddp=ddp, overlap=overlap
            )
        case "fused", "lamb":
            return fusedpg.optim.LAMB(model.parameters(), lr=lr, ddp=ddp, overlap=overlap)
    raise ValueError(f"no {args.optimizer} {args.algorithm}")


# --- data -------------------------------------------------------------------------


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1,797 real digits of 8x8 pixels; a fifth, with the same share of each digit, is held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in parts)

    def pixels(x: Tensor) -> Tensor:
        return x.view(-1, 1, 8, 8).float() / 16

    return TensorDataset(pixels(x_train), y_train), TensorDataset(pixels(x_test), y_test)


class Batches:
    """Which samples this rank takes in a step: a function of seed and step alone.

    All ranks together take the same samples, however many ranks there are. So a resumed run
    sees what the interrupted one would have seen, without any state of a sampler.
    """

    def __init__(self, args: argparse.Namespace, samples: int) -> None:
        self._samples, self._batch_size, self._seed = samples, args.batch_size, args.seed
        self._per_epoch = samples // args.batch_size
        if self._per_epoch == 0:
            sys.exit(f"--batch-size {args.batch_size} is more than the {samples} samples")
        self._epoch = -1
        self._order = torch.empty(0)
        self.steps: int = args.epochs * self._per_epoch if args.epochs else args.steps

    def __getitem__(self, step: int) -> Tensor:
        epoch, batch = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 32) + epoch)
            self._order = torch.randperm(self._samples, generator=generator)
            self._epoch = epoch
        first = batch * self._batch_size
        chosen = self._order[first : first + self._batch_size]
        return chosen[dist.get_rank() :: dist.get_world_size()]


# --- training -----------------------------------------------------------------------


class Training:
    """Counts steps: progress bar, random seeds, time, checkpoints, the line at the end."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        scheduler: LRScheduler | None = None,
    ) -> None:
        self._args = args
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._total = steps
        self._losses: list[Tensor] = []
        self._seconds = 0.0
        self._timed = 0
        self._first = self._load() if args.resume else 0

    def steps(self) -> Iterator[int]:
        """The numbers of the steps still to do; the body of the loop is one step."""
        args, rank = self._args, dist.get_rank()
        last = self._total if args.stop_at is None else min(self._total, args.stop_at)
        warm = self._first + min(10, (last - self._first) // 4)
        with tqdm(
            range(self._first, last),
            desc=PROGRAM,
            unit="step",
            initial=self._first,
            total=self._total,
            disable=rank != 0,
            ncols=90,
        ) as bar:
            for step in bar:
                # Dropout and augmentation, too, follow from the step: resuming needs no RNG state.
                torch.manual_seed((args.seed << 40) + (step << 12) + rank)
                start = time.perf_counter()
                yield step
                if step >= warm:
                    self._seconds += time.perf_counter() - start
                    self._timed += 1
                bar.set_postfix(loss=f"{self._losses[-1].item():.3f}", refresh=False)
                done = step + 1
                if args.checkpoint and (done == last or done % args.save_every == 0):
                    self._save(done)

    def record(self, loss: Tensor) -> None:
        """Notes this rank's loss of a step."""
        self._losses.append(loss.detach())

    # --- checkpoints: torch's format, whatever optimizer wrote it

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it continues."""
        same = {key: getattr(self._args, key) for key in ("algorithm", "batch_size", "seed")}
        return same if self._scheduler is None else {**same, "steps": self._total}

    def _save(self, step: int) -> None:
        optimizer, path = self._optimizer, self._args.checkpoint
        if isinstance(optimizer, fusedpg.optim.FusedOptimizer):
            state = optimizer.full_state_dict()  # all ranks take part, rank 0 gets it
        else:
            state = optimizer.state_dict()
        if dist.get_rank() != 0:
            return
        checkpoint = {
            "run": self._identity(),
            "step": step,
            "model": self._model.state_dict(),
            "optimizer": state,
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
        }
        partial = path.with_name(path.name + ".part")
        torch.save(checkpoint, partial)
        partial.replace(path)  # an interrupted save leaves the earlier file

    def _load(self) -> int:
        checkpoint = torch.load(self._args.checkpoint, weights_only=True)
        run = self._identity()
        if checkpoint["run"] != run:
            sys.exit(f"--resume: {self._args.checkpoint} is of {checkpoint['run']}, this is {run}")
        self._model.load_state_dict(checkpoint["model"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(checkpoint["scheduler"])
        return int(checkpoint["step"])

    # --- the end

    def finish(self, **metrics: str) -> None:
        """Prints loss, metrics and speed, and leaves the process group."""
        args, world_size = self._args, dist.get_world_size()
        losses = torch.stack(self._losses) if self._losses else torch.empty(0)
        dist.all_reduce(losses)
        losses /= world_size
        if dist.get_rank() == 0:
            done = self._first + len(losses)
            figures = [f"{name} {value}" for name, value in metrics.items()]
            if self._losses:
                figures.insert(0, f"loss {losses[-1].item():.4f}")
            speed = self._timed / self._seconds if self._timed else None
            if speed is not None:
                figures.append(f"{speed:.1f} steps/s")
            who = f"{args.optimizer} {args.algorithm} on {args.backend}, {world_size} ranks"
            print(f"{PROGRAM}: {who}: step {done}/{self._total}, ", end="")
            print(", ".join(figures), flush=True)
            if args.json is not None:
                report = {
                    "first_step": self._first,
                    "losses": losses.tolist(),  # of every step, the mean over ranks
                    "steps_per_second": speed,
                    **metrics,
                }
                args.json.write_text(json.dumps(report) + "\n")
        dist.destroy_process_group()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    test: TensorDataset,
    score: Callable[[Tensor, Tensor], Tensor],
    batch_size: int = 64,
) -> float:
    """The mean score over a test set that the ranks share out; the same on all of them."""
    for buffer in model.buffers():  # DDP trains with rank 0's running statistics
        dist.broadcast(buffer, src=0)
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    x, y = (tensor[mine] for tensor in test.tensors)
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        scores = score(model(inputs), targets).double()
        total += torch.tensor([scores.sum().item(), scores.numel()], dtype=torch.float64)
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Which samples are classified right: the score whose mean is the accuracy."""
    return logits.argmax(dim=1) == labels
