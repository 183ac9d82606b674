"""Training arms with glibc's malloc as it is, each arm in processes of its own.

What malloc gives back to the system depends on what else lies on the heap, so arms that share
processes measure each other. Here every arm has its own ranks, which wait while others run: a turn
goes round, and an arm makes a few steps in each of its turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import _harness as harness
import _training as arms
from _harness import Bar, Context, Row
from _training import ARMS, NO_SYNC
from _words import BEST, KEPT

STEPS = 3  # in one turn, after one that brings caches back


def bars() -> list[Bar]:
    size = arms.parameter_bytes("mlp")
    return [Bar(2, "mlp", BEST + kept, size, "a" + kept, at_least=2.2) for kept in ("", KEPT)]


def names(chosen: list[str]) -> list[str]:
    return chosen + [name + KEPT for name in chosen if name in ("a", "f", "g")]


def run(
    args: argparse.Namespace,
    reference: Callable[[str, int], torch.Tensor],
    check: Callable[[str, str, arms.Arm, torch.Tensor], None],
) -> list[Row]:
    """Rows of all arms of args.model."""
    everyone = names(args.arms)
    mp = multiprocessing.get_context("spawn")
    # One for each arm and rank.
    turns = [[mp.Semaphore(0) for _ in range(args.world_size)] for _ in everyone]
    failed = mp.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(everyone)) as pool:
        path = Path(folder) / "reference.pt"
        torch.save(reference(args.model, args.world_size), path)
        for first in turns[0]:
            first.release()
        waiting = []
        for i, name in enumerate(everyone):
            mine = argparse.Namespace(**vars(args))
            mine.arm, mine.reference, mine.check, mine.failed = name, path, check, failed
            mine.turn, mine.next = turns[i], turns[(i + 1) % len(turns)]
            mine.backends = [ARMS[name.removesuffix(KEPT)].backend]
            waiting.append(pool.submit(_one_arm, mine))
        rows = [row for arm in waiting for row in arm.result()]
    for kept in (False, True):
        rows += arms.best([row for row in rows if row.arm.endswith(KEPT) == kept])
    for row in rows:
        faults, cpu = row.more["faults"], row.more["cpu"]
        print(f"{row.arm}: {faults:.0f} faults and {1e3 * cpu:.0f} ms of CPU a step")
    return rows


def _one_arm(args: argparse.Namespace) -> list[Any]:
    try:
        return harness.run(_measure, args, [args.arm])
    except BaseException:
        args.failed.set()
        raise


def _measure(context: Context, args: argparse.Namespace, name: str) -> list[Row]:
    arm = name.removesuffix(KEPT)
    if arm != name:
        import fusedpg

        harness.require(fusedpg.keep_freed_memory(), "this malloc is not glibc's")

    def wait() -> None:
        while not args.turn[context.rank].acquire(timeout=1):
            harness.require(not args.failed.is_set(), "another arm has failed")

    def pass_on() -> None:
        args.next[context.rank].release()

    wait()
    made = ARMS[arm].make(args.model, context.groups[ARMS[arm].backend])
    if arm != NO_SYNC:  # its replicas go their own ways
        args.check(arm, args.model, made, torch.load(args.reference))
    pass_on()
    samples = []
    cost = torch.zeros(2, dtype=torch.float64)

    def step() -> None:
        before = _cost()
        made.step()
        cost.add_(_cost() - before)

    for _ in range(args.rounds):
        wait()
        context.clock.sample(made.step)
        samples += [context.clock.sample(step) for _ in range(STEPS)]
        pass_on()
    wait()
    pass_on()  # before what follows, which needs no turn
    dist.all_reduce(cost)
    faults, cpu = (cost / (context.world_size * len(samples))).tolist()
    size = arms.parameter_bytes(args.model)
    # What a step costs one rank, on average: minor page faults and seconds of CPU time.
    return [Row.of(args.model, size, name, samples, more={"faults": faults, "cpu": cpu})]


def _cost() -> torch.Tensor:
    """This process' page faults and CPU time so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return torch.tensor([used.ru_minflt, used.ru_utime + used.ru_stime], dtype=torch.float64)
