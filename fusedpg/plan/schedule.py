"""In which order a device runs its stages' forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedpg.plan.config import Plan, PlanError


class Action(NamedTuple):
    """A forward ("F") or backward ("B") pass of one stage over one micro-batch."""

    stage: int
    kind: str
    micro_batch: int


def actions(plan: Plan, pipeline_rank: int) -> list[Action]:
    """The actions of a stage's devices, with its virtual stages, in an iteration.

    Raises:
        PlanError: if the schedule is not executed, or not with this number of micro-batches.
    """
    if plan.schedule == "gpipe":
        return list(_gpipe(plan.num_micro_batches, pipeline_rank))
    if plan.schedule == "1f1b":
        return list(_one_forward_one_backward(plan, pipeline_rank))
    if plan.schedule == "interleaved":
        return _interleaved(plan, pipeline_rank)
    raise PlanError(
        f"schedule {plan.schedule} is not executed: its backward pass is in two parts, and the "
        "optimizers of fusedpg.optim take gradients from whole ones"
    )


def _gpipe(count: int, stage: int) -> Iterator[Action]:
    for kind in "FB":
        for number in range(count):
            yield Action(stage, kind, number)


def _one_forward_one_backward(plan: Plan, stage: int) -> Iterator[Action]:
    count = plan.num_micro_batches
    ahead = min(count, plan.num_stages - 1 - stage)
    for number in range(count + ahead):
        if number < count:
            yield Action(stage, "F", number)
        if number >= ahead:
            yield Action(stage, "B", number - ahead)


def _interleaved(plan: Plan, pipeline_rank: int) -> list[Action]:
    """The list of torch's schedule, which needs none of torch's stages."""
    from torch.distributed.pipelining import schedules  # slow to import

    count = plan.num_micro_batches
    period = plan.num_stages // plan.virtual_stages
    rounds = max(1, count // period)
    if count % rounds:
        raise PlanError(
            f"schedule interleaved needs micro-batches in {rounds} equal rounds (one for each "
            f"{period} stages), and there are {count}"
        )
    schedule: Any = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size = period
    schedule.n_local_stages = plan.virtual_stages
    schedule._n_microbatches = count
    schedule.microbatches_per_round = count // rounds
    return [
        Action(action.stage_index, action.computation_type.value, action.microbatch_index)
        for action in schedule._calculate_single_rank_operations(pipeline_rank)
        if action is not None
    ]
