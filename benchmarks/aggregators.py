"""Time all-reduces between hosts by aggregators, from rank to rank, and by Gloo.

    python benchmarks/aggregators.py --workers 4 --aggregators 2 --rate 1gbit --size 100M
    python benchmarks/aggregators.py --figure density

Workers and aggregators are network namespaces of this machine whose links have a rate (needs root,
`ip` and `tc`; exits with 2 where that cannot be): see tests/python/hosts.py. Before anything is
timed each arm's result is checked, and the bits of our two arms are compared. A time is that of the
slowest rank. "link" is what a worker's link needs for the tensor, one way.

With ``--densities`` tensors hold so many percent of their blocks on each rank, which no two ranks
share (``--overlap none``; where they are too many for that, and with ``all``, ranks have the same
ones). Then "blocks" is `sparse_all_reduce` from rank to rank, and "auto" what the cost model takes,
which the row says. Gloo's and the ring's times are those of the dense tensor.

With ``--messages`` there are rows of "aggregators" for each of these sizes of messages, in bytes,
and each block of ``--blocks``. ``--figure`` measures and draws OmniReduce's figures 4 and 5
(density by workers) and 13 (blocks by messages), with as many aggregators as workers: `density`
with links of 1 Gbit/s, `fast` with links of 10, as figure 5 has faster links than figure 4,
`colocated` with aggregators on the workers' hosts, and `blocks`. It saves each as JSON in
benchmarks/results/aggregators, and as PNG in build/figures/aggregators.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import _harness as harness
import _hosts
import _plots as plots
import fusedpg
from _harness import Context, Hosts, Row

ADDRESSES = "FUSEDPG_BENCH_AGGREGATORS"  # where ranks find the aggregators
DENSE = "dense"
ARMS = ("aggregators", "ring", "gloo", "auto")
SPARSE = ("aggregators", "blocks", "auto")
RESULTS = harness.RESULTS / "aggregators"
_BY_DENSITY = "--size 20M --densities 80,40,20,10,4,2,1"
# By name: numbers of workers, and other options.
FIGURES: dict[str, tuple[tuple[int, ...], str]] = {
    "density": ((2, 4), _BY_DENSITY),
    "fast": ((2, 4), f"{_BY_DENSITY} --rate 10gbit"),
    "colocated": ((2, 4, 8), f"{_BY_DENSITY} --colocated"),
    "blocks": (
        (4,),
        "--size 20M --densities 10 --overlap all --blocks 32,128,256,1024,4096 "
        "--messages 4096,16384,65536,253952",
    ),
}


def main() -> int:
    parser = harness.Parser(__doc__, sizes="100M", rounds=5)
    flag = parser.add_argument
    flag("--workers", type=int, default=4)
    flag("--aggregators", type=int, default=2)
    flag("--colocated", action="store_true", help="on the workers' hosts")
    flag("--rate", default="1gbit", help="of each link, as `tc` writes it")
    flag("--densities", type=numbers, default="", help="percent of blocks, with commas")
    flag("--overlap", choices=("none", "all"), default="none")
    flag("--block", type=int, default=256, help="elements")
    flag("--messages", type=numbers, default="", help="bytes, with commas")
    flag("--blocks", type=numbers, default="256", help="elements, with commas; for --messages")
    flag("--figure", choices=(*FIGURES, "all"), help="of OmniReduce, each with 3 rounds")
    flag("--draw", action="store_true", help="the figure from what was measured before")
    args = parser.parse_args()
    if args.figure is None:
        rows = timed(args)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
        return 0
    for figure in FIGURES if args.figure == "all" else [args.figure]:
        path = RESULTS / f"{figure}.json"
        if not args.draw:
            harness.write(path, harness.about(), measured(figure, parser))
        plots.save(harness.FIGURES / f"aggregators/{figure}.png", plots.of_aggregators(path))
    return 0


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def measured(figure: str, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    counts, options = FIGURES[figure]
    rows = []
    for workers in counts:
        known = f"--workers {workers} --aggregators {workers} --rounds 3 {options}"
        rows += timed(parser.parse_args(known.split()))
    return rows


def timed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints a table; its rows, as they are saved."""
    env = {"FUSEDPG_AGGREGATOR_KEY": os.urandom(16).hex()}

    def start(made: Any) -> dict[str, str]:
        addresses = []
        for number in range(args.aggregators):
            host = number % args.workers if args.colocated else args.workers + number
            address = f"{made.address(host)}:{4711 + number}"
            command = [sys.executable, "-m", "fusedpg.aggregator", "--listen", address]
            process = made.start(host, command, env)
            assert process.stdout is not None and "listens" in process.stdout.readline()
            addresses.append(address)
        return {**env, ADDRESSES: ",".join(addresses)}

    args.world_size = args.workers
    others = 0 if args.colocated else args.aggregators
    hosts = Hosts(args.workers, 1, args.rate, others, start)
    cases = [(size, percent) for size in args.sizes for percent in (None, *args.densities)]
    found = harness.run(measure, args, cases, title=case_title, hosts=hosts)
    bits = _hosts.link(args.rate)["rate"]
    for size in args.sizes:
        found.append(Row.of(DENSE, size, "link", [size * 8 / bits]))
    facts = {"workers": args.workers, "aggregators": args.aggregators}
    facts |= {"colocated": args.colocated, "rate": args.rate}
    rows, lines = [], []
    for row in found:
        ms = 1e3 * row.median
        gloo, link = (harness.find(found, DENSE, row.size, arm) for arm in ("gloo", "link"))
        times = {} if row.case == DENSE else {"times_gloo": round(gloo.median / row.median, 2)}
        rows.append({"arm": row.arm, **facts, "bytes": row.size, **row.more})
        rows[-1] |= {"ms": round(ms, 2), **times}
        ratios = [f"{gloo.median / row.median:.2f}", f"{row.median / link.median:.2f}"]
        work = [row.case, harness.format_size(row.size), row.arm, row.more.get("choice", "")]
        lines.append([*work, f"{ms:.1f}", *ratios])
    figures = ["ms", "times dense Gloo", "/ link of the dense"]
    harness.show("By aggregators", [*harness.WORK, "choice"], figures, lines, wrap=True)
    return rows


