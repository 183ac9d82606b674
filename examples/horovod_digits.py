"""A program for Horovod, with another import: a small CNN learns handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/horovod_digits.py
    torchrun --standalone --nproc-per-node 2 examples/horovod_digits.py --compress topk
    torchrun --standalone --nproc-per-node 2 examples/horovod_digits.py --compress own

``--compress`` sends less of the gradients; ``own`` is a compressor of this program, as one is
written for GRACE.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fusedpg
import fusedpg.hvd as hvd


class Rows(fusedpg.compress.Compressor):
    """Sends the half of a gradient's first dimension that has the larger norms."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        rows = tensor.reshape(tensor.shape[0], -1)
        kept = rows.norm(dim=1).topk((rows.shape[0] + 1) // 2).indices
        return [rows[kept], kept], tensor.shape

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        rows, kept = tensors
        result = torch.zeros(ctx).reshape(ctx[0], -1)
        result[kept] = rows
        return result.reshape(ctx)


GRACE = {
    "topk": {"compressor": "topk", "memory": "residual", "compress_ratio": 0.1},
    "own": {"compressor": Rows(), "memory": "residual", "communicator": "allgather"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compress", choices=GRACE)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = (torch.tensor(of) for of in load_digits(return_X_y=True))
    images = (images.float() / 16).view(-1, 1, 8, 8)
    train = TensorDataset(images[300:], labels[300:])
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        hvd.SyncBatchNorm(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        grace=GRACE[args.compress] if args.compress else None,
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for samples, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(samples), targets)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
    model.eval()
    with torch.no_grad():
        right = (model(images[:300]).argmax(1) == labels[:300]).float().mean()
    right = hvd.allreduce(right, name="accuracy")
    if hvd.rank() == 0:
        print(f"accuracy {right:.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
