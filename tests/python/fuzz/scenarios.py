"""Scenarios of chaos in which ranks do more than run traffic until it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fuzz import ranks
from fuzz.core import Wrong
from fuzz.ranks import REFUSED, Outcome, join, limit, say, until_failure
from fuzz.rounds import Round
from fuzz.traffic import Traffic
from harness import Context

Play = Callable[[Context, Round, Outcome], None]
PLAYS: dict[str, Play] = {}
TURNS = 5


def play(name: str) -> Callable[[Play], Play]:
    """Registers what ranks do in a scenario."""

    def register(function: Play) -> Play:
        PLAYS[name] = function
        return function

    return register


def calm(one: Round, group: Any = None) -> None:
    """Some turns that must all be right."""
    traffic = Traffic(one.traffic, one.numel, one.arena, group)
    for turn in range(TURNS):
        traffic.turn(turn)


@play("exit")
def exit_without_destroy(context: Context, one: Round, outcome: Outcome) -> None:
    if context.rank != one.victim:
        until_failure(context, one, outcome)
        return
    join(context, one, one.members)
    traffic = Traffic(one.traffic, one.numel, one.arena)
    for turn in range(3):
        traffic.turn(turn)
    ranks.leave_process(one.variant)


def _starved(context: Context, one: Round, which: int, value: Callable[[], int]) -> None:
    """The victim lacks something while the group is made: all raise, or have a smaller arena."""
    start = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            if context.rank == one.victim:
                stack.enter_context(limit(which, value()))
            join(context, one, one.members)
    except REFUSED as error:
        took = time.monotonic() - start
        if took > one.timeout + 4:
            raise Wrong(f"creation failed after {took:.1f} s: {error}") from error
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    else:
        # There was just enough of it; or the victim failed when this rank had all it needs, which
        # then hears why in its first operation.
        try:
            try:
                calm(one)
            except torch.OutOfMemoryError:  # all have as much of an arena as fits on the victim
                calm(dataclasses.replace(one, arena=False))
        except dist.DistBackendError as error:
            if context.rank == one.victim or "reported: fused:" not in str(error):
                raise
            if time.monotonic() - start > one.timeout + 4:
                raise Wrong(f"this came late: {error}") from error
        finally:
            dist.destroy_process_group()


@play("descriptors")
def descriptors(context: Context, one: Round, outcome: Outcome) -> None:
    """EMFILE in the middle of the bootstrap."""

    def value() -> int:
        most = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        return most + 1 + one.variant % 8

    _starved(context, one, resource.RLIMIT_NOFILE, value)


@play("address space")
def address_space(context: Context, one: Round, outcome: Outcome) -> None:
    """No room for the arenas."""

    def value() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * resource.getpagesize() + (one.variant % 5) * (20 << 20)

    _starved(context, one, resource.RLIMIT_AS, value)


@play("small arena")
def small_arena(context: Context, one: Round, outcome: Outcome) -> None:
    """A full arena refuses tensors, and nothing else."""
    import fusedpg

    join(context, one, one.members, arena_bytes=(4 + one.variant % 8) << 20)
    held = []
    try:
        while True:
            held.append(fusedpg.empty(200_000))
            if len(held) > 100:
                raise Wrong("a small arena holds 80 MB")
    except torch.OutOfMemoryError:
        pass
    for turn in range(TURNS):
        tensor = held[turn % len(held)].fill_(1)
        dist.all_reduce(tensor)
        if not bool((tensor == len(one.members)).all()):
            raise Wrong("a sum in a full arena is wrong")
    calmer = Traffic(one.traffic, one.numel, False)
    for turn in range(TURNS):
        calmer.turn(turn)
    dist.destroy_process_group()


@play("resize")
def resize(context: Context, one: Round, outcome: Outcome) -> None:
    """Three ranks, two of them, three again, under one store."""
    for members in (one.members, one.survivors, one.members):
        if context.rank in members:
            join(context, one, members)
            calm(one)
            dist.destroy_process_group()
        # The next group may begin while others still leave this one.
        if one.variant % 2:
            time.sleep(0.02)


@play("fork")
def fork(context: Context, one: Round, outcome: Outcome) -> None:
    """A forked child may do anything but harm its parent's group."""
    join(context, one, one.members)
    traffic = Traffic(one.traffic, one.numel, one.arena)
    for turn in range(TURNS):
        child = os.fork() if context.rank == one.victim and turn == 1 else -1
        if child == 0:
            code = 3
            try:
                dist.all_reduce(torch.ones(3))
            except dist.DistBackendError:
                code = 7
            finally:
                os._exit(code)
        traffic.turn(turn)
        if child > 0:
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) != 7:
                raise Wrong(f"a forked child ended with {os.waitstatus_to_exitcode(status)}")
    dist.destroy_process_group()


