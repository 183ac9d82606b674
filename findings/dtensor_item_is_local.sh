#!/usr/bin/env bash
# torch 2.13.0, DTensor. The sum of a sharded DTensor is a DTensor whose placement is Partial. item(), and float(), give this
# rank's part of it without a collective and without an error: ranks print different numbers for one tensor, none of them its
# sum. full_tensor() and a comparison in the same program use the whole sum. mean() and max() are alike.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()
total = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).sum()
print(f"rank {rank}: item() {total.item()}, full_tensor() {total.full_tensor().item()}, == 28: {bool(total == 28)}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0: item() 6.0, full_tensor() 28.0, == 28: True
rank 1: item() 22.0, full_tensor() 28.0, == 28: True
SEEN
