"""Random plans: losses and weights are those of one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import harness
from fusedpg.plan import Plan, models
from fusedpg.plan.operators import Model, Part
from fusedpg.plan.stage import mixed
from fuzz.core import Choices, Pair, done
from harness import Context

WHERE = tuple(f"{size}, {name}" for size in (2, 4) for name in ("gpt", "t5", "resnet"))
EXAMPLES = 4
WIDTHS = {2: [[1, 1]], 4: [[1, 1, 2], [2, 2], [3, 1], [1, 2, 1]]}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def draw_plan(draw: Choices | random.Random, model: Model, devices: int, **given: Any) -> Plan:
    """A legal plan: any widths, and any degrees, ways and recomputation for each operator."""
    cuts = sorted(draw.sample(range(1, devices), draw.randint(0, devices - 1)))
    widths = [b - a for a, b in zip([0, *cuts], [*cuts, devices])]
    widths = given.pop("widths", widths)
    count = len(model.operators)
    borders = [0, *sorted(draw.sample(range(1, count), len(widths) - 1)), count]
    micro = math.lcm(*widths) * draw.choice([1, 2])
    micro_batches = given.pop("micro_batches", draw.choice([2, 3, 4]))
    columns: dict[str, list[list[int]]] = {"tp": [], "dp": [], "recompute": [], "algo": []}
    for stage, width in enumerate(widths):
        tps = [t for t in range(1, width + 1) if width % t == 0]
        column: dict[str, list[int]] = {name: [] for name in columns}
        often = draw.random()  # of changes of degrees inside of the stage
        tp = draw.choice(tps)
        for number in range(borders[stage], borders[stage + 1]):
            op = model.operators[number]
            inputs = [model.values[name] for name in op.inputs]
            if draw.random() < often / 3:
                tp = draw.choice(tps)
            algo = draw.randint(0, 1)
            possible = tp if op.problem(tp, algo, inputs) is None else 1
            column["tp"].append(possible)
            column["dp"].append(width // possible)
            column["recompute"].append(int(draw.random() < 0.4))
            column["algo"].append(algo)
        for name, values in column.items():
            columns[name].append(values)
    return Plan(
        model.name,
        model.size,
        micro * micro_batches,
        micro,
        tuple(widths),
        tuple(b - a for a, b in itertools.pairwise(borders)),
        *(tuple(tuple(stage) for stage in column) for column in columns.values()),
        model=model.facts,
        **{"schedule": draw.choice(["1f1b", "gpipe"]), **given},
    ).check(model.names)


@functools.lru_cache
def tiny(name: str) -> Model:
    """Without dropout, whose bits depend on who computes what."""
    return models.build(name, "tiny", **({} if name == "resnet" else {"dropout": 0.0}))


def reference(
    model: Model, plan: Plan, steps: int, dtype: torch.dtype, make: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of one process, operator after operator, by torch's optimizer."""
    modules = [op.module(Part(), dtype, mixed(0, i)) for i, op in enumerate(model.operators)]
    optimizer = make([p for module in modules for p in module.parameters()])
    losses = []
    for step in range(steps):
        batch = model.random_batch(plan.global_batch_size, dtype, step)
        total = 0.0
        for begin in range(0, plan.global_batch_size, plan.micro_batch_size):
            held = {k: v[begin : begin + plan.micro_batch_size] for k, v in batch.items()}
            for op, module in zip(model.operators, modules):
                outputs = module(*(held[name] for name in op.inputs))
                held.update(zip(op.outputs, outputs if isinstance(outputs, tuple) else [outputs]))
            loss = held[model.operators[-1].outputs[0]].sum() / plan.global_batch_size
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    weights = {
        f"{i}.{name}": value
        for i, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }
    return losses, weights


def train(plan: Plan, model: Model, steps: int, dtype: torch.dtype, **more: Any) -> Any:
    from fusedpg.plan.train import Trainer

    trainer = Trainer(plan, model, dtype=dtype, **more)
    losses = [
        trainer.step(model.random_batch(plan.global_batch_size, dtype, step)).loss
        for step in range(steps)
    ]
    return losses, trainer.state_dict(), trainer


def compare(context: Context, plan: Plan, model: Model, dtype: torch.dtype, steps: int) -> None:
    # The gradient of a key's bias is zero but for rounding, and a small eps makes steps of it.
    options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
    losses, weights, _ = train(plan, model, steps, dtype, options=options)
    if context.rank:
        return
    make = functools.partial(torch.optim.AdamW, **options)
    wanted, expected = reference(model, plan, steps, dtype, make)
    assert wanted[-1] != wanted[0]
    within_tolerance = TOLERANCE[dtype]
    where = json.dumps(plan.to_json())
    for ours, theirs in zip(losses, wanted, strict=True):
        assert abs(ours - theirs) <= within_tolerance * abs(theirs), (losses, wanted, where)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        error = (weights[key] - value).norm() / value.norm().clamp_min(1e-12)
        assert float(error) <= within_tolerance * (10 if dtype == torch.float32 else 1), (
            key,
            where,
        )


@dataclasses.dataclass(frozen=True)
class Program:
    plan: Plan
    dtype: torch.dtype
    steps: int


def workers(where: str) -> harness.Workers:
    return harness.pool(int(where[0]))


def draw(choose: Choices, where: str) -> Program:
    size, name = int(where[0]), where.split(", ")[1]
    schedule = choose.choice(["1f1b", "gpipe", "zero_bubble", "interleaved"])
    given: dict[str, Any] = {"schedule": schedule}
    devices = size
    if schedule == "interleaved" or (schedule == "zero_bubble" and choose.random() < 0.4):
        devices = 2 * size  # two stages on the same ones
        micro_batches = choose.choice([2, 4, 6])
        given |= {"widths": [size // 2] * 4, "virtual_stages": 2, "micro_batches": micro_batches}
    elif schedule == "zero_bubble":
        given |= {"widths": choose.choice(WIDTHS[size]), "micro_batches": 6}
    plan = draw_plan(choose, tiny(name), devices, **given)
    if choose.random() < 0.2:
        never = tuple(tuple(0 for _ in stage) for stage in plan.recompute_ops)
        plan = dataclasses.replace(plan, recompute_ops=never)
    dtype = choose.choice([torch.float64, torch.float32] if name == "gpt" else [torch.float64])
    return Program(plan, dtype, choose.choice([3, 4, 20] if name == "gpt" else [3, 4]))


def run(program: Program, context: Context) -> Iterator[Pair]:
    compare(context, program.plan, tiny(program.plan.model_name), program.dtype, program.steps)
    yield done("training")
