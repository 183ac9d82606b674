"""Measure and draw OmniReduce's figures 4 and 5 (density by workers) and 13 (blocks by messages).

    python benchmarks/aggregators_figures.py [density | fast | colocated | blocks] [--draw]

Saves each as JSON in benchmarks/results/aggregators, and as PNG in build/figures/aggregators:
`density` with links of 1 Gbit/s, `fast` with links of 10, as figure 5 has faster links than figure
4, `colocated` with aggregators on the workers' hosts. With ``--draw`` draws the JSON that is there.
Runs `aggregators.py` on namespaces with as many aggregators as workers; what that needs, and what a
row has, it says itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import _harness as harness
import _plots as plots

HERE = Path(__file__).resolve().parent
RESULTS = harness.RESULTS / "aggregators"
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


def picture(path: Path) -> plots.Draw:
    """Of saved rows."""
    draw = plots.draw_blocks if path.stem == "blocks" else plots.draw_densities
    return partial(draw, json.loads(path.read_text())["rows"])


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
            harness.write(path, harness.about(), measure(figure))
        plots.save(harness.FIGURES / f"aggregators/{figure}.png", picture(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
