"""The format of plans: what is read, what is written, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fusedpg.plan import Plan, PlanError, Prediction

PLAN = Plan(
    model_name="gpt",
    model_size="tiny",
    global_batch_size=32,
    micro_batch_size=4,
    num_gpus=(1, 1, 2),
    num_ops_in_each_stage=(2, 1, 3),
    model_parallel_size_of_each_op=((1, 1), (1,), (2, 1, 2)),
    data_parallel_size_of_each_op=((1, 1), (1,), (1, 2, 1)),
    recompute_ops=((0, 0), (1,), (0, 1, 1)),
    algo_of_each_op=((0, 0), (0,), (0, 1, 0)),
    model={"num_layers": 2, "hidden_size": 16},
    predicted=Prediction(12.5, (12.5, 11.0, 9.25), (100.0, 90.5, 80.0), "fusedpg"),
)
INTERLEAVED = Plan(
    model_name="gpt",
    model_size="tiny",
    global_batch_size=8,
    micro_batch_size=2,
    num_gpus=(1, 2, 1, 2),
    num_ops_in_each_stage=(1, 1, 1, 1),
    model_parallel_size_of_each_op=((1,), (2,), (1,), (1,)),
    data_parallel_size_of_each_op=((1,), (1,), (1,), (2,)),
    recompute_ops=((0,),) * 4,
    algo_of_each_op=((0,),) * 4,
    schedule="interleaved",
    virtual_stages=2,
)


@pytest.mark.parametrize("plan", [PLAN, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_file(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["num_stages"] == plan.num_stages
    assert data["checkpoint_activations"] == [any(flags) for flags in plan.recompute_ops]
    # Aceso's files have no keys of ours.
    for name in ("schedule", "virtual_stages", "predicted"):
        data.pop(name, None)
    if plan is PLAN:
        assert Plan.from_json(data) == dataclasses.replace(plan, predicted=None)


def test_plan_of_acesos_readme() -> None:
    """Its two first stages have `checkpoint_activations` and recompute no operator."""
    widths, operators = [1, 1, 2], [85, 91, 139]

    def each(values: list[int]) -> list[list[int]]:
        return [[value] * count for value, count in zip(values, operators)]

    plan = Plan.from_json(
        {
            "model_name": "gpt",
            "model_size": "1_3B",
            "num_layers": 24,
            "seq_length": 2048,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "hidden_size": 2048,
            "global_batch_size": 32,
            "micro_batch_size": 1,
            "num_stages": 3,
            "num_gpus": widths,
            "checkpoint_activations": [True, True, False],
            "resharding_stages": [False, False, False],
            "num_ops_in_each_stage": operators,
            "model_parallel_size_of_each_op": each(widths),
            "data_parallel_size_of_each_op": each([1, 1, 1]),
            "recompute_ops": each([0, 0, 0]),
            "algo_of_each_op": each([0, 0, 0]),
        }
    )
    assert plan.num_devices == 4 and plan.num_ops == 315
    assert plan.checkpoint_activations == (False, False, False)


def test_where() -> None:
    assert PLAN.num_devices == 4 and PLAN.num_micro_batches == 8 and PLAN.num_ops == 6
    assert [list(PLAN.devices(stage)) for stage in range(3)] == [[0], [1], [2, 3]]
    assert [PLAN.first_op(stage) for stage in range(3)] == [0, 2, 3]
    assert PLAN.resharding_stages == (False, False, True)
    assert INTERLEAVED.num_devices == 3
    assert [list(INTERLEAVED.devices(stage)) for stage in range(4)] == [[0], [1, 2]] * 2


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_gpus": (1, 1, 3)}, "operator 0 of stage 2 has tp 2 * dp 1 = 2, on 3 devices"),
        ({"micro_batch_size": 3, "global_batch_size": 33}, "operator 1 of stage 2 divides a micro"),
        ({"global_batch_size": 33}, "33 is not a multiple of micro_batch_size 4"),
        ({"num_ops_in_each_stage": (2, 1, 2)}, "has 3 numbers for stage 2, which has 2"),
        (
            {"num_ops_in_each_stage": (2, 4)},
            "num_gpus is for 3 stages, num_ops_in_each_stage for 2",
        ),
        ({"num_ops_in_each_stage": (2, 0, 4)}, "not of positive integers"),
        ({"num_ops_in_each_stage": ()}, "needs a stage"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"micro_batch_size": True}, "micro_batch_size is True"),
        ({"recompute_ops": ((0, 0), (2,), (0, 1, 1))}, "recompute 2, not 0 or 1"),
        ({"algo_of_each_op": ((0, 0), (0,), (0, 1, -1))}, "algo -1, not 0 or 1"),
        ({"data_parallel_size_of_each_op": ((0, 1), (1,), (1, 2, 1))}, "tp 1 and dp 0"),
        ({"schedule": "dapple"}, "none of 1f1b, gpipe"),
        ({"virtual_stages": 3}, "schedule 1f1b has one stage a device"),
        ({"schedule": "interleaved"}, "needs virtual_stages of 2 or more"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "not a multiple of virtual_stages 2"),
        ({"schedule": "interleaved", "virtual_stages": 3}, "stage 2 has 2 devices, stage 0"),
    ],
)
def test_problem(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as info:
        dataclasses.replace(PLAN, **change).check()
    assert said in str(info.value)


def test_problem_with_what_is_there() -> None:
    assert PLAN.problems(operators=["op"] * 6, devices=4) == []
    assert PLAN.problems(operators=["op"] * 7, devices=8) == [
        "the plan has 6 operators, the model 7",
        "the plan is for 4 devices, not 8",
    ]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_gpus": None}, "wrong kind"),
        ({"num_stages": 2}, "num_stages is 2, but by the other keys 3"),
        ({"checkpoint_activations": [True, True, False]}, "by the other keys [False, True, True]"),
        ({"checkpoint_activations": [True]}, "by the other keys [False, True, True]"),
        ({"predicted": {"time": 1.0}}, "wrong kind"),
    ],
)
def test_refused_file(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json() | change))
    with pytest.raises(PlanError) as info:
        Plan.load(path)
    assert said in str(info.value) and str(path) in str(info.value)


def test_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text, said in [("{", "plan.json"), ("[]", "not list"), ('{"num_gpus": []}', "model_name")]:
        path.write_text(text)
        with pytest.raises(PlanError, match=said):
            Plan.load(path)
