"""The benchmarks' plots: ours in one colour, peers grey, what bounds us all as a line.

Drawn from rows alone, so that `report.py` can draw them again from saved results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _words as words
from _harness import Row, format_size, peer_row, ratio_to_peer

COLOURS = {words.OURS: "#1967d2", words.PEER: "#9aa0a6", words.LIMIT: "#202124"}
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
BAR = 0.36  # inches
REPEATED = "best of f, g"
Panel = tuple[str, int]  # case, and size where each has a panel of its own


def plt() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.edgecolor": "#80868b",
            "xtick.color": "#3c4043",
            "ytick.color": "#3c4043",
            "font.size": 10,
            "legend.frameon": False,
        }
    )
    return matplotlib.pyplot


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.3g}" if value < 1 else f"{value:.{2 if value < 10 else int(value < 100)}f}"


def typical(row: Row) -> float:
    """The median; of Gloo its fast mode, which ratios are to (see `_harness.py`)."""
    gloo = row.arm.removesuffix(words.KEPT) == "a" or row.arm.startswith("gloo")
    return row.fast if gloo else row.median


def gloo_of(rows: Sequence[Row], row: Row) -> Row | None:
    """Gloo's row that this one is compared with."""
    if any(r.arm == "a" for r in rows if r.case == row.case):
        return peer_row(rows, row, "a")
    return peer_row(rows, row, "gloo")


def against_gloo(rows: Sequence[Row], row: Row) -> str:
    """ "2.3x", or nothing for Gloo itself and for limits."""
    gloo = gloo_of(rows, row)
    if gloo is None or gloo is row or words.whose(row.arm) == words.LIMIT:
        return ""
    ratio = ratio_to_peer(row, gloo)
    return f"{ratio:.{2 if ratio < 1.995 else 1 if ratio < 9.95 else 0}f}x"


def bars(axis: Any, rows: Sequence[Row], title: str, places_in_all: int, *, names: bool) -> None:
    """Times of one case, one below the other; limits as vertical lines."""
    limits = [row for row in rows if words.whose(row.arm) == words.LIMIT]
    shown = [row for row in rows if row not in limits]
    places = range(len(shown))
    axis.barh(
        places,
        [1e3 * typical(row) for row in shown],
        color=[COLOURS[words.whose(row.arm)] for row in shown],
        height=0.72,
    )
    longest = max(typical(row) for row in rows)
    for place, row in zip(places, shown):
        times = against_gloo(rows, row)
        text = f"{milliseconds(typical(row))} ms" + (f", {times}" if times else "")
        axis.text(
            1e3 * (typical(row) + 0.015 * longest), place, text, va="center", fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}, zorder=3,
        )  # fmt: skip
    below = ["ms"]  # the axis' label explains the lines, too
    for limit, style, sign in zip(limits, LINES[1:], ("- - -", "· · ·", "- · -")):
        axis.axvline(
            1e3 * limit.median, color=COLOURS[words.LIMIT], linestyle=style, linewidth=1.1, zorder=2
        )
        below.append(f"{sign}  {words.arm(limit.arm)}: {milliseconds(limit.median)} ms")
    labels = [words.arm(row.arm) for row in shown] if names else [""] * len(shown)
    axis.set_yticks(places, labels)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(places_in_all - 0.5, -0.5)
    axis.set_xlim(0, 1.32e3 * longest)
    axis.set(title=title)
    axis.set_xlabel("\n".join(below), fontsize="small")


def sweep(axis: Any, rows: Sequence[Row], title: str) -> None:
    """Times by size, with how many times as fast as Gloo our fastest arm is."""
    drawn = dict.fromkeys(COLOURS, 0)
    sizes = sorted({row.size for row in rows})
    for name in dict.fromkeys(row.arm for row in rows):
        kind = words.whose(name)
        line = [row for row in rows if row.arm == name]
        style = {"linestyle": LINES[drawn[kind] % 4], "marker": MARKERS[drawn[kind] % 4]}
        if kind == words.LIMIT:
            style = {"linestyle": ":"}
        drawn[kind] += 1
        places = [sizes.index(row.size) for row in line]
        axis.plot(
            places, [1e3 * typical(row) for row in line], label=words.arm(name),
            color=COLOURS[kind], markersize=4.5, **style,
        )  # fmt: skip
        low, high = ([1e3 * getattr(row, q) for row in line] for q in ("p25", "p75"))
        axis.fill_between(places, low, high, alpha=0.15, color=COLOURS[kind], linewidth=0)
    for place, size in enumerate(sizes):
        ours = [r for r in rows if r.size == size and words.whose(r.arm) == words.OURS]
        # What has a counterpart on Gloo by its name is compared there, not across.
        best = min(ours, key=lambda row: row.median)
        text = against_gloo(rows, best)
        if text:
            axis.annotate(
                text, (place, 1e3 * best.median), (0, -13), textcoords="offset points",
                ha="center", fontsize="small", color=COLOURS[words.OURS], weight="bold", zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8},
            )  # fmt: skip
    axis.set(title=title, ylabel="ms", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
    axis.margins(x=0.08, y=0.12)
    axis.grid(axis="y", alpha=0.25)


def finish(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color="#5f6368")
    figure.savefig(path, dpi=120)
    plt().close(figure)


def note(world_size: int) -> str:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"{ranks}, fp32, medians; less is better. Blue: fusedpg, grey: others, black: limits.\n"
        "2.3x: so many times as fast as Gloo"
    )


