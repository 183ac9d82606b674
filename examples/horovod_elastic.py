"""Horovod's elastic training: ranks may be lost and join, and training goes on.

    fusedpg-run -np 3 --min-np 2 python examples/horovod_elastic.py

Kill a rank while it runs (its pid is in the output): the others go on from the last commit.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.nn import functional

import fusedpg.hvd as hvd

SAMPLES, FEATURES, CLASSES = 1536, 32, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES)
    labels = (inputs @ torch.randn(FEATURES, CLASSES)).argmax(1)
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, args.batch, sampler=sampler)

    model = torch.nn.Linear(FEATURES, CLASSES)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
        while state.epoch < args.epochs:
            for batch, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                sampler.record_batch(batch, len(x))
                if batch % 10 == 9:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    if hvd.rank() == 0:
        accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
        print(f"epoch {state.epoch}, {hvd.size()} ranks, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