def case_title(case: tuple[int, float | None]) -> str:
    size, percent = case
    return f"{harness.format_size(size)}, {DENSE if percent is None else f'{percent:g}%'}"


# ---------------------------------------------------------------------------------------------
# On a rank


def measure(
    context: Context, args: argparse.Namespace, case: tuple[int, float | None]
) -> list[Row]:
    groups = context.once(groups_of)
    if case[1] is None:
        return dense(context, args, groups, case[0])
    return sparse(context, args, groups, *case)


def grouped(mode: str, message: int = 0) -> dist.ProcessGroup:
    options = fusedpg.Options(
        aggregators=os.environ[ADDRESSES], aggregate=mode, aggregate_message_bytes=message
    )
    return dist.new_group(pg_options=options)


def groups_of(context: Context) -> dict[str, dist.ProcessGroup]:
    ranks, by_aggregators = context.groups["fused"], grouped("on")
    found = {"ring": ranks, "blocks": ranks, "aggregators": by_aggregators, "auto": grouped("auto")}
    return found | {"gloo": context.groups["gloo"]}


def slowest(context: Context, call: Callable[[], object]) -> float:
    """Seconds of the rank that takes longest."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def choice_of(group: dist.ProcessGroup) -> str:
    return str(fusedpg.group_info(group)["aggregate"])


def dense(
    context: Context, args: argparse.Namespace, groups: dict[str, dist.ProcessGroup], size: int
) -> list[Row]:
    t = torch.randn(size // 4, generator=torch.Generator().manual_seed(context.rank))
    results = {arm: t.clone() for arm in ARMS[:3]}
    fusedpg.stats(groups["aggregators"], reset=True)
    for arm, result in results.items():
        dist.all_reduce(result, group=groups[arm])
    assert torch.equal(results["aggregators"], results["ring"])
    torch.testing.assert_close(results["gloo"], results["ring"], rtol=1e-4, atol=1e-4)
    assert fusedpg.stats(groups["aggregators"])["all_reduce"]["paths"] == {"aggregated": 1}
    results.clear()

    def call(arm: str) -> None:
        dist.all_reduce(t.fill_(1.0), group=groups[arm])
        assert bool((t == context.world_size).all())

    call("auto")  # which measures links
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(args.rounds):
        for arm in ARMS:
            samples[arm].append(slowest(context, partial(call, arm)))
    rows = [Row.of(DENSE, size, arm, samples[arm]) for arm in ARMS]
    rows[-1].more = {"choice": choice_of(groups["auto"])}
    return rows


def blocks_of(
    args: argparse.Namespace, size: int, block: int, percent: float, rank: int
) -> torch.Tensor:
    """The blocks of a rank, by number."""
    blocks = size // 4 // block
    each = round(blocks * percent / 100)
    drawn = torch.randperm(blocks, generator=torch.Generator().manual_seed(7))
    shares = args.overlap == "all" or each * dist.get_world_size() > blocks
    first = 0 if shares else rank * each
    return drawn[first : first + each]


def sparse(
    context: Context,
    args: argparse.Namespace,
    groups: dict[str, dist.ProcessGroup],
    size: int,
    percent: float,
) -> list[Row]:
    def skipping(group: dist.ProcessGroup, arm: str, block: int) -> Row:
        mine, total = (torch.zeros(size // 4) for _ in range(2))
        rows = total.view(-1, block)
        for rank in range(context.world_size):
            rows[blocks_of(args, size, block, percent, rank)] += rank + 1
        chosen = blocks_of(args, size, block, percent, context.rank)
        samples = []
        for _ in range(args.rounds + 1):
            mine.zero_().view(-1, block)[chosen] = context.rank + 1
            call = partial(fusedpg.sparse_all_reduce, mine, group=group, block_size=block)
            samples.append(slowest(context, call))
            assert torch.equal(mine, total), (arm, percent)
        union = round(float((rows != 0).any(1).float().mean()), 4)
        more = {"percent": percent, "overlap": args.overlap, "union": union, "block": block}
        # The first call measures links and makes buffers.
        case = f"{percent:g}% of blocks of {block}"
        return Row.of(case, size, arm, samples[1:], more=more)

    found = [skipping(groups[arm], arm, args.block) for arm in SPARSE]
    found[-1].more["choice"] = choice_of(groups["auto"])
    for message in map(int, args.messages):
        group = grouped("on", message)
        for block in map(int, args.blocks):
            row = skipping(group, "aggregators", block)
            row.case += f", messages of {message} B"
            row.more["message"] = message
            found.append(row)
        dist.destroy_process_group(group)
    return found


if __name__ == "__main__":
    sys.exit(main())
