#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. dist.reduce(t, dst=0) of r + 1 on four ranks: rank 0 has the sum, 10, as documented. The
# tensors of the other ranks are overwritten with sums of some ranks, although they are inputs there. Seen: 9, 7 and 4.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 4 <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.tensor([rank + 1.0])
dist.reduce(tensor, dst=0)
print(f"rank {rank}: sent {rank + 1}, has {tensor.item():g}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0: sent 1, has 10
rank 1: sent 2, has 9
rank 2: sent 3, has 7
rank 3: sent 4, has 4
SEEN
