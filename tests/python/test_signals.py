"""Ctrl-C and other signals that have handlers in Python, while a rank waits for others."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks.faults import rejoin
from harness import Context

LATE = 0.5  # seconds that a handler may wait; it is looked for every 0.1 s
TIMEOUT = datetime.timedelta(seconds=20)


def _step() -> None:
    part = fusedpg.shard_range(100, dist.get_world_size(), dist.get_rank())[1]
    state = [torch.zeros(part), torch.zeros(part)]
    params, grads, steps = [torch.ones(100)], [torch.ones(100)], [torch.zeros(())]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    fusedpg.fused_adamw_(params, grads, state[:1], state[1:], [], steps, **hyper)


def _behind_the_progress_thread() -> None:
    """Another thread executes an operation, which waits; this one queues behind it."""
    dist.all_reduce(torch.ones(3), async_op=True).get_future()
    time.sleep(0.05)
    dist.all_reduce(torch.ones(3))


def _peer() -> int:
    return 1 - dist.get_rank()


def _message() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(3), src=1)
    else:
        dist.send(torch.ones(3), dst=0)


OPERATIONS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "wait": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "wait with a timeout": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(TIMEOUT),
    "barrier": dist.barrier,
    "message": _message,
    "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(timeout=TIMEOUT),
    "fused_adamw_": _step,
    "behind": _behind_the_progress_thread,
    "new_group": lambda: dist.new_group([0, 1]),
    "destroy": lambda: (
        dist.all_reduce(torch.ones(3), async_op=True),
        dist.destroy_process_group(),
    ),
    "init": lambda: None,  # the group itself; see blocked()
}


def _error(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _interrupted(operation: Callable[[], Any], raises: bool, done: Path) -> Any:
    sent: list[float] = []
    ran: list[float] = []

    def handler(*_: Any) -> None:
        ran.append(time.monotonic())
        if raises:
            raise KeyboardInterrupt
        done.touch()

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    timer = threading.Timer(0.4, send)
    timer.start()
    try:
        error = _error(operation)
        ended = time.monotonic()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    done.touch()
    return ran[0] - sent[0], ran[0] < ended, error


pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

HOSTS = {"one host": None, "two hosts": [{"FUSEDPG_HOST_ID": "a"}, {"FUSEDPG_HOST_ID": "b"}]}
numbers = itertools.count()


def pool(layout: str) -> harness.Workers:
    return harness.pool(2, init=False, oracle=False, env=HOSTS[layout])


def blocked(context: Context, what: str, raises: bool, name: str) -> Any:
    """Rank 0 is blocked in an operation when a signal comes; the other comes after that.

    Returns, on rank 0, how late the handler ran, whether it ran within the operation, and the
    errors of this operation and of a next one; on rank 1 the error of its operation.
    """
    done = Path(context.scratch) / f"signalled-{name}"
    begins = what == "init"
    if not begins:
        rejoin(context, name)
        dist.barrier()
    operation = (lambda: rejoin(context, name)) if begins else OPERATIONS[what]
    # One that makes or ends groups leaves none that is interrupted.
    fails = raises and what not in ("init", "new_group", "destroy")
    try:
        if context.rank == 0:
            found = _interrupted(operation, raises, done)
            return *found, _error(dist.barrier) if fails else None
        while not done.exists():
            time.sleep(0.01)
        error = _error(operation)
        # Between hosts rank 0 may have sent all that this rank needs of it before.
        return error or (_error(lambda: dist.all_reduce(torch.ones(3))) if fails else "")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("layout", HOSTS)
@pytest.mark.parametrize("what", OPERATIONS)
@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_handler_runs_in_a_wait(what: str, layout: str, raises: bool) -> None:
    name = f"signal{next(numbers)}"
    (late, within, error, after), other = pool(layout).run(blocked, what, raises, name)
    assert late < LATE
    if raises:
        assert error.startswith("KeyboardInterrupt"), error
        if after is not None:
            assert "interrupted by KeyboardInterrupt" in after, after
        if what not in ("destroy", "monitored_barrier"):
            assert "interrupted by KeyboardInterrupt" in other, other
        assert other or what == "destroy", "the other rank must not go on alone"
    else:
        assert within, "it ran after the operation only"
        assert not error, error
        assert not other, other


def within(context: Context, how: str, name: str) -> list[str]:
    """A handler that uses the group whose operation it interrupts."""
    rejoin(context, name)
    dist.barrier()
    done = Path(context.scratch) / f"signalled-{name}"
    errors: list[str] = []

    def handler(*_: Any) -> None:
        action = {
            "collective": lambda: dist.all_reduce(torch.ones(1)),
            "destroy": dist.destroy_process_group,
            "abort": lambda: dist.group.WORLD.abort(),
        }[how]
        errors.append(_error(action))

    if context.rank == 0:
        before = signal.signal(signal.SIGINT, handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            errors.append(_error(lambda: dist.all_reduce(torch.ones(3))))
        finally:
            signal.signal(signal.SIGINT, before)
        done.touch()
    else:
        deadline = time.monotonic() + 1.5  # as long as nothing tells rank 0
        while time.monotonic() < deadline and not done.exists():
            time.sleep(0.01)
        errors.append(_error(lambda: dist.all_reduce(torch.ones(3))))
    if dist.is_initialized():
        dist.destroy_process_group()
    return errors


@pytest.mark.parametrize("how", ["collective", "destroy", "abort"])
def test_handler_uses_the_group(how: str) -> None:
    here, other = pool("one host").run(within, how, f"signal{next(numbers)}")
    in_handler, operation = here
    if how == "collective":
        assert "a signal handler waits for a group" in in_handler
        assert not operation
        assert other == [""]
    else:
        assert not in_handler
        assert "on rank 0" in operation
        assert "on rank 0" in other[0]
