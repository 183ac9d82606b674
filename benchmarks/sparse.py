"""Time all-reduce that skips blocks of zeros against the dense one, by density.

    python benchmarks/sparse.py --check-bars
    python benchmarks/sparse.py --densities 1,.1,.01 --overlap none --tensor both
    python benchmarks/sparse.py --hosts 2 --rate 1gbit --sizes 16M,100M --check-bars

Tensors are 1-D, fp32 and zero but for a share of their blocks of 256 elements (the density). Ranks
draw these blocks each for itself ("random"), all the same ("full") or all others ("none"). The arms
are `dist.all_reduce` in groups with `block_skip` "off" (called dense), "auto" and "on", Gloo's, the
search for blocks alone ("scan") and a copy of the same bytes. all_reduce is in place: each sample
begins from the same data. Before anything is timed, all arms have to give Gloo's result, bit for
bit, and "on" has to send the bytes that the densities say: with d the share of blocks that a rank
has and u the share that any rank has, P ranks and N bytes, (d + u) N (P-1)/P and bitmaps. The
2 N (P-1)/P of a dense all-reduce over that is the bound on the speed-up.

With `--hosts` each rank is on a host of its own: a network namespace whose link has a rate (needs
root, `ip` and `tc`; exits with 2 where that cannot be). How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
import _hosts as hosts
import _plots as plots
import _words as words
from _harness import COPY, Bar, Context, Row

BLOCK = 256  # elements
SCAN = "scan"
# Arms by the option block_skip.
SKIP: dict[str, Literal["off", "auto", "on"]] = {"dense": "off", "auto": "auto", "on": "on"}
# The first call of a shape only looks at a sample; later ones know the density.
UNTIMED = {"auto": 3}
OVERLAPS = ("random", "full", "none")
TENSORS = ("arena", "ordinary")
DENSITIES = "1,.8,.4,.2,.1,.08,.04,.02,.01"
ROUNDS, HOST_ROUNDS = 21, 5
SIZE = 100 << 20
BARS = [
    Bar(2, "1% random, arena", "on", SIZE, "dense", at_least=1.8),
    Bar(2, "1% random, arena", "on", SIZE, "gloo", at_least=8),
    Bar(2, "100% random, arena", "auto", SIZE, "dense", at_most=1.05),
    Bar(2, "100% random, arena", "on", SIZE, "dense", at_most=1.15),
    Bar(2, "1% random, 1gbit", "on", SIZE, "gloo", at_least=20),
    Bar(2, "10% random, 1gbit", "on", SIZE, "gloo", at_least=5),
]


def main() -> int:
    parser = harness.Parser(__doc__, sizes="100M", rounds=0)
    shares = {"type": harness.parse_shares, "default": DENSITIES}
    parser.add_argument("--densities", help="shares of blocks, above 0", **shares)
    parser.add_argument("--overlap", choices=OVERLAPS, default="random")
    parser.add_argument("--tensor", choices=(*TENSORS, "both"), default="arena")
    hosts.add_options(parser)
    args = parser.parse_args()
    if set(args.backends) != {"fused", "gloo"}:
        parser.error("--backends: this compares fused and gloo")
    args.world_size = args.hosts or args.world_size
    args.rounds = args.rounds or (HOST_ROUNDS if args.hosts else ROUNDS)
    todo = cases(args)
    if not todo:
        parser.error("--overlap none: no density is that of disjoint blocks")
    rows = harness.run(measure, args, todo, hosts=hosts.chosen(args))
    name = "sparse" if args.overlap == "random" else f"sparse_{args.overlap}"
    name += f"_hosts_{args.rate}" if args.hosts else ""
    print_densities(rows)
    limit = "gloo" if args.hosts else COPY
    return harness.finish(name, rows, args, limit=limit, bars=BARS)


# ---------------------------------------------------------------------------------------------
# On a rank


@dataclass(frozen=True)
class Case:
    size: int  # bytes
    density: float
    overlap: str
    where: str  # of TENSORS; between hosts, their rate

    @property
    def name(self) -> str:
        return f"{100 * self.density:.3g}% {self.overlap}, {self.where}"

    def __str__(self) -> str:
        return f"{harness.format_size(self.size)}, {self.name}"


def cases(args: argparse.Namespace) -> list[Case]:
    """What the options ask for, without what is impossible: disjoint shares above 1."""
    places = list(TENSORS) if args.tensor == "both" else [args.tensor]
    return [
        Case(size, density, args.overlap, where)
        for where in ([args.rate] if args.hosts else places)
        for size in args.sizes
        for density in args.densities
        if args.overlap != "none" or density * args.world_size <= 1
    ]


class Data:
    """A rank's tensors of one size: integers, of which every order of additions makes the same."""

    def __init__(self, context: Context, size: int) -> None:
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


