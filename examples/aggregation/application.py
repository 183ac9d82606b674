"""Exercise 3 of SwitchML's tutorial: an application of one's own.

python examples/aggregation/application.py                               # without a network
torchrun --nproc-per-node 2 examples/aggregation/application.py          # two workers
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from fusedpg import aggregation

distributed = "RANK" in os.environ
if distributed:
    dist.init_process_group("fused")
# From switchml.cfg, if there is one, and the environment; what is given here goes before both.
config = aggregation.Config.load(backend="group" if distributed else "dummy")

with aggregation.Context(config) as context:
    data = torch.ones(1 << 20)  # 4 MB

    begun = time.perf_counter_ns()
    context.all_reduce(data)
    print(f"A synchronous all-reduce took {time.perf_counter_ns() - begun:,} ns.")

    begun = time.perf_counter_ns()
    job = context.all_reduce_async(data)
    print(f"Submitting an asynchronous one took {time.perf_counter_ns() - begun:,} ns.")

    begun = time.perf_counter_ns()
    job.wait()
    print(f"Waiting for it took {time.perf_counter_ns() - begun:,} ns.")

    assert torch.equal(data, torch.full_like(data, float(context.num_workers**2)))
    print(context.stats())

if distributed:
    dist.destroy_process_group()
