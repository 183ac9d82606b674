"""Two ranks that end in many ways, many times, without tidying up.

Usage: exits.py <mode> <times> <backend>. Forks pairs of ranks from a process
that has imported torch, so that each one ends with a full finalisation of its
interpreter but does not pay for the import. Prints one line per pair: seconds
and the two exit codes.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import torch
import torch._dynamo  # DDP would import it in every rank
import torch.distributed as dist

kept: list[Any] = []


def rank_main(mode: str, rank: int, port: int, backend: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
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
    torch.set_num_threads(1)
    gc.freeze()
    for _ in range(times):
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
                rank_main(mode, rank, port, backend)
                return
            children.append(child)
        codes = wait(children, 20)
        print(f"{time.monotonic() - begin:.3f} {codes[0]} {codes[1]}", flush=True)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


if __name__ == "__main__":
    main()
