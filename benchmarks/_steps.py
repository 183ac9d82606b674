"""Optimizer steps on a flat buffer of parameters and one of gradients: arms that all make the same.

Gradients are known, so that every arm can be compared with one process on their average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import _harness as harness
from _harness import Context

ADAMW, LAMB = "adamw step", "lamb step"
FUSED, SKIPS = "fused_adamw_", "fused_adamw_ block_skip"
SHARED = "fused_adamw_, shared parameters"
TWO_OPS = "reduce_shards, fused step (f)"
THREE_OPS = "reduce_scatter, AdamW, all_gather (e)"
CLASS, LOCAL = "fusedpg.optim.AdamW, no DDP", "torch.optim.AdamW(fused=True)"
LAMB_OP, LAMB_GLOO = "fused_lamb_", "gloo all_reduce + LAMB"
BLOCK = 256  # elements
# A large eps: with a small one AdamW does not depend on the gradients' scale, and the check below
# would not tell a sum from a mean.
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 0.1, 1e-2
# The same for calls of ours, and for optimizers.
HYPER: dict[str, Any] = {
    "lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": WEIGHT_DECAY
}  # fmt: skip
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
CHECKED_STEPS = 5
Made = TypeVar("Made", bound=Callable[..., Any])
TOLERANCE = 1e-6  # relative norm of the difference of the parameters


def split_arm(backend: str) -> str:
    return f"{backend} all_reduce + AdamW"


GLOO, UNFUSED, DEEPSPEED = map(split_arm, ("gloo", "fused", "deepspeed"))


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


def reference_parameters(gradients: Gradients, world_size: int) -> Tensor:
    """What one process gets from the average of all ranks' gradients."""
    params = initial(gradients.numel)
    optimizer = torch.optim.AdamW([params], **OPTIONS, fused=False)
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


ARMS: dict[str, dict[str, tuple[str, Callable[..., StepArm]]]] = {}  # by case and name


def arm(case: str, name: str, backend: str = "fused", **given: Any) -> Callable[[Made], Made]:
    """Registers what makes an arm of a case from a number of elements and a backend's group."""

    def register(make: Made) -> Made:
        ARMS.setdefault(case, {})[name] = backend, partial(make, **given)
        return make

    return register


@arm(ADAMW, FUSED)
@arm(ADAMW, SKIPS, block_skip=True)
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
            *([self.params], [self.grads], [exp_avg], [exp_avg_sq], [], [steps]),
            **HYPER,
            block_skip=self._block_skip,
            group=self._group,
        )


class EngineStep(FusedStep):
    """The step as the optimizers' classes call it."""

    def call(self, grads: Tensor, **how: bool) -> None:
        from fusedpg._registration import load_extension
        from fusedpg.functional import _backend

        exp_avg, exp_avg_sq, steps = self._state
        backend: Any = _backend(self._group)
        backend.fused_step_(
            "fused_adamw_",
            *([self.params], [grads], [[exp_avg], [exp_avg_sq]], [steps]),
            [load_extension().Hyper(**HYPER)],
            **how,
        )


@arm(ADAMW, TWO_OPS)
class TwoOps(EngineStep):
    """What the class does with overlap=False: reduce in backward, the rest in step()."""

    def step(self) -> None:
        import fusedpg
        from fusedpg.functional import _backend

        _backend(self._group).reduce_shards_([self.grads])
        offset, length = fusedpg.shard_range(
            self.params.numel(), dist.get_world_size(self._group), dist.get_rank(self._group)
        )
        self.call(self.grads[offset : offset + length], reduced=True)


@arm(ADAMW, THREE_OPS)
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
        self._optimizer = torch.optim.AdamW([self._own], **OPTIONS, fused=True)
        self._group = group

    def step(self) -> None:
        assert self._own.grad is not None
        dist.reduce_scatter_tensor(
            self._own.grad, self._grads, op=dist.ReduceOp.AVG, group=self._group
        )
        self._optimizer.step()
        dist.all_gather_into_tensor(self._padded, self._own.detach(), group=self._group)