def measure(context: Context, args: argparse.Namespace, case: Case) -> list[Row]:
    import fusedpg
    from fusedpg._registration import load_extension

    gloo, data = context.groups["gloo"], context.once(Data, case.size)
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
    if not args.hosts:
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
        rounds=args.rounds,
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


# ---------------------------------------------------------------------------------------------
# Output


def bound(row: Row) -> float:
    """Bytes of the dense all-reduce over those that skipping moves."""
    assert row.bus_factor is not None
    bitmaps = 2 * row.more["bitmaps"] / (row.size * row.bus_factor)
    return float(2 / (row.more["density"] + row.more["union"] + bitmaps))


def by_arm(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each case."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.case, row.size), {})[row.arm] = row
    return list(found.values())


def print_densities(rows: Sequence[Row]) -> None:
    """What skipping gains, beside what it could, and what it moves, beside the formula."""
    lines = []
    for arms in by_arm(rows):
        on, auto, dense, gloo = (arms[name] for name in ("on", "auto", "dense", "gloo"))
        scan = f"{arms[SCAN].median / on.median:.0%}" if SCAN in arms else ""
        lines.append(
            [
                on.case,
                harness.format_size(on.size),
                auto.more["path"],
                f"{on.more['union']:.1%}",
                f"{bound(on):.2f}x",
                *(f"{peer.median / row.median:.2f}x" for peer, row in ((dense, on), (dense, auto))),
                f"{harness.ratio_to_peer(on, gloo):.2f}x",
                scan,
                f"{on.more['sent'] * 1e-6:.4g}",
                f"{on.more['sent'] / on.more['formula']:.3f}",
            ]
        )
    figures = ("u", "bound", "dense/on", "dense/auto", "gloo/on", "scan/on", "MB sent", "bytes")
    title = 'Densities (u: of the result; bytes: what "on" sends over its formula)'
    harness.show(title, ["work", "size", "path of auto"], figures, lines)


def draw(rows: Sequence[Row], world_size: int) -> Any:
    """Times by density, and below them how many times as fast as Gloo, with the bound by bytes."""
    tables: dict[str, list[dict[str, Row]]] = {}
    for arms in by_arm(rows):
        first = arms["on"]
        drawn, where = first.case.split(" ", 1)[1].split(", ")
        where = {"arena": "in the arena", "ordinary": "ordinary memory"}.get(where, where)
        title = f"{harness.format_size(first.size)}, {where}, {drawn} blocks"
        tables.setdefault(title, []).append(arms)
    figure, axes = plots.plt().subplots(
        2, len(tables), figsize=(max(6.5, 5.5 * len(tables)), 8), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for column, (title, lines) in enumerate(tables.items()):
        lines = sorted(lines, key=lambda arms: arms["on"].more["density"])
        densities = [100 * arms["on"].more["density"] for arms in lines]
        times, gains = axes[0][column], axes[1][column]
        styles = plots.Styles()
        for name in lines[0]:
            kind = words.whose(name)
            style = styles.next(kind)
            plots.with_quartiles(times, densities, [arms[name] for arms in lines], style)
            if kind == words.OURS:
                gain = [harness.ratio_to_peer(arms[name], arms["gloo"]) for arms in lines]
                gains.plot(densities, gain, **style)
        dense = [harness.ratio_to_peer(arms["dense"], arms["gloo"]) for arms in lines]
        bounds = [ratio * bound(arms["on"]) for ratio, arms in zip(dense, lines)]
        label = "dense, by the bytes that skipping leaves"
        gains.plot(densities, bounds, color=plots.COLOURS[words.LIMIT], linestyle=":", label=label)
        times.set(title=f"all_reduce, {title}", ylabel="ms")
        gains.set(xlabel="blocks of a rank that are not zero, %", ylabel="times as fast as Gloo")
        gains.legend(fontsize="small")
        for axis in (times, gains):
            axis.set(xscale="log", yscale="log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    return plots.titled(figure, plots.note(world_size))


if __name__ == "__main__":
    sys.exit(main())
