"""The benchmarks' plots: ours in one colour, peers grey, what bounds us all as a line.

Drawn from rows alone, so that `report.py` can draw them again from saved results.
"""

from __future__ import annotations

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
BAR = 0.36  # inches
REPEATED = "best of f, g"
WIDTH = 8  # inches: more of them are too small to read on a page
SHADES = ("#1967d2", "#669df6", "#174ea6", "#8ab4f8")  # lines of ours that have names
Panel = tuple[str, int]  # case, and size where each has a panel of its own
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
    if spare:
        axes.flat[-1].legend(handles, labels, loc="center", fontsize="medium")
    else:
        ncols = 3 if columns > 1 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize="small")
    return titled(figure, note(world_size))


def named_sweeps(rows: Sequence[Row], world_size: int) -> Any:
    """A panel for each case below the other, over sizes, each line with its name at its end."""
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, axes = plt().subplots(
        len(cases), 1, figsize=(WIDTH, 3.2 * len(cases)), squeeze=False, layout="constrained"
    )
    for axis, case in zip(axes.flat, cases):
        mine = [row for row in rows if row.case == case]
        sizes = sorted({row.size for row in mine})
        lines = {}
        for arm in dict.fromkeys(row.arm for row in mine):
            line = [row for row in mine if row.arm == arm]
            points = [sizes.index(row.size) for row in line], [1e3 * typical(row) for row in line]
            lines[words.arm(arm)] = (words.whose(arm), *points)
        named_lines(axis, lines)
        axis.set(title=words.case(case), ylabel="ms")
        axis.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
    return titled(figure, note(world_size).splitlines()[0])


Line = tuple[str, Sequence[float], Sequence[float]]  # whose it is, x and y


