"""What ranks of several hosts do that die, leave or wait before they have met in an operation."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checks import faults
from harness import Context


def _operation(what: str, group: Any, peer: int) -> None:
    x = torch.ones(4)
    if what == "send":
        dist.send(x, peer, group=group)
    elif what == "recv from any":
        dist.recv(x, group=group)
    elif what.startswith("recv"):
        dist.recv(x, peer, group=group)
    else:
        dist.all_reduce(x, group=group)


def victim(context: Context, how: str, what: str, name: str, first: bool) -> tuple[str, float]:
    """Rank 1 goes before the group's first operation, as rank 0 waits for it or just before that.

    What rank 0 is told, and how long that took.
    """
    seconds = timedelta(seconds=20)
    faults.rejoin(context, name, [0, 1], seconds.seconds)
    world = dist.group.WORLD
    assert world is not None
    group = world
    if "after" in what:
        dist.all_reduce(torch.ones(4))
        dist.barrier()
    if "new group" in what:
        group = dist.new_group(timeout=seconds)
    store = dist.PrefixStore(name, context.store)
    if context.rank == 0:
        if first:
            store.wait(["goes"])
            time.sleep(0.3)
        else:
            store.set("waits", "")
        begin = time.monotonic()
        try:
            _operation(what, group, 1)
        except dist.DistBackendError as error:
            took = time.monotonic() - begin
            dist.destroy_process_group()
            return str(error), took
        raise AssertionError("rank 1 was not there")
    if not first:
        store.wait(["waits"])
        time.sleep(0.3)
    store.set("goes", "")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "leave":
        dist.destroy_process_group(group)
    elif how == "abort":
        group._get_backend(torch.device("cpu")).abort()
    elif how == "fail":
        # For a reason of its own; the process lives on.
        group.set_timeout(timedelta(seconds=0.3))
        with contextlib.suppress(dist.DistBackendError):
            dist.recv(torch.ones(4), 0, group=group, tag=99)
    else:
        from fusedpg import _registration

        sys.last_value = RuntimeError("out of memory while loading the model")
        _registration._end_at_exit()
        os._exit(0)
    time.sleep(2.5)
    if dist.is_initialized():
        dist.destroy_process_group()
    return "", 0.0


def chain(context: Context, name: str) -> str:
    """Rank 1 waits in vain for rank 2, and rank 0 for rank 1."""
    faults.rejoin(context, name, [0, 1, 2], 1.5)
    dist.barrier()
    text = ""
    try:
        if context.rank == 0:
            time.sleep(0.7)
            dist.recv(torch.ones(4), 1)
        elif context.rank == 1:
            dist.recv(torch.ones(4), 2)
    except dist.DistBackendError as error:
        text = str(error)
    time.sleep(3.5 if context.rank == 2 else 1)
    dist.destroy_process_group()
    return text


def out_of_reach(context: Context, name: str, timeout: float) -> tuple[str, float]:
    """The hosts have met; the parent cuts the link; the first operation."""
    faults.rejoin(context, name, [0, 1], timeout)
    faults.mark(context, name)
    while not os.path.exists(f"{context.scratch}/{name}go"):
        time.sleep(0.01)
    begin = time.monotonic()
    try:
        _operation(name, dist.group.WORLD, 1 - context.rank)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("there is no link")
