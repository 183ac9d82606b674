"""``python -m fusedpg.plan search``, and the arguments that it shares with other commands."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fusedpg.plan.aceso import AcesoModel
from fusedpg.plan.config import positive_integer, positive_number
from fusedpg.plan.database import Database
from fusedpg.plan.model import CostModel
from fusedpg.plan.search import Found, Limits, best_plans, search
from fusedpg.plan.space import Space

COST_MODELS: dict[str, type[CostModel]] = {"aceso": AcesoModel, "fusedpg": CostModel}
# Aceso's bound on the stages that it tries.
_MOST_STAGES = 16


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a database, and the model in it."""
    parser.add_argument("--database", type=Path, required=True, help="folder of the profile")
    parser.add_argument("--model-name", required=True, help="such as gpt")
    parser.add_argument("--model-size", required=True, help="such as 1_3B")
    parser.add_argument("--num-layers", type=positive_integer, help="if not those of the size")
    parser.add_argument("--devices", type=positive_integer, required=True, help="of all machines")
    parser.add_argument("--devices-per-node", type=positive_integer, help="all by default")
    parser.add_argument(
        "--cost-model",
        choices=sorted(COST_MODELS),
        default="fusedpg",
        help="aceso: the original's formulas, to compare with it",
    )


def add_space_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which plans there are."""
    add_model_arguments(parser)
    parser.add_argument(
        "--global-batch", type=positive_integer, required=True, help="samples of an iteration"
    )
    parser.add_argument(
        "--micro-batches",
        type=positive_integer,
        nargs="+",
        help="by default what was measured, on 1, 2, 4, ... data-parallel devices",
    )
    parser.add_argument(
        "--memory-limit", type=positive_number, required=True, help="MB of a device"
    )


def cost_model(arguments: argparse.Namespace) -> CostModel:
    per_node = arguments.devices_per_node
    if per_node is not None and arguments.devices % per_node:
        raise ValueError(
            f"--devices {arguments.devices} is not a multiple of --devices-per-node {per_node}"
        )
    database = Database(
        arguments.database, arguments.model_name, arguments.model_size, arguments.num_layers
    )
    return COST_MODELS[arguments.cost_model](database, arguments.devices, per_node)


def plan_space(arguments: argparse.Namespace) -> Space:
    """The plans that the arguments describe, nothing of which is priced."""
    model = cost_model(arguments)
    sizes = arguments.micro_batches or model.micro_batch_sizes()
    return Space(model, arguments.global_batch, sizes, arguments.memory_limit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_space_arguments(parser)
    parser.add_argument(
        "--stages", type=positive_integer, nargs="+", help="1 to 16 of them by default"
    )
    parser.add_argument(
        "--steps", type=positive_integer, default=100, help="trials for each number of stages"
    )
    parser.add_argument(
        "--time-budget",
        type=positive_number,
        help="seconds of wall-clock time for all; no limit by default",
    )
    parser.add_argument("--hops", type=positive_integer, default=7, help="primitives in a row")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument(
        "--workers",
        type=positive_integer,
        default=len(os.sched_getaffinity(0)),
        help="processes; as many as this one may use cores, here",
    )
    parser.add_argument("--top", type=positive_integer, default=1, help="plans to save")
    parser.add_argument("--output", type=Path, required=True, help="the plan's file (JSON)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def main(arguments: argparse.Namespace) -> int:
    space = plan_space(arguments)
    model = space.model
    stages = arguments.stages or range(1, min(arguments.devices, _MOST_STAGES, model.num_ops) + 1)
    impossible = [one for one in stages if not 1 <= one <= min(arguments.devices, model.num_ops)]
    if impossible:
        raise ValueError(
            f"{impossible[0]} stages are not possible with {arguments.devices} devices and "
            f"{model.num_ops} operators"
        )
    limits = Limits(steps=arguments.steps, seconds=arguments.time_budget, hops=arguments.hops)
    begun = time.monotonic()
    with _progress(arguments.quiet, len(stages) * arguments.steps) as tell:
        found = search(
            functools.partial(plan_space, arguments),
            list(stages),
            seed=arguments.seed,
            limits=limits,
            top=arguments.top,
            workers=arguments.workers,
            progress=tell,
        )
    seconds = time.monotonic() - begun
    plans = best_plans(found, arguments.top, arguments.memory_limit)
    output: Path = arguments.output
    for place, plan in enumerate(plans):
        name = (
            output if place == 0 else output.with_name(f"{output.stem}_{place + 1}{output.suffix}")
        )
        plan.save(name)
        assert plan.predicted is not None
        print(
            f"{name}: {plan.predicted.time_ms:,.2f} ms an iteration, "
            f"{max(plan.predicted.stage_memory_mb):,.2f} MB, {plan.num_stages} stages, "
            f"micro-batch {plan.micro_batch_size}"
        )
    record = output.with_suffix(".search.json")
    record.write_text(json.dumps({"seconds": seconds, "found": [one.to_json() for one in found]}))
    _summary(found, seconds, record)
    return 0


def _summary(found: list[Found], seconds: float, record: Path) -> None:
    priced = sum(one.priced for one in found)
    print(f"{priced:,} plans priced in {seconds:.1f} s; {record} says how")
    for reason, count in sorted(
        {reason: n for one in found for reason, n in one.left_out.items()}.items()
    ):
        print(f"left out {count:,} plans: {reason}")


@contextlib.contextmanager
def _progress(quiet: bool, total: int) -> Iterator[Callable[[int, int, float], None] | None]:
    """A function that shows a bar with the best time so far; None where nobody sees it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    completed: dict[int, int] = {}
    best = float("inf")
    # Without a thread that refreshes it, since the search forks.
    with Progress(console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("searching", total=total)

        def tell(stages: int, trial: int, found: float) -> None:
            nonlocal best
            completed[stages] = trial
            best = min(best, found)
            said = f"best {best:,.1f} ms" if best < float("inf") else "none fits yet"
            done = sum(completed.values())
            bar.update(task, completed=done, description=said, refresh=True)

        yield tell
