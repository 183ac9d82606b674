"""What a group of many hosts takes to be made and to be used first, beside Gloo's.

    python benchmarks/many_hosts.py --world-size 64

Each process takes itself for a host of its own and talks to the others by TCP over loopback, so all
of them share this machine's cores: what is compared is the work and the messages of creation, not a
network. Both backends make a group of all ranks in turn, use it, and destroy it. Times are those of
the slowest rank; descriptors are the most that any rank has opened for a group.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import _harness as harness
from _harness import Bar, Context, Row

ARMS = ("fused", "gloo")
CREATION, FIRST, LATER = "creation", "first all_reduce", "later all_reduce"
UNUSED, USED = "descriptors before the first collective", "descriptors after it"
SIZE, AGAIN = 4096, 5
BARS = [Bar(p, CREATION, "fused", 0, peer="gloo", at_most=0.5) for p in (64, 128)]


def main() -> int:
    args = harness.Parser(__doc__, backends="fused", rounds=5).parse_args()
    rows = harness.run(measure, args, ["groups"], each_a_host=True)
    counts = [row for row in rows if row.case in (UNUSED, USED)]
    times = [row for row in rows if row not in counts]
    harness.finish("many_hosts", times, args, limit="", bars=BARS)
    for row in counts:
        print(f"{row.case}: {row.arm} {row.median:.0f}")
    if not args.no_save:
        path = harness.RESULTS / f"many_hosts_descriptors_p{args.world_size}.json"
        harness.save_rows(path, counts, args.world_size, unit="descriptors")
    return 0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def measure(context: Context, args: argparse.Namespace, _: str) -> list[Row]:
    found: dict[tuple[str, str], list[float]] = {}
    world = context.groups["fused"]

    def most(values: dict[str, float]) -> dict[str, float]:
        told = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=world)
        return dict(zip(values, told.tolist(), strict=True))

    for number in range(args.rounds + 1):
        for arm in ARMS:
            values = one_group(context, arm)
            if number:  # the first round makes what later ones find
                for case, value in most(values).items():
                    found.setdefault((case, arm), []).append(value)
    return [row(case, arm, values) for (case, arm), values in found.items()]


def one_group(context: Context, arm: str) -> dict[str, float]:
    """This rank's seconds and descriptors of a group from creation to end."""
    gc.collect()
    before = descriptors()
    x = torch.full((SIZE // 4,), float(context.rank))
    expected = context.world_size * (context.world_size - 1) / 2
    context.clock.barrier()
    begun = time.perf_counter()
    group = dist.new_group(backend=arm, timeout=harness.TIMEOUT)
    values = {CREATION: time.perf_counter() - begun, UNUSED: float(descriptors() - before)}
    context.clock.barrier()
    later = []
    for number in range(1 + AGAIN):
        y = x.clone()
        context.clock.barrier()
        begun = time.perf_counter()
        dist.all_reduce(y, group=group)
        took = time.perf_counter() - begun
        harness.require(bool((y == expected).all()), f"wrong: {arm}")
        if number:
            later.append(took)
        else:
            values[FIRST] = took
    values |= {LATER: statistics.median(later), USED: float(descriptors() - before)}
    context.clock.barrier()
    dist.destroy_process_group(group)
    context.clock.barrier()
    return values


def row(case: str, arm: str, values: list[float]) -> Row:
    size = SIZE if "all_reduce" in case else 0
    return Row.of(case, size, arm, values, modes=False)


if __name__ == "__main__":
    sys.exit(main())
