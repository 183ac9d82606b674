"""A whole optimizer step of several ranks that share one GPU.

Each rank is a host of its own to NCCL (see tests/gpu/ranks.py), talks over loopback sockets and
takes turns on the GPU with the others. So these times rank ways to do the same work on the same
wire; they say nothing about a machine with a GPU a rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import _gpu_table as table
import _harness as harness
from _gpu_kernels import DEVICE, randn
from _harness import COPY, Bar, Context, Row

FUSED = "fused_adamw_"
RING = "fused_adamw_, patched ring"
ALL_REDUCE = "nccl all_reduce + AdamW(fused=True)"
THREE_CALLS = "reduce_scatter, our update, all_gather"
TORCH_CALLS = "reduce_scatter, AdamW(fused=True), all_gather"
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 0.1, 1e-2
CHECKED_STEPS = 3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
TYPES = {"step fp32": torch.float32, "step bf16 + master": torch.bfloat16}
M = 1 << 20


def bars() -> list[Bar]:
    return [
        Bar(2, case, FUSED, size, peer, at_least=1.0)
        for case in TYPES
        for size in (16 * M, 64 * M, 256 * M)
        for peer in (ALL_REDUCE, THREE_CALLS, TORCH_CALLS)
    ]


def environment(rank: int) -> None:
    """Before NCCL is first used."""
    os.environ |= {
        "NCCL_HOSTID": f"fusedpg-bench-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
    }


def gradient(numel: int, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return randn(1 + 1000 * step + rank, numel, dtype)


def optimizer(param: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [param], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


class Arm:
    """Flat parameters and gradients of one type; half ones with fp32 masters."""

    def __init__(self, numel: int, dtype: torch.dtype, context: Context) -> None:
        self.context = context
        self.rank, self.size = context.rank, context.world_size
        self.params = randn(0, numel, dtype)
        self.grads = torch.zeros_like(self.params)
        self.half = dtype != torch.float32

    def step(self) -> None:
        raise NotImplementedError

    def call(self) -> None:
        self.step()
        torch.cuda.synchronize()

    def checked(self, reference: Tensor) -> Callable[[], object]:
        dtype, numel = self.params.dtype, self.params.numel()
        for step in range(CHECKED_STEPS):
            self.grads.copy_(gradient(numel, step, self.rank, dtype))
            self.call()
        name = type(self).__name__
        error = float((self.params.double() - reference.double()).norm() / reference.norm())
        harness.require(error <= TOLERANCE[dtype], f"{name}: relative difference {error:.2e}")
        same = harness.same_on_all_ranks(self.params.view(torch.uint8).cpu())
        harness.require(same, f"{name}: ranks differ")
        return self.call


class AllReduce(Arm):
    """The usual way: replicated gradients, every rank updates everything."""

    def __init__(self, numel: int, dtype: torch.dtype, context: Context) -> None:
        super().__init__(numel, dtype, context)
        self.master = self.params.float() if self.half else self.params
        self.master.grad = torch.zeros_like(self.master) if self.half else self.grads
        self.optimizer = optimizer(self.master)

    def step(self) -> None:
        group = self.context.groups["nccl"]
        dist.all_reduce(self.grads, dist.ReduceOp.AVG, group=group)
        if self.half:
            assert self.master.grad is not None
            self.master.grad.copy_(self.grads)
        self.optimizer.step()
        if self.half:
            self.params.copy_(self.master)


class Sharded(Arm):
    def __init__(self, numel: int, dtype: torch.dtype, context: Context) -> None:
        super().__init__(numel, dtype, context)
        shard = table.shard_size(numel, self.size)
        harness.require(shard * self.size == numel, "choose a size that ranks divide evenly")
        self.own = self.params[self.rank * shard : (self.rank + 1) * shard]
        self.states = [torch.zeros(shard, device=DEVICE) for _ in range(2)]
        self.masters = [self.own.float()] if self.half else []
        self.steps = torch.zeros((), device=DEVICE)


class ThreeCalls(Sharded):
    """Sharded, but one after the other."""

    def __init__(self, numel: int, dtype: torch.dtype, context: Context) -> None:
        super().__init__(numel, dtype, context)
        self.reduced = torch.zeros_like(self.own)
        hyper: dict[str, Any] = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}
        self.launch = table.Slices(
            table.load(),
            self.rank,
            self.size,
            hyper | {"weight_decay": WEIGHT_DECAY},
            [self.params],
            masters=self.masters,
            states=[[state] for state in self.states],
            steps=[self.steps],
        )

    def step(self) -> None:
        group = self.context.groups["nccl"]
        dist.reduce_scatter_tensor(self.reduced, self.grads, group=group)
        self.launch.prepare(divisor=float(self.size))
        self.launch.update("adam", self.reduced)
        dist.all_gather_into_tensor(self.params, self.own, group=group)


class TorchSharded(ThreeCalls):
    """The same with torch's fused AdamW in place of our kernel."""

    def __init__(self, numel: int, dtype: torch.dtype, context: Context) -> None:
        super().__init__(numel, dtype, context)
        self.master = self.masters[0] if self.half else self.own.view_as(self.own)
        self.master.grad = torch.zeros_like(self.master)
        self.optimizer = optimizer(self.master)

    def step(self) -> None:
        group = self.context.groups["nccl"]
        dist.reduce_scatter_tensor(self.reduced, self.grads, dist.ReduceOp.AVG, group=group)
        assert self.master.grad is not None
        self.master.grad.copy_(self.reduced)
        self.optimizer.step()
        if self.half:
            self.own.copy_(self.master)
        dist.all_gather_into_tensor(self.params, self.own, group=group)


