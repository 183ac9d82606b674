#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. The flight recorder of torch is filled by Gloo, too. But every collective stays "scheduled",
# without a time of its end, after it has ended, and sends and receives are not recorded. So a dump of
# a healthy job reads as one in which nothing ever ended.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import pickle, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
work = dist.isend(torch.ones(3), 1) if rank == 0 else dist.irecv(torch.ones(3), 0)
work.wait()
dist.barrier()
for entry in pickle.loads(_dump_fr_trace())["entries"]:
    print(f"rank {rank}: {entry['profiling_name']}, {entry['state']}, ended {entry['time_discovered_completed_ns']}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
rank 0: gloo:all_reduce, scheduled, ended None
rank 0: gloo:barrier, scheduled, ended None
rank 1: gloo:all_reduce, scheduled, ended None
rank 1: gloo:barrier, scheduled, ended None
SEEN
