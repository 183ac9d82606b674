"""Time a pipeline segment between two hosts: what a stage computes last, sent to the next one.

    python benchmarks/pipeline_parallel.py --check-bars
    python benchmarks/pipeline_parallel.py --sizes 4K,1M

The experiment of CoCoNet (ASPLOS 2022, figure 12) for this project. Stage 0 is the ranks of host 0,
stage 1 those of host 1, which are network namespaces whose links have a rate (needs root, `ip` and
`tc`; exits with 2 where that cannot be). Stage 0 computes residual + dropout(all_reduce(x) + bias)
in fp32, rows of 1024 features, and every rank of stage 1 gets all of it. The arms, in turn:

    gloo all_reduce + send   Gloo's all_reduce, torch's operations, every rank sends the whole
    all_reduce + send        the same on our groups, with dist.send and dist.recv
    as written               the same as a function of `fusedpg.fuse`, operation by operation
    slices sent              every rank sends its slice (`FuseSend`), and stage 1 gathers
    one operation            reduce-scatter and computation as one operation, its slice is sent
    in chunks                that in 4 chunks of rows, each sent while the next is computed

The first two are timed up to 16 MB. "link" is what the link needs for one whole tensor. A second
part cuts a tensor into micro-batches of 1 MB, on which stage 1 computes gelu, and waits for each
before the next, or begins the next one before it waits. In the third part x is a product of
`--inner` features of each rank, which takes about as long as the link does for the slices: in one
operation, and in chunks. "stage 0 alone" is all but the send. Results are checked before anything
is timed (dropout of the first two is torch's own, so they are compared with p = 0), and so is what
crosses the link in both hosts' counters: slices are 1/P of the bytes of the unsliced send.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import _harness as harness
import _hosts as hosts
import fusedpg
from _harness import Bar, Context, Hosts, Row
from between_hosts import LINK, RATES, link_row
from collectives import case_title
from fusedpg import fusion
from fusedpg.fusion import AsShard, FuseCollective, FuseSend, Overlap, Partial, Shard
from fusedpg.fusion.philox import kept as kept_elements
from model_parallel import FEATURES, P, after

M = 1 << 20
RANKS, RATE = 2, "1gbit"
SEGMENT, BATCHES, PRODUCT = "segment", "micro-batches", "product"
PARTS = (SEGMENT, BATCHES, PRODUCT)
GLOO, PLAIN = "gloo all_reduce + send", "all_reduce + send"
WRITTEN, SLICES, ONE, CHUNKS = "as written", "slices sent", "one operation", "in chunks"
COMPUTED = "stage 0 alone"
WAITED, FLYING = "one by one", "two on their way"
SCHEDULES: dict[str, tuple[fusion.Transformation, ...]] = {
    WRITTEN: (),
    SLICES: (FuseSend(),),
    ONE: (FuseSend(), AsShard(), FuseCollective()),
    CHUNKS: (FuseSend(), AsShard(), FuseCollective(), Overlap("send")),
}
RECEIVED: dict[str, tuple[fusion.Transformation, ...]] = {
    WRITTEN: (),
    SLICES: (FuseSend(),),
    ONE: (FuseSend(),),
    CHUNKS: (FuseSend(), Overlap("recv")),
}
IN_PRODUCT, INNER = (4 * M, 16 * M), 1024
MOST_OF_PLAIN, BATCH, IN_BATCHES = 16 * M, M, 16 * M
# Smaller ones are mostly headers.
COUNTED = M
CHECKED, SEED = M, 7  # elements at either end that are compared; of dropout
SIZES = ",".join(str(4 << n) for n in range(10, 27, 2))
# Against the unsliced send without a fused function, whose dropout is the fastest there is.
BARS = [
    Bar(2 * RANKS, SEGMENT, ONE, size, peer, at_least=1.7)
    for size in (M, 4 * M, 16 * M)
    for peer in (PLAIN, GLOO)
]
BARS += [Bar(2 * RANKS, SEGMENT, CHUNKS, n, ONE, at_most=1.02) for n in (M, 4 * M, 16 * M)]
BARS += [Bar(2 * RANKS, PRODUCT, CHUNKS, n, ONE, at_least=1.15) for n in IN_PRODUCT]


@fusedpg.fuse
def stage0(x: Partial, bias, residual, seed: int):
    return fusion.send(residual + fusion.dropout(fusion.all_reduce(x) + bias, P, seed))


@fusedpg.fuse
def layer(x: Shard(1), w: Shard(0), bias, residual, seed: int):
    product = fusion.all_reduce(x @ w)
    return fusion.send(residual + fusion.dropout(product + bias, P, seed))


@fusedpg.fuse
def computed(x: Shard(1), w: Shard(0), bias, residual, seed: int) -> tuple[Shard]:
    return (residual + fusion.dropout(fusion.all_reduce(x @ w) + bias, P, seed),)


@fusedpg.fuse
def stage1(like):
    return fusion.recv(like)


def main() -> int:
    parser = harness.Parser(__doc__, sizes=SIZES, rounds=0)
    parser.add_argument("--rate", default=RATE, choices=[r for r in RATES if RATES[r]])
    parser.names("--parts", PARTS)
    parser.add_argument("--inner", type=int, default=INNER)
    args = parser.parse_args()
    cases = [(SEGMENT, size) for size in args.sizes if SEGMENT in args.parts]
    cases += [(BATCHES, IN_BATCHES)] * (BATCHES in args.parts)
    cases += [(PRODUCT, size) for size in IN_PRODUCT if PRODUCT in args.parts]
    where = Hosts(2, RANKS, args.rate)
    rows = harness.run(measure, args, cases, title=case_title, hosts=where)
    args.world_size = 2 * RANKS
    print_bytes(rows)
    return harness.finish("pipeline_parallel", rows, args, limit=LINK, bars=BARS)


# ---------------------------------------------------------------------------------------------
# On a rank


class Stage:
    """This rank's stage, and its groups of a backend in it and over stages."""

    def __init__(self, context: Context, backend: str) -> None:
        self.number, self.rank = divmod(context.rank, RANKS)
        inside = [[s * RANKS + r for r in range(RANKS)] for s in range(2)]
        across = [[r, RANKS + r] for r in range(RANKS)]
        made = [
            [dist.new_group(ranks, backend=backend, timeout=harness.TIMEOUT) for ranks in groups]
            for groups in (inside, across)
        ]
        self.group, self.stages = made[0][self.number], made[1][self.rank]


