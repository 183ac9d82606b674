"""A rank of tests/python/test_hosts.py: reductions between hosts, checked; prints what it moved."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import fusedpg

NUMEL = 2_000_003
BLOCK = 256


def contribution(rank: int, density: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.rand(-(-NUMEL // BLOCK), generator=generator) < density
    data = torch.randint(-9, 10, (NUMEL,), generator=generator)
    return (data * chosen.repeat_interleave(BLOCK)[:NUMEL]).float()


def main(density: float) -> None:
    dist.init_process_group("fused", pg_options=fusedpg.Options(block_skip="on"))
    rank, size = dist.get_rank(), dist.get_world_size()
    want = sum((contribution(other, density) for other in range(size)), torch.zeros(NUMEL))
    for _ in range(5):
        data = contribution(rank, density)
        dist.all_reduce(data)
        assert torch.equal(data, want)
    table = torch.nn.Embedding(1000, 8, sparse=True)
    table.weight.data.fill_(1)
    model = torch.nn.parallel.DistributedDataParallel(table)
    model(torch.tensor([rank, 7])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert torch.allclose(table.weight.grad.to_dense()[7], torch.ones(8))
    # In one write: ranks share a pipe, and print writes the end of the line by itself.
    os.write(1, f"moved {json.dumps(fusedpg.stats()['all_reduce'])}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
