"""Optimizers that the library does not have, as programs around a collective.

torchrun --standalone --nproc-per-node 2 examples/own_optimizers.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fusedpg
from fusedpg.fusion import Partial, Replicate, Shard, all_reduce

# A rank keeps the slice `fusedpg.shard_range` of each moment; gradients are each rank's own.


@fusedpg.fuse
def sgd(g: Partial, w: Replicate, m: Shard, lr: float, momentum: float):
    m = momentum * m + all_reduce(g, "mean")
    return w - lr * m, m


@fusedpg.fuse
def adamw(
    g: Partial, w: Replicate, m: Shard, v: Shard, t: int, lr: float, b1: float, b2: float, wd: float
):
    """Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2."""
    g = all_reduce(g, "mean")
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    update = m / (1 - b1**t) / (torch.sqrt(v) / (1 - b2**t) ** 0.5 + 1e-8)
    return w * (1 - lr * wd) - lr * update, m, v


@fusedpg.fuse
def lion(g: Partial, w: Replicate, m: Shard, lr: float, b1: float, b2: float, wd: float):
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2."""
    g = all_reduce(g, "mean")
    direction = torch.sign(b1 * m + (1 - b1) * g)
    m = b2 * m + (1 - b2) * g
    return w - lr * (direction + wd * w), m


@fusedpg.fuse
def rmsprop(g: Partial, w: Replicate, v: Shard, lr: float, alpha: float):
    """torch.optim.RMSprop, without momentum."""
    g = all_reduce(g, "mean")
    v = alpha * v + (1 - alpha) * g * g
    return w - lr * g / (torch.sqrt(v) + 1e-8), v


@fusedpg.fuse
def adafactor(g: Partial, w: Replicate, v: Shard, t: int, lr: float):
    """Shazeer and Stern 2018, arXiv:1804.04235, algorithm 5, with all of the second moment."""
    g = all_reduce(g, "mean")
    decay = 1 - t**-0.8
    v = decay * v + (1 - decay) * (g * g + 1e-30)
    u = g * torch.rsqrt(v)
    u = u / torch.clamp(u.square().mean().sqrt(), min=1.0)
    return w - lr * torch.clamp(w.square().mean().sqrt(), min=1e-3) * u, v


def main() -> None:
    dist.init_process_group("fused")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    params = list(model.parameters())
    moments = [torch.zeros(fusedpg.shard_range(p.numel(), world_size, rank)[1]) for p in params]
    torch.manual_seed(1 + rank)  # every rank has data of its own
    x = torch.randn(512, 20)
    y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()
    for step in range(101):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, m in zip(params, moments):
                lion.into((p, m), p.grad, p, m, lr=2e-3, b1=0.9, b2=0.99, wd=0.01)
        if rank == 0 and step % 25 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    if rank == 0:
        print(lion.schedule(params[0], params[0], moments[0], lr=0.1, b1=0.9, b2=0.99, wd=0.0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
