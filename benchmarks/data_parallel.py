"""Time an optimizer step written as a fused function, under each kind of schedule.

    python benchmarks/data_parallel.py --check-bars
    python benchmarks/data_parallel.py --world-size 4 --sizes 16M,100M

The experiment of CoCoNet (ASPLOS 2022, figure 10) for this project: SGD with momentum and AdamW
over 2^10 to 2^26 elements of fp32, as functions of `fusedpg.fuse` that write into their arguments,
in the arena. The arms, in turn:

    as written            all_reduce, and operation by operation
    on slices             reduce-scatter, the same operations on the owned slice, all-gather
    one operation         the same as one operation of the group, with generated C++
    fused_sgd_, ...       the operation that is written by hand
    gloo all_reduce, ...  Gloo's all_reduce, then on every rank all of torch's operations, in place,
                          or torch.optim's optimizer with fused=True

Before anything is timed each arm makes five steps on known gradients, against one process on the
averaged gradients; of SGD the generated step must have the bits of the schedules that run operation
by operation (AdamW's square roots are exact there, and torch's may not be). How times are taken:
see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
import fusedpg
from _harness import COPY, Bar, Context, Row
from _steps import (
    BETAS,
    CHECKED_STEPS,
    EPS,
    HYPER,
    LR,
    OPTIONS,
    WEIGHT_DECAY,
    Gradients,
    StepArm,
    initial,
)
from collectives import case_title
from fusedpg import fusion
from fusedpg.fusion import Partial, Replicate, Shard, all_reduce

SGD, ADAMW = "sgd step", "adamw step"
WRITTEN, SLICES, ONE = "as written", "on slices", "one operation"
BY_HAND = {SGD: "fused_sgd_", ADAMW: "fused_adamw_"}
GLOO = {SGD: "gloo all_reduce + SGD", ADAMW: "gloo all_reduce + eager AdamW"}
# With torch.optim's kernels.
GLOO_FUSED = {SGD: "gloo all_reduce + SGD(fused=True)", ADAMW: "gloo all_reduce + AdamW"}
MOMENTUM = 0.9
M = 1 << 20
BARS = [
    bar
    for case in (SGD, ADAMW)
    for size in (16 * M, 100 * M)
    for bar in (
        Bar(2, case, ONE, size, BY_HAND[case], at_most=1.1),
        Bar(2, case, ONE, size, GLOO[case], at_least=5),
    )
]
_ON_SLICES = (fusion.Reorder(), fusion.AsShard())
SCHEDULES: dict[str, tuple[fusion.Transformation, ...]] = {
    WRITTEN: (),
    SLICES: _ON_SLICES,
    ONE: (*_ON_SLICES, fusion.FuseCollective()),
}


@fusedpg.fuse
def sgd(g: Partial, w: Replicate, m: Shard, momentum: float, lr: float) -> Any:
    m = momentum * m + all_reduce(g, "mean")
    return w - lr * m, m


@fusedpg.fuse
def adamw(
    g: Partial,
    w: Replicate,
    m: Shard,
    v: Shard,
    beta1: float,
    beta2: float,
    keep: float,
    eps: float,
    step_size: float,
    root: float,
) -> Any:
    g = all_reduce(g, "mean")
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    return w * keep - step_size * (m / (torch.sqrt(v) / root + eps)), m, v


def corrected(step: int) -> tuple[float, float]:
    """AdamW's lr / (1 - beta1^step), and sqrt(1 - beta2^step)."""
    return LR / (1 - BETAS[0] ** step), (1 - BETAS[1] ** step) ** 0.5


