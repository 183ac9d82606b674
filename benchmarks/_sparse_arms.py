"""What `sparse.py` times: tensors of which blocks are zeros, and the ways to all-reduce them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
from _harness import COPY, Context, Row

BLOCK = 256  # elements
SCAN = "scan"
# Arms by the option block_skip.
SKIP: dict[str, Literal["off", "auto", "on"]] = {"dense": "off", "auto": "auto", "on": "on"}
# The first call of a shape only looks at a sample; later ones know the density.
UNTIMED = {"auto": 3}
OVERLAPS = ("random", "full", "none")
TENSORS = ("arena", "ordinary")


@dataclass(frozen=True)
class Case:
    size: int  # bytes
    density: float
    overlap: str
    where: str  # of TENSORS; between hosts, their rate

    @property
    def name(self) -> str:
        return f"{100 * self.density:.3g}% {self.overlap}, {self.where}"


def cases(args: argparse.Namespace, world_size: int) -> list[Case]:
    """What the options ask for, without what is impossible: disjoint shares above 1."""
    return [
        Case(size, density, args.overlap, where)
        for where in args.places
        for size in args.sizes
        for density in args.densities
        if args.overlap != "none" or density * world_size <= 1
    ]


class Data:
    """A rank's tensors of one size: integers, of which every order of additions makes the same."""

    def __init__(self, size: int, context: Context) -> None:
        generator = torch.Generator().manual_seed(1 + context.rank)
        numel = size // 4
        self._values = torch.randint(1, 9, (numel,), generator=generator, dtype=torch.float32)
        self._context = context
        self.blocks = -(-numel // BLOCK)

    def present(self, case: Case) -> Tensor:
        """Which blocks this rank has."""
        rank = self._context.rank
        seed = 1 + rank if case.overlap == "random" else 0
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(seed))
        count = max(1, round(case.density * self.blocks))
        first = rank * count if case.overlap == "none" else 0
        mask = torch.zeros(self.blocks, dtype=torch.bool)
        mask[order[first : first + count]] = True
        return mask

    def tensor(self, present: Tensor) -> Tensor:
        elements = present.repeat_interleave(BLOCK)[: self._values.numel()]
        return torch.where(elements, self._values, 0)


class AllReduce:
    """`dist.all_reduce` in place, of a tensor which begins as `source` each time."""

    def __init__(self, group: dist.ProcessGroup, source: Tensor, *, arena: bool) -> None:
        import fusedpg

        numel = source.numel()
        self.group = group
        self.tensor = fusedpg.empty(numel, group=group) if arena else torch.empty(numel)
        self._source = source

    def prepare(self) -> None:
        self.tensor.copy_(self._source)

    def __call__(self) -> None:
        dist.all_reduce(self.tensor, group=self.group)


@dataclass
class Moved:
    """What one call moved."""

    path: str
    sent: float  # the mean of the ranks
    blocks: int
    present: int
    union: int


def checked(name: str, arm: AllReduce, expected: Tensor, gloo: dist.ProcessGroup) -> Moved:
    """Requires the expected result of each untimed call; what the last of them moved."""
    import fusedpg

    for _ in range(UNTIMED.get(name, 1)):
        fusedpg.stats(arm.group, reset=True)
        arm.prepare()
        arm()
        same = torch.equal(arm.tensor.view(torch.int32), expected.view(torch.int32))
        harness.require(same, f"{name}: not what Gloo computes")
    found: dict[str, Any] = fusedpg.stats(arm.group)["all_reduce"]
    sent = torch.tensor([float(found["bytes_sent"])], dtype=torch.float64)
    dist.all_reduce(sent, group=gloo)
    return Moved(
        path=", ".join(path for path, calls in found["paths"].items() if calls),
        sent=sent.item() / dist.get_world_size(gloo),
        blocks=found["blocks"],
        present=found["blocks_present"],
        union=found["blocks_union"],
    )