def save_sweeps(path: Path, rows: Sequence[Row], world_size: int) -> None:
    """A panel for each case, over sizes; one legend for all."""
    cases = list(dict.fromkeys(row.case for row in rows))
    columns = min(3, len(cases))
    spare = len(cases) % columns != 0
    lines = math.ceil(len(cases) / columns)
    width = 4.6 * columns if columns > 1 else 7
    figure, axes = plt().subplots(
        lines, columns, figsize=(width, 3.5 * lines + 0.7), squeeze=False, layout="constrained"
    )
    for axis, case in zip(axes.flat, cases):
        sweep(axis, [row for row in rows if row.case == case], words.case(case))
    handles, labels = axes.flat[0].get_legend_handles_labels()
    for axis in axes.flat[len(cases) :]:
        axis.set_axis_off()
    if spare:
        axes.flat[-1].legend(handles, labels, loc="center", fontsize="medium")
    else:
        ncols = 3 if columns > 1 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize="small")
    finish(figure, path, note(world_size))


def save_bars(
    path: Path, rows: Sequence[Row], world_size: int, *, title: Callable[[Row], str] | None = None
) -> None:
    """A panel of bars for each case; one column of names where all panels have the same arms."""
    rows = [row for row in rows if not row.arm.startswith(REPEATED)]
    panels: dict[Panel, list[Row]] = {}
    for row in rows:
        panels.setdefault((row.case, row.size), []).append(row)
    arms = [tuple(row.arm for row in panel) for panel in panels.values()]
    same = len(set(arms)) == 1
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    longest = max(len([n for n in names if words.whose(n) != words.LIMIT]) for names in arms)
    limits = max(sum(words.whose(name) == words.LIMIT for name in names) for names in arms)
    height = BAR * longest + 1.2 + 0.2 * limits
    width = max(8, 3.6 * columns + 3.2 * (1 if same else columns))
    figure, axes = plt().subplots(
        lines, columns, figsize=(width, height * lines + 0.4), squeeze=False, layout="constrained"
    )
    for number, (axis, panel) in enumerate(zip(axes.flat, panels.values())):
        name = title(panel[0]) if title else words.case(panel[0].case)
        bars(axis, panel, name, longest, names=not same or number % columns == 0)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    finish(figure, path, note(world_size))


def save_speedups(path: Path, rows: Sequence[Row], base: str, title: str) -> None:
    """How many times as fast as one arm each is, as groups of bars over sizes."""
    sizes = sorted({row.size for row in rows})
    names = list(dict.fromkeys(row.arm for row in rows))
    figure, axis = plt().subplots(figsize=(max(7, 1.2 * len(sizes)), 3.8), layout="constrained")
    width = 0.84 / len(names)
    times = {(row.size, row.arm): typical(row) for row in rows}
    shades = {kind: [n for n in names if words.whose(n) == kind] for kind in COLOURS}
    for number, name in enumerate(names):
        shown = [size for size in sizes if (size, name) in times and (size, base) in times]
        places = [sizes.index(size) + (number - (len(names) - 1) / 2) * width for size in shown]
        heights = [times[size, base] / times[size, name] for size in shown]
        kind = words.whose(name)
        alpha = (1 + shades[kind].index(name)) / len(shades[kind])
        axis.bar(
            places, heights, width * 0.92, color=COLOURS[kind], alpha=alpha, label=words.arm(name)
        )
        for place, height in zip(places, heights):
            axis.annotate(
                f"{height:.2f}", (place, height), (0, 3), textcoords="offset points",
                ha="center", rotation=90, fontsize="x-small",
            )  # fmt: skip
    axis.axhline(1, color=COLOURS[words.LIMIT], linewidth=0.8, linestyle="--")
    axis.set(ylabel=f"times as fast as\n{words.arm(base)}")
    axis.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
    axis.margins(y=0.15)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    finish(figure, path, title)


def save_plot(path: Path, rows: Sequence[Row], world_size: int) -> None:
    """Over sizes where the cases have several, else bars."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.case, set()).add(row.size)
    swept = [row for row in rows if len(sizes[row.case]) > 1]
    single = [row for row in rows if len(sizes[row.case]) == 1]
    if swept:
        save_sweeps(path, swept, world_size)
    if single:
        beside = path.with_stem(f"{path.stem}_{single[0].case}".replace(" ", "_"))
        save_bars(beside if swept else path, single, world_size)


def save_optimizers(path: Path, rows: Sequence[Row], world_size: int) -> None:
    """Training steps in one picture, single optimizer steps in another one."""
    steps = [row for row in rows if row.case.endswith(" step") or row.case == "list"]
    training = [row for row in rows if row not in steps]
    if training:
        save_bars(path, training, world_size)
    if steps:
        stem = path.stem if not training else path.stem.replace("optimizers", "optimizers_step", 1)
        save_bars(
            path.with_stem(stem), steps, world_size,
            title=lambda row: f"{words.case(row.case)} on {format_size(row.size)} of parameters",
        )  # fmt: skip


def save_step_densities(path: Path, rows: Sequence[Row], world_size: int) -> None:
    """Steps between hosts: one row of panels for each size, one column for each density."""
    cases = list(dict.fromkeys(row.case for row in rows))
    ordered = sorted(rows, key=lambda row: (row.size, cases.index(row.case)))

    def title(row: Row) -> str:
        density = row.case.partition(", ")[2] or "100%"
        return f"{format_size(row.size)}, {density} of the gradients' blocks"

    # A copy inside a host bounds nothing there.
    save_bars(path, [row for row in ordered if row.arm != "copy"], world_size, title=title)
