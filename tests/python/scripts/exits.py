"""Two ranks that end in many ways, many times, without tidying up.

Usage: exits.py <mode> <times> <backend> [<seed>]. Forks pairs of ranks from a process
that has imported torch, so that each one ends with a full finalisation of its
interpreter but does not pay for the import. Prints one line per pair: seconds
and the two exit codes. The mode "drawn" draws what is under way when a rank ends, and
how it ends, from the seed and those that follow; it ends with an error itself where
an exit code is not the expected one.
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # DDP would import it in every rank
import torch.distributed as dist

kept: list[Any] = []

ENDS = {"return": 0, "exit": 5, "raise": 1, "os._exit": 7, "destroy": 0, "destroy and raise": 1}
"""How a drawn rank ends, and its exit code."""


def _daemon(function: Callable[..., Any], *args: Any) -> None:
    def run() -> None:
        try:
            while True:
                function(*args)
        except Exception:
            pass  # the group has ended

    kept.append(threading.Thread(target=run, daemon=True))
    kept[-1].start()


def _begun() -> Any:
    """An operation that the other rank may never come to."""
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    kept.append(work)
    return work


def _callback(function: Callable[[], Any]) -> None:
    kept.append(_begun().get_future().then(lambda _: function()))


UNDER_WAY: dict[str, Callable[[], Any]] = {
    "operation": _begun,
    "callback": lambda: _callback(lambda: 3),
    "callback that takes long": lambda: _callback(lambda: time.sleep(0.7)),
    "callback with a collective": lambda: _callback(lambda: dist.all_reduce(torch.ones(3))),
    "thread in a wait": lambda: _daemon(_begun().wait),
    "thread in collectives": lambda: _daemon(lambda: dist.all_reduce(torch.ones(10))),
    "thread in recv": lambda: _daemon(lambda: dist.recv(torch.zeros(10), 1 - dist.get_rank())),
    "thread in a future's wait": lambda: _daemon(_begun().get_future().wait),
    "send": lambda: kept.append(dist.isend(torch.ones(100), 1 - dist.get_rank())),
}


def drawn(seed: int, rank: int) -> tuple[list[str], str]:
    """What is under way on a rank when it ends, and how it ends."""
    rng = random.Random(f"{seed} {rank}")
    return rng.sample(list(UNDER_WAY), rng.randint(0, 3)), rng.choice(list(ENDS))


def drawn_main(seed: int, rank: int) -> None:
    what, end = drawn(seed, rank)
    for one in what:
        UNDER_WAY[one]()
    time.sleep(random.Random(f"{seed} {rank} time").choice([0, 0, 0.002, 0.05]))
    if end.startswith("destroy"):
        dist.destroy_process_group()
    if end.endswith("raise"):
        raise ValueError("given up")
    if end == "exit":
        sys.exit(5)
    if end == "os._exit":
        os._exit(7)


def rank_main(mode: str, rank: int, port: int, backend: str, seed: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=4 if mode == "drawn" else 300)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if mode == "drawn":
        drawn_main(seed, rank)
        return
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 20))
    model(torch.ones(2, 20)).sum().backward()
    if mode == "quiet":
        return
    if mode == "work":
        # An unfinished operation and a callback nobody waits for.
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        kept.append(work.get_future().then(lambda future: future.value()))
        kept.append(work)
    elif mode == "arena":
        if backend == "fused":
            import fusedpg

            kept.append(fusedpg.empty(10_000).fill_(1))
        kept.append(model)
        kept.append(dist.new_group())
    elif mode == "compress":
        from fusedpg import compress

        state = compress.from_params({"compressor": "topk", "memory": "residual"})
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
        model.register_comm_hook(state, compress.hook)
        for _ in range(2):
            model(torch.ones(2, 300)).sum().backward()
        kept.append(model)
    elif mode == "destroy":
        dist.destroy_process_group()
    elif mode == "exit":
        sys.exit(5)
    elif mode == "raise":
        if rank == 1:
            raise ValueError("rank 1 gives up")
        for _ in range(1000):
            dist.all_reduce(tensor)
            time.sleep(0.01)
    elif mode == "fork":
        kept.append(model)
        child = os.fork()
        if child == 0:
            # Falls through to the end of the interpreter with the group inherited.
            sys.exit(9)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != 9:
            sys.exit(f"a forked child ended with {os.waitstatus_to_exitcode(status)}")
        dist.all_reduce(tensor)
    else:
        raise SystemExit(f"unknown mode {mode}")


def wait(children: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


def main() -> None:
    mode, times, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    first = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    wrong = False
    torch.set_num_threads(1)
    gc.freeze()
    for seed in range(first, first + times):
        # The store's server is a thread: it lives in a child of its own.
        ready, told = os.pipe()
        server = os.fork()
        if server == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(told, str(store.port).encode())
            os.close(told)
            signal.pause()
        os.close(told)
        port = int(os.read(ready, 16))
        os.close(ready)
        begin = time.monotonic()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                rank_main(mode, rank, port, backend, seed)
                return
            children.append(child)
        codes = wait(children, 20)
        print(f"{time.monotonic() - begin:.3f} {codes[0]} {codes[1]}", flush=True)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        if mode == "drawn" and codes != [ENDS[drawn(seed, rank)[1]] for rank in range(2)]:
            wrong = True
            print(f"seed {seed}: {codes} {drawn(seed, 0)} {drawn(seed, 1)}", file=sys.stderr)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
