"""One optimizer step alone, on a flat buffer of parameters and one of gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import _harness as harness
from _harness import COPY, Bar, Context, Row
from fused_step import (
    BETAS,
    CHECKED_STEPS,
    EPS,
    LR,
    TOLERANCE,
    WEIGHT_DECAY,
    FusedStep,
    Gradients,
    SplitStep,
    StepArm,
    initial,
    make_optimizer,
    reference_parameters,
)

SIZE = 100 << 20
ONE_OP = "fused_adamw_"
SHARED = "fused_adamw_, shared parameters"
TWO_OPS = "reduce_shards, fused step (f)"
THREE_OPS = "reduce_scatter, AdamW, all_gather (e)"
GLOO, DEEPSPEED = "gloo all_reduce + AdamW", "deepspeed all_reduce + AdamW"
CLASS, LOCAL = "fusedpg.optim.AdamW, no DDP", "torch.optim.AdamW(fused=True)"
LAMB_OP, LAMB_GLOO = "fused_lamb_", "gloo all_reduce + LAMB"


def bars() -> list[Bar]:
    adamw = "adamw step"
    bert = 4 * sum(torch.Size(shape).numel() for shape in bert_shapes())
    return [
        Bar(2, adamw, ONE_OP, SIZE, GLOO, at_least=4.5),
        Bar(4, adamw, ONE_OP, SIZE, GLOO, at_least=8),
        Bar(2, adamw, ONE_OP, SIZE, DEEPSPEED, at_least=2.8),
        Bar(2, adamw, SHARED, SIZE, GLOO, at_least=6),
        Bar(2, adamw, ONE_OP, SIZE, THREE_OPS, at_least=1.15),
        Bar(2, adamw, TWO_OPS, SIZE, THREE_OPS, at_least=1.0),
        Bar(2, "lamb step", LAMB_OP, SIZE, LAMB_GLOO, at_least=5),
        Bar(2, "list", LIST, bert, ONE_TENSOR, at_most=1.01),
        Bar(1, adamw, CLASS, SIZE, LOCAL, at_least=1.0),
    ]


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    rows = []
    for size in harness.progress(context, args.sizes, harness.format_size):
        numel = size // 4
        gradients = Gradients(numel, density=1.0)
        reference = reference_parameters(gradients, context.world_size)
        arms: dict[str, Callable[[], object]] = {COPY: harness.copy_arm(size)}
        for name, make in adamw_arms(context).items():
            arms[name] = make(numel).checked(name, gradients, reference, context)
        rows += harness.measure(context, arms, case="adamw step", size=size, rounds=args.rounds)
        del arms, reference
        lamb = {name: make(numel) for name, make in lamb_arms(context).items()}
        check_lamb(lamb, context)
        timed: dict[str, Callable[[], object]] = {COPY: harness.copy_arm(size)}
        timed.update((name, arm.step) for name, arm in lamb.items())
        rows += harness.measure(context, timed, case="lamb step", size=size, rounds=args.rounds)
    return rows


def adamw_arms(context: Context) -> dict[str, Callable[[int], StepArm]]:
    arms: dict[str, Callable[[int], StepArm]] = {}
    groups = context.groups
    if "fused" in groups:
        fused = groups["fused"]
        arms[ONE_OP] = lambda numel: FusedStep(numel, fused)
        arms[TWO_OPS] = lambda numel: TwoOps(numel, fused)
        arms[THREE_OPS] = lambda numel: ThreeOps(numel, fused)
        arms[SHARED] = lambda numel: SharedStep(numel, fused)
        arms[CLASS] = lambda numel: ClassStep(numel, fused)
    if context.world_size == 1:
        arms[LOCAL] = lambda numel: LocalStep(numel)
        return arms
    if "gloo" in groups:
        gloo = groups["gloo"]
        arms[GLOO] = lambda numel: SplitStep(numel, gloo)
    deepspeed = harness.load_deepspeed(context.rank, context.world_size)
    if deepspeed is not None:
        arms[DEEPSPEED] = lambda numel: DeepSpeedStep(numel, deepspeed, context.world_size)
    return arms


class TwoOps(FusedStep):
    """What the class does with overlap=False: reduce in backward, the rest in step()."""

    def step(self) -> None:
        import fusedpg
        from fusedpg.functional import _backend

        backend: Any = _backend(self._group)
        backend.reduce_shards_([self.grads])
        offset, length = fusedpg.shard_range(
            self.params.numel(), dist.get_world_size(self._group), dist.get_rank(self._group)
        )
        exp_avg, exp_avg_sq, steps = self._state
        from fusedpg._registration import load_extension

        hyper = load_extension().Hyper(
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
        )
        backend.fused_step_(
            "fused_adamw_",
            [self.params],
            [self.grads[offset : offset + length]],
            [[exp_avg], [exp_avg_sq]],
            [steps],
            [hyper],
            reduced=True,
        )


class SharedStep(FusedStep):
    """All ranks hold one copy of the parameters."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        from fusedpg.functional import _backend

        super().__init__(numel, group)
        self.params = _backend(group).empty_shared([numel], torch.float32)
        if dist.get_rank(group) == 0:
            self.params.copy_(initial(numel))
        dist.barrier(group=group)

    def step(self) -> None:
        from fusedpg._registration import load_extension
        from fusedpg.functional import _backend

        exp_avg, exp_avg_sq, steps = self._state
        hyper = load_extension().Hyper(
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
        )
        _backend(self._group).fused_step_(
            "fused_adamw_",
            [self.params],
            [self.grads],
            [[exp_avg], [exp_avg_sq]],
            [steps],
            [hyper],
            shared_params=True,
        )


