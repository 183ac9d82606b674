"""Benchmarks between hosts: network namespaces whose links have a rate (tests/python/hosts.py)."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import _harness as harness
from _harness import Clock, Context, Row

TIMEOUT = 1800.0  # seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, help="2 to 4, with one rank each")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as `tc` writes it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank on a host


def run(args: argparse.Namespace, cases: int, row: type[Row]) -> list[Row] | None:
    """This program on each host, as a worker; what rank 0 reports. None, and why: no hosts."""
    from tqdm import tqdm

    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/python"))
    import hosts

    reason = hosts.why_not()
    if reason is not None:
        print(f"no hosts: {reason}", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.touch()
        program = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:], "--worker", str(path)]
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            hosts.Hosts(args.hosts, args.rate) as made,  # ends first, and its processes with it
            tqdm(total=cases, unit="case", ncols=90, desc=f"{args.hosts} hosts") as bar,
        ):
            ranks = pool.submit(made.run, program, ranks=1, timeout=TIMEOUT)
            while concurrent.futures.wait([ranks], timeout=0.5).not_done:
                bar.update(path.read_text().count("\n") - bar.n)
            ranks.result()
            lines = path.read_text().splitlines()
            bar.update(len(lines) - bar.n)
        return [row(**one) for line in lines for one in json.loads(line)]


def worker(args: argparse.Namespace, measure: Callable[[Context], Iterable[Sequence[Row]]]) -> None:
    """One rank that torchrun started; rank 0 reports the rows of each case."""
    torch.set_num_threads(1)
    import fusedpg  # noqa: F401  (registers the backend)

    dist.init_process_group("fused", timeout=harness.TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    gloo = dist.new_group(backend="gloo", timeout=harness.TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    context = Context(rank, world_size, GroupClock(gloo), {"fused": world, "gloo": gloo})
    for rows in measure(context):
        if rank == 0:
            with args.worker.open("a") as file:
                file.write(json.dumps([asdict(row) for row in rows]) + "\n")
    dist.barrier(group=gloo)
    dist.destroy_process_group()


class GroupClock(Clock):
    """Common start and common clock of ranks that share the machine's clock, but no memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def barrier(self, *, sleep: bool = True) -> None:
        dist.barrier(group=self._group)

    def _latest(self, *times: int) -> list[int]:
        values = torch.tensor(times, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in values]

    def sample(self, call: Callable[[], object], calls: int = 1) -> float:
        # Later than any rank gets to know of it.
        (begin,) = self._latest(time.perf_counter_ns() + 3_000_000)
        while time.perf_counter_ns() < begin:
            pass
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        end = time.perf_counter_ns()
        minus_start, last = self._latest(-start, end)
        return (last + minus_start) / calls * 1e-9
