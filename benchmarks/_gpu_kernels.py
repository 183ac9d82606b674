"""The kernels alone, in one process: no NCCL, no process group.

Times are the GPU's own (CUDA events around a graph of launches), arms in turn, round by round.
Every case has an arm that copies as many bytes as the kernel reads and writes together, halved: a
copy reads and writes each of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import _gpu_table as table
import _harness as harness
from _harness import COPY, Bar, Row
from _steps import bert_shapes

DEVICE = torch.device("cuda", 0)
OURS, TORCH = "ours", "torch _fused_adamw_"
TORCH_CASTS = "torch cast, _fused_adamw_, cast"
TORCH_SUMS = "torch sum in fp32, _fused_adamw_, cast"
FOLDS = (2, 8)  # ranks whose bf16 gradients an owner adds
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
SPAN = 4e-3  # seconds of a sample, of several launches where they are short
M, G = 1 << 20, 1 << 30

Arms = dict[str, Callable[[], object]]


def bars() -> list[Bar]:
    result = []
    for size in (64 * M, 256 * M, G):
        for case in ("pack", "unpack", "adamw fp32", "adamw bf16 + master"):
            result.append(Bar(1, case, OURS, size, COPY, at_most=1 / 0.9))
        result.append(Bar(1, "adamw fp32", OURS, size, TORCH, at_least=1.0))
        result.append(Bar(1, "adamw bf16 + master", OURS, size, TORCH_CASTS, at_least=1.0))
        for ranks in FOLDS:
            result.append(Bar(1, folded_case(ranks), OURS, size, COPY, at_most=1 / 0.9))
            result.append(Bar(1, folded_case(ranks), OURS, size, TORCH_SUMS, at_least=1.0))
    return [*result, Bar(1, "adamw fp32, 397 tensors", OURS, bert_bytes(), TORCH, at_least=1.0)]


def folded_case(ranks: int) -> str:
    return f"adamw bf16 + master, sum of {ranks}"


def bert_bytes() -> int:
    return 4 * sum(torch.Size(shape).numel() for shape in bert_shapes())


# ---------------------------------------------------------------------------------------------
# Time


def seconds(call: Callable[[], object], calls: int = 1) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def record(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Launches from Python take longer than a kernel on a few megabytes: a graph has none."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def measure(arms: Arms, *, case: str, size: int, rounds: int) -> list[Row]:
    batch, graphs = {}, {}
    for name, call in arms.items():
        seconds(call, 3)
        batch[name] = min(200, math.ceil(SPAN * 3 / seconds(call, 3)))
        graphs[name] = record(call, batch[name])
        seconds(graphs[name].replay)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for _ in range(rounds):
        for name in order:
            samples[name].append(seconds(graphs[name].replay) / batch[name])
        order.append(order.pop(0))
    # One process that has the GPU to itself: no second mode to look for.
    return [
        Row.of(case, size, name, values, modes=False, calls=batch[name])
        for name, values in samples.items()
    ]


def copy_arm(moved: int) -> Callable[[], object]:
    """A copy that reads and writes `moved` bytes together."""
    source = torch.ones(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# ---------------------------------------------------------------------------------------------
# Arms


def randn(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(numel, generator=generator, device=DEVICE).to(dtype)


def moves(api: table.CudaApi, size: int) -> dict[str, Arms]:
    """Between one flat fp32 tensor and the wire of two ranks."""
    numel = size // 4
    grads, params = randn(1, numel), torch.zeros(numel, device=DEVICE)
    launch = table.Slices(api, 0, 2, HYPER, [params], grads=[grads])
    wire = torch.zeros(2 * launch.block, device=DEVICE)
    harness.require(wire.numel() == numel, "the wire is longer than the tensor")
    launch.pack(wire)
    launch.unpack(wire)
    launch.synchronize()
    harness.require(torch.equal(wire, grads) and torch.equal(params, grads), "pack and unpack")
    copy = copy_arm(2 * size)
    return {
        "pack": {COPY: copy, OURS: lambda: launch.pack(wire)},
        "unpack": {COPY: copy, OURS: lambda: launch.unpack(wire)},
    }


def torch_step(lists: Sequence[Sequence[Tensor]], steps: list[Tensor]) -> Callable[[], object]:
    params, grads, exp_avgs, exp_avg_sqs = (list(one) for one in lists)
    hyper = {**HYPER, "amsgrad": False, "maximize": False}
    # The list operator, as torch.optim calls it; one tensor would be a list of one.
    return lambda: torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], steps, **hyper)


class Ours:
    """AdamW of whole tensors, as a group of one rank: reduced gradients come as a wire block."""

    def __init__(
        self,
        api: table.CudaApi,
        params: Sequence[Tensor],
        block: Tensor,
        masters: Sequence[Tensor] = (),
    ) -> None:
        kind = torch.float32
        self.states = [[torch.zeros_like(p, dtype=kind) for p in params] for _ in range(2)]
        self.steps = [torch.zeros((), device=DEVICE) for _ in params]
        self._block = block
        self._launch = table.Slices(
            api, 0, 1, HYPER, params, masters=masters, states=self.states, steps=self.steps
        )
        harness.require(self._launch.block == block.numel(), "sizes must be multiples of 32")

    def prepare(self) -> None:
        """Scalars of the next step: one short kernel an operation, not one a chunk."""
        self._launch.prepare()

    def update(self) -> None:
        self._launch.update("adam", self._block)


def close(found: Tensor, want: Tensor, what: str, tolerance: float = 2e-6) -> None:
    error = float((found.double() - want.double()).norm() / want.double().norm())
    harness.require(error <= tolerance, f"{what}: relative difference {error:.2e}")


def adamw(api: table.CudaApi, numels: Sequence[int]) -> Arms:
    """fp32: seven streams, of which four are read."""
    total = sum(numels)
    grads = randn(2, total)
    mine, theirs = (list(randn(3, total).split(list(numels))) for _ in range(2))
    parts = list(grads.split(list(numels)))
    ours = Ours(api, mine, grads)
    states = [[torch.zeros_like(p) for p in theirs] for _ in range(2)]
    # torch's kernel takes the step it is at; ours counts by itself.
    steps = [torch.ones((), device=DEVICE) for _ in theirs]
    step = torch_step([theirs, parts, *states], steps)
    harness.require(
        all(a.dtype == b.dtype and a.nbytes == b.nbytes for a, b in zip(mine, theirs)), "types"
    )
    ours.prepare()
    ours.update()
    step()
    torch.cuda.synchronize()
    close(torch.cat(mine), torch.cat(theirs), "adamw fp32")
    # torch's kernel rounds beta2 to fp32 before it takes it from 1: 1.3e-5 of 0.001.
    close(torch.cat(ours.states[1]), torch.cat(states[1]), "exp_avg_sq", 2e-5)
    return {COPY: copy_arm(7 * 4 * total), OURS: ours.update, TORCH: step}


def adamw_master(api: table.CudaApi, numel: int) -> Arms:
    """bf16 parameters and gradients, fp32 masters and moments: 28 bytes an element."""
    half = torch.bfloat16
    grads, start = randn(4, numel, half), randn(5, numel, half)
    mine, theirs = start.clone(), start.clone()
    own_master, master = start.float(), start.float()
    ours = Ours(api, [mine], grads, [own_master])
    wide = torch.empty(numel, device=DEVICE)
    states = [[torch.zeros(numel, device=DEVICE)] for _ in range(2)]
    step = torch_step([[master], [wide], *states], [torch.ones((), device=DEVICE)])

    def casts() -> None:
        wide.copy_(grads)
        step()
        theirs.copy_(master)

    ours.prepare()
    ours.update()
    casts()
    torch.cuda.synchronize()
    close(own_master, master, "masters")
    harness.require(
        torch.equal(mine, own_master.to(half)), "parameters are not the rounded masters"
    )
    return {COPY: copy_arm(28 * numel), OURS: ours.update, TORCH_CASTS: casts}


def folded(api: table.CudaApi, numel: int, ranks: int) -> Arms:
    """An owner's part where half gradients come by all-to-all: 26 bytes an element, 2 a rank."""
    half = torch.bfloat16
    slices, start = randn(6, ranks * numel, half), randn(7, numel)
    master, theirs = start.clone(), start.clone()
    mine, rounded = (torch.empty(numel, dtype=half, device=DEVICE) for _ in range(2))
    own, torchs = ([[torch.zeros_like(start)] for _ in range(2)] for _ in range(2))
    whole = torch.empty(ranks * numel, dtype=half, device=DEVICE)
    launch = table.Slices(
        *(api, 0, ranks, HYPER, [whole]),
        masters=[master],
        states=own,
        steps=[torch.zeros((), device=DEVICE)],
    )
    harness.require(launch.block == numel, "sizes must be multiples of 32")
    wide = torch.empty(numel, device=DEVICE)
    step = torch_step([[theirs], [wide], *torchs], [torch.ones((), device=DEVICE)])

    def sums() -> None:
        torch.sum(slices.view(ranks, numel), 0, dtype=torch.float32, out=wide)
        wide.div_(ranks)
        step()
        rounded.copy_(theirs)

    def update() -> None:
        launch.update("adam", slices, mine, folds=True)

    launch.prepare(divisor=float(ranks))
    update()
    sums()
    launch.synchronize()
    close(master, theirs, "masters")
    harness.require(torch.equal(mine, master.to(half)), "parameters are not the rounded masters")
    return {COPY: copy_arm((26 + 2 * ranks) * numel), OURS: update, TORCH_SUMS: sums}


