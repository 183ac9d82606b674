"""Benchmarks between hosts: network namespaces whose links have a rate (tests/python/hosts.py)."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import _harness as harness
from _harness import Clock, Context, Hosts, Job, Row

TIMEOUT = 1800.0  # seconds
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
RECEIVED = SENT.with_name("rx_bytes")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, help="2 to 8, with one rank each")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as `tc` writes it")


def chosen(args: argparse.Namespace) -> Hosts | None:
    """By these options."""
    return Hosts(args.hosts, 1, args.rate) if args.hosts else None


def namespaces() -> Any:
    """tests/python/hosts.py."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/python"))
    import hosts

    return hosts


def launch(job: Job, where: Hosts) -> list[Row]:
    """The job on hosts. Exits with 2 where there can be none."""
    if where.count == 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher.append(f"--nproc-per-node={where.ranks}")

        def start(program: list[str], env: dict[str, str]) -> None:
            command = [*launcher, *program]
            subprocess.run(command, env={**os.environ, **env}, check=True, timeout=TIMEOUT)

        return harness.launched(job, start)
    reason = namespaces().why_not()
    if reason is not None:
        print(f"no hosts: {reason}", file=sys.stderr)
        sys.exit(2)
    made = namespaces().Hosts(where.count + where.others, where.rate)

    def start_on_hosts(program: list[str], env: dict[str, str]) -> None:
        more = where.start(made) if where.start else {}
        made.run(program, ranks=[where.ranks] * where.count, env=env | more, timeout=TIMEOUT)

    return harness.launched(job, start_on_hosts, within=made)


def link(rate: str) -> dict[str, float]:
    """Bits a second, and the bytes that a link lets through at once."""
    units = {"gbit": 1e9, "mbit": 1e6}
    bits = float(rate[:-4]) * units[rate[-4:]]
    burst = namespaces().burst(rate)
    return {"rate": bits, "burst": float(burst[:-2]) * (1 << {"kb": 10, "mb": 20}[burst[-2:]])}


def take_own_cores() -> None:
    """Cores for this host alone, where the machine has enough: threads that follow inherit them.

    Else the kernel at times puts the processes of two hosts on one core, where everything takes
    twice as long, as it never does between machines.
    """
    hosts, host = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["GROUP_RANK"])
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // hosts
    if share > 0:
        os.sched_setaffinity(0, cores[host * share : (host + 1) * share])


def be_rank(job: Job, send: Callable[[list[Row]], object]) -> None:
    """The whole life of a rank that torchrun started."""
    torch.set_num_threads(1)
    if job.own_cores:
        take_own_cores()
    import fusedpg  # noqa: F401  (registers the backend)

    dist.init_process_group("fused", timeout=harness.TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    gloo = dist.new_group(backend="gloo", timeout=harness.TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job.work(Context(rank, world_size, GroupClock(gloo), {"fused": world, "gloo": gloo}), send)
    dist.destroy_process_group()


def bytes_sent(context: Context, call: Callable[[], object]) -> float:
    """What this rank's host sends in a call, on its link, with all headers."""
    return bytes_over_link(context, call)[0][context.rank]


def bytes_over_link(
    context: Context, call: Callable[[], object], calls: int = 3
) -> tuple[list[float], list[float]]:
    """What each rank's host sends, and what it receives, in a call."""
    context.clock.barrier()
    before = _counters()
    for _ in range(calls):
        call()
    context.clock.barrier()
    mine = (_counters() - before) / calls
    everyone = [torch.empty_like(mine) for _ in range(context.world_size)]
    dist.all_gather(everyone, mine, group=context.groups["gloo"])
    sent, received = torch.stack(everyone).t().tolist()
    return sent, received


def idle_share(context: Context, call: Callable[[], object], least: float = 2.0) -> float:
    """The part of the time of calls, `least` seconds long in all, in which the cores here idle."""
    calls = math.ceil(least / min(context.clock.sample(call) for _ in range(2)))
    before, begin = _idle(), time.monotonic()
    for _ in range(calls):
        call()
    idle, length = _idle() - before, time.monotonic() - begin
    return idle / length / len(os.sched_getaffinity(0))


def _idle() -> float:
    """Seconds that the cores of this process have had nothing to do for."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    ticks = sum(int(fields[4]) + int(fields[5]) for fields in lines if fields[0] in own)
    return ticks / os.sysconf("SC_CLK_TCK")


def _counters() -> torch.Tensor:
    counts = [int(path.read_text()) for path in (SENT, RECEIVED)]
    return torch.tensor(counts, dtype=torch.float64)


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
