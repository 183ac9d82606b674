"""Time all_reduce and `fused_adamw_` on 1, 2 and 4 hosts beside a cost model fitted to some sizes.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --layouts 1x1,2x1,4x1 --rate 10gbit

Hosts are network namespaces of this machine whose links have a rate (see tests/python/hosts.py), so
all of them share its cores: where ranks outnumber these, waits do not spin, as a peer needs the
core. Sizes of up to 64 KB are timed in turn with one another, twelve times as often as larger ones,
for a machine's drift is as long as such calls. The model of an operation on N bytes, H hosts and L
ranks on each:

    seconds = a + b (P-1) Q + s (P-1) [P > C] + r R Q + c N Q + m M Q + w max(0, 2 (H-1)/H N - B)

with P = H L ranks, C cores of the machine, Q = max(1, P/C) ranks that queue for a core, and B the
bytes that a link lets through at once before its rate holds. a is what a call costs, b what each
peer adds with whom a rank agrees on it, and s what it adds where waits sleep: somebody has to wake
them. An `all_reduce` goes whole to every peer, with the agreement, while that is at most 128 KiB
for a rank; then a rank sends M = N (P-1) bytes, and R = 0. Otherwise there are R = 2 (H-1) messages
more, contributions and results, of M = 2 (H-1) N/P bytes in all. r is what such a message costs,
m a byte that goes through a socket, c a byte of a rank's tensor, w a byte on the link. They are
fitted for each operation by least squares of the relative error, none below zero, on the sizes of
--fit; sizes of --check are predicted only. A group of one host uses shared memory, which is another
engine: it has a fit of its own, in which M = R = 0.

The projection to 16,384 hosts takes the same figures, with a machine for each host: P becomes L in
Q and [P > C] there. **It is an extrapolation**: nothing here knows of switches that are shared, of
slow hosts, or of what a thousand peers cost beyond b.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import _harness as harness
import _hosts as hosts
import _plots as plots
import _steps as steps
import _words as words
import collectives
from _harness import Context, Hosts, Row

K, M = 1 << 10, 1 << 20
FIT, CHECK = "4K,64K,1M,8M,48M", "16K,3M,24M"
OPS = ("all_reduce", "fused_adamw_")
WITHIN = 0.15  # of the measured time: what the model promises for sizes that it has not seen
FACTORS = tuple(2**k for k in range(15))  # hosts of the projection
PROJECTED = 100 * M
TERMS = ("a", "b", "s", "r", "c", "m", "w")
SMALL, MORE = 64 * K, 12  # bytes; times the rounds
AT_ONCE = 128 * K  # select_net_one_shot() in csrc/collectives/selector.cpp


def main() -> int:
    parser = harness.Parser(__doc__, backends="fused", rounds=7)
    parser.add_argument("--layouts", default="1x2,2x1,2x2,4x1,4x2", help="hosts x ranks on each")
    sizes = harness.parse_sizes
    parser.add_argument("--fit", type=sizes, default=FIT, help="sizes that the model sees")
    parser.add_argument("--check", type=sizes, default=CHECK, help="sizes that it predicts")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as `tc` writes it")
    args = parser.parse_args()
    rows: list[Row] = []
    everything = sorted(args.fit + args.check)
    small = [size for size in everything if size <= SMALL]
    together = [*([small] if small else []), *([size] for size in everything if size > SMALL)]
    for layout in args.layouts.split(","):
        args.layout = count, ranks = tuple(map(int, layout.split("x")))
        if count * ranks == 1:
            continue  # nothing is communicated
        crowded = count > 1 and count * ranks > len(os.sched_getaffinity(0))
        os.environ["FUSEDPG_SPIN_US"] = "0" if crowded else "-1"
        rows += harness.run(measure, args, together, hosts=Hosts(count, ranks, args.rate))
    predict(rows)
    print_model(rows)
    args.world_size = max(math.prod(layout_of(row)) for row in rows)
    return harness.finish("scaling", rows, args, limit="")


def measure(context: Context, args: argparse.Namespace, together: Sequence[int]) -> list[Row]:
    """Sizes in turn with one another."""
    count, ranks = args.layout
    group = context.groups["fused"]
    link = {"rate": 0.0, "burst": 0.0} if count == 1 else hosts.link(args.rate)
    arms = {f"{op} {n}": make_arm(op, n, context, group) for n in together for op in OPS}
    rounds = args.rounds * (MORE if together[0] <= SMALL else 1)
    rows = harness.measure(context, arms, case="", size=0, rounds=rounds)
    for row in rows:
        row.arm, size = row.arm.split()
        row.size, row.case = int(size), f"{row.arm}, {count} x {ranks}"
        row.more = {
            "hosts": count,
            "ranks": ranks,  # on each host
            **link,
            "cores": len(os.sched_getaffinity(0)),
            "fitted": row.size in args.fit,  # the model has seen it
            "predicted": 0.0,  # and `model`, TERMS: predict() has both
            "model": (),
        }
    return rows


def make_arm(
    op: str, size: int, context: Context, group: dist.ProcessGroup
) -> Callable[[], object]:
    if op == "all_reduce":
        numel = size // 4 // context.world_size * context.world_size
        return collectives.make_arm(
            collectives.OPS[op], numel, group, False, context, harness.format_size(size)
        )
    return steps.checked(context, size, [op])[op]


# ---------------------------------------------------------------------------------------------
# The model


def features(
    op: str, size: float, hosts: int, ranks: int, burst: float, share: float
) -> tuple[float, ...]:
    """What TERMS are multiplied by; `share`: ranks for each core of their machine."""
    peers, queue = hosts * ranks - 1.0, max(1.0, share)
    at_once = op == "all_reduce" and size * peers <= AT_ONCE
    messages = 0.0 if at_once else 2.0 * (hosts - 1)
    sent = size * peers if at_once else messages * size / (peers + 1)
    link = max(0.0, 2 * (hosts - 1) / hosts * size - burst)
    return (
        1.0, peers * queue, peers * (share > 1), messages * queue, size * queue,
        sent * queue if hosts > 1 else 0.0, link,
    )  # fmt: skip


def features_of(row: Row) -> tuple[float, ...]:
    # All hosts are on this machine.
    hosts, ranks = layout_of(row)
    share = hosts * ranks / row.more["cores"]
    return features(row.arm, row.size, hosts, ranks, row.more["burst"], share)


def layout_of(row: Row) -> tuple[int, int]:
    """Hosts, and ranks on each."""
    return row.more["hosts"], row.more["ranks"]


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """Least squares of the relative error, none below zero: the best of all sets of terms."""
    inputs = torch.tensor([features_of(row) for row in rows], dtype=torch.float64)
    inputs /= torch.tensor([row.median for row in rows], dtype=torch.float64)[:, None]
    scale = inputs.abs().amax(0).clamp_min(1e-300)
    best, least = (0.0,) * len(TERMS), float("inf")
    for chosen in range(1, 1 << len(TERMS)):
        columns = [t for t in range(len(TERMS)) if chosen >> t & 1]
        if any(not inputs[:, t].any() for t in columns) or len(columns) > len(rows):
            continue
        part = inputs[:, columns] / scale[columns]
        found = torch.linalg.lstsq(part, torch.ones(len(rows), 1, dtype=torch.float64)).solution
        error = float((part @ found - 1).square().sum())
        if bool((found >= 0).all()) and error < least - 1e-12:
            least = error
            terms = [0.0] * len(TERMS)
            for t, value in zip(columns, (found[:, 0] / scale[columns]).tolist(), strict=True):
                terms[t] = value
            best = tuple(terms)
    return best


def inside(rows: Sequence[Row], op: str, alone: bool) -> list[Row]:
    """Those of an operation on one host, or between hosts."""
    return [row for row in rows if row.arm == op and (row.more["hosts"] == 1) == alone]


def predict(rows: Sequence[Row]) -> None:
    """One fit for each operation between hosts, and one inside a host."""
    for same in (inside(rows, op, alone) for op in OPS for alone in (True, False)):
        seen = [row for row in same if row.more["fitted"]]
        model = fit(seen) if seen else ()
        for row in same if seen else ():
            predicted = sum(t * f for t, f in zip(model, features_of(row), strict=True))
            row.more |= {"model": model, "predicted": predicted}


def error(row: Row) -> float:
    return float(row.more["predicted"] / row.median - 1)


def print_model(rows: Sequence[Row]) -> None:
    lines = (
        [row.case, harness.format_size(row.size), f"{1e3 * row.median:.4g}",
         f"{1e3 * row.more['predicted']:.4g}", f"{error(row):+.0%}",
         "fitted" if row.more["fitted"] else ""]
        for row in rows
    )  # fmt: skip
    figures = ["ms", "model ms", "error", ""]
    harness.show("Measured and predicted", ["work", "size"], figures, lines)
    held_out = [row for row in rows if not row.more["fitted"]]
    good = [row for row in held_out if abs(error(row)) <= WITHIN]
    print(f"{len(good)} of {len(held_out)} held-out times within {WITHIN:.0%}")
    for op in OPS:
        for where, alone in (("one host", True), ("hosts", False)):
            if found := inside(rows, op, alone):
                text = ", ".join(f"{t} {v:.3g}" for t, v in zip(TERMS, found[0].more["model"]))
                print(f"{op}, {where}: {text}")


def projected(model: Sequence[float], like: Row, count: int, size: int) -> float:
    """Seconds on so many hosts, with a machine for each."""
    ranks, cores, burst = (like.more[name] for name in ("ranks", "cores", "burst"))
    found = features(like.arm, size, count, ranks, burst, ranks / cores)
    return sum(t * f for t, f in zip(model, found, strict=True))


# ---------------------------------------------------------------------------------------------
# Output


def draw(rows: Sequence[Row], world_size: int) -> Any:
    """A row of panels for each operation: by size with the model, and the projection."""
    figure, axes = plots.plt().subplots(
        len(OPS), 2, figsize=(12, 4 * len(OPS) + 0.8), squeeze=False, layout="constrained"
    )
    for (by_size, by_hosts), op in zip(axes, OPS):
        ours = [row for row in rows if row.arm == op]
        layouts = list(dict.fromkeys(map(layout_of, ours)))
        for (count, ranks), marker in zip(layouts, "os^DvP"):
            line = [row for row in ours if layout_of(row) == (count, ranks)]
            shade = plots.plt().cm.viridis(0.9 * layouts.index((count, ranks)) / len(layouts))
            for fitted in (True, False):
                some = [row for row in line if row.more["fitted"] == fitted]
                by_size.plot(
                    [row.size / M for row in some], [1e3 * row.median for row in some],
                    linestyle="", marker=marker, color=shade, markersize=5,
                    markerfacecolor=shade if fitted else "white",
                    label=f"{count} x {ranks}" if fitted else None,
                )  # fmt: skip
            by_size.plot(
                [row.size / M for row in line], [1e3 * row.more["predicted"] for row in line],
                color=shade, linewidth=1,
            )  # fmt: skip
        title = f"{words.arm(op)}: hosts x ranks; filled: fitted, hollow: predicted"
        by_size.set(xscale="log", yscale="log", xlabel="MB", ylabel="ms", title=title)
        by_size.legend(fontsize="small")
        for ranks, style in ((1, "-"), (2, "--")):
            like = [row for row in inside(ours, op, False) if row.more["ranks"] == ranks]
            if not like:
                continue
            for size, colour in ((PROJECTED, plots.COLOURS[words.OURS]), (M, "#80868b")):
                counts = [count for count in FACTORS if count > 1]
                times = [1e3 * projected(like[0].more["model"], like[0], n, size) for n in counts]
                label = f"{harness.format_size(size)}, {ranks} a host"
                by_hosts.plot(counts, times, linestyle=style, color=colour, label=label)
        most = max(layout_of(row)[0] for row in ours)
        by_hosts.axvspan(most, FACTORS[-1], color="#f1f3f4", zorder=0)
        by_hosts.set(
            xscale="log", yscale="log", xlabel="hosts, each a machine of its own", ylabel="ms",
            title="Projection of the model; grey: not measured",
        )  # fmt: skip
        by_hosts.xaxis.set_major_formatter("{x:g}")
        by_hosts.legend(fontsize="small")
        for axis in (by_size, by_hosts):
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.25)
    rate = max(row.more["rate"] for row in rows)
    cores = rows[0].more["cores"]
    note = f"links of {rate * 1e-9:g} Gbit/s, all hosts on one machine of {cores} cores"
    return plots.titled(figure, f"fp32, medians; {note}")


if __name__ == "__main__":
    sys.exit(main())
