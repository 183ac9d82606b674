"""Plans are executed: whatever a plan divides, losses and weights are those of one process."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from fusedpg.plan import Plan, PlanError, models
from fusedpg.plan.layout import Layout, reshard, within
from fusedpg.plan.operators import Model, Part
from fusedpg.plan.stage import mixed
from harness import Context

# --- resharding is a pure function --------------------------------------------------------


def layouts(first: int, width: int, dims: int) -> Iterator[Layout]:
    for tp in (t for t in range(1, width + 1) if width % t == 0):
        for split in (None, *range(1, dims)):
            yield Layout(tuple(range(first, first + width)), tp, width // tp, split)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("beside", [True, False])
def test_reshard_gives_every_element_once(width: int, beside: bool) -> None:
    """From every layout to every layout, of the same devices and of neighbours of any width."""
    shape = (24, 24, 24)
    whole = torch.arange(math.prod(shape)).view(shape)
    for other in [width] if not beside else [1, 2, 3, 4, 6, 8]:
        sources, targets = layouts(0, width, 3), layouts(width if beside else 0, other, 3)
        for source, target in itertools.product(list(sources), list(targets)):
            blocks = {
                device: torch.zeros(target.local_shape(shape), dtype=torch.int64) - 1
                for device in target.devices
            }
            pieces = reshard(shape, source, target)
            assert len({(p.source, p.target) for p in pieces}) == len(pieces)
            for piece in pieces:
                held = source.box(source.devices.index(piece.source), shape)
                there = target.box(target.devices.index(piece.target), shape)
                data = whole[within(held, tuple((0, s) for s in shape))][within(piece.box, held)]
                place = blocks[piece.target][within(piece.box, there)]
                assert bool((place == -1).all()), "an element came twice"
                place.copy_(data)
                if piece.source != piece.target and piece.target in source.devices:
                    own = source.box(source.devices.index(piece.target), shape)
                    inside = all(b >= ob and e <= oe for (b, e), (ob, oe) in zip(piece.box, own))
                    assert not inside, "a device is sent what it has"
            for index, device in enumerate(target.devices):
                box = target.box(index, shape)
                assert torch.equal(blocks[device], whole[within(box, tuple((0, s) for s in shape))])


def test_reshard_spreads_load() -> None:
    """Where several devices hold the same, not one alone sends it."""
    source, target = Layout((0, 1), 2, 1), Layout((2, 3), 2, 1)
    assert sorted(p.source for p in reshard((4, 4), source, target)) == [0, 1]


def test_layouts_that_do_not_divide() -> None:
    with pytest.raises(PlanError, match="dimension 1 of size 3 does not divide by 2"):
        Layout((0, 1), 2, 1, split=1).box(0, (4, 3))
    with pytest.raises(PlanError, match="micro-batch"):
        Layout((0, 1), 2, 1, split=0)


# --- plans --------------------------------------------------------------------------------


def random_plan(model: Model, devices: int, seed: int, **given: Any) -> Plan:
    """A legal plan: any widths, and any degrees, ways and recomputation for each operator."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, devices), draw.randint(0, devices - 1)))
    widths = [b - a for a, b in zip([0, *cuts], [*cuts, devices])]
    widths = given.pop("widths", widths)
    count = len(model.operators)
    borders = [0, *sorted(draw.sample(range(1, count), len(widths) - 1)), count]
    micro = math.lcm(*widths) * draw.choice([1, 2])
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
        micro * draw.choice([2, 3, 4]),
        micro,
        tuple(widths),
        tuple(b - a for a, b in itertools.pairwise(borders)),
        *(tuple(tuple(stage) for stage in column) for column in columns.values()),
        model=model.facts,
        **{"schedule": draw.choice(["1f1b", "gpipe"]), **given},
    ).check(model.names, devices)


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


TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(10))
@harness.on_ranks(2, 4, timeout=120)
def test_losses_of_one_process(context: Context, seed: int, dtype: torch.dtype) -> None:
    """20 random legal plans of GPT over 20 steps, unequal widths among them."""
    model = tiny("gpt")
    compare(context, random_plan(model, context.world_size, seed), model, dtype, steps=20)
