"""All-reduces that skip zeros, of ranks that share one GPU (_gpu_steps.py), and their kernel."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import _gpu_kernels as kernels
import _gpu_steps as steps
import _gpu_table as table
import _harness as harness
from _harness import COPY, Bar, Context, Row

BLOCK = 256
DENSITIES = (0.01, 0.1, 0.5, 1.0)  # of a rank's blocks
NCCL, ON, AUTO = "nccl all_reduce", "block_skip on", "block_skip auto"
FIND = "find_blocks"
UNTIMED = 20  # calls in which "auto" settles
M = 1 << 20
DEVICE = steps.DEVICE


def kernel_bars() -> list[Bar]:
    # A copy of as many bytes reads half of them: looking is to run at 85% of that bandwidth.
    return [Bar(1, FIND, kernels.OURS, size, COPY, at_most=1 / 0.85) for size in (64 * M, 256 * M)]


def bars() -> list[Bar]:
    return [Bar(2, "density 100%", AUTO, size, NCCL, at_most=1.05) for size in (16 * M, 64 * M)]


def blocks(seed: int, numel: int, density: float) -> Tensor:
    """Small integers, of which every order of additions makes the same, in some blocks."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    data = torch.randint(1, 9, (numel,), generator=generator, device=DEVICE).float()
    count = -(-numel // BLOCK)
    present = torch.rand(count, generator=generator, device=DEVICE) < density
    return data * present.repeat_interleave(BLOCK)[:numel]


def find_arms(api: table.CudaApi, size: int) -> kernels.Arms:
    numel = size // 4
    data = blocks(1, numel, 0.1)
    count = -(-numel // BLOCK)
    flags = torch.empty(count, dtype=torch.uint8, device=DEVICE)

    def find() -> None:
        table.find_blocks(api, data, BLOCK, flags)

    find()
    torch.cuda.synchronize()
    want = data.view(-1, BLOCK).any(1)
    harness.require(torch.equal(flags.bool(), want), "find_blocks found other blocks")
    return {COPY: kernels.copy_arm(size), kernels.OURS: find}


def run_kernels(args: argparse.Namespace) -> list[Row]:
    api = table.load()
    rows = []
    for size in args.sizes:
        arms = find_arms(api, size)
        rows += kernels.measure(arms, case=FIND, size=size, rounds=args.rounds)
    return rows


class AllReduce:
    def __init__(self, group: dist.ProcessGroup, source: Tensor) -> None:
        self.group, self.source = group, source
        self.tensor = torch.empty_like(source)

    def prepare(self) -> None:
        self.tensor.copy_(self.source)
        torch.cuda.synchronize()

    def __call__(self) -> None:
        dist.all_reduce(self.tensor, group=self.group)
        torch.cuda.synchronize()


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    import fusedpg

    steps.environment(context.rank)
    torch.cuda.set_device(DEVICE)

    def group(**options: Any) -> dist.ProcessGroup:
        chosen = fusedpg.Options(timeout=harness.TIMEOUT, **options)
        made: dist.ProcessGroup = dist.new_group(backend="fused", pg_options=chosen)
        return made

    groups = {NCCL: group(), ON: group(block_skip="on"), AUTO: group(block_skip="auto")}
    rows = []
    cases = [(density, size) for size in args.sizes for density in DENSITIES]
    for density, size in harness.progress(
        context, cases, lambda c: f"{c[0]:.0%} {harness.format_size(c[1])}"
    ):
        parts = [blocks(7 + rank, size // 4, density) for rank in range(context.world_size)]
        want = torch.stack(parts).sum(0)
        made = {name: AllReduce(one, parts[context.rank]) for name, one in groups.items()}
        del parts
        for name, arm in made.items():
            for _ in range(UNTIMED if name == AUTO else 2):
                arm.prepare()
                arm()
            harness.require(torch.equal(arm.tensor, want), f"{name}: not the sum")
        arms: dict[str, Callable[[], object]] = {COPY: steps.copy_arm(size), **made}
        rows += harness.measure(
            context,
            arms,
            case=f"density {density:.0%}",
            size=size,
            rounds=args.rounds,
            prepare={name: arm.prepare for name, arm in made.items()},
        )
        del arms, made, want
        torch.cuda.empty_cache()
    return rows
