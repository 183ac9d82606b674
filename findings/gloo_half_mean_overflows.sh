#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. The mean (ReduceOp.AVG) of 65504 and 65504 in float16 is infinity: the sum is rounded to
# float16 before it is divided, although the mean of numbers of a type always fits it. DDP is not hit, as it divides first; a
# program that averages float16 itself sees an overflow that is none, and its loss scaler skips the step.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for dtype in (torch.float16, torch.bfloat16):
    largest = torch.finfo(dtype).max
    tensor = torch.full((1,), largest, dtype=dtype)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    print(f"{dtype}, rank {rank}: the mean is the input: {tensor.item() == largest}, infinite: {tensor.isinf().item()}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
torch.bfloat16, rank 0: the mean is the input: False, infinite: True
torch.bfloat16, rank 1: the mean is the input: False, infinite: True
torch.float16, rank 0: the mean is the input: False, infinite: True
torch.float16, rank 1: the mean is the input: False, infinite: True
SEEN