@arm(ADAMW, SHARED)
class SharedStep(EngineStep):
    """All ranks hold one copy of the parameters."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        from fusedpg.functional import _backend

        super().__init__(numel, group)
        self.params = _backend(group).empty_shared([numel], torch.float32)
        if dist.get_rank(group) == 0:
            self.params.copy_(initial(numel))
        dist.barrier(group=group)

    def step(self) -> None:
        self.call(self.grads, shared_params=True)


@arm(ADAMW, CLASS)
class ClassStep(StepArm):
    """The optimizer class without DDP, on gradients in ordinary memory."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        import fusedpg

        params, self.grads = initial(numel).requires_grad_(), torch.zeros(numel)
        params.grad = self.grads
        self._optimizer = fusedpg.optim.AdamW([params], **OPTIONS, process_group=group)
        self.params = params.detach()

    def step(self) -> None:
        self._optimizer.step()


@arm(ADAMW, LOCAL, "")
class LocalStep(StepArm):
    """torch's fused AdamW in one process."""

    def __init__(self, numel: int, group: dist.ProcessGroup | None = None) -> None:
        self.params, self.grads = initial(numel), torch.zeros(numel)
        self.params.grad = self.grads
        self._optimizer = torch.optim.AdamW([self.params], **OPTIONS, fused=True)

    def step(self) -> None:
        self._optimizer.step()


@arm(ADAMW, UNFUSED)
@arm(ADAMW, GLOO, "gloo")
class SplitStep(LocalStep):
    """All-reduce of a backend, a division, then torch's."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        super().__init__(numel)
        self._world_size = dist.get_world_size(group)
        self._group = group

    def all_reduce(self) -> None:
        dist.all_reduce(self.grads, group=self._group)

    def step(self) -> None:
        self.all_reduce()
        self.grads.div_(self._world_size)
        self._optimizer.step()


@arm(ADAMW, DEEPSPEED, "deepspeed")
class DeepSpeedStep(SplitStep):
    def all_reduce(self) -> None:
        call = harness.load_deepspeed(dist.get_rank(), self._world_size)
        assert call is not None
        call(self.grads)


@arm(LAMB, LAMB_OP)
class FusedLamb(FusedStep):
    def step(self) -> None:
        import fusedpg

        exp_avg, exp_avg_sq, steps = self._state
        fusedpg.fused_lamb_(
            *([self.params], [self.grads], [exp_avg], [exp_avg_sq], [steps]),
            **HYPER,
            group=self._group,
        )


@arm(LAMB, LAMB_GLOO, "gloo")
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


def made(context: Context, case: str, size: int, names: Iterable[str]) -> dict[str, StepArm]:
    """Arms on so many bytes of parameters, as far as this run has what they need."""
    world_size, kinds = context.world_size, {name: ARMS[case][name] for name in names}
    groups: dict[str, Any] = dict(context.groups)
    if world_size == 1:
        groups[""] = None
    elif DEEPSPEED in kinds and harness.load_deepspeed(context.rank, world_size) is not None:
        groups["deepspeed"] = dist.group.WORLD
    return {
        name: make(size // 4, groups[backend])
        for name, (backend, make) in kinds.items()
        if backend in groups
    }


def checked(
    context: Context, size: int, names: Iterable[str], density: float = 1.0
) -> dict[str, Callable[[], object]]:
    """Such arms of AdamW, which have made the steps that they should."""
    gradients = Gradients(size // 4, density)
    reference = reference_parameters(gradients, context.world_size)
    arms = made(context, ADAMW, size, names)
    return {n: arm.checked(n, gradients, reference, context) for n, arm in arms.items()}


def checked_lamb(
    context: Context, size: int, names: Iterable[str]
) -> dict[str, Callable[[], object]]:
    """Arms of LAMB, which all make the same steps."""
    arms = made(context, LAMB, size, names)
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
    return {name: arm.step for name, arm in arms.items()}


def bert_shapes() -> list[tuple[int, ...]]:
    """The parameters of BERT-large with its pre-training heads: 397 tensors, 336 million."""
    width, layer = 1024, []
    for rows, columns in ((width, width),) * 4 + ((4 * width, width), (width, 4 * width)):
        layer += [(rows, columns), (rows,)]
    layer += [(width,)] * 4
    embeddings = [(30522, width), (512, width), (2, width), (width,), (width,)]
    heads = [(width, width), (width,), (width, width), (width,), (width,), (width,)]
    return embeddings + 24 * layer + heads + [(30522,), (1,)]
