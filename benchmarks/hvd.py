"""Time training steps of fusedpg.hvd's DistributedOptimizer, and of DDP on "fused" and on Gloo.

    python benchmarks/hvd.py --check-bars
    python benchmarks/hvd.py --models vectors --rounds 51

Three models: the MLP and the CNN of ddp.py, and one of 1,000 parameters of 1 KB each, where the
work for each parameter is all that counts. Arms: `fused` and `gloo` are DDP, `hvd` is Horovod's
optimizer on "fused", and `hvd fused=True` the same with the fused step. They run in turn, one step
a sample, each with a model of its own; their losses are compared before. How times are taken: see
`_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import _harness as harness
import _training as training
import fusedpg.hvd as hvd
from _harness import Bar, Context, Row

MODELS = ("mlp", "cnn", "vectors")


def main() -> int:
    parser = harness.Parser(__doc__, rounds=31)
    parser.names("--models", MODELS)
    args = parser.parse_args()
    rows = harness.run(measure, args, args.models)
    return harness.finish("hvd", rows, args, limit="fused", bars=bars())


def bars() -> list[Bar]:
    found = []
    for name, most in {"mlp": 1.05, "cnn": 1.05, "vectors": 1.3}.items():
        found.append(Bar(2, name, "hvd", training.parameter_bytes(name), "fused", at_most=most))
    found.append(Bar(2, "mlp", "hvd", training.parameter_bytes("mlp"), "gloo", at_least=1.3))
    return found


def measure(context: Context, args: argparse.Namespace, name: str) -> list[Row]:
    hvd.init()
    try:
        arms = {backend: arm(name, group) for backend, group in context.groups.items()}
        arms["hvd"] = arm(name)
        arms["hvd fused=True"] = arm(name, fused=True)
        training.same_losses(name, arms, 3, atol=1e-8)
        size = training.parameter_bytes(name)
        return harness.measure(context, arms, case=name, size=size, rounds=args.rounds)
    finally:
        hvd.shutdown()


def arm(name: str, group: Any = None, **options: Any) -> Callable[[], torch.Tensor]:
    """A step of training: under DDP if there is a group, else with hvd's optimizer."""
    model = training.MODELS[name]
    torch.manual_seed(0)
    net: nn.Module = model.make()
    if group is not None:
        net = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    if group is None:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = model.batch(generator)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    sys.exit(main())
