"""Random programs against aggregators, and what many operations leave behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from fusedpg import aggregator
from fuzz import aggregators, core
from harness import Context
from test_aggregators import KEY, Aggregator, on_hosts, workers

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(240)]


def beside_the_ranks(context: Context) -> None:
    """Aggregators on threads of ranks 0 and 1, which are used by all: DDP, and drain."""
    server = aggregator.Aggregator(key=KEY) if context.rank < 2 else None
    both: list[Any] = [None] * context.world_size
    dist.all_gather_object(both, server.place if server else None)
    places = f"{both[0]},{both[1]}"
    found = []
    group = dist.new_group(pg_options=fusedpg.Options(aggregators=places, aggregate="on"))
    for where in (None, group):
        torch.manual_seed(3)
        model = torch.nn.Linear(300, 400)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=where)
        draw = torch.Generator().manual_seed(context.rank)
        for _ in range(3):
            ddp(torch.randn(8, 300, generator=draw)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*found)) and len(found[0]) == 2
    assert fusedpg.stats(group)["all_reduce"]["paths"]["aggregated"] >= 3
    dist.barrier()
    if server is not None:
        server.drain()  # the group goes on
        assert server.active
    dist.barrier()
    t = torch.ones(200_000)
    dist.all_reduce(t, group=group)
    assert bool((t == context.world_size).all())
    dist.destroy_process_group(group)
    if server is not None:
        deadline = time.monotonic() + 10
        while server.active:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.stats()["failed"] == 0
        server.close()
    dist.barrier()


def ends_beside_the_ranks(context: Context) -> str:
    """What is raised when the aggregator on a thread of rank 0 is closed under its group."""
    server = aggregator.Aggregator(key=KEY) if context.rank == 0 else None
    place = [server.place if server else None]
    dist.broadcast_object_list(place)
    group = dist.new_group(pg_options=fusedpg.Options(aggregators=place[0], aggregate="on"))
    dist.all_reduce(torch.ones(200_000), group=group)
    dist.barrier()
    if server is not None:
        server.close()
    try:
        dist.all_reduce(torch.ones(200_000), group=group)
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("no error")


def held_here() -> tuple[int, int]:
    """Descriptors, and bytes of this process's own memory."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), memory("self")


def memory(pid: str) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = dict(line.split(":") for line in file.read().splitlines()[1:])
    return 1024 * int(fields["Private_Dirty"].split()[0])


def many(context: Context, places: str, count: int) -> tuple[int, int]:
    """What a rank holds more after so many operations than after some."""
    group = dist.new_group(pg_options=fusedpg.Options(aggregators=places, aggregate="on"))
    t = torch.zeros(100_000)

    def run(n: int) -> None:
        for step in range(n):
            t.zero_()
            t[256 * (step % 300) :][:2000] = context.rank + 1
            if step % 2:
                fusedpg.sparse_all_reduce(t, group=group)
            else:
                dist.all_reduce(t, group=group)

    run(100)
    before = held_here()
    run(count)
    after = held_here()
    dist.destroy_process_group(group)
    return after[0] - before[0], after[1] - before[1]


@pytest.fixture(scope="module")
def two() -> Iterator[list[Aggregator]]:
    with Aggregator() as first, Aggregator() as second:
        yield [first, second]


@pytest.fixture
def ranks() -> Any:
    return harness.pool(3, env=on_hosts(3), oracle=False, one_host=False)


def places(two: list[Aggregator]) -> str:
    return ",".join(one.place for one in two)


def held(one: Aggregator) -> tuple[int, int]:
    pid = str(one.process.pid)
    return len(list(Path("/proc", pid, "fd").iterdir())), memory(pid)


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 8))])
@pytest.mark.parametrize("where", aggregators.WHERE)
def test_programs(where: str, seed: int) -> None:
    core.search("aggregators", where, core.seed(seed))


def test_beside_the_ranks(ranks: Any) -> None:
    ranks.run(beside_the_ranks)


def test_ends_beside_the_ranks() -> None:
    """All raise, and name it."""
    with workers(3) as found:
        for text in found.run(ends_beside_the_ranks):
            assert "aggregator 0 (127.0.0.1:" in text, text


def test_nothing_is_left(ranks: Any, two: list[Aggregator]) -> None:
    """After 1000 operations: no descriptors, no memory."""
    ranks.run(many, places(two), 0)
    before = [held(one) for one in two]
    for descriptors, memory in ranks.run(many, places(two), 1000):
        assert descriptors == 0
        assert memory < 4 << 20
    for one, (descriptors, memory) in zip(two, before):
        assert held(one)[0] <= descriptors + 1  # a job's end may take a moment
        assert held(one)[1] - memory < 8 << 20
