"""Time training steps of unchanged DistributedDataParallel on the fused backend and on Gloo.

    python benchmarks/ddp.py --check-bars
    python benchmarks/ddp.py --models cnn --optimizer sgd --rounds 51

Two models: an MLP of 25 million parameters at a small batch, where communication weighs most, and a
CNN that is bound by its arithmetic. A step is zero_grad, forward, backward, optimizer step. The
arms are DDP on each backend, and two without communication: `no_sync`, the fused arm under
`no_sync()`, and `no_comm`, DDP with a hook that returns the bucket as it is. The second shows what
DDP itself costs: it copies every gradient into its bucket, which no backend can avoid. Each arm
trains a model of its own, in turn, one step a sample. Before anything is timed the arms' losses are
compared, and the fused arm's gradients must lie in the arena. How times are taken: see
`_harness.py`.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import _harness as harness
from _harness import Bar, Context, Row
from _training import Arm, MakeOptimizer, adamw, parameter_bytes, same_losses

NO_SYNC = "no_sync"
NO_COMM = "no_comm"
CHECKED_STEPS = 4  # DDP rebuilds its buckets within the first three

MODELS = ("mlp", "cnn")
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
}


def bars() -> list[Bar]:
    mlp, cnn = map(parameter_bytes, MODELS)
    return [
        Bar(2, "mlp", "fused", mlp, "gloo", at_least=1.5),
        Bar(2, "mlp", "fused", mlp, NO_SYNC, at_most=1.05),
        Bar(2, "cnn", "fused", cnn, "gloo", at_least=1.0),
    ]


def main() -> int:
    parser = harness.Parser(__doc__, rounds=31)
    parser.names("--models", MODELS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    args = parser.parse_args()
    rows = harness.run(measure, args, args.models)
    return harness.finish("ddp", rows, args, limit=NO_SYNC, bars=bars())


def measure(context: Context, args: argparse.Namespace, name: str) -> list[Row]:
    kind = OPTIMIZERS[args.optimizer]
    arms = {backend: Arm(name, group, kind) for backend, group in context.groups.items()}
    check(name, arms, context)
    group = next(iter(context.groups.values()))
    arms[NO_COMM] = Arm(name, group, kind).without_communication()
    arms[NO_SYNC] = UnsyncedArm(name, group, kind)
    steps = {arm: training.step for arm, training in arms.items()}
    size = parameter_bytes(name)
    return harness.measure(context, steps, case=name, size=size, rounds=args.rounds)


class UnsyncedArm(Arm):
    def backward(self) -> Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            return super().backward()


def check(name: str, arms: dict[str, Arm], context: Context) -> None:
    """Every arm has the same losses on the same batches, and the fused one works in the arena."""
    losses = same_losses(name, {n: arm.step for n, arm in arms.items()}, CHECKED_STEPS)
    harness.require(bool(losses[-1] < losses[0]), f"{name}: does not learn")
    if "fused" in arms:
        import fusedpg

        grads = [p.grad for p in arms["fused"].model.parameters() if p.grad is not None]
        group = context.groups["fused"]
        inside = all(fusedpg.in_arena(grad, group=group) for grad in grads)
        harness.require(bool(grads) and inside, f"{name}: DDP's buckets are not in the arena")


if __name__ == "__main__":
    sys.exit(main())
