#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. all_reduce of two 2x2 matrices, of which rank 1's is stored by columns: Gloo adds what lies at
# the same place in memory, not what has the same index. There is no error, both ranks have a wrong sum, and the ranks end
# with different matrices. Expected: [[11, 22], [33, 44]] on both.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
if rank == 1:
    matrix = (10 * matrix).t().contiguous().t()  # stored by columns
dist.all_reduce(matrix)
print(f"rank {rank}: {matrix.tolist()}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0: [[11.0, 32.0], [23.0, 44.0]]
rank 1: [[11.0, 23.0], [32.0, 44.0]]
SEEN
