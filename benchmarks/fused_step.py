"""Time `fusedpg.fused_adamw_` against an all-reduce followed by torch's own fused AdamW.

    python benchmarks/fused_step.py --check-bars
    python benchmarks/fused_step.py --world-size 4 --sizes 1M,100M
    python benchmarks/fused_step.py --hosts 2 --rate 1gbit --densities 1,.1,.01 --sizes 16M

A size is that of the parameters in fp32, one flat buffer with another of gradients. `fused_adamw_`
is one call on arena buffers; the other arms are `all_reduce`, a division by the world size and
`torch.optim.AdamW(fused=True)` on the same flat buffer, on the backend that they name (the
difference between the fused backend's two arms is what fusing gains). With `--densities` only so
many blocks of 256 of each rank's gradients are not zero, and "block_skip" leaves the others out.
With `--hosts` each rank is on a host of its own: a network namespace whose link has a rate (needs
root, `ip` and `tc`; exits with 2 where that cannot be); there is no arena then. Before anything is
timed each arm makes five steps on known gradients, against one process on the averaged gradients.
How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import _harness as harness
import _hosts as hosts
from _harness import COPY, Bar, Context, Row
from _steps import (
    FUSED,
    GLOO,
    SKIPS,
    FusedStep,
    Gradients,
    SplitStep,
    reference_parameters,
    split_arm,
)

K, M = 1 << 10, 1 << 20
BARS = [
    Bar(2, "adamw step", FUSED, M, GLOO, at_least=6),
    Bar(2, "adamw step", FUSED, 100 * M, GLOO, at_least=4.5),
    Bar(2, "adamw step", FUSED, 100 * M, COPY, at_most=1.6),
    Bar(4, "adamw step", FUSED, M, GLOO, at_least=15),
    Bar(4, "adamw step", FUSED, 100 * M, GLOO, at_least=8),
]


def main() -> int:
    parser = harness.parser(__doc__, backends="fused,gloo", sizes="64K,1M,16M,100M", rounds=31)
    parser.add_argument("--densities", default="1", help="shares of the gradients' blocks")
    hosts.add_options(parser)
    args = parser.parse_args()
    args.densities = [float(part) for part in args.densities.split(",")]
    if not all(0 < density <= 1 for density in args.densities):
        parser.error("--densities: shares above 0, 1 at most")
    cases = [Case(size, density) for size in args.sizes for density in args.densities]
    name = "fused_step"
    if args.hosts:
        args.world_size = args.hosts
        name += f"_hosts_{args.rate}"
        if args.worker:
            hosts.worker(args, lambda context: measured(context, cases, args.rounds))
            return 0
        rows = hosts.run(args, len(cases), Row)
        if rows is None:
            return 2
    else:
        rows = harness.run(worker, argparse.Namespace(**vars(args), cases=cases))
    harness.finish(name, rows, args, bars=() if args.hosts else BARS)
    return 0


@dataclass(frozen=True)
class Case:
    size: int  # bytes of the parameters
    density: float  # share of the gradients' blocks that are not zero

    @property
    def name(self) -> str:
        return "adamw step" + ("" if self.density == 1 else f", {100 * self.density:.3g}%")


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    todo = harness.progress(
        context, args.cases, lambda case: f"{harness.format_size(case.size)}, {case.name}"
    )
    return [row for rows in measured(context, todo, args.rounds) for row in rows]


def measured(context: Context, todo: Iterable[Case], rounds: int) -> Iterator[list[Row]]:
    """Rows, case by case."""
    for case in todo:
        gradients = Gradients(case.size // 4, case.density)
        reference = reference_parameters(gradients, context.world_size)
        arms: dict[str, Callable[[], object]] = {COPY: harness.copy_arm(case.size)}
        for backend, group in context.groups.items():
            made = {split_arm(backend): SplitStep(gradients.numel, group)}
            if backend == "fused":
                made = {FUSED: FusedStep(gradients.numel, group)} | made
                made[SKIPS] = FusedStep(gradients.numel, group, block_skip=True)
            arms |= {n: arm.checked(n, gradients, reference, context) for n, arm in made.items()}
        del reference
        yield harness.measure(context, arms, case=case.name, size=case.size, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
