"""Train a small CNN on handwritten digits with DistributedDataParallel and a fused optimizer.

torchrun --standalone --nproc-per-node 2 examples/digits_cnn.py
"""

from __future__ import annotations

import _common as common
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATES = {"adamw": 4e-3, "adam": 4e-3, "sgd": 0.05, "lamb": 0.02}


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main() -> None:
    parser = common.argument_parser(__doc__, steps=330, batch_size=64)
    args = common.parse_args(parser, LEARNING_RATES, quick={"steps": 40})
    if not common.launched(args.nproc):
        return
    common.start(args)

    train, test = common.digits(args.seed)
    images, labels = train.tensors
    batches = common.Batches(args, len(train))
    model = build_model()
    ddp = DistributedDataParallel(model)
    optimizer = common.make_optimizer(args, model, ddp)

    training = common.Training(args, model, optimizer, batches.steps)
    for step in training.steps():
        samples = batches[step]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(images[samples]), labels[samples])
        loss.backward()
        optimizer.step()
        training.record(loss)

    accuracy = common.evaluate(model, test, common.correct)
    training.finish(accuracy=f"{accuracy:.2%}")


if __name__ == "__main__":
    main()
