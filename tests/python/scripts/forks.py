"""Two ranks that fork at random moments, and children that do what their parents do.

Usage: forks.py <layout: one, hosts> <backend> <forks> <seed>. The ranks draw operations from the
seed, with other threads in the middle of theirs, and fork between two of them. The children make a
group of their own and use everything in it; the parents go on meanwhile. Ends with an error where a
result is wrong, or a process hangs or does not end by itself.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"

import fusedpg
from fusedpg import hvd
from fusedpg.fusion import all_reduce

LIMIT = 60  # seconds; for a process and what it waits for
TIMEOUT = datetime.timedelta(seconds=20)


def limit(seconds: int) -> None:
    """Ends this process then, with its stacks; dump_traceback_later() hangs in a child."""
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    signal.alarm(seconds)


def expect(value: torch.Tensor, number: float) -> None:
    if not bool((value == number).all()):
        raise AssertionError(f"expected {number}, got {value.flatten()[:4]}")


def future(group: Any) -> None:
    x = torch.ones(1000)
    result = dist.all_reduce(x, group=group, async_op=True).get_future()
    expect(result.then(lambda done: done.value()[0] + 1).wait(), 3)


def large(group: Any) -> None:
    x = torch.ones(300_000)
    dist.all_reduce(x, group=group)
    expect(x, 2)


def messages(group: Any) -> None:
    other = 1 - dist.get_rank(group)
    for count in (10, 200_000):
        got = torch.zeros(count)
        work = dist.isend(torch.full((count,), 5.0), group=group, group_dst=other)
        dist.recv(got, group=group, group_src=other)
        work.wait()
        expect(got, 5)


def step(group: Any) -> None:
    p = torch.nn.Parameter(torch.ones(5000))
    p.grad = torch.full((5000,), float(dist.get_rank(group)))
    fusedpg.optim.SGD([p], lr=2.0, process_group=group).step()
    expect(p.detach(), 0)


def horovod(group: Any) -> None:
    expect(hvd.allreduce(torch.ones(100), op=hvd.Sum, name="x"), 2)


def subgroup(group: Any) -> None:
    one = dist.new_group(timeout=TIMEOUT)
    large(one)
    messages(one)
    dist.destroy_process_group(one)


@fusedpg.fuse
def program(g):
    return 2 * all_reduce(g, "mean") + 1


def fused(group: Any) -> None:
    expect(program(torch.ones(1000), group=group), 3)


OPERATIONS = [future, large, messages, step, horovod, subgroup, fused]


def begin(backend: str, rank: int, port: int) -> Any:
    """The default group, Horovod on it, and a group for this thread."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group(backend, timeout=TIMEOUT)
    hvd.init()
    return dist.group.WORLD


def end() -> None:
    hvd.shutdown()
    dist.destroy_process_group()


def child(backend: str, rank: int, port: int, rng: random.Random) -> None:
    limit(LIMIT)
    torch.set_num_threads(1)  # OpenMP's threads do not survive
    dist.destroy_process_group()
    group = begin(backend, rank, port)
    for operation in rng.sample(OPERATIONS, len(OPERATIONS)):
        operation(group)
    end()


def traffic(group: Any, rounds: int, stop: threading.Event) -> None:
    """In a thread: something is under way in every part."""
    for _ in range(rounds):
        future(group)
        messages(group)
        if stop.is_set():  # the other rank does all the same
            time.sleep(0.001)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def rank_main(backend: str, rank: int, ports: list[int], seed: int) -> None:
    limit(LIMIT + 40 * len(ports))
    rng = random.Random(seed)
    group = begin(backend, rank, ports[0])
    beside = dist.new_group(timeout=TIMEOUT)
    for port in ports[1:]:
        stop = threading.Event()
        thread = threading.Thread(target=traffic, args=(beside, rng.randint(0, 200), stop))
        thread.start()
        for operation in rng.choices(OPERATIONS, k=rng.randint(0, 3)):
            operation(group)
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.02)
        drawn = rng.random()
        forked = os.fork()
        if forked == 0:
            code = 1
            try:
                child(backend, rank, port, random.Random(drawn))
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            if drawn < 0.5:
                sys.exit(code)  # its interpreter ends as any
            os._exit(code)
        for operation in rng.choices(OPERATIONS, k=rng.randint(0, 3)):
            operation(group)
        stop.set()
        thread.join()
        _, status = os.waitpid(forked, 0)
        if status != 0:
            raise AssertionError(f"a child of rank {rank} ended with {status}")
    end()


def first_calls() -> None:
    """Calls once what the ranks' threads call of torch.

    Each operator of torch has a C++ static that its first call fills: a child that is forked while
    another thread does so waits for it for ever, in its own first call (seen without fusedpg).
    """
    x = torch.full((2,), 1.0) + torch.zeros(2) * torch.ones(2)
    expect(x.clone().copy_(x).detach(), 1)
    expect(torch.cat([x, torch.empty(2).fill_(1)]).sum().div_(4).flatten(), 1)
    x.view(torch.uint8).numpy()[:] = x.as_strided((2,), (1,)).contiguous().view(torch.uint8)
    expect(x.mul_(2).sub_(1).narrow(0, 0, 1).reshape(1).view(1), 1)
    dist.init_process_group("fake", rank=0, world_size=2)
    for work in (dist.isend(x, 1), dist.irecv(x, 1), dist.all_reduce(x, async_op=True)):
        work.wait()
    dist.group.WORLD._allgather_base(torch.empty(4), x).wait()
    dist.destroy_process_group()


def main() -> None:
    layout, backend, count, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ports = [free_port() for _ in range(count + 1)]
    torch.set_num_threads(1)
    first_calls()
    os.environ["FUSEDPG_SERVE_GLOO"] = "1" if backend == "gloo" else "0"
    ranks = []
    for rank in range(2):
        forked = os.fork()
        if forked == 0:
            if layout == "hosts":
                os.environ["FUSEDPG_HOST_ID"] = f"host {rank}"
            if backend == "gloo":
                fusedpg.serve_gloo()
            rank_main(backend, rank, ports, seed)
            return
        ranks.append(forked)
    statuses = []
    while len(statuses) < 2:
        pid, status = os.wait()
        statuses.append(status)
        if status != 0:
            for rank in ranks:
                if rank != pid:
                    time.sleep(1)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank, signal.SIGABRT)
    if any(statuses):
        sys.exit(f"seed {seed}: ranks ended with {statuses}")


if __name__ == "__main__":
    main()
