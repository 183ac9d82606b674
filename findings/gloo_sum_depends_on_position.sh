#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. Three ranks reduce tensors of 100,000 equal float32 values, 2^24, 1 and 1. Each position adds
# the same three numbers, but the result holds two values: Gloo splits a tensor among the ranks and each part begins its sum
# at another rank. So equal inputs give unequal outputs within one tensor, and the sum of a parameter changes when a bucket is
# laid out differently. All ranks agree with each other.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 3 <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.full((100_000,), [2.0**24, 1.0, 1.0][rank])
dist.all_reduce(tensor)
print(f"rank {rank}: {tensor.unique().tolist()}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0: [16777216.0, 16777218.0]
rank 1: [16777216.0, 16777218.0]
rank 2: [16777216.0, 16777218.0]
SEEN
