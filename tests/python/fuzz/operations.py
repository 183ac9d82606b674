"""Runs random programs on pools of ranks and judges what all ranks say together."""

from __future__ import annotations

import dataclasses

import harness
from fuzz import execute
from fuzz.programs import Program, draw_program

STEPS = 40
ARMS = ("one host", "hosts")


@dataclasses.dataclass
class Tally:
    """What has been done so far."""

    programs: int = 0
    calls: int = 0


class Failure(AssertionError):
    """Something is wrong; says how to see it again."""


def replay(seed: int, world: int, arm: str) -> str:
    return f"make fuzz SEED={seed} WORLD={world} ARM='{arm}'"


def between_hosts(arm: str) -> bool:
    return arm == "hosts"


def workers_for(world: int, arm: str) -> harness.Workers:
    if between_hosts(arm):
        env = [{"FUSEDPG_HOST_ID": str(rank % 2)} for rank in range(world)]
        return harness.pool(world, env=env, one_host=False, timeout=30, oracle=False)
    return harness.pool(world, timeout=30, oracle=False)


def run_one(seed: int, world: int, arm: str, tally: Tally, steps: int = STEPS) -> None:
    """One program; raises Failure."""
    workers = workers_for(world, arm)
    try:
        answers = workers.run(execute.run_program, seed, between_hosts(arm), steps, timeout=90)
    except harness.WorkerFailure as error:
        raise Failure(f"{replay(seed, world, arm)}\n{error}") from error
    wrong = [text for one, _, _ in answers for text in one]
    program = draw_program(seed, world, hosts=between_hosts(arm), steps=steps)
    wrong += differences(program, [digests for _, digests, _ in answers])
    if wrong:
        # Groups are left behind in whatever state.
        workers.close()
        # What others only waited for comes last.
        wrong.sort(key=lambda text: "timeout after" in text)
        raise Failure("\n".join([f"replay: {replay(seed, world, arm)}", *wrong]))
    tally.programs += 1
    tally.calls += sum(count for _, _, count in answers)


def differences(program: Program, digests: list[dict[int, str]]) -> list[str]:
    """Steps after which members do not have the same bits."""
    found = []
    for lane in program.lanes:
        for step in lane:
            ranks = program.groups[step.group].ranks
            if len({digests[rank].get(step.number) for rank in ranks}) > 1:
                found.append(f"members have different bits after {step}")
    return found