@play("writers")
def writers(context: Context, one: Round, outcome: Outcome) -> None:
    """Threads and a healthy group write into the arena of a group that fails: no write is lost."""
    import fusedpg

    join(context, one, one.members)
    healthy = None
    if one.victim in one.members:
        places = [one.members.index(rank) for rank in one.survivors]
        healthy = dist.new_group(places)
    size = (1 + one.variant % 8) << 18  # up to 16 MB
    count = 3
    shared = fusedpg.empty(size, dtype=torch.int64).fill_(0)
    array = shared.numpy()
    stop = threading.Event()
    written: dict[int, int] = {}

    def write(place: int) -> None:
        turns = 0
        stride = max(size // 17, 1)
        while not stop.is_set():
            for at in range(place, size // 2, stride):
                array[at] += 1
            turns += 1
        written[place] = turns

    threads = [threading.Thread(target=write, args=(place,)) for place in range(count)]
    mine = context.rank != one.victim
    if mine:
        for thread in threads:
            thread.start()

    def healthy_work() -> None:
        """The second half is the healthy group's."""
        half = shared[size // 2 :]
        turn = 0
        while True:
            turn += 1
            half.fill_(turn)
            dist.all_reduce(half, group=healthy)
            if not bool((half == 2 * turn).all()):
                ranks._life.trouble.append("a healthy group's sum is wrong beside a failing one")
                return
            flag = torch.tensor([1 if stop.is_set() else 0])
            dist.all_reduce(flag, group=healthy)
            if int(flag) == len(one.survivors):
                return

    worker = threading.Thread(target=healthy_work)
    if mine:
        worker.start()
    try:
        ranks.run(context, one, Traffic("sums", 1000, True), outcome)
    finally:
        time.sleep(0.02)
        stop.set()
        if mine:
            for thread in threads:
                thread.join()
            worker.join(10)
            if worker.is_alive():
                outcome.wrong.append("a healthy group hangs beside a failing one")
    stride = max(size // 17, 1)
    lost = {
        place: (turns, [int(v) for v in array[place : size // 2 : stride] if v != turns][:4])
        for place, turns in written.items()
        if any(array[place : size // 2 : stride] != turns)
    }
    if lost:
        outcome.wrong.append(f"writes were lost (place: written, found): {lost}")
    outcome.wrong += ranks._life.trouble
    ranks._life.trouble = []
    if healthy is not None and mine:
        dist.destroy_process_group(healthy)


@play("shared parameters")
def shared_parameters(context: Context, one: Round, outcome: Outcome) -> None:
    """Rank 0, whose memory the parameters are in, fails between two steps."""
    import fusedpg

    join(context, one, one.members)
    torch.manual_seed(one.number)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (7, 5000, 300_000)]
    optimizer = fusedpg.optim.AdamW(params, lr=0.01, share_parameters=True)
    for turn in range(2):
        for param in params:
            param.grad = torch.full_like(param, 1.0 + turn)
        optimizer.step()
    before = [param.detach().clone() for param in params]
    dist.barrier()
    if context.rank == one.victim and one.variant % 2:
        dist.distributed_c10d._abort_process_group()
        say(context, one, "running")
        outcome.error, outcome.when = "aborted itself", time.monotonic()
        return
    say(context, one, "running")
    try:
        while True:
            dist.barrier()
    except dist.DistBackendError as error:
        outcome.error, outcome.when = str(error), time.monotonic()
    for param, old in zip(params, before):
        if not torch.equal(param.detach(), old):
            zeros = int((param.detach() == 0).sum())
            raise Wrong(f"shared parameters changed when rank 0 failed ({zeros} zeros)")


@play("kill in creation")
def kill_in_creation(context: Context, one: Round, outcome: Outcome) -> None:
    say(context, one, "running")
    start = time.monotonic()
    try:
        join(context, one, one.members)
        until = Traffic(one.traffic, one.numel, one.arena)
        ranks._life.traffic = until
        ranks.run(context, one, until, outcome)
    finally:
        took = time.monotonic() - start
        if took > one.timeout + 4:
            outcome.wrong.append(f"a rank killed in creation was missed after {took:.1f} s")


@play("kill behind messages")
def kill_behind_messages(context: Context, one: Round, outcome: Outcome) -> None:
    """Messages between survivors go on while one of them waits for the dead."""
    join(context, one, one.members)
    ranks._life.traffic = Traffic("sums", 10, False)
    if context.rank == one.victim:
        say(context, one, "running")
        time.sleep(LONG)
        return
    first, second = one.survivors
    other = one.members.index(second if context.rank == first else first)
    victim = one.members.index(one.victim)
    late: list[Any] = []
    if context.rank == first:
        late.append(dist.irecv(torch.empty(10), victim))
    say(context, one, "running")
    start = time.monotonic()
    tensor, came = torch.ones(100), torch.empty(100)
    try:
        while time.monotonic() - start < LONG:
            work = dist.isend(tensor, other, tag=5)
            dist.recv(came, other, tag=5)
            work.wait()
            if late and late[0].is_completed():
                late[0].wait()
    except dist.DistBackendError as error:
        outcome.error, outcome.when = str(error), time.monotonic()
        return
    outcome.wrong.append(f"messages between survivors hid a dead peer for {LONG} s")


LONG = 6.0


@play("self-test: wrong")
def flipped(context: Context, one: Round, outcome: Outcome) -> None:
    """One element of one result is one too many."""
    join(context, one, one.members)
    traffic = Traffic("sums", 1000, True)
    expect = traffic._expect

    def flip(tensor: torch.Tensor, value: float, what: str) -> None:
        if context.rank == one.victim:
            tensor[-1] += 1
        expect(tensor, value, what)

    try:
        traffic._expect = flip  # type: ignore[method-assign]
        traffic.turn(0)
    finally:
        dist.destroy_process_group()


@play("self-test: leaked")
def leaked(context: Context, one: Round, outcome: Outcome) -> None:
    """A descriptor stays open."""
    os.dup(1)


@play("self-test: silent")
def silent(context: Context, one: Round, outcome: Outcome) -> None:
    """Nobody hears of the victim's end."""
    if context.rank == one.victim:
        os._exit(0)
    outcome.wrong.append("nothing was raised")
