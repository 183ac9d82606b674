"""Fused optimizers come and go: attach, detach, several on one DDP, and what is left of them."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

import harness
from checks import optim_life as life

pytestmark = pytest.mark.fused_only

DDP = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "view, find_unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("mode", ["manual", "ddp", "overlap"])
def test_everything_is_freed(pair: harness.Workers, mode: str) -> None:
    for zero in (True, False):
        pair.run(life.freed, mode, zero, False)


@pytest.mark.parametrize("mode", ["ddp", "overlap"])
def test_everything_is_freed_after_a_failure(mode: str) -> None:
    # One rank: the others would wait for what it did not start.
    harness.pool(1).run(life.freed, mode, False, True)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_detach_leaves_plain_ddp(pair: harness.Workers, view: bool, static: bool) -> None:
    pair.run(life.is_plain_again, view, static)


@pytest.mark.parametrize("attached", [False, True])
def test_detach_with_what_came_after_the_step(pair: harness.Workers, attached: bool) -> None:
    pair.run(life.pending_after_step, attached)


def test_forgotten_ddp(pair: harness.Workers) -> None:
    for view in (False, True):
        for hook in (False, True):
            for first in (False, True):
                # DDP is in the middle of a backward then.
                pair.run(life.forgotten, view, hook, first)


def test_wrong_modules(pair: harness.Workers) -> None:
    pair.run(life.wrong_modules)


def test_sharded_elsewhere(pair: harness.Workers) -> None:
    pair.run(life.sharded_elsewhere)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [harness.slow(name) if name in ("view", "find_unused") else name for name in DDP],
)
def test_coming_and_going(pair: harness.Workers, options: str) -> None:
    program: life.Program = [("train", 2, False, (), True)]
    for kind in ("ddp", "overlap", "late", "shared"):
        for half in range(life.HALVES):
            program.append(("new", half, kind, half == 1))
            program.append(("train", 3, half == 0, (), half == 1))
        for half in range(life.HALVES):
            program.append(("park", half, half == 0))
            program.append(("train", 2, half == 1, (), True))
        for half in range(life.HALVES):
            program.append(("back", half))
            program.append(("train", 2, False, (), False))
    found = pair.run(life.lives, program, DDP[options])
    assert not any(found), found


@st.composite
def programs(draw: st.DrawFn) -> tuple[life.Program, str]:
    options = draw(st.sampled_from(sorted(DDP)))
    half = st.integers(0, life.HALVES - 1)
    kind = st.sampled_from(["ddp", "overlap", "late", "torch", "shared"])
    change = st.one_of(
        st.tuples(st.just("new"), half, kind, st.booleans()),
        st.tuples(st.just("park"), half, st.booleans()),
        st.tuples(st.just("back"), half),
    )
    program: life.Program = []
    for _ in range(draw(st.integers(1, 6))):
        program += draw(st.lists(change, min_size=1, max_size=2))
        skip = draw(st.lists(st.integers(0, 5), max_size=2, unique=True))
        skip = skip if "find_unused" in options else []
        accumulate = draw(st.booleans()) and "static" not in options
        steps = draw(st.integers(1, 3))
        program.append(("train", steps, accumulate, tuple(skip), draw(st.booleans())))
    return program, options


@pytest.mark.long
@hypothesis.settings(max_examples=12)
@hypothesis.given(programs(), st.integers(1, 3))
def test_drawn_lives(drawn: tuple[life.Program, str], size: int) -> None:
    program, options = drawn
    found = harness.pool(size).run(life.lives, program, DDP[options])
    assert not any(found), found
