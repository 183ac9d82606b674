"""torchft: two replicas, of two ranks each, which may come and go.

torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510 &
export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
torchrun --master-port 29601 --nproc-per-node 2 examples/frameworks/with_torchft.py --replica 0 &
torchrun --master-port 29602 --nproc-per-node 2 examples/frameworks/with_torchft.py --replica 1
"""

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, Optimizer, ProcessGroupGloo

import fusedpg

args = arguments()
losses = Losses(args.losses)

# Inside a replica: the backend fused, and an optimizer whose state its ranks share.
dist.init_process_group("fused")
rank, ranks = dist.get_rank(), dist.get_world_size()
ddp = DistributedDataParallel(Model())
optimizer = fusedpg.optim.AdamW(groups(ddp.module), lr=LR, ddp=ddp, max_grad_norm=1.0)


# A rank that comes back gets the slices of the same rank of another replica.
def state_dict() -> dict[str, Any]:
    return {"model": ddp.module.state_dict(), "optimizer": optimizer.local_state_dict()}


def load_state_dict(state: dict[str, Any]) -> None:
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


# Between replicas: torchft. Each rank reduces its slices with the same rank of the others.
manager = Manager(
    pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=20)),
    min_replica_size=1,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    replica_id=f"replica{args.replica}",
    use_async_quorum=False,
)
wrapped = Optimizer(manager, optimizer)

data = Samples()
while manager.current_step() < args.steps:
    wrapped.zero_grad()  # waits for the replicas of this step
    step = manager.current_step()
    first = step * BATCH
    mine = [data[i] for i in range(first + rank, first + BATCH, ranks)]
    loss = ddp(**{key: torch.stack([sample[key] for sample in mine]) for key in "xy"})
    losses.note(step, loss)
    loss.backward()
    for param in ddp.parameters():
        if param.grad is not None:
            manager.allreduce(param.grad.local()).wait()
    wrapped.step()
    time.sleep(args.pause)
manager.shutdown()
