"""The time of an iteration on devices that share processor cores.

Where there are more devices than cores, a stage's pass takes longer the more other stages compute
at the same time, so no sum over stages says how long an iteration takes. This module plays the
schedule: a pass needs some milliseconds of a core for each of its devices, and the devices of a
machine that compute share its cores evenly. Waiting takes no core: not for messages, nor inside
of a pass, where tensor-parallel devices wait for each other.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fusedpg.plan.schedule import passes

__all__ = ["SharedCores", "Work", "played"]


@dataclass(frozen=True)
class SharedCores:
    """Every `devices` devices in a row share `cores` cores, or what they get of them."""

    devices: int
    cores: float

    def spread(self, work: Work) -> dict[int, int]:
        """The number of a stage's devices on each machine."""
        devices = range(work.first_device, work.first_device + work.width)
        return dict(collections.Counter(device // self.devices for device in devices))


@dataclass(frozen=True)
class Work:
    """A stage's work. Times are milliseconds, with a core for each device.

    Args:
        first_device: its first device.
        width: how many it has.
        forward: of a pass over a micro-batch.
        backward: likewise.
        forward_busy: the share of the forward pass in which its devices need their cores.
        backward_busy: likewise.
        receive: how long the message that a forward pass needs is on its way.
        send: how long the gradient that a backward pass needs is on its way.
        finish: on cores, when the last backward pass has ended.
        wait: on links, after that.
    """

    first_device: int
    width: int
    forward: float
    backward: float
    receive: float
    send: float
    finish: float
    wait: float
    forward_busy: float = 1.0
    backward_busy: float = 1.0


@dataclass
class _Stage:
    """A stage's progress."""

    todo: list[tuple[str, int]]
    machines: dict[int, int]  # devices on each machine
    place: int = 0  # in `todo`
    left: float = 0.0  # of the pass that runs
    busy: float = 1.0  # the share of it on cores
    runs: bool = False
    ready: dict[tuple[str, int], float] = field(default_factory=dict)  # when messages are there
    end: float = 0.0


def played(
    stages: Sequence[Work], micro_batches: int, cores: SharedCores, schedule: str = "1f1b"
) -> float:
    """Milliseconds until the last stage has ended."""
    count = len(stages)
    found = [
        _Stage(list(passes(schedule, micro_batches, count, i)), cores.spread(work))
        for i, work in enumerate(stages)
    ]
    # The links between neighbours, forwards and backwards, carry one message after the other.
    free: dict[tuple[int, str], float] = {}
    now = 0.0
    while True:
        soonest = math.inf
        for number, stage in enumerate(found):
            if stage.runs or stage.place > len(stage.todo):
                continue
            begin = _ready(stage, number, count)
            if begin <= now:
                stage.runs = True
                stage.left, stage.busy = _duration(stages[number], stage)
            else:
                soonest = min(soonest, begin)
        busy: dict[int, float] = {}
        running = [stage for stage in found if stage.runs]
        for stage in running:
            for machine, devices in stage.machines.items():
                busy[machine] = busy.get(machine, 0.0) + devices * stage.busy
        rates = [
            min(cores.cores / max(cores.cores, busy[machine]) for machine in stage.machines)
            for stage in running
        ]
        step = min((stage.left / rate for stage, rate in zip(running, rates)), default=math.inf)
        step = min(step, soonest - now)
        if not math.isfinite(step):
            return max(stage.end + work.wait for stage, work in zip(found, stages))
        now += step
        for stage, rate in zip(running, rates):
            stage.left -= step * rate
        for number, stage in enumerate(found):
            if stage.runs and stage.left <= 1e-9:
                _ended(stages, found, number, now, free)


def _ready(stage: _Stage, number: int, count: int) -> float:
    """When the message of the stage's next pass is there."""
    if stage.place == len(stage.todo):  # what follows the last pass
        return 0.0
    kind, _ = stage.todo[stage.place]
    if number == (0 if kind == "F" else count - 1):
        return 0.0
    return stage.ready.get(stage.todo[stage.place], math.inf)


def _duration(work: Work, stage: _Stage) -> tuple[float, float]:
    if stage.place == len(stage.todo):
        return work.finish, 1.0
    if stage.todo[stage.place][0] == "F":
        return work.forward, work.forward_busy
    return work.backward, work.backward_busy


def _ended(
    stages: Sequence[Work],
    found: Sequence[_Stage],
    number: int,
    now: float,
    free: dict[tuple[int, str], float],
) -> None:
    """A stage's pass has ended: its message leaves."""
    stage = found[number]
    stage.runs, stage.end = False, now
    if stage.place < len(stage.todo):
        kind, micro_batch = stage.todo[stage.place]
        other = number + 1 if kind == "F" else number - 1
        if 0 <= other < len(found):
            takes = stages[other].receive if kind == "F" else stages[other].send
            link = (min(number, other), kind)
            there = max(now, free.get(link, 0.0)) + takes
            free[link] = there
            found[other].ready[kind, micro_batch] = there
    stage.place += 1