def run(args: argparse.Namespace) -> list[Row]:
    from tqdm import tqdm

    api = table.load()
    cases: list[tuple[str, int, Callable[[], dict[str, Arms]]]] = []
    for size in args.sizes:
        cases += [
            ("moves", size, lambda size=size: moves(api, size)),
            ("adamw fp32", size, lambda size=size: {"adamw fp32": adamw(api, [size // 4])}),
            (
                "adamw bf16 + master",
                size,
                lambda size=size: {"adamw bf16 + master": adamw_master(api, size // 2)},
            ),
            *(
                (
                    folded_case(ranks),
                    size,
                    lambda size=size, ranks=ranks: {
                        folded_case(ranks): folded(api, size // 2, ranks)
                    },
                )
                for ranks in FOLDS
            ),
        ]
    if args.lists:
        # Rounded up to the alignment of slices, which a wire block has too.
        numels = [-(-torch.Size(shape).numel() // 32) * 32 for shape in bert_shapes()]
        title = "adamw fp32, 397 tensors"
        cases.append((title, bert_bytes(), lambda: {title: adamw(api, numels)}))
    rows = []
    with tqdm(cases, unit="case", ncols=90) as bar:
        for title, size, make in bar:
            bar.set_description(f"{title} {harness.format_size(size)}")
            made: Any = make()
            for case, arms in made.items():
                rows += measure(arms, case=case, size=size, rounds=args.rounds)
            del made, arms
            torch.cuda.empty_cache()
    return rows
