"""Fused optimizers against torch.optim on plain DDP, pattern by pattern and at random."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import harness
from checks import optim_differential as differential
from checks import optim_trips
from checks.optim_patterns import NAMES, Program
from checks.optim_script import Setup

pytestmark = pytest.mark.fused_only

GRAPHS = ("", "find_unused", "static")
FINISHES = ("", "clip", "its own clip", "scaler", "overflow", "scaler alone")
SETUPS = [
    Setup(optimizer, mode, view, graph, finish)
    for mode, view, graph, finish, optimizer in itertools.product(
        ("ddp", "overlap", "hook"), (False, True), GRAPHS, FINISHES, ("SGD", "AdamW", "LAMB")
    )
    # The update in backward has one way to finish; the others raise, which other tests see.
    if mode != "overlap" or not finish
]


def agree(workers: harness.Workers, name: str, setups: list[Setup]) -> None:
    cases = [(name, setup) for setup in setups]
    found = [one for rank in workers.run(differential.compare, cases) for one in rank]
    assert not found, "\n".join(found[:20])


HOOKED = [s for s in SETUPS if s.finish == "" and s.mode == "hook"]
EVERY = [s for s in SETUPS if s.finish == "" and s.mode != "hook"]
# Every mode, view and kind of graph; the optimizers in turn, each with every kind of graph.
CHOSEN = [s for i, s in enumerate(EVERY) if i % 3 == (i // 3 + i // 9) % 3]
assert len({(s.optimizer, s.graph) for s in CHOSEN}) == 9
# In an order without a rhythm, so that each part has some of everything.
FINISHED = random.Random(1).sample([s for s in SETUPS if s.finish], 120)
# Those where a step follows more than one backward, or some parameters have no gradient.
INTERESTING = (
    "plainly",
    "reentrant_checkpoints",
    "accumulation",
    "synchronised_twice_with_unused",
    "unused_on_some_ranks",
    "module_first",
)


@pytest.mark.parametrize("name", NAMES)
def test_patterns(pair: harness.Workers, name: str) -> None:
    agree(pair, name, CHOSEN)


@pytest.mark.parametrize("name", INTERESTING)
def test_clipping_and_scaling(pair: harness.Workers, name: str) -> None:
    agree(pair, name, FINISHED[INTERESTING.index(name) :: len(INTERESTING)])


@pytest.mark.parametrize("name", NAMES)
def test_hooks(pair: harness.Workers, name: str) -> None:
    agree(pair, name, HOOKED[list(NAMES).index(name) % 5 :: 5])


@pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch copies every gradient at once",
)
@pytest.mark.parametrize("name", INTERESTING)
def test_batched_copies(pair: harness.Workers, name: str) -> None:
    agree(pair, name, [dataclasses.replace(s, batched=True) for s in CHOSEN])


@pytest.mark.parametrize("size", [1, 3])
def test_other_worlds(size: int) -> None:
    for i, name in enumerate(NAMES):
        agree(harness.pool(size), name, CHOSEN[i % 4 :: 4])


@pytest.mark.parametrize("name", ("accumulation_of_unused", *INTERESTING))
def test_unknown_torch(pair: harness.Workers, name: str) -> None:
    cases = [(name, setup) for setup in CHOSEN[::2]]
    found = pair.run(differential.compare_without_taking, cases)
    assert not any(found), found


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_unfrozen_by_hand(trio: harness.Workers, optimizer: str) -> None:
    trio.run(differential.unfrozen_by_hand, optimizer)


@pytest.mark.parametrize("steps", [0, 2])
def test_masters_and_memory_format(pair: harness.Workers, steps: int) -> None:
    pair.run(differential.masters_and_memory_format, steps)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "LAMB"])
def test_masters(pair: harness.Workers, optimizer: str, dtype: torch.dtype, overlap: bool) -> None:
    pair.run(differential.masters, optimizer, dtype, overlap)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_everything(size: int) -> None:
    for name in NAMES:
        agree(harness.pool(size), name, SETUPS)


# What a script may do between two steps.
BETWEEN = st.one_of(
    st.tuples(st.just("trip"), st.sampled_from(["whole", "local", "distributed"])),
    st.tuples(st.just("save")),
    st.tuples(st.just("load")),
    st.tuples(st.just("take out"), st.integers(0, 5)),
)
# And between backward and step.
WRITE = st.tuples(st.just("write"), st.integers(0, 5))
OFTEN = st.sampled_from([True, True, True, False])
RARELY = OFTEN.map(lambda yes: not yes)


def options(graph: str) -> st.SearchStrategy[dict[str, object]]:
    """Of a forward. Without ``find_unused_parameters`` all parameters have to be used."""
    layers = st.lists(st.integers(0, 5), max_size=2, unique=True)
    segments = {"segments": st.integers(1, 3), "reentrant": st.booleans()}
    kinds = [st.just({}), st.fixed_dictionaries(segments)]
    if graph:
        kinds.append(st.fixed_dictionaries({"skip": layers}))
    return st.one_of(kinds)


def wild_pass() -> st.SearchStrategy[tuple[object, ...]]:
    through = st.sampled_from(["ddp", "ddp", "ddp", "module"])
    return st.tuples(st.just("pass"), OFTEN, OFTEN, through, options("any"), RARELY)


@st.composite
def wild(draw: st.DrawFn) -> Program:
    """Anything; most of it is refused sooner or later."""
    others = st.one_of(
        st.tuples(st.just("again")),
        st.tuples(st.just("evaluate")),
        st.tuples(st.just("zero")),
        st.tuples(st.just("freeze"), st.integers(0, 5), st.booleans()),
    )
    between = st.one_of(BETWEEN, st.tuples(st.just("detach"), st.booleans(), st.just({})))
    program: Program = []
    for _ in range(draw(st.integers(2, 5))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
            if draw(st.integers(0, 4)) == 0:
                program.append(draw(others))
            program.append(draw(wild_pass()))
        if draw(st.integers(0, 9)) == 9:
            program.append(("load",))
        if draw(st.integers(0, 9)) == 9:
            program.append(("set data", draw(st.integers(0, 5))))
        program += draw(st.lists(WRITE, max_size=1))
        program.append(("step", draw(OFTEN)))
        if draw(st.integers(0, 9)) == 9:
            program.append(("step", draw(OFTEN)))
        program += draw(st.lists(between, max_size=1))
    return program


@st.composite
def sound(draw: st.DrawFn, setup: Setup) -> Program:
    """What the setup allows, nearly always."""
    overlap, static = setup.mode == "overlap", setup.graph == "static"
    # A static graph is the same in every pass.
    forward = st.just(draw(options("static"))) if static else options(setup.graph)
    # Under no_sync(), or, with an optimizer that waits for step(), synchronised as well.
    alone = st.tuples(st.just(False), st.just(False), st.sampled_from(["ddp", "module"]))
    both = st.tuples(st.just(True), st.just(True), st.just("ddp"))
    early = alone if overlap else st.one_of(alone, both)
    between = st.one_of(BETWEEN, st.tuples(st.just("detach"), st.booleans(), forward))
    program: Program = []
    for _ in range(draw(st.integers(3, 6))):
        if setup.graph == "find_unused" and not overlap and draw(RARELY):
            program.append(("freeze", draw(st.integers(0, 5)), draw(st.booleans())))
        if not static or program:  # the first pass is what DDP takes for the graph
            for kind in draw(st.lists(early, max_size=2)):
                program.append(("pass", *kind, draw(forward), False))
        if draw(RARELY):
            program.append(("evaluate",))
        program.append(("pass", True, True, "ddp", draw(forward), False))
        program += draw(st.lists(WRITE, max_size=2))
        if not overlap and draw(RARELY):
            program.append(("step", False))
        program.append(("step", overlap or draw(OFTEN)))
        actions = draw(st.lists(between, max_size=2))
        if any(action[0] in ("take out", "detach") for action in actions):
            program.append(("zero",))
        program += actions
    return program


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Setup, Program]:
    setup = draw(st.sampled_from(SETUPS))
    return setup, draw(sound(setup) if draw(OFTEN) else wild())


# Without shrinking: an example that raises or hangs costs a new pool, or its time limit.
BRIEFLY = [hypothesis.Phase.explicit, hypothesis.Phase.generate]


def check_script(size: int, setup: Setup, program: Program) -> None:
    found = harness.pool(size).run(differential.compare_program, program, setup)
    assert not any(found), found


@hypothesis.settings(max_examples=60, phases=BRIEFLY)
@hypothesis.given(scripts())
def test_drawn_scripts(script: tuple[Setup, Program]) -> None:
    check_script(2, *script)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_more_drawn_scripts(size: int) -> None:
    @hypothesis.seed(size)
    @hypothesis.settings(max_examples=600, phases=BRIEFLY)
    @hypothesis.given(scripts())
    def test(script: tuple[Setup, Program]) -> None:
        check_script(size, *script)

    test()


@st.composite
def legs(draw: st.DrawFn) -> list[Program]:
    """Layer 3 is never used, and so has no state."""
    programs: list[Program] = []
    for _ in range(3):
        program: Program = []
        for _ in range(draw(st.integers(1, 4))):
            for synchronised in [*draw(st.sampled_from([[], [], [False]])), True]:
                skip = {3, *draw(st.lists(st.integers(0, 5), max_size=2))}
                program.append(("pass", synchronised, True, "ddp", {"skip": sorted(skip)}, False))
            program.append(("step", draw(st.sampled_from([True, True, False]))))
            program += draw(
                st.sampled_from(
                    [
                        [("zero",)],
                        [("freeze", draw(st.integers(0, 5)), draw(st.booleans())), ("zero",)],
                        [("zero",), ("trip", draw(st.sampled_from(["whole", "distributed"])))],
                    ]
                )
            )
        programs.append(program)
    return programs


@hypothesis.settings(max_examples=6, phases=BRIEFLY)
@hypothesis.given(
    legs(),
    st.sampled_from(["SGD", "Adam", "AdamW"]),
    st.sampled_from(["ddp", "overlap"]),
    st.sampled_from(optim_trips.WAYS),
)
def test_drawn_trips(programs: list[Program], optimizer: str, mode: str, way: str) -> None:
    """Checkpoints from three ranks to two and back."""
    setup = Setup(optimizer, mode, graph="find_unused")
    with tempfile.TemporaryDirectory() as folder:
        for number, (size, program) in enumerate(zip((3, 2, 3), programs, strict=True)):
            found = harness.pool(size).run(optim_trips.leg, setup, program, number, way, folder)
            assert not any(found), found
