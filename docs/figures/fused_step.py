"""Draws docs/figures/fused_step.svg: an optimizer step as it is usual, and as one fused operation.

python docs/figures/fused_step.py [--png FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, GREY, PAPER = "#202124", "#5f6368", "#ffffff"
# The half that rank 0 owns and the one that rank 1 owns: line and fill.
HALVES = (("#1967d2", "#d2e3fc"), ("#c5610a", "#fde3cb"))
RANKS = (0.0, 5.2)  # where the ranks' columns begin
WIDTH = 4.0  # of a whole tensor; a rank owns one half
HEIGHT = 0.62


def text(axis: Any, x: float, y: float, words: str, **style: Any) -> None:
    style = {"ha": "center", "va": "center", "fontsize": 10, "color": INK} | style
    axis.text(x, y, words, **style)


def tensor(axis: Any, x: float, y: float, name: str, halves: tuple[int, ...] = (0, 1)) -> None:
    for half in halves:
        line, fill = HALVES[half]
        left = x + half * WIDTH / 2
        axis.add_patch(
            Rectangle((left, y), WIDTH / 2, HEIGHT, facecolor=fill, edgecolor=line, linewidth=1.3)
        )
        text(axis, left + WIDTH / 4, y + HEIGHT / 2, name)


def arrow(axis: Any, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axis.add_patch(
        FancyArrowPatch(
            begin, end, arrowstyle="-|>", mutation_scale=11, linewidth=1.4, color=colour,
            shrinkA=1, shrinkB=1,
        )
    )  # fmt: skip


def box(axis: Any, x: float, y: float, width: float, height: float, line: str, fill: str) -> None:
    axis.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=fill, edgecolor=line, linewidth=1.3,
        )
    )  # fmt: skip


def centre(rank: int, half: int) -> float:
    return RANKS[rank] + half * WIDTH / 2 + WIDTH / 4


def heads(axis: Any, title: str, colour: str) -> None:
    middle = (RANKS[1] + WIDTH) / 2
    text(axis, middle, 9.75, title, fontsize=13, weight="bold", color=colour)
    for rank, x in enumerate(RANKS):
        text(axis, x + WIDTH / 2, 9.0, f"rank {rank}", fontsize=11, color=GREY)
        tensor(axis, x, 8.0, "grad")


def usual(axis: Any) -> None:
    heads(axis, "all_reduce, then the optimizer", GREY)
    middle = (RANKS[1] + WIDTH) / 2
    for rank in (0, 1):
        for half in (0, 1):
            for other in (0, 1):
                colour = HALVES[half][0]
                arrow(axis, (centre(rank, half), 8.0), (centre(other, half), 6.3), colour)
    for x in RANKS:
        tensor(axis, x, 5.68, "mean grad")
        arrow(axis, (x + WIDTH / 2, 5.68), (x + WIDTH / 2, 4.75), GREY)
        box(axis, x, 2.6, WIDTH, 2.15, GREY, "#f1f3f4")
        text(axis, x + WIDTH / 2, 4.35, "AdamW", weight="bold")
        for half in (0, 1):
            line, fill = HALVES[half]
            left = x + 0.2 + half * (WIDTH / 2 - 0.2)
            size = (WIDTH / 2 - 0.2, 0.6)
            axis.add_patch(
                Rectangle((left, 3.0), *size, facecolor=fill, edgecolor=line, linewidth=1.3)
            )
            text(axis, left + WIDTH / 4 - 0.1, 3.3, "m, v")
        arrow(axis, (x + WIDTH / 2, 2.6), (x + WIDTH / 2, 1.62), GREY)
        tensor(axis, x, 1.0, "param")
    text(axis, middle, 0.05, "Each rank stores the mean gradient, keeps all moments,", color=GREY)
    text(axis, middle, -0.5, "and computes the same update as its peers.", color=GREY)


def fused(axis: Any) -> None:
    heads(axis, "one fused step", HALVES[0][0])
    middle = (RANKS[1] + WIDTH) / 2
    for half, x in enumerate(RANKS):
        line, fill = HALVES[half]
        left, width = x + 0.35, WIDTH - 0.7
        box(axis, left, 3.1, width, 2.9, line, fill)
        at = left + width / 2
        text(axis, at, 5.55, "add in rank order", fontsize=10)
        text(axis, at, 4.9, "AdamW", weight="bold")
        axis.add_patch(
            Rectangle((at - 0.95, 3.45), 1.9, 0.65, facecolor=PAPER, edgecolor=line, linewidth=1.3)
        )
        text(axis, at, 3.775, "m, v")
        for rank in (0, 1):
            side = -0.5 if rank == 0 else 0.5
            arrow(axis, (centre(rank, half), 8.0), (at + side, 6.0), line)
            arrow(axis, (at + side, 3.1), (centre(rank, half), 1.62), line)
    for x in RANKS:
        tensor(axis, x, 1.0, "param")
    text(axis, middle, 6.25, "reduce-scatter", color=GREY, style="italic", fontsize=9.5, bbox=WHITE)
    text(axis, middle, 2.85, "all-gather", color=GREY, style="italic", fontsize=9.5, bbox=WHITE)
    text(axis, middle, 0.05, "Each element is added and updated once, by its owner;", color=GREY)
    text(axis, middle, -0.5, "the sum is never stored, moments are 1/P a rank.", color=GREY)


WHITE = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5, "alpha": 0.85}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", type=Path, help="draw it there, too")
    args = parser.parse_args()
    # The same file whenever it is drawn.
    plt.rcParams.update({"svg.hashsalt": "fusedpg", "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.6), facecolor=PAPER)
    for axis, draw in zip(axes, (usual, fused)):
        draw(axis)
        axis.set(xlim=(-0.3, RANKS[1] + WIDTH + 0.3), ylim=(-0.9, 10.2))
        axis.set_axis_off()
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01, wspace=0.06)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
    if args.png:
        figure.savefig(args.png, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
