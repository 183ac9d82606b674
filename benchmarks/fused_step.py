"""Time `fusedpg.fused_adamw_` against an all-reduce followed by torch's own fused AdamW.

    python benchmarks/fused_step.py --check-bars
    python benchmarks/fused_step.py --world-size 4 --sizes 1M,100M
    python benchmarks/fused_step.py --hosts 2 --rate 1gbit --densities 1,.1,.01 --sizes 16M

A size is that of the parameters in fp32, one flat buffer with another of gradients. `fused_adamw_`
is one call on arena buffers; the other arms are `all_reduce`, a division by the world size and
`torch.optim.AdamW(fused=True)` on the same flat buffer, on the backend that they name (the
difference between the fused backend's two arms is what fusing gains). With `--densities` only so
many blocks of 256 of each rank's gradients are not zero, and "block_skip" leaves the others out.
With `--hosts` each rank is on a host of its own: a network namespace whose link has a rate (needs
root, `ip` and `tc`; exits with 2 where that cannot be); there is no arena then. Before anything is
timed each arm makes five steps on known gradients, against one process on the averaged gradients.
How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
import _hosts as hosts
from _harness import COPY, Bar, Context, Row

FUSED, SKIPS = "fused_adamw_", "fused_adamw_ block_skip"
BLOCK = 256  # elements
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
    parser.add_argument("--densities", default="1", help="shares of the gradients' blocks")
    hosts.add_options(parser)
    args = parser.parse_args()
    args.densities = [float(part) for part in args.densities.split(",")]
    if not all(0 < density <= 1 for density in args.densities):
        parser.error("--densities: shares above 0, 1 at most")
    cases = [Case(size, density) for size in args.sizes for density in args.densities]
    name = "fused_step"
    if args.hosts:
        args.world_size = args.hosts
        name += f"_hosts_{args.rate}"
        if args.worker:
            hosts.worker(args, lambda context: measured(context, cases, args.rounds))
            return 0
        rows = hosts.run(args, len(cases), Row)
        if rows is None:
            return 2
    else:
        rows = harness.run(worker, argparse.Namespace(**vars(args), cases=cases))
    harness.finish(name, rows, args, bars=() if args.hosts else BARS)
    return 0


@dataclass(frozen=True)
class Case:
    size: int  # bytes of the parameters
    density: float  # share of the gradients' blocks that are not zero

    @property
    def name(self) -> str:
        return "adamw step" + ("" if self.density == 1 else f", {100 * self.density:.3g}%")


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    todo = harness.progress(
        context, args.cases, lambda case: f"{harness.format_size(case.size)}, {case.name}"
    )
    return [row for rows in measured(context, todo, args.rounds) for row in rows]


def measured(context: Context, todo: Iterable[Case], rounds: int) -> Iterator[list[Row]]:
    """Rows, case by case."""
    for case in todo:
        gradients = Gradients(case.size // 4, case.density)
        reference = reference_parameters(gradients, context.world_size)
        arms: dict[str, Callable[[], object]] = {COPY: harness.copy_arm(case.size)}
        for backend, group in context.groups.items():
            made = {split_arm(backend): SplitStep(gradients.numel, group)}
            if backend == "fused":
                made = {FUSED: FusedStep(gradients.numel, group)} | made
                made[SKIPS] = FusedStep(gradients.numel, group, block_skip=True)
            arms |= {n: arm.checked(n, gradients, reference, context) for n, arm in made.items()}
        del reference
        yield harness.measure(context, arms, case=case.name, size=case.size, rounds=rounds)


def initial(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Gradients:
    """Of each rank and step: zero but for a share of their blocks."""

    numel: int
    density: float

    def of(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
        values = torch.randn(self.numel, generator=generator)
        if self.density < 1:
            present = torch.rand(-(-self.numel // BLOCK), generator=generator) < self.density
            # Not a product: -0.0 is no zero that is skipped.
            return torch.where(present.repeat_interleave(BLOCK)[: self.numel], values, 0)
        return values


def make_optimizer(params: Tensor, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [params], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=fused
    )


def reference_parameters(gradients: Gradients, world_size: int) -> Tensor:
    """What one process gets from the average of all ranks' gradients."""
    params = initial(gradients.numel)
    optimizer = make_optimizer(params, fused=False)
    for step in range(CHECKED_STEPS):
        total = gradients.of(step, 0)
        for rank in range(1, world_size):
            total += gradients.of(step, rank)
        params.grad = total.div_(world_size)
        optimizer.step()
    return params


class StepArm:
    """A flat buffer of parameters, one of gradients, and a step on them."""

    params: Tensor
    grads: Tensor

    def step(self) -> None:
        raise NotImplementedError

    def checked(
        self, name: str, gradients: Gradients, reference: Tensor, context: Context
    ) -> Callable[[], object]:
        """The step, once it has followed the reference and all ranks hold the same bits."""
        for step in range(CHECKED_STEPS):
            self.grads.copy_(gradients.of(step, context.rank))
            self.step()
        error = ((self.params - reference).norm() / reference.norm()).item()
        harness.require(error <= TOLERANCE, f"{name}: relative difference {error:.2e}")
        harness.require(harness.same_on_all_ranks(self.params), f"{name}: ranks differ")
        self.grads.copy_(gradients.of(0, context.rank))
        return self.step


class FusedStep(StepArm):
    def __init__(self, numel: int, group: dist.ProcessGroup, *, block_skip: bool = False) -> None:
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
        self._block_skip = block_skip

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
            block_skip=self._block_skip,
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
