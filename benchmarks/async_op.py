"""Time the asynchronous ways to an all_reduce, and what a matmul between submit and wait hides.

    python benchmarks/async_op.py --check-bars
    python benchmarks/async_op.py --world-size 4 --sizes 4K,1M --ways sync,async,functional

fp32, the same tensors and the same ranks for all ways:

    sync         dist.all_reduce(x)
    async        dist.all_reduce(x, async_op=True).wait()
    functional   y = _functional_collectives.all_reduce(x), y.wait(), one element of it is read
    compiled     the same with `y * 0.5` behind it, in a function under torch.compile

The functional ones leave x alone: they include the clone that they reduce. "Communicates nothing"
is a functional one on torch's "fake" backend: what of it is torch's own. `/ sync` is the time over
that of a synchronous all_reduce on the fused backend, `x gloo` how many times as fast as the same
way on Gloo. Gloo has ordinary tensors only: its rows, from one measurement, stand twice.

**overlap**: a 16 MB all_reduce and a matmul of 640 x 640 in three orders: the matmul alone, one
after the other ("sync + matmul"), and submit, matmul, wait ("overlap"). Where all cores run ranks
nothing can be hidden but waiting, and a good overlap takes no longer than one after the other.

Every result is checked against exact sums before anything is timed, several operations in flight
at once among them. How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import _harness as harness
from _harness import Bar, Context, Row
from collectives import allocate, kinds_of_tensor, pattern, sum_over_ranks

Group = dist.ProcessGroup
Way = Callable[[Tensor, Group], Tensor]  # to the result of an all_reduce
K, M = 1 << 10, 1 << 20
ARENA, ORDINARY, OVERLAP = "arena", "ordinary", "overlap"
FAKE = "fake functional"
OVERLAPPED = 16 * M
MATMUL = 640


def sync(x: Tensor, group: Group) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def async_(x: Tensor, group: Group) -> Tensor:
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return x


def functional(x: Tensor, group: Group) -> Tensor:
    y: Tensor = funcol.all_reduce(x, "sum", group).wait()
    y[0].item()
    return y


_compiled: dict[str, Callable[[Tensor], Tensor]] = {}


def compiled(x: Tensor, group: Group) -> Tensor:
    name = group.group_name
    if name not in _compiled:

        def halved(x: Tensor) -> Tensor:
            return funcol.all_reduce(x, "sum", name) * 0.5

        # One graph for all sizes.
        _compiled[name] = torch.compile(halved, dynamic=True, fullgraph=True)
    y = _compiled[name](x)
    y[0].item()
    return y


WAYS: dict[str, tuple[Way, float]] = {  # and what multiplies its result
    "sync": (sync, 1.0),
    "async": (async_, 1.0),
    "functional": (functional, 1.0),
    "compiled": (compiled, 0.5),
}

BARS = [
    *(
        Bar(2, case, "async", size, "sync", at_most=limit)
        for case in (ARENA, ORDINARY)
        for size, limit in ((4 * K, 2.5), (M, 1.2), (16 * M, 1.2))
    ),
    *(
        Bar(2, case, "functional", size, "gloo functional", at_least=limit)
        for case in (ARENA, ORDINARY)
        for size, limit in ((4 * K, 8), (M, 3))
    ),
    # What it was when a progress thread ran every asynchronous operation: 1.05 and 1.02.
    *(
        Bar(
            2, OVERLAP, f"fused {kind} overlap", 16 * M, f"fused {kind} sync + matmul", at_most=1.05
        )
        for kind in (ARENA, ORDINARY)
    ),
]


def main() -> int:
    parser = harness.Parser(__doc__, sizes="4K,64K,1M,16M", rounds=21)
    parser.names("--ways", WAYS)
    parser.add_argument("--tensor", choices=(ARENA, ORDINARY, "both"), default="both")
    parser.add_argument("--no-overlap", action="store_true", help="without that part")
    args = parser.parse_args()
    cases = [*args.sizes, *([] if args.no_overlap else [OVERLAP])]
    rows = harness.run(measure, args, cases)
    harness.finish("async_op", rows, args, limit="sync", bars=BARS)
    explain(rows)
    return 0


def measure(context: Context, args: argparse.Namespace, case: int | str) -> list[Row]:
    if isinstance(case, int):
        return measure_ways(context, args, case)
    return measure_overlap(context, args, case)


def measure_ways(context: Context, args: argparse.Namespace, size: int) -> list[Row]:
    arms: dict[str, Callable[[], object]] = {}
    places: dict[str, tuple[list[str], str]] = {}  # of an arm: its cases, and its name there
    kinds = [ARENA, ORDINARY] if args.tensor == "both" else [args.tensor]
    for backend, group in context.groups.items():
        for arena in kinds_of_tensor(backend, args.tensor):
            for way in args.ways:
                title = f"{backend} {ARENA if arena else ORDINARY} {way}"
                arms[title] = make_arm(way, size, group, arena, context, title)
                if backend == "fused":
                    places[title] = [ARENA if arena else ORDINARY], way
                else:
                    places[title] = kinds, f"{backend} {way}"
    if "functional" in args.ways:
        x, fake = torch.zeros(size // 4), harness.fake_group()
        arms[FAKE] = lambda: functional(x, fake)
        places[FAKE] = kinds, FAKE
    rows = harness.measure(context, arms, case="", size=size, rounds=args.rounds)
    return [
        dataclasses.replace(row, case=case, arm=places[row.arm][1])
        for case in kinds
        for row in rows
        if case in places[row.arm][0]
    ]


def make_arm(
    name: str, size: int, group: Group, arena: bool, context: Context, title: str
) -> Callable[[], object]:
    way, factor = WAYS[name]
    numel = size // 4
    x = allocate(numel, arena, group)
    expected = sum_over_ranks(numel, context.world_size) * factor
    for _ in range(2):
        x.copy_(pattern(numel, context.rank))
        harness.require(torch.equal(way(x, group), expected), f"wrong: {title}, {size} B")
    if name == "async":
        check_several(numel, group, arena, context, title)
    x.zero_()  # sums stay finite however many calls are timed
    return lambda: way(x, group)


def check_several(numel: int, group: Group, arena: bool, context: Context, title: str) -> None:
    """Some operations in flight, waited for in another order."""
    tensors = [allocate(numel, arena, group) for _ in range(3)]
    for i, x in enumerate(tensors):
        x.copy_(pattern(numel, context.rank, start=i))
    works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    for i, x in enumerate(tensors):
        expected = sum_over_ranks(numel, context.world_size, start=i)
        harness.require(torch.equal(x, expected), f"wrong: {title}, number {i} of several")


# ---------------------------------------------------------------------------------------------
# Overlap


def measure_overlap(context: Context, args: argparse.Namespace, case: str) -> list[Row]:
    a, b, c = (torch.randn(MATMUL, MATMUL) for _ in range(3))
    expected = a @ b

    def matmul() -> None:
        torch.mm(a, b, out=c)

    arms: dict[str, Callable[[], object]] = {"matmul alone": matmul}
    numel = OVERLAPPED // 4
    for backend, group in context.groups.items():
        for arena in kinds_of_tensor(backend, args.tensor):
            x = allocate(numel, arena, group)

            # Defaults bind this turn's variables.
            def serial(x: Tensor = x, group: Group = group) -> None:
                dist.all_reduce(x, group=group)
                matmul()

            def overlapped(x: Tensor = x, group: Group = group) -> None:
                work = dist.all_reduce(x, group=group, async_op=True)
                matmul()
                work.wait()

            title = backend + (f" {ARENA if arena else ORDINARY}" if backend == "fused" else "")
            for name, call in (("sync + matmul", serial), ("overlap", overlapped)):
                x.copy_(pattern(numel, context.rank))
                c.zero_()
                call()
                correct = torch.equal(x, sum_over_ranks(numel, context.world_size))
                harness.require(correct, f"wrong: {title}, {name}")
                harness.require(torch.allclose(c, expected, atol=1e-3), f"wrong matmul: {name}")
                arms[f"{title} {name}"] = call
            x.zero_()
    return harness.measure(context, arms, case=case, size=OVERLAPPED, rounds=args.rounds)


def explain(rows: list[Row]) -> None:
    """What of a functional collective is torch's; overlap against one after the other."""
    for row in rows:
        fake = harness.find(rows, row.case, row.size, FAKE)
        if row.arm == "functional" and fake is not None:
            print(
                f"{row.case}, {harness.format_size(row.size)}: of {1e6 * row.median:.0f} us of a "
                f"functional collective {fake.median / row.median:.0%} are torch's own"
            )
    times = {row.arm: row.median for row in rows if row.case == OVERLAP}
    for arm, serial in times.items():
        title = arm.removesuffix(" sync + matmul")
        if title != arm:
            overlapped = times[f"{title} overlap"]
            print(
                f"{title}: overlap takes {overlapped / serial:.2f}x of sync + matmul, "
                f"{overlapped / times['matmul alone']:.2f}x of the matmul alone"
            )


if __name__ == "__main__":
    sys.exit(main())
