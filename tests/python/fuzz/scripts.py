"""Random training scripts by the fused optimizers, and by torch's on plain DDP."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import harness
from checks import optim_differential as differential
from checks.optim_patterns import Program
from checks.optim_script import SCALED, Setup
from fuzz.core import Choices, Wrong

WHERE = ("2", "1", "3")
EXAMPLES = 60
GRAPHS = ("", "find_unused", "static")
FINISHES = ("", "clip", "its own clip", "max_grad_norm", *SCALED)
SETUPS = [
    Setup(optimizer, mode, view, graph, finish)
    for mode, view, graph, finish, optimizer in itertools.product(
        ("ddp", "overlap", "hook", "manual"),
        *((False, True), GRAPHS, FINISHES, ("SGD", "AdamW", "LAMB")),
    )
    # The update in backward has one way to finish; the others raise, which other tests see. In
    # manual mode the DDP is the oracle's alone.
    if (mode != "overlap" or not finish)
    and (mode != "manual" or (graph == "find_unused" and not view))
]


@dataclasses.dataclass(frozen=True)
class Script:
    size: int
    setup: Setup
    program: Program


def yes(choose: Choices) -> bool:
    return choose.choice([True, False])


def often(choose: Choices) -> bool:
    return choose.choice([True, True, True, False])


def rarely(choose: Choices) -> bool:
    return choose.randrange(4) == 3


def options(choose: Choices, graph: str) -> dict[str, Any]:
    """Of a forward. Without ``find_unused_parameters`` all parameters have to be used."""
    kind = choose.choice(["none", "segments", "skip"][: 3 if graph else 2])
    if kind == "segments":
        return {"segments": choose.randint(1, 3), "reentrant": yes(choose)}
    return {"skip": choose.sample(range(6), choose.randrange(3))} if kind == "skip" else {}


def between(choose: Choices, forward: dict[str, Any]) -> tuple[Any, ...]:
    """What a script may do between two steps."""
    what = choose.choice(["trip", "save", "load", "take out", "detach"])
    given: dict[str, tuple[Any, ...]] = {
        "trip": (choose.choice(["whole", "local", "distributed"]),),
        "take out": (choose.randrange(6),),
        "detach": (yes(choose), forward),
    }
    return what, *given.get(what, ())


def writes(choose: Choices, most: int) -> Program:
    """And between backward and step."""
    return [("write", choose.randrange(6)) for _ in range(choose.randint(0, most))]


def wild(choose: Choices) -> Program:
    """Anything; most of it is refused sooner or later."""
    program: Program = []
    for _ in range(choose.randint(2, 5)):
        for _ in range(choose.choice([1, 1, 1, 2, 3])):
            if choose.randrange(5) == 4:
                freeze = ("freeze", choose.randrange(6), yes(choose))
                program.append(choose.choice([("again",), ("evaluate",), ("zero",), freeze]))
            through = choose.choice(["ddp", "ddp", "ddp", "module"])
            syncs = often(choose), often(choose)
            program.append(("pass", *syncs, through, options(choose, "any"), rarely(choose)))
        if choose.randrange(10) == 9:
            program.append(("load",))
        if choose.randrange(10) == 9:
            program.append(("set data", choose.randrange(6)))
        program += writes(choose, 1)
        program += [("step", often(choose))] * (2 if choose.randrange(10) == 9 else 1)
        program += [between(choose, {}) for _ in range(choose.randrange(2))]
    return program


def sound(choose: Choices, setup: Setup) -> Program:
    """What the setup allows, nearly always."""
    overlap, static = setup.mode == "overlap", setup.graph == "static"
    same = options(choose, "static")  # a static graph is the same in every pass

    def forward() -> dict[str, Any]:
        return same if static else options(choose, setup.graph)

    program: Program = []
    for _ in range(choose.randint(3, 6)):
        if setup.graph == "find_unused" and not overlap and rarely(choose):
            program.append(("freeze", choose.randrange(6), yes(choose)))
        if not static or program:  # the first pass is what DDP takes for the graph
            for _ in range(choose.randrange(3)):
                # Under no_sync(); an optimizer that waits for step() may synchronise as well.
                both = not overlap and yes(choose)
                through = "ddp" if both else choose.choice(["ddp", "module"])
                program.append(("pass", both, both, through, forward(), False))
        if rarely(choose):
            program.append(("evaluate",))
        program.append(("pass", True, True, "ddp", forward(), False))
        program += writes(choose, 2)
        if not overlap and rarely(choose):
            program.append(("step", False))
        program.append(("step", overlap or often(choose)))
        actions = [between(choose, forward()) for _ in range(choose.randrange(3))]
        if any(action[0] in ("take out", "detach") for action in actions):
            program.append(("zero",))
        program += actions
    return program


def draw(choose: Choices, where: str) -> Script:
    setup = choose.choice(SETUPS)
    program = sound(choose, setup) if often(choose) else wild(choose)
    return Script(int(where), setup, program)


def check(script: Script) -> int:
    pool = harness.pool(script.size)
    found = pool.run(differential.compare_program, script.program, script.setup)
    if any(found):
        raise Wrong("\n".join(found))
    return len(script.program)