def named_lines(axis: Any, lines: Mapping[str, Line], *, names: bool = True) -> None:
    """Lines over a logarithmic axis of times; names at the right stand apart from each other."""
    drawn = dict.fromkeys(COLOURS, 0)
    ends = []
    for name, (kind, xs, ys) in lines.items():
        number = drawn[kind]
        drawn[kind] += 1
        colour = SHADES[number % 4] if kind == words.OURS else COLOURS[kind]
        style = {"linestyle": LINES[number % 4]}
        if kind != words.LIMIT:
            style["marker"] = MARKERS[number % 4]
        axis.plot(xs, ys, color=colour, markersize=4.5, **style)
        ends.append((math.log10(ys[-1]), xs[-1], name, colour))
    axis.set(yscale="log")
    axis.margins(x=0.04, y=0.1)
    axis.yaxis.set_major_locator(plt().matplotlib.ticker.LogLocator(subs=(1, 2, 5), numticks=12))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.grid(axis="y", alpha=0.25)
    if not names:
        return
    low, high = map(math.log10, axis.get_ylim())
    height, room = (high - low) / (axis.get_figure().get_figheight() / _rows(axis)), 0.2
    texts = [textwrap.fill(name, 30) for _, _, name, _ in ends]
    halves = [room * height * (text.count("\n") + 1) / 2 for text in texts]
    # From below each as far above the one before as its text needs; then back from the top.
    order = sorted(range(len(ends)), key=lambda i: ends[i][0])
    places, at = {}, low
    for i in order:
        places[i] = max(ends[i][0], at + halves[i])
        at = places[i] + halves[i]
    at = high
    for i in order[::-1]:
        places[i] = min(places[i], at - halves[i])
        at = places[i] - halves[i]
    for i, (y, x, _, colour) in enumerate(ends):
        axis.annotate(
            texts[i], (x, 10**y), (1.04, (places[i] - low) / (high - low)),
            textcoords="axes fraction", va="center", fontsize="small", color=colour,
            arrowprops={
                "arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )  # fmt: skip


def _rows(axis: Any) -> int:
    return int(axis.get_subplotspec().get_gridspec().nrows)


def bar_panels(
    rows: Sequence[Row], world_size: int, *, title: Callable[[Row], str] | None = None
) -> Any:
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
        axis.set_title(textwrap.fill(head, 22))
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


def speedups(rows: Sequence[Row], base: str, title: str) -> Any:
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
    return titled(figure, title)


# ---------------------------------------------------------------------------------------------
# The pictures of each benchmark, by the stem of a file's name


def by_sizes(
    stem: str,
    rows: Sequence[Row],
    world_size: int,
    swept: Callable[[Sequence[Row], int], Any] = sweeps,
    single: Callable[[Sequence[Row], int], Any] = bar_panels,
) -> dict[str, Draw]:
    """Over sizes where the cases have several, else bars."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.case, set()).add(row.size)
    many = [row for row in rows if len(sizes[row.case]) > 1]
    one = [row for row in rows if len(sizes[row.case]) == 1]
    found: dict[str, Draw] = {stem: partial(swept, many, world_size)} if many else {}
    if one:
        apart = f"{stem}_{one[0].case}".replace(" ", "_") if many else stem
        found[apart] = partial(single, one, world_size)
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


def of_step_densities(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    """Steps between hosts: one row of panels for each size, one column for each density."""
    cases = list(dict.fromkeys(row.case for row in rows))
    ordered = sorted(rows, key=lambda row: (row.size, cases.index(row.case)))

    def title(row: Row) -> str:
        density = row.case.partition(", ")[2] or "100%"
        return f"{format_size(row.size)}, {density} of the gradients' blocks"

    # A copy inside a host bounds nothing there.
    shown = [row for row in ordered if row.arm != COPY]
    return {stem: partial(bar_panels, shown, world_size, title=title)}


def of_model_parallel(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    def single(some: Sequence[Row], world_size: int) -> Any:
        columns = {
            words.case(case): {"": timed_bars([row for row in some if row.case == case])}
            for case in dict.fromkeys(row.case for row in some)
        }
        return bar_columns(columns, "ms", note(world_size))

    return by_sizes(stem, rows, world_size, named_sweeps, single)


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


def of_pipeline(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    title = f"2 stages of {world_size // 2} ranks on two hosts, fp32, link of 1 Gbit/s"
    segment = [row for row in rows if row.case == "segment" and row.arm != "link"]
    return {stem: partial(speedups, segment, "all_reduce + send", title)}


def of_sparse(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    import sparse

    return {stem: partial(sparse.draw, rows, world_size)}


def of_scaling(stem: str, rows: Sequence[Row], world_size: int) -> dict[str, Draw]:
    import scaling

    return {stem: partial(scaling.draw, rows, world_size)}


OTHERS: dict[str, Callable[[str, Sequence[Row], int], dict[str, Draw]]] = {
    "between_hosts": of_hosts,
    "compress": of_compression,
    "fused_step_hosts": of_step_densities,
    "model_parallel": of_model_parallel,
    "optimizers": of_optimizers,
    "pipeline_parallel": of_pipeline,
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
        lines: dict[str, Line] = {}
        for arm, name in arms.items():
            some = [row for row in mine if row["arm"] == arm and "percent" in row]
            found = sorted(some, key=lambda row: row["percent"])
            percent, times = ([row[key] for row in found] for key in ("percent", "ms"))
            lines[name] = words.OURS, percent, times
        gloo = next(row["ms"] for row in mine if row["arm"] == "gloo")
        lines["Gloo, dense"] = words.PEER, [min(percent), max(percent)], [gloo, gloo]
        axis.set(xscale="log")
        named_lines(axis, lines, names=count == workers[-1])
        title = f"{count} workers,\n{count} aggregators"
        axis.set(title=title, xlabel="% of a rank's blocks")
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylabel("ms")
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
    for message, line, mark in zip(sorted({row["message"] for row in found}), LINES, MARKERS):
        some = [row for row in found if row["message"] == message]
        axis.plot(
            [row["block"] for row in some], [row["ms"] for row in some], line, marker=mark,
            markersize=4.5, color=COLOURS[words.OURS], label=f"messages of {message >> 10} KiB",
        )  # fmt: skip
    axis.set(title="4 workers, 4 aggregators, 10% of blocks, the same of all")
    axis.set(xlabel="elements of a block", ylabel="ms", xscale="log")
    axis.set_xticks(sorted({row["block"] for row in found}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_ylim(0)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(fontsize="small")
    return titled(figure, "20 MiB of fp32, links of 1 Gbit/s, medians")
