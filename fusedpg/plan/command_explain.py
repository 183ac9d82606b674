"""``python -m fusedpg.plan explain``: what a plan costs, and why the search took each step."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from fusedpg.plan.command_search import cost_model
from fusedpg.plan.config import Plan, positive_integer
from fusedpg.plan.model import Price


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="the plan's file")
    parser.add_argument("--database", type=Path, help="prices the plan by this profile")
    parser.add_argument("--cost-model", choices=("fusedpg", "aceso"), default="fusedpg")
    parser.add_argument("--devices-per-node", type=positive_integer, help="all by default")
    parser.add_argument("--all", action="store_true", help="steps that led to nothing, too")


def main(arguments: argparse.Namespace) -> int:
    plan = Plan.load(arguments.plan)
    print(
        f"{plan.model_name} {plan.model_size} on {plan.num_devices} devices: {plan.num_stages} "
        f"stages, {plan.num_micro_batches} micro-batches of {plan.micro_batch_size}"
    )
    for stage in range(plan.num_stages):
        _describe(plan, stage)
    if arguments.database is not None:
        arguments.model_name, arguments.model_size = plan.model_name, plan.model_size
        layers = plan.model.get("num_layers")
        arguments.num_layers = layers if isinstance(layers, int) else None
        arguments.devices = plan.num_devices
        _costs(cost_model(arguments).price(plan))
    record = arguments.plan.with_suffix(".search.json")
    if record.exists():
        _steps(json.loads(record.read_text()), plan.num_stages, arguments.all)
    return 0


def _describe(plan: Plan, stage: int) -> None:
    columns = zip(
        plan.model_parallel_size_of_each_op[stage],
        plan.data_parallel_size_of_each_op[stage],
        plan.algo_of_each_op[stage],
    )
    said = [
        f"{len(list(run))} with tp {tp} dp {dp}" + (" algo 1" if algo else "")
        for (tp, dp, algo), run in itertools.groupby(columns)
    ]
    if len(said) > 8:
        said = [*said[:8], f"{len(said) - 8} more runs"]
    recomputed = sum(plan.recompute_ops[stage])
    devices = plan.devices(stage)
    print(
        f"  stage {stage}: devices {devices.start} to {devices.stop - 1}, "
        f"{plan.num_ops_in_each_stage[stage]} operators ({', '.join(said)}), "
        f"{recomputed} recomputed"
    )


def _costs(price: Price) -> None:
    print(f"by the cost model {price.cost_model}: {price.time_ms:,.2f} ms an iteration")
    passes, others = ("forward", "backward", "recompute", "reshard"), ("exposed", "optimizer")
    header = (*passes, "receive", "send", *others)
    print("  ms of a micro-batch; exposed reduction and optimizer: of an iteration")
    print("  stage " + "".join(f"{name:>11}" for name in header) + f"{'MB':>12}")
    for number, stage in enumerate(price.stages):
        row = "".join(f"{getattr(stage, name):11.2f}" for name in header)
        print(f"  {number:5} {row}{stage.memory:12,.1f}")
    for note in price.notes:
        print(f"  note: {note}")


def _steps(record: dict[str, list[dict[str, object]]], stages: int, everything: bool) -> None:
    for found in record["found"]:
        if found["stages"] != stages:
            continue
        print(f"the search of {stages} stages, {found['priced']} plans:")
        steps = found["steps"]
        assert isinstance(steps, list)
        for step in steps:
            if not (step["better"] or everything):
                continue
            before = "nothing that fits" if step["before"] is None else f"{step['before']:,.2f} ms"
            print(
                f"  trial {step['trial']} ({step['seconds']:.1f} s): {before} -> "
                f"{step['after']:,.2f} ms, {step['memory']:,.0f} MB"
                + ("" if step["better"] else ", no better")
            )
            for why in step["why"]:
                print(f"    {why}")
            print(f"    = {step['plan']}")
