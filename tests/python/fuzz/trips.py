"""Runs that go on from a checkpoint at another world size, as torch.optim on plain DDP does."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import harness
from checks.optim_patterns import Program, execute
from checks.optim_script import Script, Setup
from fuzz.core import Choices, Wrong
from harness import Context

WHERE = ("3 to 2 to 3",)
EXAMPLES = 5
# whole: torch's format in one file; crossed: ours goes on from torch's and the other way round.
WAYS = ("whole", "whole, crossed", "distributed", "distributed, crossed")


def save(script: Script, way: str, folder: Path) -> None:
    if "distributed" in way:
        whole = get_optimizer_state_dict(script.module, script.opt)
        dcp.save({"optimizer": whole}, checkpoint_id=folder / "dcp")
        whole = {"names": list(whole["state"])}
    elif script.fused:
        whole = script.opt.full_state_dict()
    else:
        whole = script.opt.state_dict()
    if script.context.rank == 0:
        torch.save([script.module.state_dict(), whole], folder / "whole.pt")
    dist.barrier(group=script.context.oracle)


def load(script: Script, way: str, folder: Path) -> None:
    model, whole = torch.load(folder / "whole.pt")
    script.module.load_state_dict(model)
    if "distributed" not in way:
        script.opt.load_state_dict(whole)
        return
    state = {"optimizer": get_optimizer_state_dict(script.module, script.opt)}
    # Parameters that were never used are not in the checkpoint.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder / "dcp", planner=planner)
    set_optimizer_state_dict(script.module, script.opt, optim_state_dict=state["optimizer"])
    if script.fused:
        return
    # They get what torch's step with gradients of zero has made to have something to load into:
    # a counter of one, and moments of the weight decay.
    for name, param in script.module.named_parameters():
        if name not in whole["names"]:
            script.opt.state.pop(param, None)


def leg(
    context: Context, setup: Setup, program: Program, number: int, way: str, path: str
) -> list[str]:
    """One part of a run, from the checkpoint of the part before to the next."""
    histories: list[Any] = []
    if setup.mode == "overlap":
        # A frozen layer that backward goes through would be among those updated before it does.
        program = [operation for operation in program if operation[0] != "freeze"]
    for fused in (False, True):
        script = Script(context, setup, fused)
        script.batches = 1000 * number
        source = not fused if "crossed" in way else fused
        if number:
            load(script, way, Path(path) / f"{number} {source}")
        execute(program)(script)
        script.opt.zero_grad()
        target = Path(path) / f"{number + 1} {fused}"
        if context.rank == 0:
            target.mkdir()
        dist.barrier(group=context.oracle)
        save(script, way, target)
        histories.append(script.history)
    found = []
    for step, (theirs, ours) in enumerate(zip(*histories, strict=True)):
        for i, (want, got) in enumerate(zip(theirs, ours, strict=True)):
            apart = float((got - want).abs().max())
            if not apart <= 1e-11:
                found.append(f"leg {number}, step {step}, parameter {i}: {apart:.1e} apart")
    return found[:3]


@dataclasses.dataclass(frozen=True)
class Trip:
    setup: Setup
    way: str
    legs: tuple[tuple[int, Program], ...]  # and on how many ranks


def draw_leg(choose: Choices) -> Program:
    """Layer 3 is never used, and so has no state."""
    program: Program = []
    for _ in range(choose.randint(1, 4)):
        for synchronised in [*choose.choice([[], [], [False]]), True]:
            skip = {3, *choose.sample(range(6), choose.randrange(3))}
            program.append(("pass", synchronised, True, "ddp", {"skip": sorted(skip)}, False))
        program.append(("step", choose.choice([True, True, False])))
        freeze = ("freeze", choose.randrange(6), choose.choice([True, False]))
        trip = ("trip", choose.choice(["whole", "distributed"]))
        program += choose.choice([[("zero",)], [freeze, ("zero",)], [("zero",), trip]])
    return program


def draw(choose: Choices, where: str) -> Trip:
    optimizer = choose.choice(["SGD", "Adam", "AdamW"])
    mode = choose.choice(["ddp", "overlap", "manual"])
    legs = tuple((int(size), draw_leg(choose)) for size in where.split(" to "))
    return Trip(Setup(optimizer, mode, graph="find_unused"), choose.choice(WAYS), legs)


def check(trip: Trip) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for number, (size, program) in enumerate(trip.legs):
            found = harness.pool(size).run(leg, trip.setup, program, number, trip.way, folder)
            if any(found):
                raise Wrong(str(found))
    return len(trip.legs)
