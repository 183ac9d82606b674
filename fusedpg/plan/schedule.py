"""In which order a device runs its stages' forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedpg.plan.config import Plan, PlanError


class Action(NamedTuple):
    """A pass of one stage over one micro-batch.

    It is forward ("F") or backward ("B"); or one part of a backward pass: what the stage before
    needs ("I"), or the gradients of weights ("W").
    """

    stage: int
    kind: str
    micro_batch: int


def actions(plan: Plan, pipeline_rank: int) -> list[Action]:
    """The actions of a stage's devices, with its virtual stages, in an iteration.

    Raises:
        PlanError: if the schedule is not possible with this number of micro-batches.
    """
    if plan.schedule in ("gpipe", "1f1b"):
        numbers = plan.num_micro_batches, plan.num_stages, pipeline_rank
        return [Action(pipeline_rank, *one) for one in passes(plan.schedule, *numbers)]
    return _by_torch(plan, pipeline_rank)


def passes(schedule: str, count: int, stages: int, stage: int) -> Iterator[tuple[str, int]]:
    """A stage's passes over `count` micro-batches in the order of "gpipe" or "1f1b"."""
    behind = stages - 1 - stage
    ahead = count if schedule == "gpipe" else min(count, behind)
    for number in range(count + ahead):
        if number < count:
            yield "F", number
        if number >= ahead:
            yield "B", number - ahead


def _by_torch(plan: Plan, pipeline_rank: int) -> list[Action]:
    """The list of torch's schedule, which needs none of torch's stages."""
    from torch.distributed.pipelining import schedules  # slow to import

    kinds: dict[str, Any] = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    }
    kind = kinds[plan.schedule]
    count = plan.num_micro_batches
    period = plan.num_stages // plan.virtual_stages
    rounds = max(1, count // period)
    if count % rounds:
        raise PlanError(
            f"schedule {plan.schedule} needs micro-batches in {rounds} equal rounds (one for each "
            f"{period} stages), and there are {count}"
        )
    schedule = kind.__new__(kind)
    schedule.pp_group_size = period
    schedule.n_local_stages = plan.virtual_stages
    schedule._n_microbatches = count
    schedule.microbatches_per_round = count // rounds
    return [
        Action(action.stage_index, action.computation_type.value, action.microbatch_index)
        for action in schedule._calculate_single_rank_operations(pipeline_rank)
        if action is not None
    ]
