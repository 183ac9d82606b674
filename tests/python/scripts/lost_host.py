"""Rank 1 ends without a word in the middle of reductions; rank 0 says what it raises."""

from __future__ import annotations

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

import fusedpg


def main(address: str, rank: int) -> None:
    dist.init_process_group(
        "fused",
        init_method=f"tcp://{address}:29501",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=10),
    )
    data = torch.ones(1_000_000)
    fusedpg.sparse_all_reduce(data)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            fusedpg.sparse_all_reduce(data.fill_(1))
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
