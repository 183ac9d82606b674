"""A rank of tests/python/test_hosts_moves.py: so many gathers and broadcasts of 4 MB, checked."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import fusedpg

NUMEL = 1_000_000


def main(gathers: int, broadcasts: int) -> None:
    dist.init_process_group("fused")
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    for _ in range(gathers):
        output = torch.empty(size * NUMEL)
        dist.all_gather_into_tensor(output, torch.full((NUMEL,), float(rank)))
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(NUMEL))
    for _ in range(broadcasts):
        tensor = torch.full((NUMEL,), float(rank + 1))
        dist.broadcast(tensor, 0)
        assert bool((tensor == 1).all())
    dist.barrier()
    if rank % 2 == 0:
        print(json.dumps({"transport": fusedpg.group_info()["transport"]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