class ThreeOps(StepArm):
    """Our collectives, torch's AdamW between them."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        import fusedpg

        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        chunk = -(-numel // world_size)
        self._padded = fusedpg.empty(chunk * world_size, group=group).zero_()
        self._grads = fusedpg.empty(chunk * world_size, group=group).zero_()
        self.params, self.grads = self._padded[:numel], self._grads[:numel]
        self.params.copy_(initial(numel))
        own = self._padded[rank * chunk : (rank + 1) * chunk]
        self._own = nn.Parameter(own)
        self._own.grad = fusedpg.empty(chunk, group=group)
        self._optimizer = torch.optim.AdamW(
            [self._own], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._group = group

    def step(self) -> None:
        assert self._own.grad is not None
        dist.reduce_scatter_tensor(
            self._own.grad, self._grads, op=dist.ReduceOp.AVG, group=self._group
        )
        self._optimizer.step()
        dist.all_gather_into_tensor(self._padded, self._own.detach(), group=self._group)


class ClassStep(StepArm):
    """The optimizer class without DDP, on gradients in ordinary memory."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        import fusedpg

        self.params, self.grads = initial(numel).requires_grad_(), torch.zeros(numel)
        self.params.grad = self.grads
        self._optimizer = fusedpg.optim.AdamW(
            [self.params],
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            process_group=group,
        )
        self.params = self.params.detach()

    def step(self) -> None:
        self._optimizer.step()


class LocalStep(StepArm):
    """torch's fused AdamW in one process."""

    def __init__(self, numel: int) -> None:
        self.params, self.grads = initial(numel), torch.zeros(numel)
        self.params.grad = self.grads
        self._optimizer = make_optimizer(self.params, fused=True)

    def step(self) -> None:
        self._optimizer.step()


class DeepSpeedStep(LocalStep):
    def __init__(self, numel: int, all_reduce: Callable[[Tensor], object], world_size: int) -> None:
        super().__init__(numel)
        self._all_reduce = all_reduce
        self._world_size = world_size

    def step(self) -> None:
        self._all_reduce(self.grads)
        self.grads.div_(self._world_size)
        self._optimizer.step()


# ---------------------------------------------------------------------------------------------
# Many tensors

ONE_TENSOR, LIST = "one flat tensor", "397 tensors"


def bert_shapes() -> list[tuple[int, ...]]:
    """The parameters of BERT-large with its pre-training heads: 397 tensors, 336 million."""
    width, layer = 1024, []
    for rows, columns in ((width, width),) * 4 + ((4 * width, width), (width, 4 * width)):
        layer += [(rows, columns), (rows,)]
    layer += [(width,)] * 4
    embeddings = [(30522, width), (512, width), (2, width), (width,), (width,)]
    heads = [(width, width), (width,), (width, width), (width,), (width,), (width,)]
    return embeddings + 24 * layer + heads + [(30522,), (1,)]