def check_moved(moved: Moved, formula: float, bitmaps: float, present: Tensor, union: int) -> None:
    """Requires of a call that skipped that it moved those blocks and hardly more."""
    counted = (moved.blocks, moved.present, moved.union)
    wanted = (present.numel(), int(present.sum()), union)
    harness.require(counted == wanted, f"blocks, own and any rank's: {counted}, not {wanted}")
    # Where chosen blocks lie is chance, and those that a rank owns itself it does not send.
    noise = 3 * math.sqrt(wanted[1]) * BLOCK * 4
    error = moved.sent - formula
    good = -0.02 * formula - noise <= error <= 0.02 * formula + bitmaps + noise
    harness.require(good, f"{moved.sent:.0f} bytes sent; the formula says {formula:.0f}")


def measure(context: Context, case: Case, data: Data, rounds: int, *, hosts: bool) -> list[Row]:
    import fusedpg
    from fusedpg._registration import load_extension

    gloo = context.groups["gloo"]
    present = data.present(case)
    source = data.tensor(present)
    everyone = present.to(torch.uint8)
    dist.all_reduce(everyone, dist.ReduceOp.MAX, group=gloo)
    union = int(everyone.sum())
    reference = AllReduce(gloo, source, arena=False)
    reference.prepare()
    reference()
    expected = reference.tensor.clone()
    harness.require(harness.same_on_all_ranks(expected), "gloo: ranks differ")

    # New groups, which have no memory of the density of an earlier case.
    groups = {
        name: dist.new_group(
            backend="fused",
            timeout=harness.TIMEOUT,
            pg_options=fusedpg.Options(block_skip=skip, block_size=BLOCK),
        )
        for name, skip in SKIP.items()
    }
    arena = case.where == "arena"
    reduces = {name: AllReduce(group, source, arena=arena) for name, group in groups.items()}
    moved = {name: checked(name, arm, expected, gloo) for name, arm in reduces.items()}
    del expected

    others = context.world_size - 1
    dense = 2 * case.size * others / context.world_size
    share = int(present.sum()) / data.blocks
    formula = dense * (share + union / data.blocks) / 2
    bitmaps = 2 * others * math.ceil(data.blocks / 8)
    if moved["on"].path == "block_sparse":
        check_moved(moved["on"], formula, bitmaps, present, union)

    arms: dict[str, Callable[[], object]] = {}
    scanned = reduces["on"]
    if not hosts:
        find_blocks = load_extension().find_blocks
        arms = {
            COPY: harness.copy_arm(case.size),
            SCAN: lambda: find_blocks(scanned.tensor, BLOCK),
        }
    arms |= reduces | {"gloo": reference}
    prepare = {name: arm.prepare for name, arm in (reduces | {"gloo": reference}).items()}
    if SCAN in arms:
        prepare[SCAN] = scanned.prepare
    timed = harness.measure(
        context,
        arms,
        case=case.name,
        size=case.size,
        rounds=rounds,
        bus_factor=2 * others / context.world_size,
        prepare=prepare,
    )
    for row in timed:
        if row.arm == SCAN:
            row.bus_factor = None  # nothing moves
        skipping = row.arm in moved and moved[row.arm].path == "block_sparse"
        row.more = {
            "density": share,  # of the blocks that each rank has
            "union": union / data.blocks,  # that any rank has
            "path": moved[row.arm].path if row.arm in moved else "",
            "sent": moved[row.arm].sent if row.arm in moved else 0.0,  # bytes, the ranks' mean
            "formula": formula if skipping else dense,  # what `sent` should be, without bitmaps
            "bitmaps": bitmaps,  # bytes
        }
    dist.barrier(group=gloo)
    for group in groups.values():
        dist.destroy_process_group(group)
    return timed


def measured(
    context: Context, todo: Iterable[Case], rounds: int, *, hosts: bool
) -> Iterator[list[Row]]:
    """Rows, case by case."""
    size, data = 0, None
    for case in todo:
        if data is None or size != case.size:
            size, data = case.size, Data(case.size, context)
        yield measure(context, case, data, rounds, hosts=hosts)


def worker(context: Context, args: argparse.Namespace) -> list[Row]:
    todo = cases(args, context.world_size)
    bar = harness.progress(
        context, todo, lambda case: f"{harness.format_size(case.size)}, {case.name}"
    )
    return [row for rows in measured(context, bar, args.rounds, hosts=False) for row in rows]
