"""A rank of tests/python/test_compress_hosts.py: what a compressed step sends over its host's link.

Prints the bytes that the interface counts, by method.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedpg import compress

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
STEPS = 3


def counted() -> int:
    """When everything has been sent, also what the other ranks of this host send."""
    dist.barrier()
    time.sleep(0.05)
    return int(SENT.read_text())


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.zeros(1000, 1000))

    def forward(self, grad: torch.Tensor) -> torch.Tensor:
        return (self.all * grad).sum()


def sent(params: dict[str, object], schedule: str) -> float:
    """Bytes a step; without parameters DDP's own."""
    ddp = DistributedDataParallel(Weights())
    if params:
        ddp.register_comm_hook(compress.from_params(params, schedule=schedule), compress.hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    before = 0
    for step in range(1 + STEPS):
        if step == 1:
            before = counted()
        ddp.zero_grad()
        ddp(torch.randn(1000, 1000, generator=generator)).backward()
    return (counted() - before) / STEPS


def main(methods: dict[str, dict[str, object]]) -> None:
    dist.init_process_group("fused")
    found = {name: sent(params, "bucket") for name, params in methods.items()}
    if dist.get_node_local_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
