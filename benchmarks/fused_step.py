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
from dataclasses import dataclass

import _harness as harness
import _hosts as hosts
import _steps as steps
from _harness import COPY, Bar, Context, Row
from _steps import ADAMW, FUSED, GLOO, SKIPS, UNFUSED

ARMS = (FUSED, UNFUSED, SKIPS, GLOO)
K, M = 1 << 10, 1 << 20
BARS = [
    Bar(2, ADAMW, FUSED, M, GLOO, at_least=6),
    Bar(2, ADAMW, FUSED, 100 * M, GLOO, at_least=4.5),
    Bar(2, ADAMW, FUSED, 100 * M, COPY, at_most=1.6),
    Bar(4, ADAMW, FUSED, M, GLOO, at_least=15),
    Bar(4, ADAMW, FUSED, 100 * M, GLOO, at_least=8),
]


def main() -> int:
    parser = harness.Parser(__doc__, sizes="64K,1M,16M,100M", rounds=31)
    shares = "shares of the gradients' blocks"
    parser.add_argument("--densities", type=harness.parse_shares, default="1", help=shares)
    hosts.add_options(parser)
    args = parser.parse_args()
    args.world_size = args.hosts or args.world_size
    cases = [Case(size, density) for size in args.sizes for density in args.densities]
    rows = harness.run(measure, args, cases, hosts=hosts.chosen(args))
    name = f"fused_step_hosts_{args.rate}" if args.hosts else "fused_step"
    return harness.finish(name, rows, args, bars=() if args.hosts else BARS)


@dataclass(frozen=True)
class Case:
    size: int  # bytes of the parameters
    density: float  # share of the gradients' blocks that are not zero

    @property
    def name(self) -> str:
        return ADAMW + ("" if self.density == 1 else f", {100 * self.density:.3g}%")

    def __str__(self) -> str:
        return f"{harness.format_size(self.size)}, {self.name}"


def measure(context: Context, args: argparse.Namespace, case: Case) -> list[Row]:
    arms = {COPY: harness.copy_arm(case.size)}
    arms |= steps.checked(context, case.size, ARMS, case.density)
    return harness.measure(context, arms, case=case.name, size=case.size, rounds=args.rounds)


if __name__ == "__main__":
    sys.exit(main())