class Fused(Sharded):
    group, path = "fused", "stock"

    def checked(self, reference: Tensor) -> Callable[[], object]:
        import fusedpg

        call = super().checked(reference)
        path = fusedpg.group_info(self.context.groups[self.group])["cuda_path"]
        harness.require(path == self.path, f"{type(self).__name__} took the path {path!r}")
        return call

    def step(self) -> None:
        import fusedpg

        fusedpg.fused_adamw_(
            [self.params],
            [self.grads],
            [self.states[0]],
            [self.states[1]],
            [],
            [self.steps],
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            master_params=self.masters,
            group=self.context.groups[self.group],
        )


class Ring(Fused):
    group, path = "ring", "ring"


ARMS = {
    ALL_REDUCE: AllReduce,
    THREE_CALLS: ThreeCalls,
    TORCH_CALLS: TorchSharded,
    FUSED: Fused,
}


def reference(numel: int, dtype: torch.dtype, world_size: int) -> Tensor:
    """One process on the averaged gradients, in fp32."""
    params = randn(0, numel, dtype).float()
    step_of = optimizer(params)
    for step in range(CHECKED_STEPS):
        total = gradient(numel, step, 0, dtype).float()
        for rank in range(1, world_size):
            total += gradient(numel, step, rank, dtype).float()
        params.grad = total / world_size
        step_of.step()
    return params


def copy_arm(size: int) -> Callable[[], object]:
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)

    def call() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return call


def add_ring(context: Context) -> bool:
    """A group that takes the ring, where the NCCL that is loaded is patched."""
    import fusedpg

    options = fusedpg.Options(timeout=harness.TIMEOUT, nccl="patched", half_sums="wire")
    context.groups["ring"] = dist.new_group(backend="fused", pg_options=options)
    try:
        Ring(32 * context.world_size, torch.float32, context).call()
    except RuntimeError as error:
        if "patches/nccl" not in str(error):
            raise
        if context.rank == 0:
            print(f"{RING!r} is left out: {error}", file=sys.stderr)
        return False
    return True


def kinds(context: Context) -> dict[str, type[Arm]]:
    """The arms, once this rank is ready for them."""
    environment(context.rank)
    torch.cuda.set_device(DEVICE)
    return ARMS | ({RING: Ring} if context.world_size > 1 and add_ring(context) else {})


def measure(context: Context, args: argparse.Namespace, of: tuple[str, int]) -> list[Row]:
    case, size = of
    made_of = context.once(kinds)
    dtype = TYPES[case]
    numel = size // dtype.itemsize
    made = {name: kind(numel, dtype, context) for name, kind in made_of.items()}
    # What is compared moves the same.
    moved = {(a.params.dtype, a.params.nbytes, a.grads.nbytes) for a in made.values()}
    harness.require(moved == {(dtype, size, size)}, f"arms differ: {moved}")
    want = reference(numel, dtype, context.world_size)
    arms: dict[str, Callable[[], object]] = {COPY: copy_arm(size)}
    arms.update((name, arm.checked(want)) for name, arm in made.items())
    del want
    rows = harness.measure(context, arms, case=case, size=size, rounds=args.rounds)
    del arms, made
    torch.cuda.empty_cache()
    return rows
