"""Time all-reduces between hosts by aggregators, from rank to rank, and by Gloo.

    python benchmarks/aggregators.py --workers 4 --aggregators 2 --rate 1gbit --size 100M

Workers and aggregators are network namespaces of this machine whose links have a rate (needs root,
`ip` and `tc`; exits with 2 where that cannot be): see tests/python/hosts.py. Before anything is
timed each arm's result is checked, and the bits of our two arms are compared. A row has the median
of the slowest rank's times. "link" is what a worker's link needs for the tensor, one way.

With ``--densities`` tensors hold so many percent of their blocks on each rank, which no two ranks
share (``--overlap none``; where they are too many for that, and with ``all``, ranks have the same
ones). Then "blocks" is `sparse_all_reduce` from rank to rank, and "auto" what the cost model takes,
which the row says. Gloo's and the ring's times are those of the dense tensor.

With ``--messages`` there are rows of "aggregators" for each of these sizes of messages, in bytes,
and each block of ``--blocks`` (OmniReduce's figure 13). `aggregators_figures.py` draws the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedpg

UNITS = {"K": 1 << 10, "M": 1 << 20}
PORT = 29411
ARMS = ("aggregators", "ring", "gloo")
SPARSE = ("aggregators", "blocks", "auto")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--aggregators", type=int, default=2)
    parser.add_argument("--colocated", action="store_true", help="on the workers' hosts")
    parser.add_argument("--rate", default="1gbit", help="of each link, as `tc` writes it")
    parser.add_argument("--size", default="100M", help="bytes of fp32, with K or M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--densities", default="", help="percent of blocks, with commas")
    parser.add_argument("--overlap", choices=("none", "all"), default="none")
    parser.add_argument("--block", type=int, default=256, help="elements")
    parser.add_argument("--messages", default="", help="bytes, with commas")
    parser.add_argument("--blocks", default="256", help="elements, with commas; for --messages")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the aggregators' places
    return parser.parse_args(argv)


def numel(size: str) -> int:
    return int(float(size[:-1]) * UNITS[size[-1]]) // 4


def slowest(seconds: float, group: Any) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def timed(args: argparse.Namespace, arms: dict[str, Any]) -> dict[str, float]:
    """Medians of ms, of calls that take turns."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(args.rounds):
        for arm, call in arms.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            times[arm].append(slowest(time.perf_counter() - begin, dist.group.WORLD))
    return {arm: round(1e3 * statistics.median(times[arm]), 2) for arm in arms}


def blocks_of(args: argparse.Namespace, percent: float, rank: int) -> torch.Tensor:
    """The blocks of a rank, by number."""
    blocks = numel(args.size) // args.block
    each = round(blocks * percent / 100)
    drawn = torch.randperm(blocks, generator=torch.Generator().manual_seed(7))
    shares = args.overlap == "all" or each * dist.get_world_size() > blocks
    first = 0 if shares else rank * each
    return drawn[first : first + each]


def sparse(
    args: argparse.Namespace, groups: dict[str, Any], percent: float, arms: tuple[str, ...] = SPARSE
) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, total = (torch.zeros(numel(args.size)) for _ in range(2))
    rows = total.view(-1, args.block)
    for r in range(size):
        rows[blocks_of(args, percent, r)] += r + 1
    chosen = blocks_of(args, percent, rank)

    def call(arm: str) -> Any:
        def run() -> None:
            fusedpg.sparse_all_reduce(t, group=groups[arm], block_size=args.block)

        return run

    t = mine
    times = {}
    for arm in arms:
        group_times = []
        for round_ in range(args.rounds + 1):
            mine.zero_().view(-1, args.block)[chosen] = rank + 1
            times[arm] = timed(argparse.Namespace(rounds=1), {arm: call(arm)})[arm]
            assert torch.equal(mine, total), (arm, percent)
            if round_:  # the first one measures links and makes buffers
                group_times.append(times[arm])
        times[arm] = statistics.median(group_times)
    choice = fusedpg.group_info(groups[arms[-1]])["aggregate"]
    union = float((rows != 0).any(1).float().mean())
    return {"ms": times, "union": round(union, 4), "choice": choice}


