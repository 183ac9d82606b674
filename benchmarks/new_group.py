"""What dist.new_group takes inside a host, beside Gloo's.

    python benchmarks/new_group.py --world-size 4

The default group is fusedpg's, as in a user's script, and each call makes a group of all its ranks
by `dist.new_group`; the one before is destroyed outside of the timed part. Times are those of the
slowest rank. How they are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import _harness as harness
from _harness import Bar, Context, Row

CASE = "new_group"
ARMS = ("fused", "gloo")
BARS = [Bar(p, CASE, "fused", 0, peer="gloo", at_most=1.0) for p in (2, 4, 8)]


class NewGroup:
    """Makes a group; `destroy` ends the one before."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.group: dist.ProcessGroup | None = None

    def __call__(self) -> None:
        self.group = dist.new_group(backend=self.backend, timeout=harness.TIMEOUT)

    def destroy(self) -> None:
        if self.group is not None:
            # No rank leaves while another one is at it.
            dist.barrier()
            dist.destroy_process_group(self.group)
            dist.barrier()
            self.group = None


def main() -> int:
    args = harness.Parser(__doc__, backends="fused", rounds=41).parse_args()
    rows = harness.run(measure, args, [CASE])
    return harness.finish("new_group", rows, args, limit="gloo", bars=BARS)


def measure(context: Context, args: argparse.Namespace, case: str) -> list[Row]:
    arms = {name: NewGroup(name) for name in ARMS}
    for name, arm in arms.items():
        arm()
        x = torch.full((4,), float(context.rank))
        dist.all_reduce(x, group=arm.group)
        expected = context.world_size * (context.world_size - 1) / 2
        harness.require(bool((x == expected).all()), f"wrong: {name}")
    calls: dict[str, Callable[[], object]] = {name: partial(arm) for name, arm in arms.items()}
    rows = harness.measure(
        context,
        calls,
        case=case,
        size=0,
        rounds=args.rounds,
        prepare={name: arm.destroy for name, arm in arms.items()},
    )
    for arm in arms.values():
        arm.destroy()
    return rows


if __name__ == "__main__":
    sys.exit(main())
