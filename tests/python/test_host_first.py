"""Ranks of several hosts that go, wait or are out of reach before they have met in an operation."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harness
import hosts
from checks import faults
from harness import Context, Died, RemoteError


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


pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

NO_LINKS = pytest.mark.skipif(hosts.why_not() is not None, reason=f"no links: {hosts.why_not()}")
_names = (f"first{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def two() -> Iterator[harness.Workers]:
    """In no group."""
    env = [{"FUSEDPG_HOST_ID": f"first{rank}"} for rank in range(2)]
    with harness.Workers(2, env=env, init=False, oracle=False, one_host=False) as workers:
        yield workers


# What a survivor is told: of how the other side went, and of why.
TOLD = {
    "kill": ["nothing was heard since from rank 1"],
    "leave": ["nothing was heard since from rank 1"],
    "abort": ["the first cause is rank 1", "was aborted on rank 1"],
    "fail": ["the first to fail was rank 1", "recv(16 bytes, tag 99, from rank 0)"],
    "raise": [
        "the first cause is rank 1",
        "exited without destroy_process_group, after RuntimeError: out of memory while loading",
    ],
}
OPERATIONS = ["recv", "send", "recv from any", "all_reduce", "all_reduce in a new group"]
OPERATIONS += ["recv after collectives", "recv in a new group after collectives"]
QUICK = {
    ("kill", "recv"),
    ("raise", "all_reduce"),
    ("abort", "all_reduce"),
    ("abort", "recv in a new group after collectives"),
}


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


@pytest.mark.parametrize(
    ("how", "what", "first"),
    [
        (how, what, first) if (how, what) in QUICK else harness.slow(how, what, first)
        for how in TOLD
        for what in OPERATIONS
        for first in (True, False)
    ],
)
def test_goes_before_the_first_operation(
    two: harness.Workers, how: str, what: str, first: bool
) -> None:
    """Noticed within two seconds, though it has never sent anything, with the reason it gave."""
    two.start(victim, how, what, next(_names), first)
    answer, gone = two.collect(30)
    if how in ("kill", "raise"):
        assert isinstance(gone, Died), gone
        two.respawn([1])
    assert isinstance(answer, tuple) and not isinstance(answer, RemoteError), answer
    text, took = answer
    assert took < 2.3, (took, text)  # 0.3 of which it is there
    for words in [*TOLD[how], *(["recv("] if what.startswith("recv") else [])]:
        assert words in text, text


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


def test_a_consequence_names_its_cause() -> None:
    """Who waits for a rank that waits for another one is told so, and not that it has ended."""
    env = [{"FUSEDPG_HOST_ID": f"chain{rank}"} for rank in range(3)]
    with harness.Workers(3, env=env, init=False, oracle=False, one_host=False) as workers:
        text, first, _ = workers.run(chain, "chain")
    assert "recv(16 bytes, tag 0, from rank 2), failed on rank 1: timeout after 1500 ms" in first
    assert "rank 1 has ended" not in text, text
    assert "the first to fail was rank 1: " in text, text
    assert "recv(16 bytes, tag 0, from rank 2), failed on rank 1: timeout after 1500 ms" in text
    assert "nothing was heard since from rank 2" in text, text


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


@NO_LINKS
@pytest.mark.parametrize("what", ["all_reduce", harness.slow("recv"), harness.slow("send")])
def test_out_of_reach(what: str) -> None:
    """A firewall drops what comes: the error has the address, the port and what to look at."""
    timeout = 2.0
    with hosts.Hosts(2) as links:
        env = [links.environment(0), links.environment(1)]
        ports = {"FUSEDPG_PORT_RANGE": "40000-40001"}
        with harness.Workers(
            2, env=[e | ports for e in env], init=False, oracle=False, one_host=False,
            hosts=links, on=[0, 1],
        ) as workers:  # fmt: skip
            workers.start(out_of_reach, what, timeout)
            while not all((workers.scratch / f"{what}{rank}").exists() for rank in (0, 1)):
                time.sleep(0.01)
            links.cut(1)
            (workers.scratch / f"{what}go").touch()
            answers: list[Any] = workers.collect(30)
            links.mend(1)
    for rank, (text, took) in enumerate(answers):
        there = re.escape(hosts.Hosts.address(1 - rank))
        assert re.search(
            rf"rank {1 - rank} at {there} port 40000 has not answered .* \d+ ms: .*firewall.*"
            r"FUSEDPG_PORT_RANGE.*FUSEDPG_SOCKET_IFNAME",
            text,
        ), text
        assert took < timeout + 2, (took, text)