class Segment:
    """A tensor's way from stage 0 to stage 1."""

    def __init__(self, size: int, ours: Stage, gloo: Stage) -> None:
        features = min(FEATURES, size // 4)
        self.shape = (size // 4 // features, features)
        generator = torch.Generator().manual_seed(0)
        everyone = [torch.randn(self.shape, generator=generator) for _ in range(RANKS)]
        self.bias = torch.randn(features, generator=generator)
        self.residual = torch.randn(self.shape, generator=generator)
        self.x = everyone[ours.rank].clone()
        self.sum = everyone[0].add_(everyone[1]).add_(self.bias)
        self.ours, self.gloo, self.first = ours, gloo, ours.number == 0
        self.like = torch.empty(self.shape)

    def plain(self, stage: Stage, p: float) -> Tensor | None:
        if self.first:
            dist.all_reduce(self.x, group=stage.group)
            dist.send(after(self.x, self.bias, self.residual, p), group=stage.stages, group_dst=1)
            return None
        dist.recv(self.like, group=stage.stages, group_src=0)
        return self.like

    def fused(self, name: str) -> Tensor | None:
        groups = {"group": self.ours.group, "stages": self.ours.stages}
        if self.first:
            call = stage0.scheduled(*SCHEDULES[name])
            self._call = partial(call, self.x, self.bias, self.residual, SEED, **groups)
        else:
            call = stage1.scheduled(*RECEIVED[name])
            self._call = partial(call, self.like, **groups)
        result: Tensor = self._call()
        return None if self.first else result

    def arms(self, plain: bool) -> dict[str, Callable[[], object]]:
        """Each compared with one process."""
        arms: dict[str, Callable[[], object]] = {}
        kept = self.x.clone()
        for name, stage in ((GLOO, self.gloo), (PLAIN, self.ours)) if plain else ():
            self.x.copy_(kept)
            self._check(name, self.plain(stage, 0.0), 0.0)
            arms[name] = partial(self.plain, stage, P)
        self.x.copy_(kept)
        for name in SCHEDULES:
            self._check(name, self.fused(name), P)
            arms[name] = self._call
        self.x.zero_()  # sums in place stay finite
        return arms

    def _check(self, name: str, got: Tensor | None, p: float) -> None:
        """The first and the last elements, which are of two ranks."""
        if got is None:
            return
        count = min(CHECKED, got.numel())
        for begin in (0, got.numel() - count):
            part = slice(begin, begin + count)
            mask = kept_elements(p, SEED, begin, count, got.device)
            dropped = torch.where(mask, self.sum.view(-1)[part] / (1 - p), 0.0)
            want = self.residual.view(-1)[part] + dropped
            close = torch.allclose(got.view(-1)[part], want, atol=1e-4)
            harness.require(close, f"{name}: {self.shape} differs from one process")


def products(size: int, inner: int, ours: Stage) -> dict[str, Callable[[], object]]:
    """A product before the sum: numbers that chunks and one operation have to have alike."""
    rows = size // 4 // FEATURES
    generator = torch.Generator().manual_seed(ours.rank)
    x = torch.randint(-2, 3, (rows, inner), generator=generator).float()
    w = torch.randint(-2, 3, (inner, FEATURES), generator=generator).float()
    rest = torch.zeros(FEATURES), torch.ones(rows, FEATURES), SEED
    groups: dict[str, Any] = {"group": ours.group, "stages": ours.stages}
    arms: dict[str, Callable[[], object]] = {}
    for name in (ONE, CHUNKS):
        if ours.number == 0:
            arms[name] = partial(layer.scheduled(*SCHEDULES[name]), x, w, *rest, **groups)
        else:
            arms[name] = partial(stage1.scheduled(*RECEIVED[name]), rest[1], **groups)
    one, other = (call() for call in arms.values())
    harness.require(torch.equal(one, other), f"{PRODUCT}, {size} bytes: other numbers in chunks")
    alone = computed.scheduled(AsShard(), FuseCollective())
    arms[COMPUTED] = lambda: alone(x, w, *rest, group=ours.group) if ours.number == 0 else None
    return arms


def batches(ours: Stage) -> dict[str, Callable[[], object]]:
    """A tensor in micro-batches."""
    count = IN_BATCHES // BATCH
    parts = [Segment(BATCH, ours, ours) for _ in range(count)]
    groups: dict[str, Any] = {"group": ours.group, "stages": ours.stages}
    first = ours.number == 0

    def begin(part: Segment, async_op: bool) -> Any:
        given = (part.x, part.bias, part.residual, SEED) if first else (part.like,)
        return (stage0 if first else stage1)(*given, async_op=async_op, **groups)

    def finish(result: Tensor) -> Tensor:
        return result if first else F.gelu(result)

    def waited() -> list[Tensor]:
        return [finish(begin(part, False)) for part in parts]

    def flying() -> list[Tensor]:
        results, before = [], begin(parts[0], True)
        for part in parts[1:]:
            following = begin(part, True)
            results.append(finish(before.wait()))
            before = following
        return [*results, finish(before.wait())]

    for one, other in zip(waited(), flying(), strict=True):
        harness.require(torch.equal(one, other), "micro-batches: other numbers when in flight")
    return {WAITED: waited, FLYING: flying}


@torch.no_grad()
def measure(context: Context, args: argparse.Namespace, of: tuple[str, int]) -> list[Row]:
    (case, size), bits = of, RATES[args.rate]
    ours, gloo = context.once(Stage, "fused"), context.once(Stage, "gloo")
    assert bits is not None
    if case == SEGMENT:
        arms = Segment(size, ours, gloo).arms(size <= MOST_OF_PLAIN)
    elif case == BATCHES:
        arms = batches(ours)
    else:
        arms = products(size, args.inner, ours)
    crossing = {}
    for name, call in arms.items():
        sent, received = hosts.bytes_over_link(context, call, 1 if size > M else 3)
        crossing[name] = sent[0], received[-1]
    if case == SEGMENT:
        check_bytes(size, crossing)
    rounds = args.rounds or (11 if size <= M else 5 if size <= 16 * M else 3)
    rows = harness.measure(context, arms, case=case, size=size, rounds=rounds)
    for row in rows:
        row.more["sent"], row.more["received"] = crossing[row.arm]
    limit = link_row(case, size, size, 8 / bits)
    limit.more["received"] = size
    return [*rows, limit]


def check_bytes(size: int, crossing: dict[str, tuple[float, float]]) -> None:
    """Slices are 1/P of the unsliced send, and what one host sends the other one receives."""
    if size < COUNTED:
        return
    for name, both in crossing.items():
        parts = RANKS if name in (GLOO, PLAIN, WRITTEN) else 1
        for count in both:
            about = parts * size <= count <= 1.1 * parts * size
            harness.require(about, f"{name}: {count:.0f} bytes on the link for {parts} x {size}")
    for name in (SLICES, ONE, CHUNKS):
        for mine, whole in zip(crossing[name], crossing[WRITTEN]):
            share = mine / whole
            harness.require(share <= 1 / RANKS + 0.01, f"{name}: {share:.3f} of the bytes, {size}")


# ---------------------------------------------------------------------------------------------
# Output


def print_bytes(rows: Sequence[Row]) -> None:
    """What crossed the link, beside the unsliced send."""
    lines = []
    for row in rows:
        whole = harness.find(rows, row.case, row.size, WRITTEN)
        if row.arm != LINK:
            sent, received = row.more["sent"], row.more["received"]
            share = f"{sent / whole.more['sent']:.3f}" if whole else ""
            moved = [f"{count * 1e-6:.4g}" for count in (sent, received)]
            lines.append([*harness.work_of(row), *moved, share])
    figures = ["MB sent", "MB received", "of the unsliced send"]
    title = "Bytes from stage 0 to stage 1, with all headers"
    harness.show(title, harness.WORK, figures, lines)


if __name__ == "__main__":
    sys.exit(main())
