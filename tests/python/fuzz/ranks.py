"""What a rank does in a round of chaos, in three phases that the parent starts."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import os
import resource
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fuzz import resources
from fuzz.core import Wrong
from fuzz.rounds import LEFT_OUT, Round
from fuzz.traffic import Traffic
from harness import Context

PATTERN = 4711.0
SELF_TESTS = {"wrong": "1 of 1000 elements are wrong", "leaked": "leaked", "silent": "nothing was"}
LONGEST = 15.0  # seconds of traffic without the fault that should have ended it
REFUSED = (dist.DistBackendError, torch.OutOfMemoryError, RuntimeError, OSError)


@dataclasses.dataclass
class Outcome:
    """How one phase ended on one rank."""

    error: str = ""  # of the group
    when: float = 0.0  # CLOCK_MONOTONIC, which ranks share
    turns: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


class Life:
    """What a rank keeps between the phases of a round."""

    def __init__(self) -> None:
        self.rounds = 0
        self.before: resources.Held = {}
        self.traffic: Traffic | None = None
        self.kept: list[torch.Tensor] = []
        self.threads: list[threading.Thread] = []
        self.trouble: list[str] = []


_life = Life()


def say(context: Context, one: Round, what: str) -> None:
    context.store.set(f"{one.number}/{what}/{context.rank}", "1")


MEETING = timedelta(seconds=20)


def join(context: Context, one: Round, members: tuple[int, ...], **options: Any) -> None:
    """The default group of some ranks, always under one and the same store."""
    import fusedpg

    # torch counts an attempt that failed, on this rank alone, in the name of the next group.
    dist.distributed_c10d._world.group_count = 0
    timeout = timedelta(seconds=one.timeout)
    # Ranks of a busy machine may need longer to meet than they have for an operation.
    patience = timeout if one.scenario == "kill in creation" else max(timeout, MEETING)
    dist.init_process_group(
        "fused",
        store=dist.PrefixStore(store_name(one, members), context.store),
        rank=members.index(context.rank),
        world_size=len(members),
        timeout=patience,
        pg_options=fusedpg.Options(**{"threads": 1, **options}),
    )
    assert dist.group.WORLD is not None
    # torch's own function for it knows the backends of NCCL and Gloo alone.
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def store_name(one: Round, members: tuple[int, ...]) -> str:
    """One store for all rounds in which the same ranks take part; resizing has one for all."""
    if one.scenario == "resize":
        return f"resize{one.number}"
    return f"of {members}{one.number if 'one store' in LEFT_OUT else ''}"


def begin(context: Context, one: Round) -> Outcome:
    """The group's life until something goes wrong."""
    from fuzz import scenarios

    global _life
    kept = _life
    _life = Life()
    _life.rounds = kept.rounds + 1
    del kept
    if one.scenario == "shared parameters":
        # The first optimizer imports this, and the import keeps the default group of that moment
        # for good.
        importlib.import_module("torch._dynamo")
    _life.before = resources.held()
    outcome = Outcome()
    play = scenarios.PLAYS.get(one.scenario, until_failure)
    try:
        play(context, one, outcome)
    except Wrong as error:
        outcome.wrong.append(str(error))
    except REFUSED as error:
        outcome.error = f"{type(error).__name__}: {error}"
        if one.scenario != "kill in creation":
            outcome.wrong.append(f"the round could not begin: {outcome.error}")
    outcome.when = outcome.when or time.monotonic()
    return outcome


def until_failure(context: Context, one: Round, outcome: Outcome) -> None:
    """Traffic until the group fails."""
    join(context, one, one.members)
    _life.traffic = traffic = Traffic(one.traffic, one.numel, one.arena)
    prepare(context, one)
    run(context, one, traffic, outcome)


def prepare(context: Context, one: Round) -> None:
    """What the victim does to itself, from another thread."""
    if context.rank != one.victim or one.scenario not in ("abort", "leave", "abort and leave"):
        return

    def later(action: Any, seconds: float) -> None:
        time.sleep(seconds)
        try:
            action()
        except Exception as error:
            _life.trouble.append(f"{action} raised {type(error).__name__}: {error}")

    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    actions = {
        "abort": [backend.abort],
        "leave": [backend.shutdown],
        "abort and leave": [backend.abort, backend.shutdown],
    }[one.scenario]
    wait = 0.01 + one.delay
    _life.threads = [threading.Thread(target=later, args=(one_, wait)) for one_ in actions]
    for thread in _life.threads:
        thread.start()


def run(context: Context, one: Round, traffic: Traffic, outcome: Outcome) -> None:
    begin_at = time.monotonic()
    try:
        while time.monotonic() - begin_at < LONGEST:
            traffic.turn(outcome.turns)
            outcome.turns += 1
            if outcome.turns == 2:
                say(context, one, "running")
    except dist.DistBackendError as error:
        outcome.error, outcome.when = str(error), time.monotonic()
        if not outcome.error.startswith("fused:"):
            outcome.wrong.append(f"the error is {outcome.error!r}")
        return
    outcome.wrong.append(f"nothing was raised within {LONGEST} s")


def aftermath(context: Context, one: Round) -> Outcome:
    """The old group says no at once; what it held is ours alone from now on."""
    outcome = Outcome()
    start = time.monotonic()
    if dist.is_initialized() and _life.traffic is not None:
        try:
            dist.all_reduce(torch.ones(3))
        except dist.DistBackendError:
            pass
        else:
            outcome.wrong.append("a failed group added up")
        if time.monotonic() - start > 2:
            outcome.wrong.append(f"a failed group took {time.monotonic() - start} s to say so")
        _life.kept = _life.traffic.memory()
        for tensor in _life.kept:
            tensor.fill_(PATTERN)
    for thread in _life.threads:
        thread.join(10)
        if thread.is_alive():
            outcome.wrong.append("a thread that ends the group hangs")
    outcome.wrong += _life.trouble
    if dist.is_initialized():
        start = time.monotonic()
        if one.ending == "abort":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        if time.monotonic() - start > 5:
            outcome.wrong.append(f"{one.ending} took {time.monotonic() - start} s")
    return outcome


def settle(context: Context, one: Round) -> Outcome:
    """Nothing has changed since, and nothing is left behind."""
    outcome = Outcome()
    if not all(bool((tensor == PATTERN).all()) for tensor in _life.kept):
        outcome.wrong.append("memory of a failed group was written afterwards")
    first = _life.rounds == 1  # torch makes threads of its own, once
    before = _life.before
    _life.traffic, _life.kept, _life.threads = None, [], []
    gc.collect()
    if not first:
        outcome.wrong += resources.leaks(before)
    else:
        gc.freeze()  # what torch has imported need not be looked at again
    return outcome


def leave_process(variant: int) -> None:
    """The end of a process that tells nobody."""
    sys.stdout.flush()
    if variant % 2:
        atexit._run_exitfuncs()
    os._exit(0)


@contextlib.contextmanager
def limit(which: int, value: int) -> Any:
    """A lower limit of this process."""
    old = resource.getrlimit(which)
    resource.setrlimit(which, (value, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, old)