def work(args: argparse.Namespace) -> None:
    """What a rank does; rank 0 prints rows."""
    dist.init_process_group("fused")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def grouped(mode: str, message: int = 0) -> Any:
        return dist.new_group(
            pg_options=fusedpg.Options(
                aggregators=args.worker, aggregate=mode, aggregate_message_bytes=message
            )
        )

    groups = {
        "ring": dist.group.WORLD, "blocks": dist.group.WORLD,
        "aggregators": grouped("on"), "auto": grouped("auto"),
        "gloo": dist.new_group(backend="gloo"),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    t = torch.randn(numel(args.size), generator=generator)
    results = {}
    for arm in ARMS:
        results[arm] = t.clone()
        dist.all_reduce(results[arm], group=groups[arm])
    assert torch.equal(results["aggregators"], results["ring"])
    torch.testing.assert_close(results["gloo"], results["ring"], rtol=1e-4, atol=1e-4)
    assert fusedpg.stats(groups["aggregators"])["all_reduce"]["paths"] == {"aggregated": 1}
    results.clear()

    def call(arm: str) -> Any:
        def run() -> None:
            dist.all_reduce(t.fill_(1.0), group=groups[arm])
            assert bool((t == world_size).all())

        return run

    dist.all_reduce(t, group=groups["auto"])  # which measures links
    arms = (*ARMS, "auto")
    dense = timed(args, {arm: call(arm) for arm in arms})
    facts = {
        "workers": world_size, "aggregators": args.aggregators, "colocated": args.colocated,
        "rate": args.rate, "bytes": t.nbytes,
    }  # fmt: skip
    rows = [{"arm": arm, **facts, "ms": dense[arm]} for arm in arms]
    rows[-1]["choice"] = fusedpg.group_info(groups["auto"])["aggregate"]
    for percent in (float(word) for word in args.densities.split(",") if word):
        found = sparse(args, groups, percent)
        for arm in SPARSE:
            row = {
                "arm": arm, **facts, "percent": percent, "overlap": args.overlap,
                "union": found["union"], "block": args.block, "ms": found["ms"][arm],
                "times_gloo": round(dense["gloo"] / found["ms"][arm], 2),
            }  # fmt: skip
            rows.append(row | ({"choice": found["choice"]} if arm == "auto" else {}))
        for message in (int(word) for word in args.messages.split(",") if word):
            own = {"aggregators": grouped("on", message)}
            for block in (int(word) for word in args.blocks.split(",")):
                args.block = block
                found = sparse(args, own, percent, ("aggregators",))
                ms = found["ms"]["aggregators"]
                rows.append({
                    "arm": "aggregators", **facts, "percent": percent, "overlap": args.overlap,
                    "union": found["union"], "block": block, "message": message, "ms": ms,
                    "times_gloo": round(dense["gloo"] / ms, 2),
                })  # fmt: skip
            dist.destroy_process_group(own["aggregators"])
    if rank == 0:
        for row in rows:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def rate_of(text: str) -> float:
    """Bits a second."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise SystemExit(f"--rate is in gbit or mbit, got {text}")


def main() -> int:
    args = options()
    if args.worker:
        work(args)
        return 0
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/python"))
    import hosts

    reason = hosts.why_not()
    if reason is not None:
        print(f"no hosts: {reason}", file=sys.stderr)
        return 2
    link = numel(args.size) * 4 * 8 / rate_of(args.rate) * 1e3
    env = {"FUSEDPG_AGGREGATOR_KEY": os.urandom(16).hex()}
    more = 0 if args.colocated else args.aggregators
    with hosts.Hosts(args.workers + more, args.rate) as made:
        places = []
        for a in range(args.aggregators):
            host = a % args.workers if args.colocated else args.workers + a
            place = f"{made.address(host)}:{4711 + a}"
            one = made.start(
                host, [sys.executable, "-m", "fusedpg.aggregator", "--listen", place], env
            )
            assert one.stdout is not None and "listens" in one.stdout.readline()
            places.append(place)
        command = [sys.executable, *sys.argv, "--worker", ",".join(places)]
        ranks = [
            made.start(
                rank,
                command,
                env
                | {
                    "RANK": str(rank), "WORLD_SIZE": str(args.workers), "LOCAL_RANK": "0",
                    "MASTER_ADDR": made.address(0), "MASTER_PORT": str(PORT),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(args.workers)
        ]  # fmt: skip
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        print("\n".join(outputs), file=sys.stderr)
        return 1
    rows = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    rows.append({**rows[0], "arm": "link", "ms": round(link, 2)})
    for row in rows:
        if "percent" in row:
            what = f"{row['percent']:g}% of blocks, {row['times_gloo']:.1f} times Gloo"
            if "message" in row:
                what += f", blocks of {row['block']}, messages of {row['message']} bytes"
        else:
            what = f"{row['ms'] / link:5.2f} of the link"
        print(f"{row['arm']:12} {row['ms']:9.1f} ms  {what}")
        if "choice" in row:
            print(f"{'':12} {row['choice']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
