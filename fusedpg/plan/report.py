"""Compares what was predicted with what was measured, as a table and as pictures."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from fusedpg.plan.config import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Row(NamedTuple):
    """A row of the table; errors are percent by which the prediction was too high."""

    plan: str
    stage: str  # "all": the whole iteration
    predicted_ms: float | None
    measured_ms: float
    time_error: float | None
    predicted_mb: float | None
    measured_mb: float
    memory_error: float | None


HEADER = [name.replace("error", "error_%") for name in Row._fields]


class OfRank(TypedDict):
    """A rank's part of a file of ``train --measure``."""

    rank: int
    stages: list[int]
    times: list[list[dict[str, float]]]  # of each step, of each of these stages
    memory_mb: float


@dataclass(frozen=True)
class Measured:
    """The measured cost of a plan, from the file that ``train --measure`` writes.

    Args:
        name: of the file.
        iteration_ms: the median over steps but for the first, which warms up.
        stage_times_ms: the iteration as each stage would make it alone, in the cost model's sense
            (`fusedpg.plan.config.Prediction`), from the time that its passes took.
        stage_memory_mb: of the rank of each stage that needs most.
        waiting: the share of the iteration in which each stage waited for others.
    """

    name: str
    plan: Plan
    iteration_ms: float
    stage_times_ms: tuple[float, ...]
    stage_memory_mb: tuple[float, ...]
    waiting: tuple[float, ...]

    @classmethod
    def load(cls, path: Path) -> Measured:
        """
        Raises:
            ValueError: for a file that is not of ``train --measure``.
        """
        try:
            data = json.loads(path.read_text())
            plan = Plan.from_json(data["plan"])
            seconds = data["seconds"][1:] or data["seconds"]
            passes, optimizers, waits, memory = _of_stages(plan, data["ranks"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a file of `train --measure`: {error}") from error
        count = plan.num_micro_batches
        once = [each / count for each in passes]
        alone = [t * (count - 1) + sum(once) + optimizer for t, optimizer in zip(once, optimizers)]
        iteration = statistics.median(seconds)
        return cls(
            path.stem,
            plan,
            iteration * 1e3,
            tuple(each * 1e3 for each in alone),
            tuple(memory),
            tuple(each / iteration for each in waits),
        )

    @property
    def samples_per_second(self) -> float:
        return self.plan.global_batch_size / self.iteration_ms * 1e3

    def rows(self) -> list[Row]:
        """The whole iteration, and each stage."""
        predicted = self.plan.predicted
        stages = self.plan.num_stages
        times: Sequence[float | None] = [None] * (stages + 1)
        memory = times
        if predicted is not None:
            times = [predicted.time_ms, *predicted.stage_times_ms]
            memory = [max(predicted.stage_memory_mb), *predicted.stage_memory_mb]
        names = ["all", *map(str, range(stages))]
        took = [self.iteration_ms, *self.stage_times_ms]
        used = [max(self.stage_memory_mb), *self.stage_memory_mb]
        return [
            Row(self.name, stage, time, ms, _error(time, ms), most, mb, _error(most, mb))
            for stage, time, ms, most, mb in zip(names, times, took, memory, used)
        ]


def _of_stages(plan: Plan, ranks: Sequence[OfRank]) -> tuple[list[float], ...]:
    """Seconds of passes, of the optimizer and of waiting, and MB: of each stage's slowest rank."""
    found: list[list[float]] = [[0.0] * plan.num_stages for _ in range(4)]
    for rank in ranks:
        steps = rank["times"][1:] or rank["times"]
        for place, stage in enumerate(rank["stages"]):
            of_stage = [step[place] for step in steps]
            values = (
                statistics.median(each["forward"] + each["backward"] for each in of_stage),
                statistics.median(each["optimizer"] for each in of_stage),
                statistics.median(each["waiting"] for each in of_stage),
                rank["memory_mb"],
            )
            for column, value in zip(found, values):
                column[stage] = max(column[stage], value)
    return tuple(found)


def _error(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None else 100 * (predicted - measured) / measured


def trend(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds and the best milliseconds so far, for each number of stages of a search's record.

    Raises:
        ValueError: for a file that no search wrote.
    """
    try:
        found = json.loads(path.read_text())["found"]
        return {
            f"{one['stages']} stages": [
                (step["seconds"], step["after"]) for step in one["steps"] if step["better"]
            ]
            for one in found
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a record of a search: {error}") from error


# --- pictures -----------------------------------------------------------------------------


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("Agg")  # without a screen
    from matplotlib import pyplot

    size = 5 * columns, 3.5
    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes[0])


def _save(figure: Figure, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _bars(
    axes: Axes, labels: Sequence[str], pairs: Sequence[tuple[float | None, float]], unit: str
) -> None:
    """Two bars for each label: what was predicted, where it was, and what was measured."""
    places = range(len(labels))
    axes.bar([p - 0.2 for p in places], [a or 0.0 for a, _ in pairs], 0.4, label="predicted")
    axes.bar([p + 0.2 for p in places], [b for _, b in pairs], 0.4, label="measured")
    axes.set_xticks(list(places), labels, rotation=30, ha="right")
    axes.set_ylabel(unit)
    axes.legend()


def draw_throughput(found: Sequence[Measured], path: Path) -> Path:
    """Samples a second of each plan, relative to the first, as in figure 7 of Aceso's paper."""
    figure, (axes,) = _figure(1)
    first = found[0].samples_per_second
    pairs = []
    for each in found:
        predicted, samples = each.plan.predicted, each.plan.global_batch_size
        expected = None if predicted is None else samples / predicted.time_ms * 1e3 / first
        pairs.append((expected, each.samples_per_second / first))
    _bars(axes, [each.name for each in found], pairs, f"throughput, {found[0].name} = 1")
    return _save(figure, path)


def draw_search(found: dict[str, list[tuple[float, float]]], path: Path) -> Path:
    """The best plan so far over the time of the search, as in figure 8."""
    figure, (axes,) = _figure(1)
    for label, points in found.items():
        if points:
            axes.step(*zip(*points), where="post", marker=".", label=label)
    axes.set_xlabel("seconds of search")
    axes.set_ylabel("predicted ms an iteration")
    axes.legend()
    return _save(figure, path)


def draw_stages(found: Sequence[Measured], path: Path) -> Path:
    """Time and memory of each stage, predicted and measured, as in figure 9."""
    figure, (times, memory) = _figure(2)
    rows = [row for each in found for row in each.rows()[1:]]
    labels = [f"{row.plan} {row.stage}" for row in rows]
    _bars(times, labels, [(row.predicted_ms, row.measured_ms) for row in rows], "ms an iteration")
    _bars(memory, labels, [(row.predicted_mb, row.measured_mb) for row in rows], "MB a device")
    return _save(figure, path)


# --- the command --------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measured", nargs="+", type=Path, required=True, help="files of `train --measure`"
    )
    parser.add_argument("--search", type=Path, help="the record of a search (.search.json)")
    parser.add_argument("--out", type=Path, required=True, help="folder for report.csv and PNGs")


def main(arguments: argparse.Namespace) -> int:
    found = [Measured.load(path) for path in arguments.measured]
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for each in found for row in each.rows()]
    with (out / "report.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
    print(" ".join(f"{title:>14}" for title in HEADER))
    for row in rows:
        cells = ("" if v is None else v if isinstance(v, str) else f"{v:.2f}" for v in row)
        print(" ".join(f"{cell:>14}" for cell in cells))
    pictures = [
        draw_throughput(found, out / "throughput.png"),
        draw_stages(found, out / "stages.png"),
    ]
    if arguments.search is not None:
        pictures.append(draw_search(trend(arguments.search), out / "search.png"))
    for picture in pictures:
        print(picture)
    return 0
