"""``python -m fusedpg.plan baseline``: plans found without a search, to compare it with.

They are uniform grids, all plans, and equal borders.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fusedpg.plan.command_search import add_space_arguments, plan_space
from fusedpg.plan.config import Plan, positive_integer
from fusedpg.plan.database import MissingRow
from fusedpg.plan.model import StagePrice
from fusedpg.plan.primitives import best_setting, uniform_state
from fusedpg.plan.search import NoPlanFits
from fusedpg.plan.space import Candidate, Space, State, packed

__all__ = ["TooMany", "brute_force", "dynamic_programming", "uniform_grid"]


class TooMany(ValueError):
    """More plans than may be priced."""


def _layer_counts(space: Space, stages: int) -> list[int] | None:
    """Operators of each stage, if every stage has the same number of layers."""
    starts = np.flatnonzero(space.model.is_start).tolist()
    if not starts:
        each, more = divmod(space.model.num_ops, stages)
        return [each + (stage < more) for stage in range(stages)]
    if len(starts) % stages:
        return None
    borders = [0, *starts[len(starts) // stages :: len(starts) // stages], space.model.num_ops]
    return [end - first for first, end in itertools.pairwise(borders)]


def uniform_grid(space: Space) -> list[Plan]:
    """Megatron's plans: equal stages of whole layers, one tp and dp, all recomputed or nothing.

    Returns:
        The plans that fit, the fastest first.
    """
    model = space.model
    found: list[Plan] = []
    for stages in range(1, min(model.num_devices, model.num_ops) + 1):
        counts = _layer_counts(space, stages) if model.num_devices % stages == 0 else None
        if counts is None:
            continue
        width = model.num_devices // stages
        for micro_batch in space.micro_batches:
            settings = model.tables(micro_batch).settings
            for number in space.settings(micro_batch, width).tolist():
                if settings[number][2]:
                    continue
                state = uniform_state(micro_batch, [width] * stages, counts, [number] * stages)
                found += _with_and_without_recomputation(space, state)
    return sorted(found, key=_time)


def _with_and_without_recomputation(space: Space, state: State) -> Iterator[Plan]:
    """The plans of a state that fit."""
    may = space.model.may_recompute.astype(np.uint8)
    borders = list(itertools.pairwise(itertools.accumulate(state.counts, initial=0)))
    for recompute in (False, True):
        flags = [bytes(may[first:end] * recompute) for first, end in borders]
        plan = space.plan_of(state, flags)
        try:
            price = space.model.price(plan)
        except MissingRow as error:
            space.left_out[str(error)] = space.left_out.get(str(error), 0) + 1
            continue
        space.priced += 1
        if price.memory_mb <= space.memory_limit:
            yield dataclasses.replace(plan, predicted=price.prediction())


def _time(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.time_ms


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of positive numbers, with their order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def count_plans(space: Space) -> int:
    """The number of plans that `brute_force` would price."""
    model = space.model
    total = 0
    for micro_batch in space.micro_batches:
        for stages in range(1, min(model.num_devices, model.num_ops) + 1):
            for widths in _compositions(model.num_devices, stages):
                options = [2 * len(space.settings(micro_batch, width)) for width in widths]
                if all(options):
                    # Each operator has a setting and is recomputed or not.
                    for counts in _compositions(model.num_ops, stages):
                        total += math.prod(n**count for n, count in zip(options, counts))
    return total


def brute_force(space: Space, most: int = 1_000_000) -> Plan | None:
    """The fastest of all plans that fit; None if none does.

    Every micro-batch size, number of stages, width and border of them, and for every operator
    every setting, recomputed or not. Plans are priced by the cost model, not by what the search
    uses of it.

    Args:
        space: the plans.
        most: plans that may be priced.

    Raises:
        TooMany: if there are more.
    """
    plans = count_plans(space)
    if plans > most:
        raise TooMany(f"there are {plans:,} plans, more than {most:,}")
    model = space.model
    best: tuple[float, Plan] | None = None
    for micro_batch in space.micro_batches:
        micro_batches = space.global_batch // micro_batch
        for stages in range(1, min(model.num_devices, model.num_ops) + 1):
            for widths in _compositions(model.num_devices, stages):
                for counts in _compositions(model.num_ops, stages):
                    every = []
                    first = 0
                    for stage, count in enumerate(counts):
                        every.append(
                            _stage_options(space, micro_batch, widths, stage, first, count)
                        )
                        first += count
                    for choice in itertools.product(*every):
                        space.priced += 1
                        prices, settings, flags = zip(*choice)
                        time = model.iteration(prices, micro_batches)
                        if best is None or time < best[0]:
                            state = State(micro_batch, widths, settings)
                            best = time, space.plan_of(state, flags, prices)
    return None if best is None else best[1]


def _stage_options(
    space: Space, micro_batch: int, widths: tuple[int, ...], stage: int, first: int, count: int
) -> list[tuple[StagePrice, bytes, bytes]]:
    """All ways to run a stage that fit: price, settings and flags."""
    model = space.model
    place = model.place(widths, stage)
    tables = model.tables(micro_batch, place.nodes)
    behind = len(widths) - 1 - stage
    in_flight = model.in_flight(behind, space.global_batch // micro_batch, "1f1b")
    whole = space.global_batch // micro_batch <= in_flight
    found = []
    for settings in itertools.product(space.settings(micro_batch, widths[stage]), repeat=count):
        numbers = np.array(settings, dtype=np.int64)
        for flags in itertools.product((0, 1), repeat=count):
            try:
                again = np.array(flags, dtype=bool)
                price = model.stage(tables, first, numbers, again, in_flight, place, whole)
            except MissingRow:
                break
            if price.memory <= space.memory_limit:
                found.append((price, packed(numbers), bytes(flags)))
    return found


# Borders that dynamic programming may choose; at more operators they are between layers.
_MOST_BORDERS = 64


def dynamic_programming(space: Space) -> Plan | None:
    """The fastest plan of stages of equal width, with the best borders; None if none fits.

    Operators of a stage have one setting, the best for it. Borders are between any two operators
    of a small model, else between layers.
    """
    model = space.model
    best: Candidate | None = None
    for micro_batch in space.micro_batches:
        for stages in range(1, min(model.num_devices, model.num_ops) + 1):
            if model.num_devices % stages:
                continue
            state = _best_borders(space, micro_batch, stages)
            candidate = None if state is None else space.candidate(state)
            if candidate is None or candidate.overrun > 0:
                continue
            if best is None or candidate.time < best.time:
                best = candidate
    return None if best is None else space.plan(best)


def _borders(space: Space) -> list[int]:
    ops = space.model.num_ops
    inner = list(range(1, ops))
    if ops > _MOST_BORDERS:
        inner = [one for one in np.flatnonzero(space.model.is_start).tolist() if one] or inner
    if len(inner) > _MOST_BORDERS:
        inner = [inner[int(i)] for i in np.linspace(0, len(inner) - 1, _MOST_BORDERS)]
    return [0, *inner, ops]


def _best_borders(space: Space, micro_batch: int, stages: int) -> State | None:
    """The state of equal widths whose slowest stage is fastest."""
    width = space.model.num_devices // stages
    widths = (width,) * stages
    options = space.settings(micro_batch, width).tolist()
    borders = _borders(space)
    steps = space.global_batch // micro_batch - 1
    # For each end of the stages so far: slowest and sum of times, and settings of each stage.
    reached: dict[int, tuple[float, float, tuple[bytes, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extended: dict[int, tuple[float, float, tuple[bytes, ...]]] = {}
        ends = [borders[-1]] if stage == stages - 1 else borders[1:-1]
        for first, (slowest, total, chosen) in reached.items():
            for end in ends:
                if end <= first:
                    continue
                # Only the lengths before `stage` matter here.
                settings = [*chosen, packed(np.zeros(end - first)), *[b""] * (stages - stage - 1)]
                setting = best_setting(space, micro_batch, widths, settings, stage, options)
                if setting is None:
                    continue
                settings[stage] = setting
                price, _ = space.stage(State(micro_batch, widths, tuple(settings)), stage, first)
                if price.memory > space.memory_limit:
                    continue
                label = (max(slowest, price.time), total + price.time, (*chosen, setting))
                old = extended.get(end)
                if old is None or label[0] * steps + label[1] < old[0] * steps + old[1]:
                    extended[end] = label
        reached = extended
    if borders[-1] not in reached:
        return None
    return State(micro_batch, widths, reached[borders[-1]][2])


# --- the command --------------------------------------------------------------------------


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
