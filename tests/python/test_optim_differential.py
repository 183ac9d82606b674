"""Fused optimizers against torch.optim on plain DDP, pattern by pattern and at random."""

from __future__ import annotations

import dataclasses
import inspect
import random

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import harness
from checks import optim_differential as differential
from checks.optim_patterns import NAMES
from checks.optim_script import Setup
from fuzz import core, trips
from fuzz.scripts import SETUPS

pytestmark = pytest.mark.fused_only


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 11))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, "13")])
def test_drawn_scripts(where: str, seed: int) -> None:
    core.search("scripts", where, core.seed(seed))


def test_drawn_trips() -> None:
    """Checkpoints from three ranks to two and back."""
    core.search("trips", *trips.WHERE, core.seed(0))
