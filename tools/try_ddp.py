"""A plain DDP training that does not know fusedpg; tools/try_wheel.py runs it on several groups.

    torchrun --standalone --nproc-per-node 2 tools/try_ddp.py BACKEND RESULT.json

The result says which class the group had, what it was called, and every loss.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group(sys.argv[1])
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1 + rank)  # every rank has data of its own
x = torch.randn(512, 64)
y = x[:, :8].argmax(1)
losses = []
for _ in range(50):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

mine = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(mine) for _ in range(world_size)]
dist.all_gather(everyone, mine)
assert all(torch.equal(mine, other) for other in everyone), "the ranks' parameters differ"
if rank == 0:
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    result = {"class": type(group).__name__, "backend": dist.get_backend(), "losses": losses}
    Path(sys.argv[2]).write_text(json.dumps(result))
dist.destroy_process_group()
