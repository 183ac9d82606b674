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

import sys
from collections.abc import Sequence
from typing import Any

import _harness as harness
import _hosts as hosts
import _plots as plots
import _sparse_arms as sparse
import _words as words
from _harness import Bar, Row
from _sparse_arms import OVERLAPS, SCAN, TENSORS

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
    parser = harness.parser(__doc__, backends="fused,gloo", sizes="100M", rounds=0)
    parser.add_argument("--densities", default=DENSITIES, help="shares of blocks, above 0")
    parser.add_argument("--overlap", choices=OVERLAPS, default="random")
    parser.add_argument("--tensor", choices=(*TENSORS, "both"), default="arena")
    hosts.add_options(parser)
    args = parser.parse_args()
    args.densities = [float(part) for part in args.densities.split(",")]
    if not all(0 < density <= 1 for density in args.densities):
        parser.error("--densities: shares above 0, 1 at most")
    if set(args.backends) != {"fused", "gloo"}:
        parser.error("--backends: this compares fused and gloo")
    if args.hosts:
        args.world_size = args.hosts
        args.places = [args.rate]
    else:
        args.places = list(TENSORS) if args.tensor == "both" else [args.tensor]
    args.rounds = args.rounds or (HOST_ROUNDS if args.hosts else ROUNDS)
    if not sparse.cases(args, args.world_size):
        parser.error("--overlap none: no density is that of disjoint blocks")
    if args.worker:
        hosts.worker(
            args,
            lambda context: sparse.measured(
                context, sparse.cases(args, args.world_size), args.rounds, hosts=True
            ),
        )
        return 0

    name = "sparse" if args.overlap == "random" else f"sparse_{args.overlap}"
    if args.hosts:
        found = hosts.run(args, len(sparse.cases(args, args.world_size)))
        if found is None:
            return 2
        rows = found
        name += f"_hosts_{args.rate}"
    else:
        rows = harness.run(sparse.worker, args)
    print_densities(rows)
    limit = "gloo" if args.hosts else harness.COPY
    harness.finish(name, rows, args, limit=limit, bars=BARS)
    return 0


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
    from rich.table import Table

    table = Table(title='Densities (u: of the result; bytes: what "on" sends over its formula)')
    for column in ("work", "size"):
        table.add_column(column, no_wrap=True)
    columns = ("u", "bound", "dense/on", "dense/auto", "gloo/on", "scan/on", "MB sent", "bytes")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("path of auto", no_wrap=True)
    for arms in by_arm(rows):
        on, auto, dense, gloo = (arms[name] for name in ("on", "auto", "dense", "gloo"))
        scan = f"{arms[SCAN].median / on.median:.0%}" if SCAN in arms else ""
        table.add_row(
            on.case,
            harness.format_size(on.size),
            f"{on.more['union']:.1%}",
            f"{bound(on):.2f}x",
            *(f"{peer.median / row.median:.2f}x" for peer, row in ((dense, on), (dense, auto))),
            f"{harness.ratio_to_peer(on, gloo):.2f}x",
            scan,
            f"{on.more['sent'] * 1e-6:.4g}",
            f"{on.more['sent'] / on.more['formula']:.3f}",
            auto.more["path"],
        )
    harness._console().print(table)


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
        before = dict.fromkeys(plots.COLOURS, 0)
        for name in lines[0]:
            kind = words.whose(name)
            style = {"linestyle": plots.LINES[before[kind]], "color": plots.COLOURS[kind]}
            if kind == words.LIMIT:
                style["linestyle"] = plots.LINES[2 + before[kind]]
            else:
                style |= {"marker": plots.MARKERS[before[kind]], "markersize": 4.5}
            before[kind] += 1
            chosen = [arms[name] for arms in lines]
            label = words.arm(name)
            times.plot(densities, [1e3 * row.median for row in chosen], label=label, **style)
            low, high = ([1e3 * getattr(row, q) for row in chosen] for q in ("p25", "p75"))
            times.fill_between(densities, low, high, alpha=0.15, color=style["color"], linewidth=0)
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
