"""Where the time of a small synchronous all_reduce goes, by calling it at its layers.

    python benchmarks/latency.py
    make bench-engine            # the layers below, in C++, without torch

4 KB of fp32 in the arena's stages (the one-shot path), from the outside in:

    dist.all_reduce       what a script calls: Python's checks of arguments and group
    ProcessGroup          group.allreduce: torch's dispatcher, which looks the backend up
    backend               the backend's own method: our checks, the executor, the operation
    ..., alone            the same in a group of one rank: no peer to wait for
    dist.all_reduce, fake the first two layers above a backend of torch's that does nothing

The table shows the layers in turn in one run; the lines below it their differences. How times are
taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
from _harness import Context, Row
from collectives import pattern, sum_over_ranks

Group = dist.ProcessGroup
CASE = "all_reduce"
SCRIPT, GROUP, BACKEND = "dist.all_reduce", "ProcessGroup", "backend"
FAKE = f"{SCRIPT}, fake"


def main() -> int:
    args = harness.Parser(__doc__, backends="fused", sizes="4K", rounds=41).parse_args()
    rows = harness.run(measure, args, args.sizes, title=harness.format_size)
    harness.finish("latency", rows, args, limit=SCRIPT)
    explain(rows)
    return 0


def layers(group: Group) -> dict[str, Callable[[Tensor], object]]:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    backend = group._get_backend(torch.device("cpu"))
    return {
        SCRIPT: lambda x: dist.all_reduce(x, group=group),
        GROUP: lambda x: group.allreduce([x], options),
        BACKEND: lambda x: backend.allreduce([x], options),
    }


def measure(context: Context, args: argparse.Namespace, size: int) -> list[Row]:
    groups = {"": (context.groups["fused"], context.world_size)}
    for rank in range(context.world_size):
        group = dist.new_group([rank], backend="fused")
        if rank == context.rank:
            groups[", alone"] = group, 1
    arms: dict[str, Callable[[], object]] = {}
    x = torch.zeros(size // 4)
    for suffix, (group, world_size) in groups.items():
        for name, call in layers(group).items():
            x.copy_(pattern(x.numel(), context.rank))
            call(x)
            expected = (
                sum_over_ranks(x.numel(), world_size)
                if world_size > 1
                else pattern(x.numel(), context.rank)
            )
            harness.require(torch.equal(x, expected), f"wrong: {name}{suffix}")
            arms[name + suffix] = partial(call, x)
    arms[FAKE] = partial(layers(harness.fake_group())[SCRIPT], x)
    x.zero_()
    return harness.measure(context, arms, case=CASE, size=size, rounds=args.rounds)


def explain(rows: list[Row]) -> None:
    """What each layer adds, in microseconds."""
    for size in dict.fromkeys(row.size for row in rows):
        times = {row.arm: 1e6 * row.median for row in rows if row.size == size}
        parts = {
            "Python of torch.distributed": times[SCRIPT] - times[GROUP],
            "torch's dispatcher": times[GROUP] - times[BACKEND],
            "checks, executor, copy and kernel": times[f"{BACKEND}, alone"],
            "the peers": times[BACKEND] - times[f"{BACKEND}, alone"],
        }
        print(
            f"{harness.format_size(size)}, {times[SCRIPT]:.1f} us: "
            + ", ".join(f"{what} {time:.1f}" for what, time in parts.items())
        )


if __name__ == "__main__":
    sys.exit(main())
