"""Time all-reduces between hosts by aggregators, from rank to rank, and by Gloo.

    python benchmarks/aggregators.py --workers 4 --aggregators 2 --rate 1gbit --size 100M

Workers and aggregators are network namespaces of this machine whose links have a rate (needs root,
`ip` and `tc`; exits with 2 where that cannot be): see tests/python/hosts.py. Before anything is
timed each arm's result is checked, and the bits of our two arms are compared. A row has the median
of the slowest rank's times. "link" is what a worker's link needs for the tensor, one way.
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


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--aggregators", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, as `tc` writes it")
    parser.add_argument("--size", default="100M", help="bytes of fp32, with K or M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the aggregators' places
    return parser.parse_args(argv)


def numel(size: str) -> int:
    return int(float(size[:-1]) * UNITS[size[-1]]) // 4


def slowest(seconds: float, group: Any) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def work(args: argparse.Namespace) -> None:
    """What a rank does; rank 0 prints rows."""
    dist.init_process_group("fused")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = {
        "ring": dist.group.WORLD,
        "aggregators": dist.new_group(pg_options=fusedpg.Options(aggregators=args.worker)),
        "gloo": dist.new_group(backend="gloo"),
    }
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randn(numel(args.size), generator=generator)
    results = {}
    for arm in ARMS:
        t = mine.clone()
        dist.all_reduce(t, group=groups[arm])
        results[arm] = t
    assert torch.equal(results["aggregators"], results["ring"])
    torch.testing.assert_close(results["gloo"], results["ring"], rtol=1e-4, atol=1e-4)
    assert fusedpg.stats(groups["aggregators"])["all_reduce"]["paths"] == {"aggregated": 1}
    t = results["ring"]
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(args.rounds):
        for arm in ARMS:
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(t.fill_(1.0), group=groups[arm])
            times[arm].append(slowest(time.perf_counter() - begin, dist.group.WORLD))
            assert bool((t == world_size).all())
    if rank == 0:
        for arm in ARMS:
            row = {
                "arm": arm, "workers": world_size, "aggregators": args.aggregators,
                "rate": args.rate, "bytes": mine.nbytes,
                "ms": round(1e3 * statistics.median(times[arm]), 2),
            }  # fmt: skip
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
    with hosts.Hosts(args.workers + args.aggregators, args.rate) as made:
        places = []
        for a in range(args.workers, args.workers + args.aggregators):
            place = f"{made.address(a)}:4711"
            one = made.start(
                a, [sys.executable, "-m", "fusedpg.aggregator", "--listen", place], env
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
        print(f"{row['arm']:12} {row['ms']:9.1f} ms  {row['ms'] / link:5.2f} of the link")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