def measure_list(context: Context, rounds: int) -> list[Row]:
    """What describing 397 tensors costs, against one tensor of all their elements."""
    import fusedpg

    group = context.groups["fused"]
    shapes = bert_shapes()
    numels = [torch.Size(shape).numel() for shape in shapes]
    # The same memory for both: only its description differs.
    params, grads = (fusedpg.empty(sum(numels), group=group).zero_() for _ in range(2))
    timed: dict[str, Callable[[], object]] = {}
    for name, parts in ((ONE_TENSOR, [sum(numels)]), (LIST, numels)):
        owned = [fusedpg.shard_range(n, context.world_size, context.rank)[1] for n in parts]
        lists = [list(whole.split(parts)) for whole in (params, grads)]
        for _ in range(2):
            lists.append(list(torch.zeros(sum(owned)).split(owned)))
        steps = [torch.zeros(()) for _ in parts]
        timed[name] = _list_step(lists, steps, group)
    harness.require(len(numels) == 397, f"{len(numels)} tensors")
    return harness.measure(
        context, timed, case="list", size=4 * sum(numels), rounds=max(rounds // 2, 5)
    )


def _list_step(
    lists: list[list[Tensor]], steps: list[Tensor], group: dist.ProcessGroup
) -> Callable[[], None]:
    import fusedpg

    params, grads, exp_avgs, exp_avg_sqs = lists

    def step() -> None:
        fusedpg.fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            group=group,
        )

    return step


# ---------------------------------------------------------------------------------------------
# LAMB


class FusedLamb(FusedStep):
    def step(self) -> None:
        import fusedpg

        exp_avg, exp_avg_sq, steps = self._state
        fusedpg.fused_lamb_(
            [self.params],
            [self.grads],
            [exp_avg],
            [exp_avg_sq],
            [steps],
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            group=self._group,
        )


class SplitLamb(StepArm):
    """All-reduce, then LAMB of torch's operations, in place where they allow."""

    exact = True

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        self.params, self.grads = initial(numel), torch.zeros(numel)
        self._exp_avg, self._exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self._update, self._denominator = torch.empty(numel), torch.empty(numel)
        self._steps = 0
        self._group = group

    def step(self) -> None:
        dist.all_reduce(self.grads, group=self._group)
        self.grads.div_(dist.get_world_size(self._group))
        self._steps += 1
        self._exp_avg.lerp_(self.grads, 1 - BETAS[0])
        self._exp_avg_sq.mul_(BETAS[1]).addcmul_(self.grads, self.grads, value=1 - BETAS[1])
        torch.div(self._exp_avg_sq, 1 - BETAS[1] ** self._steps, out=self._denominator)
        self._denominator.sqrt_().add_(EPS)
        torch.div(self._exp_avg, self._denominator, out=self._update)
        self._update.div_(1 - BETAS[0] ** self._steps).add_(self.params, alpha=WEIGHT_DECAY)
        # Sums of 25 million squares in fp32 are off by 1e-5: exact ones for the check.
        kind = torch.float64 if self.exact else None
        norm = torch.linalg.vector_norm
        ratio = norm(self.params, dtype=kind) / norm(self._update, dtype=kind)
        self.params.add_(self._update, alpha=-LR * float(ratio))


def lamb_arms(context: Context) -> dict[str, Callable[[int], StepArm]]:
    arms: dict[str, Callable[[int], StepArm]] = {}
    if "fused" in context.groups:
        arms[LAMB_OP] = lambda numel: FusedLamb(numel, context.groups["fused"])
    if "gloo" in context.groups:
        arms[LAMB_GLOO] = lambda numel: SplitLamb(numel, context.groups["gloo"])
    return arms


def check_lamb(arms: dict[str, StepArm], context: Context) -> None:
    """All arms make the same steps."""
    for step in range(CHECKED_STEPS):
        for arm in arms.values():
            arm.grads.copy_(Gradients(arm.grads.numel(), density=1.0).of(step, context.rank))
            arm.step()
    first, *others = arms.values()
    for other in others:
        error = ((first.params - other.params).norm() / other.params.norm()).item()
        harness.require(error <= TOLERANCE, f"lamb: relative difference {error:.2e}")
    harness.require(harness.same_on_all_ranks(first.params), "lamb: ranks differ")
    SplitLamb.exact = False
