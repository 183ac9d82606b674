"""``python -m fusedpg.plan baseline``: plans to compare the search's with."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fusedpg.plan.baseline import brute_force, dynamic_programming, uniform_grid
from fusedpg.plan.command_search import add_space_arguments, plan_space
from fusedpg.plan.config import positive_integer
from fusedpg.plan.search import NoPlanFits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        choices=("uniform", "brute-force", "borders"),
        help="Megatron's grid; all plans of a small model; borders by dynamic programming",
    )
    add_space_arguments(parser)
    parser.add_argument(
        "--most-plans", type=positive_integer, default=1_000_000, help="of brute-force"
    )
    parser.add_argument("--output", type=Path, help="the plan's file (JSON)")


def main(arguments: argparse.Namespace) -> int:
    space = plan_space(arguments)
    begun = time.monotonic()
    if arguments.kind == "uniform":
        plan = next(iter(uniform_grid(space)), None)
    elif arguments.kind == "borders":
        plan = dynamic_programming(space)
    else:
        plan = brute_force(space, arguments.most_plans)
    seconds = time.monotonic() - begun
    for reason, count in sorted(space.left_out.items()):
        print(f"left out {count:,} plans: {reason}")
    if plan is None:
        raise NoPlanFits(f"no plan of the baseline {arguments.kind} fits")
    assert plan.predicted is not None
    print(
        f"{plan.predicted.time_ms:,.2f} ms an iteration, "
        f"{max(plan.predicted.stage_memory_mb):,.2f} MB, {plan.num_stages} stages on "
        f"{list(plan.num_gpus)}, micro-batch {plan.micro_batch_size}; {space.priced:,} plans "
        f"priced in {seconds:.1f} s"
    )
    if arguments.output is not None:
        plan.save(arguments.output)
    return 0
