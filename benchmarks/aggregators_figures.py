"""Measure and draw OmniReduce's figures 4 and 5 (density by workers) and 13 (blocks by messages).

    python benchmarks/aggregators_figures.py [density | fast | colocated | blocks] [--draw]

Saves each as JSON and PNG in benchmarks/results/aggregators: `density` with links of 1 Gbit/s,
`fast` with links of 10, as figure 5 has faster links than figure 4, `colocated` with aggregators on
the workers' hosts. With ``--draw`` draws the JSON that is there. Runs `aggregators.py` on
namespaces with as many aggregators as workers; what that needs, and what a row has, it says itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _plots as plots

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "aggregators"
DENSITIES = "80,40,20,10,4,2,1"
BLOCKS, MESSAGES = "32,128,256,1024,4096", "4096,16384,65536,253952"
# Workers, and what else `aggregators.py` is told, of the figures by density.
BY_DENSITY: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "density": ((2, 4), ("--rate", "1gbit")),
    "fast": ((2, 4), ("--rate", "10gbit")),
    "colocated": ((2, 4, 8), ("--rate", "1gbit", "--colocated")),
}
FIGURES = (*BY_DENSITY, "blocks")


def rows_of(workers: int, *more: str) -> list[dict[str, Any]]:
    path = RESULTS / "part.json"
    command = [
        sys.executable, str(HERE / "aggregators.py"), "--workers", str(workers),
        "--aggregators", str(workers), "--rounds", "3", "--json", str(path), *more,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    path.unlink()
    return rows


def measure(figure: str) -> list[dict[str, Any]]:
    if figure in BY_DENSITY:
        sizes, more = BY_DENSITY[figure]
        return [
            row
            for workers in sizes
            for row in rows_of(workers, "--size", "20M", "--densities", DENSITIES, *more)
        ]
    return rows_of(
        4, "--size", "20M", "--densities", "10", "--overlap", "all",
        "--blocks", BLOCKS, "--messages", MESSAGES,
    )  # fmt: skip


def density(rows: list[dict[str, Any]], path: Path) -> None:
    sizes = sorted({row["workers"] for row in rows})
    figure, axes = plots.plt().subplots(
        1, len(sizes), figsize=(4.4 * len(sizes), 3.8), layout="constrained"
    )
    arms = (("aggregators", "#1967d2", "-"), ("blocks", "#1967d2", "--"), ("auto", "#202124", ":"))
    for axis, workers in zip(axes, sizes):
        mine = [row for row in rows if row["workers"] == workers]
        for arm, colour, line in arms:
            found = [row for row in mine if row["arm"] == arm and "percent" in row]
            label = {"blocks": "blocks from rank to rank"}.get(arm, arm)
            axis.plot(
                [row["percent"] for row in found], [row["ms"] for row in found], line,
                color=colour, label=label, marker="o", markersize=3.5,
            )  # fmt: skip
        gloo = next(row["ms"] for row in mine if row["arm"] == "gloo")
        axis.axhline(gloo, color="#9aa0a6", label="Gloo, dense")
        axis.set(title=f"{workers} workers, {workers} aggregators", xlabel="% of a rank's blocks")
        axis.set(xscale="log", yscale="log", ylabel="ms")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(axis="y", alpha=0.25)
    axes[-1].legend(fontsize="small", loc="lower right")
    where = "the workers' hosts" if rows[0]["colocated"] else "hosts of their own"
    rate = rows[0]["rate"].removesuffix("gbit")
    plots.finish(
        figure, path,
        "20 MiB of fp32, blocks of 256, none of two ranks as long as all have that many, then the "
        f"same of all;\naggregators on {where}, links of {rate} Gbit/s, medians",
    )  # fmt: skip


def blocks(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axis = plots.plt().subplots(figsize=(6.4, 4), layout="constrained")
    found = [row for row in rows if "message" in row]
    for message, line, mark in zip(
        sorted({row["message"] for row in found}), plots.LINES, plots.MARKERS
    ):
        some = [row for row in found if row["message"] == message]
        axis.plot(
            [row["block"] for row in some], [row["ms"] for row in some], line, marker=mark,
            markersize=4.5, color="#1967d2", label=f"messages of {message >> 10} KiB",
        )  # fmt: skip
    axis.set(title="4 workers, 4 aggregators, 10% of blocks, the same of all")
    axis.set(xlabel="elements of a block", ylabel="ms", xscale="log")
    axis.set_xticks(sorted({row["block"] for row in found}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_ylim(0)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(fontsize="small")
    plots.finish(figure, path, "20 MiB of fp32, links of 1 Gbit/s, medians")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", nargs="?", choices=(*FIGURES, "all"), default="all")
    parser.add_argument("--draw", action="store_true", help="from what was measured before")
    args = parser.parse_args()
    for figure in FIGURES if args.figure == "all" else [args.figure]:
        path = RESULTS / f"{figure}.json"
        if not args.draw:
            path.write_text(json.dumps(measure(figure), indent=1) + "\n")
        draw = density if figure in BY_DENSITY else blocks
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
