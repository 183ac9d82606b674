"""Time `fusedpg.fused_adamw_` against an all-reduce followed by torch's own fused AdamW.

    python benchmarks/fused_step.py --check-bars
    python benchmarks/fused_step.py --world-size 4 --sizes 1M,100M

A size is that of the parameters in fp32, one flat buffer with another of gradients. `fused_adamw_`
is one call on arena buffers; the other arms are `all_reduce`, a division by the world size and
`torch.optim.AdamW(fused=True)` on the same flat buffer, on the backend that they name (the
difference between the fused backend's two arms is what fusing gains). Before anything is timed each
arm makes five steps on known gradients, against one process on the averaged gradients. How times
are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
from _harness import COPY, Bar, Context, Row

FUSED = "fused_adamw_"
# A large eps: with a small one AdamW does not depend on the gradients' scale, and the check below
# would not tell a sum from a mean.
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 0.1, 1e-2
CHECKED_STEPS = 5
TOLERANCE = 1e-6  # relative norm of the difference of the parameters

Step = Callable[[Tensor], object]


def split_arm(backend: str) -> str:
    return f"{backend} all_reduce + AdamW"


K, M = 1 << 10, 1 << 20
GLOO = split_arm("gloo")
BARS = [
    Bar(2, "adamw step", FUSED, M, GLOO, at_least=6),
    Bar(2, "adamw step", FUSED, 100 * M, GLOO, at_least=4.5),
    Bar(2, "adamw step", FUSED, 100 * M, COPY, at_most=1.6),
    Bar(4, "adamw step", FUSED, M, GLOO, at_least=15),
    Bar(4, "adamw step", FUSED, 100 * M, GLOO, at_least=8),
]


def main() -> int:
    parser = harness.parser(__doc__, backends="fused,gloo", sizes="64K,1M,16M,100M", rounds=31)
    args = parser.parse_args()
    rows = harness.run(worker, args)
    harness.finish("fused_step", rows, args, bars=BARS)
    return 0


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    rows = []
    for size in harness.progress(context, args.sizes, harness.format_size):
        numel = size // 4
        reference = reference_parameters(numel, context.world_size)
        arms: dict[str, Callable[[], object]] = {COPY: harness.copy_arm(size)}
        for backend, group in context.groups.items():
            if backend == "fused":
                arms[FUSED] = FusedStep(numel, group).checked(reference, context)
            arms[split_arm(backend)] = SplitStep(numel, group).checked(reference, context)
        del reference
        rows += harness.measure(context, arms, case="adamw step", size=size, rounds=args.rounds)
    return rows


def initial(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def gradient(numel: int, step: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1 + 1000 * step + rank))


def make_optimizer(params: Tensor, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [params], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=fused
    )


def reference_parameters(numel: int, world_size: int) -> Tensor:
    """What one process gets from the average of all ranks' gradients."""
    params = initial(numel)
    optimizer = make_optimizer(params, fused=False)
    for step in range(CHECKED_STEPS):
        total = gradient(numel, step, 0)
        for rank in range(1, world_size):
            total += gradient(numel, step, rank)
        params.grad = total.div_(world_size)
        optimizer.step()
    return params


class StepArm:
    """A flat buffer of parameters, one of gradients, and a step on them."""

    params: Tensor
    grads: Tensor

    def step(self) -> None:
        raise NotImplementedError

    def checked(self, reference: Tensor, context: Context) -> Callable[[], object]:
        """The step, once it has followed the reference and all ranks hold the same bits."""
        name = type(self).__name__
        for step in range(CHECKED_STEPS):
            self.grads.copy_(gradient(self.grads.numel(), step, context.rank))
            self.step()
        error = ((self.params - reference).norm() / reference.norm()).item()
        harness.require(error <= TOLERANCE, f"{name}: relative difference {error:.2e}")
        harness.require(harness.same_on_all_ranks(self.params), f"{name}: ranks differ")
        self.grads.copy_(gradient(self.grads.numel(), 0, 0))
        return self.step


class FusedStep(StepArm):
    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        import fusedpg

        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if world_size == 1:  # as the optimizers do: there is nobody to share it with
            self.params, self.grads = initial(numel), torch.empty(numel)
        else:
            self.params = fusedpg.empty(numel, group=group).copy_(initial(numel))
            self.grads = fusedpg.empty(numel, group=group)
        _, owned = fusedpg.shard_range(numel, world_size, rank)
        self._state = torch.zeros(owned), torch.zeros(owned), torch.zeros(())
        self._fused_adamw_ = fusedpg.fused_adamw_
        self._group = group

    def step(self) -> None:
        exp_avg, exp_avg_sq, steps = self._state
        self._fused_adamw_(
            [self.params],
            [self.grads],
            [exp_avg],
            [exp_avg_sq],
            [],
            [steps],
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            group=self._group,
        )


class SplitStep(StepArm):
    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        self.params = initial(numel)
        self.grads = torch.zeros(numel)
        self.params.grad = self.grads
        self._optimizer = make_optimizer(self.params, fused=True)
        self._world_size = dist.get_world_size(group)
        self._group = group

    def step(self) -> None:
        dist.all_reduce(self.grads, group=self._group)
        self.grads.div_(self._world_size)
        self._optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