class Step(StepArm):
    """Parameters, gradients and state; of the state a rank has its slice, or all of it."""

    def __init__(self, case: str, w: Tensor, g: Tensor, owned: int) -> None:
        self.case, self.params, self.grads = case, w, g
        self.state = [torch.zeros(owned) for _ in range(1 if case == SGD else 2)]
        self.steps = torch.zeros(())
        self.count = 0

    def reset(self) -> None:
        self.params.copy_(initial(self.params.numel()))
        for state in self.state:
            state.zero_()
        self.steps.zero_()
        self.count = 0
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.params.grad = self.grads
        if self.case == SGD:
            return torch.optim.SGD([self.params], lr=LR, momentum=MOMENTUM, fused=True)
        return torch.optim.AdamW([self.params], **OPTIONS, fused=True)

    def program(self, *schedule: fusion.Transformation) -> Callable[[], object]:
        if self.case == SGD:
            run, (m,) = sgd.scheduled(*schedule), self.state
            return lambda: run.into((self.params, m), self.grads, self.params, m, MOMENTUM, LR)
        step, (m, v) = adamw.scheduled(*schedule), self.state
        keep = 1 - LR * WEIGHT_DECAY

        def call() -> None:
            self.count += 1
            numbers = (*BETAS, keep, EPS, *corrected(self.count))
            step.into((self.params, m, v), self.grads, self.params, m, v, *numbers)

        return call

    def by_hand(self) -> Callable[[], object]:
        if self.case == SGD:
            (m,) = self.state
            return lambda: fusedpg.fused_sgd_(
                [self.params], [self.grads], [m], lr=LR, momentum=MOMENTUM, weight_decay=0.0,
                dampening=0.0, nesterov=False, is_first_step=False,
            )  # fmt: skip
        m, v = self.state
        return lambda: fusedpg.fused_adamw_(
            [self.params], [self.grads], [m], [v], [], [self.steps], **HYPER
        )

    def update(self, gradient: Tensor) -> None:
        """With torch's operations, in place where they allow."""
        self.count += 1
        if self.case == SGD:
            (m,) = self.state
            self.params.sub_(m.mul_(MOMENTUM).add_(gradient), alpha=LR)
            return
        m, v = self.state
        m.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        step_size, root = corrected(self.count)
        self.params.mul_(1 - LR * WEIGHT_DECAY)
        self.params.addcdiv_(m, v.sqrt().div_(root).add_(EPS), value=-step_size)

    def summed(
        self, group: dist.ProcessGroup, update: Callable[[], object]
    ) -> Callable[[], object]:
        """An all_reduce, and what each rank does then."""
        world_size = dist.get_world_size(group)

        def call() -> None:
            dist.all_reduce(self.grads, group=group)
            self.grads.div_(world_size)
            update()

        return call


def main() -> int:
    sizes = ",".join(str(4 << power) for power in range(10, 27, 4)) + ",16M,100M"
    parser = harness.Parser(__doc__, sizes=sizes, rounds=31)
    parser.names("--cases", (SGD, ADAMW), help="of the two, by comma")
    args = parser.parse_args()
    cases = [(case, size) for case in args.cases for size in sorted(set(args.sizes))]
    rows = harness.run(measure, args, cases, title=case_title)
    return harness.finish("data_parallel", rows, args, bars=BARS)


def measure(context: Context, args: argparse.Namespace, case: tuple[str, int]) -> list[Row]:
    name, size = case
    arms = {COPY: harness.copy_arm(size)} | made(context, name, size // 4)
    # The large ones take seconds a round.
    rounds = args.rounds if size <= 32 * M else max(args.rounds // 3, 3)
    return harness.measure(context, arms, case=name, size=size, rounds=rounds)


def made(context: Context, case: str, numel: int) -> dict[str, Callable[[], object]]:
    """The arms, which have made the steps that they should."""
    gradients = Gradients(numel, density=1)
    reference = Step(case, initial(numel), torch.empty(0), numel)
    for step in range(CHECKED_STEPS):
        total = gradients.of(step, 0)
        for rank in range(1, context.world_size):
            total += gradients.of(step, rank)
        reference.update(total.div_(context.world_size))
    arms: dict[str, Callable[[], object]] = {}
    bits: Tensor | None = None

    def check(name: str, mine: Step, call: Callable[[], object]) -> None:
        mine.reset()
        mine.step = call  # type: ignore[method-assign]
        arms[name] = mine.checked(name, gradients, reference.params, context)

    if "fused" in context.groups:
        owned = fusedpg.shard_range(numel, context.world_size, context.rank)[1]
        mine = Step(case, fusedpg.empty(numel), fusedpg.empty(numel), owned)
        for name, schedule in SCHEDULES.items():
            # A reduction by itself is a generated operation, too: each schedule has one a step.
            before = int(fusedpg.stats().get("fused_program", {}).get("calls", 0))
            check(name, mine, mine.program(*schedule))
            after = int(fusedpg.stats().get("fused_program", {}).get("calls", 0))
            harness.require(after - before == CHECKED_STEPS, f"{name}: {after - before} generated")
            bits = mine.params.clone() if bits is None else bits
            same = case != SGD or torch.equal(mine.params, bits)
            harness.require(same, f"{name}: other bits")
        check(BY_HAND[case], mine, mine.by_hand())
    if "gloo" in context.groups:
        gloo = context.groups["gloo"]
        whole = Step(case, torch.empty(numel), torch.empty(numel), numel)
        check(GLOO[case], whole, whole.summed(gloo, lambda: whole.update(whole.grads)))
        other = Step(case, torch.empty(numel), torch.empty(numel), 0)
        check(GLOO_FUSED[case], other, other.summed(gloo, lambda: other.optimizer.step()))
    return arms


if __name__ == "__main__":
    sys.exit(main())
