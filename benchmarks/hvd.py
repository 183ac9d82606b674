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
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import _harness as harness
import fusedpg.hvd as hvd
from _harness import Bar, Context, Row
from _training import Arm, parameter_bytes, same_losses

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
        found.append(Bar(2, name, "hvd", parameter_bytes(name), "fused", at_most=most))
    found.append(Bar(2, "mlp", "hvd", parameter_bytes("mlp"), "gloo", at_least=1.3))
    return found


def measure(context: Context, args: argparse.Namespace, name: str) -> list[Row]:
    hvd.init()
    try:
        made = {backend: Mean(name, group, sgd) for backend, group in context.groups.items()}
        made["hvd"], made["hvd fused=True"] = (
            kind(name, None, sgd) for kind in (Horovod, FusedHorovod)
        )
        arms = {title: arm.step for title, arm in made.items()}
        same_losses(name, arms, 3, atol=1e-8)
        size = parameter_bytes(name)
        return harness.measure(context, arms, case=name, size=size, rounds=args.rounds)
    finally:
        hvd.shutdown()


class Mean(Arm):
    """The loss needs no classes."""

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.x).square().mean()
        return loss


class Horovod(Mean):
    """hvd's optimizer instead of DDP."""

    options: ClassVar[dict[str, Any]] = {}

    def make_optimizer(self) -> None:
        super().make_optimizer()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named, **self.options)


class FusedHorovod(Horovod):
    options: ClassVar[dict[str, Any]] = {"fused": True}


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


if __name__ == "__main__":
    sys.exit(main())
