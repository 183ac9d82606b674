"""The benchmarks' plots: ours in one colour, peers grey, what bounds us all as a line.

Drawn from rows alone, so that `report.py` can draw them again from saved results.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _words as words
from _harness import COPY, Row, format_size, peer_row, ratio_to_peer

COLOURS = {words.OURS: "#1967d2", words.PEER: "#9aa0a6", words.LIMIT: "#202124"}
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
WIDTH = 8  # inches: more of them are too small to read on a page
Draw = Callable[[], Any]  # makes a figure


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


class Styles:
    """Of the lines of a panel: a colour for whose they are, then another dash and mark for each."""

    def __init__(self) -> None:
        self._drawn = dict.fromkeys(COLOURS, 0)

    def next(self, kind: str) -> dict[str, Any]:
        number = self._drawn[kind] % 4
        self._drawn[kind] += 1
        style = {"color": COLOURS[kind], "markersize": 4.5}
        if kind == words.LIMIT:
            return style | {"linestyle": LINES[2 + number % 2]}
        return style | {"linestyle": LINES[number], "marker": MARKERS[number]}


def with_quartiles(
    axis: Any, xs: Sequence[float], line: Sequence[Row], style: Mapping[str, Any]
) -> None:
    times = [1e3 * typical(row) for row in line]
    axis.plot(xs, times, label=words.arm(line[0].arm), **style)
    low, high = ([1e3 * getattr(row, q) for row in line] for q in ("p25", "p75"))
    axis.fill_between(xs, low, high, alpha=0.15, color=style["color"], linewidth=0)


def sweep(axis: Any, rows: Sequence[Row], title: str) -> None:
    """Times by size, with how many times as fast as Gloo our fastest arm is."""
    styles = Styles()
    sizes = sorted({row.size for row in rows})
    for name in dict.fromkeys(row.arm for row in rows):
        line = [row for row in rows if row.arm == name]
        places = [sizes.index(row.size) for row in line]
        with_quartiles(axis, places, line, styles.next(words.whose(name)))
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


def titled(figure: Any, title: str) -> Any:
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color="#5f6368")
    return figure


def save(path: Path, draw: Draw) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot, figure = plt(), draw()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def note(world_size: int) -> str:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"{ranks}, fp32, medians; less is better. Blue: fusedpg, grey: others, black: limits.\n"
        "2.3x: so many times as fast as Gloo"
    )


def sweeps(rows: Sequence[Row], world_size: int) -> Any:
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
    shown = axes.flat[: len(cases)]
    if any(set(axis.get_legend_handles_labels()[1]) - set(labels) for axis in shown):
        for axis in shown:
            axis.legend(fontsize="x-small")
    elif spare:
        axes.flat[-1].legend(handles, labels, loc="center", fontsize="medium")
    else:
        ncols = 3 if columns > 1 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize="small")
    return titled(figure, note(world_size))


Bars = Mapping[str, tuple[str, float, str]]  # by the name of an arm: whose, how long, and its text


def bar_columns(columns: Mapping[str, Mapping[str, Bars]], xlabel: str, title: str) -> Any:
    """Columns of bars by one list of names: by their titles, in sections; limits are thin."""
    sections: dict[str, dict[str, None]] = {}
    for column in columns.values():
        for section, some in column.items():
            sections.setdefault(section, {}).update(dict.fromkeys(some))
    # A section without a title has no line of its own.
    places = [
        (section, name)
        for section, some in sections.items()
        for name in (*([None] if section else []), *some)
    ]
    figure, axes = plt().subplots(
        1, len(columns), figsize=(WIDTH, 0.21 * len(places) + 1.1), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axis, (head, column) in zip(axes[0], columns.items()):
        longest = max(length for some in column.values() for _, length, _ in some.values())
        for place, (section, name) in enumerate(places):
            if name is None or name not in column.get(section, {}):
                continue
            whose, length, text = column[section][name]
            height = 0.25 if whose == words.LIMIT else 0.74
            axis.barh(place, length, color=COLOURS[whose], height=height)
            axis.text(length + 0.02 * longest, place, text, va="center", fontsize="x-small")
        axis.set_xlim(0, (1.85 if len(columns) < 4 else 1.4) * longest)
        axis.set_title(textwrap.fill(head, 22 if len(columns) < 3 else 18))
        axis.set_xlabel(xlabel, fontsize="small")
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize="small")
    first = axes[0][0]
    labels = [section if name is None else words.arm(name) for section, name in places]
    first.set_yticks(range(len(places)), labels, fontsize="small")
    for label, (_, name) in zip(first.get_yticklabels(), places):
        label.set_fontweight("bold" if name is None else "normal")
    first.set_ylim(len(places) - 0.4, -0.6)
    return titled(figure, title)


def timed_bars(rows: Sequence[Row]) -> Bars:
    """Of one case: times, and how many times as fast as Gloo."""
    found = {}
    for row in rows:
        times = against_gloo(rows, row)
        text = f"{milliseconds(typical(row))}" + (f", {times}" if times else "")
        found[row.arm] = words.whose(row.arm), 1e3 * typical(row), text
    return found


def bar_panels(
    rows: Sequence[Row], world_size: int, *, title: Callable[[Row], str] | None = None
) -> Any:
    """A column of bars for each case, or where these are many, a section for each."""
    panels: dict[str, Bars] = {}
    for case, size in dict.fromkeys((row.case, row.size) for row in rows):
        mine = [row for row in rows if (row.case, row.size) == (case, size)]
        mine = [row for row in mine if not row.arm.startswith(words.BEST)]
        panels[title(mine[0]) if title else words.case(case)] = timed_bars(mine)
    columns = {"": panels} if len(panels) > 4 else {head: {"": p} for head, p in panels.items()}
    return bar_columns(columns, "ms", note(world_size))


# ---------------------------------------------------------------------------------------------
# The pictures of each benchmark, by the stem of a file's name


def by_sizes(
    stem: str,
    rows: Sequence[Row],
    world_size: int,
) -> dict[str, Draw]:
    """Over sizes where the cases have several, else bars."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.case, set()).add(row.size)
    many = [row for row in rows if len(sizes[row.case]) > 1]
    one = [row for row in rows if len(sizes[row.case]) == 1]
    found: dict[str, Draw] = {stem: partial(sweeps, many, world_size)} if many else {}
    if one:
        apart = f"{stem}_{one[0].case}".replace(" ", "_") if many else stem
        found[apart] = partial(bar_panels, one, world_size)
    return found


