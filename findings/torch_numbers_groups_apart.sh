#!/usr/bin/env bash
# torch 2.15.0, torch.distributed. Two ranks; rank 0 makes a group of itself with use_local_synchronization=True, which the
# documentation says only members need to call. torch names later groups by how many a rank has made, and since 2.15 it counts
# this one, too (2.13.0 does not): rank 0's next group has another name than rank 1's, and names are what ranks meet by. A
# new_group() of both would wait until its timeout, on any backend; this script only prints the numbers.
. "$(dirname "$0")/environment.sh"
environment torch==2.15.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    dist.new_group([0], use_local_synchronization=True)
print(f"rank {rank} would call its next group {dist.distributed_c10d._process_group_name([0, 1], False)}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0 would call its next group 2
rank 1 would call its next group 1
SEEN
