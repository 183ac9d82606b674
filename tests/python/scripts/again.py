"""Ranks without a launcher that make, use and destroy a default group, again at the same address.

Usage: again.py <layout: one, hosts> <backend> <ranks> <rounds> <what>. Each rank prints its number
and the seconds that destroying took at most. `what`: the operation of a round; or "kept", where
each rank holds the group until the next round; "late", where rank 0 destroys later than others;
"dead", where the last rank is killed, after which the others destroy their group once; "alive",
where rank 0 does not destroy its group, but ends later.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


def rank_main(backend: str, rank: int, size: int, rounds: int, what: str) -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    timeout = datetime.timedelta(seconds=20)
    longest = 0.0
    kept: Any = None
    for _ in range(rounds):
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
        x = torch.ones(3)
        if what == "broadcast":
            dist.broadcast(x, 0)
        elif what == "subgroup":
            dist.all_reduce(x, group=dist.new_group(timeout=timeout))
        elif what != "nothing":
            dist.all_reduce(x)
        if what == "kept":
            kept = dist.group.WORLD
        if what == "dead":
            if rank == size - 1:
                os.kill(os.getpid(), 9)
            try:
                dist.all_reduce(x)
                raise AssertionError("nothing was noticed")
            except RuntimeError:
                pass
        if rank == 0 and what in ("late", "alive"):
            time.sleep(0.5)
        if rank == 0 and what == "alive":
            os._exit(0)
        begin = time.monotonic()
        dist.destroy_process_group()
        longest = max(longest, time.monotonic() - begin)
    del kept
    os.write(1, f"{rank} {longest:.3f}\n".encode())  # at once


def main() -> None:
    layout, backend, size, rounds, what = *sys.argv[1:3], *map(int, sys.argv[3:5]), sys.argv[5]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    ranks = []
    for rank in range(size):
        forked = os.fork()
        if forked == 0:
            if layout == "hosts":
                os.environ["FUSEDPG_HOST_ID"] = f"host {rank % 2 if size > 2 else rank}"
            import fusedpg

            if backend == "gloo":
                fusedpg.serve_gloo()
            rank_main(backend, rank, size, rounds, what)
            return
        ranks.append(forked)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    expected = [0] * (size - 1) + [-9 if what == "dead" else 0]
    if codes != expected:
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