def of_optimizers(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    """Training steps in one picture, single optimizer steps in another one."""
    steps = [row for row in rows if row.case.endswith(" step") or row.case == "list"]
    training = [row for row in rows if row not in steps]

    def title(row: Row) -> str:
        return f"{words.case(row.case)} on {format_size(row.size)} of parameters"

    found: dict[str, Draw] = {}
    if training:
        found[stem] = partial(bar_panels, training, world_size)
    if steps:
        apart = stem.replace("optimizers", "optimizers_step", 1) if training else stem
        found[apart] = partial(bar_panels, steps, world_size, title=title)
    return found


def of_steps_on_hosts(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    # A copy inside a host bounds nothing there.
    return by_sizes(stem, [row for row in rows if row.arm != COPY], world_size)


def of_hosts(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    """all_reduce by size where the link has no rate; bars for what takes a link's time."""
    most = min(90 << 20, max(row.size for row in rows))
    columns: dict[str, dict[str, Bars]] = {}
    layout = ""
    for case in dict.fromkeys(row.case for row in rows if row.size >= most):
        part, layout, rate = case.split(", ")
        mine = [row for row in rows if row.case == case and row.size >= most]
        columns.setdefault(rate, {})[words.case(part)] = timed_bars(mine)
    title = f"{note(world_size)}; hosts x ranks: {layout}. Thin: limits"
    found: dict[str, Draw] = {stem: partial(bar_columns, columns, "ms", title)}
    small = [r for r in rows if r.case.startswith("all_reduce") and r.case.endswith("unlimited")]
    if len({row.size for row in small}) > 1:
        found[f"{stem}_sizes"] = partial(sweeps, small, world_size)
    return found


def of_compression(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    """Steps a second over those without communication, rate by rate: as in MergeComp's README."""
    columns: dict[str, dict[str, Bars]] = {}
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        alone = next(row.median for row in mine if row.arm == "no_sync")
        shares = {row.arm: 100 * alone / row.median for row in mine if row.arm != "no_sync"}
        bars = {arm: (words.whose(arm), share, f"{share:.0f}") for arm, share in shares.items()}
        columns[case.removeprefix("step, ")] = {"": bars}
    title = f"DDP, MLP of 25 M parameters, {world_size} hosts: % of the steps without communication"
    return {stem: partial(bar_columns, columns, "%", title)}


def of_sparse(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    import sparse

    return {stem: partial(sparse.draw, rows, world_size)}


def of_scaling(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    import scaling

    return {stem: partial(scaling.draw, rows, world_size)}


OTHERS: dict[str, Callable[[str, Sequence[Row], int], dict[str, Draw]]] = {
    "between_hosts": of_hosts,
    "compress": of_compression,
    "fused_step_hosts": of_steps_on_hosts,
    "optimizers": of_optimizers,
    "scaling": of_scaling,
    "sparse": of_sparse,
}


def pictures(name: str, stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    """A benchmark's, each by the stem of its file; they begin with the given one."""
    if name.startswith("compress_kernels"):
        return by_sizes(stem, rows, world_size)
    make = next((make for start, make in OTHERS.items() if name.startswith(start)), by_sizes)
    return make(stem, rows, world_size)


def draw_curves(curves: Iterable[Mapping[str, Any]]) -> Any:
    """Loss against time, rate by rate."""
    curves = list(curves)
    rates = list(dict.fromkeys(curve["rate"] for curve in curves))
    figure, axes = plt().subplots(
        1, len(rates), figsize=(5.5 * len(rates), 4), layout="constrained", squeeze=False
    )
    for axis, rate in zip(axes[0], rates):
        for curve in curves:
            if curve["rate"] == rate:
                label = f"{words.arm(curve['method'])} ({curve['steps']} steps)"
                axis.plot(*zip(*curve["points"]), label=label)
        axis.set(title=rate, xlabel="seconds", ylabel="loss (mean of 5 steps)")
        axis.legend(fontsize="small")
    return titled(figure, "Loss against time, MLP of 25 M parameters, 2 hosts")


def draw_plans(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Times and memory of plans beside what the cost model predicts."""
    figure, panels = plt().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    planned = [row for row in rows if "mb" in row]
    for axes, key, unit in zip(panels, ("ms", "mb"), ("ms an iteration", "MB a device")):
        shown = rows if key == "ms" else planned
        places = range(len(shown))
        axes.barh(places, [row[key] for row in shown], color=COLOURS[words.OURS], label="measured")
        marked = [(i, row[f"predicted_{key}"]) for i, row in enumerate(shown) if row in planned]
        axes.plot(
            *zip(*((value, i) for i, value in marked)), "|", color=COLOURS[words.LIMIT],
            markersize=12, label="predicted",
        )  # fmt: skip
        axes.set_yticks(list(places), [row["name"] for row in shown])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    # Below both, as bars fill their fields.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return titled(figure, title)


def draw_densities(rows: Sequence[Mapping[str, Any]]) -> Any:
    """OmniReduce's figures 4 and 5: times by density, for each number of workers."""
    workers = sorted({row["workers"] for row in rows})
    figure, axes = plt().subplots(
        1, len(workers), figsize=(WIDTH, 3.4), squeeze=False, layout="constrained"
    )
    arms = {"aggregators": "aggregators", "blocks": "blocks from rank to rank", "auto": "auto"}
    for axis, count in zip(axes[0], workers):
        mine = [row for row in rows if row["workers"] == count]
        styles = Styles()
        for arm, name in arms.items():
            some = [row for row in mine if row["arm"] == arm and "percent" in row]
            found = sorted(some, key=lambda row: row["percent"])
            percent, times = ([row[key] for row in found] for key in ("percent", "ms"))
            axis.plot(percent, times, label=name, **styles.next(words.OURS))
        gloo = next(row["ms"] for row in mine if row["arm"] == "gloo")
        axis.axhline(gloo, label="Gloo, dense", color=COLOURS[words.PEER])
        axis.set(xscale="log", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(axis="y", alpha=0.25)
        title = f"{count} workers,\n{count} aggregators"
        axis.set(title=title, xlabel="% of a rank's blocks")
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylabel("ms")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    where = "the workers' hosts" if rows[0]["colocated"] else "hosts of their own"
    rate = rows[0]["rate"].removesuffix("gbit")
    return titled(
        figure,
        "20 MiB of fp32, blocks of 256, none of two ranks as long as all have that many, then the "
        f"same of all;\naggregators on {where}, links of {rate} Gbit/s, medians",
    )


def draw_blocks(rows: Sequence[Mapping[str, Any]]) -> Any:
    """OmniReduce's figure 13: times by the size of blocks and of messages."""
    figure, axis = plt().subplots(figsize=(6.4, 4), layout="constrained")
    found = [row for row in rows if "message" in row]
    styles = Styles()
    for message in sorted({row["message"] for row in found}):
        some = [row for row in found if row["message"] == message]
        blocks, times = ([row[key] for row in some] for key in ("block", "ms"))
        label = f"messages of {message >> 10} KiB"
        axis.plot(blocks, times, label=label, **styles.next(words.OURS))
    axis.set(title="4 workers, 4 aggregators, 10% of blocks, the same of all")
    axis.set(xlabel="elements of a block", ylabel="ms", xscale="log")
    axis.set_xticks(sorted({row["block"] for row in found}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_ylim(0)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(fontsize="small")
    return titled(figure, "20 MiB of fp32, links of 1 Gbit/s, medians")


def of_aggregators(path: Path) -> Draw:
    """Of the rows that `aggregators.py` has saved."""
    draw = draw_blocks if path.stem == "blocks" else draw_densities
    return partial(draw, json.loads(path.read_text())["rows"])
