#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. all_reduce(MAX) of a NaN and 1 on two ranks: the result is NaN if rank 0 has the NaN, and 1 if
# rank 1 has it. torch.maximum gives NaN in both cases. So a check for NaNs by MAX misses those of higher ranks.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
nan = float("nan")
for owner in range(2):
    tensor = torch.tensor([nan if rank == owner else 1.0])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    print(f"rank {owner} has a NaN; rank {rank} gets {tensor.item()}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0 has a NaN; rank 0 gets nan
rank 0 has a NaN; rank 1 gets nan
rank 1 has a NaN; rank 0 gets 1.0
rank 1 has a NaN; rank 1 gets 1.0
SEEN
