"""What the benchmarks of jobs share: SwitchML's flags, tensors, verification and figures."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusedpg.aggregation import Config, Context

TYPES = {"float": torch.float32, "int32": torch.int32}


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false, found {text!r}")
    return text.lower() == "true"


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--tensor-type", choices=TYPES, default="float")
    flag("--device", choices=["cpu", "gpu"], default="cpu")
    flag("--verify", type=boolean, default=False, help="compare every result (default: false)")
    flag("--err", type=float, default=1.0, help="per cent that a float may be off (default: 1)")
    flag("--random", type=boolean, default=False, help="random values (default: false)")
    flag("--seed", type=int, default=0)
    flag("--dump-stats", type=boolean, default=False)
    flag(
        "--inject-wrong-bit", type=boolean, default=False, help="in one result: a test of --verify"
    )
    flag("--process-group", default="fused", help="its backend, under torchrun (default: fused)")
    flag("--config", help="default: switchml.cfg where SwitchML looks, and FUSEDPG_AGGREGATION_*")


@dataclasses.dataclass
class Values:
    """A tensor of each worker, and what comes of them."""

    arguments: argparse.Namespace
    context: Context
    rank: int

    def of(self, rank: int, numel: int, number: int) -> torch.Tensor:
        kind = TYPES[self.arguments.tensor_type]
        if not self.arguments.random:
            return (torch.arange(numel) % 1000 + 1 + number).mul_(rank + 1).to(kind)
        generator = torch.Generator().manual_seed(
            (self.arguments.seed * 1000 + number) * 1000 + rank
        )
        if kind == torch.int32:
            return torch.randint(-(2**20), 2**20, (numel,), generator=generator, dtype=kind)
        return torch.randn(numel, generator=generator)

    def mine(self, numel: int, number: int) -> torch.Tensor:
        device = "cuda" if self.arguments.device == "gpu" else "cpu"
        return self.of(self.rank, numel, number).to(device)

    def check(self, got: torch.Tensor, number: int) -> str | None:
        """What is wrong with a result, or None. In double, and of values that cannot overflow."""
        workers = self.context.num_workers
        if self.context.config.backend == "dummy":  # its workers are all like this one
            parts = [self.of(self.rank, got.numel(), number).double()] * workers
        else:
            parts = [self.of(rank, got.numel(), number).double() for rank in range(workers)]
        want = torch.stack(parts).sum(0)
        # Where values cancel out, what counts is how large they were.
        size = torch.stack([part.abs() for part in parts]).sum(0)
        exact = self.arguments.tensor_type == "int32"
        off = (got.cpu().double() - want).abs()
        wrong = ~(off <= (0 if exact else size * self.arguments.err / 100))  # NaN is wrong, too
        if not wrong.any():
            return None
        k = int(wrong.nonzero()[0])
        return (
            f"rank {self.rank}: {int(wrong.sum())} of {got.numel()} results are wrong; the first "
            f"is number {k}: expected {want[k].item()}, found {got[k].item()}"
        )


def flip(tensor: torch.Tensor) -> None:
    """One bit of the largest element: an exponent's, or the lowest of an integer."""
    k = int(tensor.double().abs().argmax())
    tensor.view(torch.int32)[k] ^= 1 << 23 if tensor.is_floating_point() else 1


def start(arguments: argparse.Namespace) -> tuple[Context, Values]:
    config = Config.load(arguments.config)
    if "RANK" in os.environ and config.backend == "group":
        dist.init_process_group(arguments.process_group)
    try:
        context = Context(config).start()
    except RuntimeError as error:
        sys.exit(f"{error}\nStart it with torchrun, or FUSEDPG_AGGREGATION_BACKEND=dummy.")
    return context, Values(arguments, context, int(os.environ.get("RANK", 0)))


def end(context: Context, arguments: argparse.Namespace, wrong: str | None) -> int:
    """The exit status: 1 if a result is `wrong`."""
    context.stop()
    if arguments.dump_stats:
        for name, value in dataclasses.asdict(context.stats()).items():
            print(f"{name}: {value}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if wrong is not None:
        print(wrong, file=sys.stderr)
    return int(wrong is not None)


def summary(what: str, nanoseconds: Sequence[float], rates: Sequence[float]) -> None:
    for name, values, unit in ((what, nanoseconds, "ns"), ("rate", rates, "Gbps")):
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(
                f"{name}: min {min(values):,.3f} max {max(values):,.3f} median "
                f"{statistics.median(values):,.3f} mean {statistics.mean(values):,.3f} "
                f"stdev {spread:,.3f} {unit}"
            )
