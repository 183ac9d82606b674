#!/usr/bin/env bash
# torch 2.13.0, backend Gloo. The Work of an asynchronous reduce_scatter never says that it is completed: is_completed() is
# False three seconds later, when the result is there, and False after wait(), too. all_reduce, all_to_all and broadcast say
# so as soon as they have ended. A program that polls is_completed() before it waits polls for ever.
. "$(dirname "$0")/environment.sh"
environment torch==2.13.0 numpy==2.2.6
ranks 2 <<'PROGRAM'
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
given, part, whole = torch.ones(4), torch.zeros(2), torch.zeros(4)

def polled(name, work):
    end = time.monotonic() + 3
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.05)
    before = work.is_completed()
    work.wait()
    print(f"{name}, rank {rank}: completed {before}, after wait() {work.is_completed()}", flush=True)

polled("all_reduce", dist.all_reduce(torch.ones(4), async_op=True))
polled("all_to_all_single", dist.all_to_all_single(whole, given, async_op=True))
polled("broadcast", dist.broadcast(torch.ones(4), 0, async_op=True))
polled("reduce_scatter_tensor", dist.reduce_scatter_tensor(part, given, async_op=True))
print(f"the part of rank {rank}: {part.tolist()}", flush=True)
dist.destroy_process_group()
PROGRAM
expect <<'SEEN'
all_reduce, rank 0: completed True, after wait() True
all_reduce, rank 1: completed True, after wait() True
all_to_all_single, rank 0: completed True, after wait() True
all_to_all_single, rank 1: completed True, after wait() True
broadcast, rank 0: completed True, after wait() True
broadcast, rank 1: completed True, after wait() True
reduce_scatter_tensor, rank 0: completed False, after wait() False
reduce_scatter_tensor, rank 1: completed False, after wait() False
the part of rank 0: [2.0, 2.0]
the part of rank 1: [2.0, 2.0]
SEEN
