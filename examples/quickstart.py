"""The shortest way in: torchrun --standalone --nproc-per-node 2 examples/quickstart.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fusedpg

dist.init_process_group("fused")
fusedpg.keep_freed_memory()  # gradients are freed in every step
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
ddp = nn.parallel.DistributedDataParallel(model)
# The one changed line; it was torch.optim.AdamW(model.parameters(), lr=1e-2).
optimizer = fusedpg.optim.AdamW(model.parameters(), lr=1e-2, ddp=ddp)

torch.manual_seed(1 + rank)  # every rank has data of its own
x = torch.randn(512, 20)
y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()
for step in range(101):
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()  # with the backward: reduce-scatter, AdamW on this rank's share, all-gather
    if rank == 0 and step % 25 == 0:
        print(f"step {step:3}: loss {loss.item():.4f}")

mine = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.empty_like(mine) for _ in range(world_size)]
dist.all_gather(everyone, mine)
assert all(torch.equal(mine, other) for other in everyone)
if rank == 0:
    print(f"{world_size} ranks hold the same {mine.numel()} parameters, bit for bit")
dist.destroy_process_group()
