"""Ranks of several hosts that go, wait or are out of reach before they have met in an operation."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

import harness
import hosts
from checks import first_contact
from harness import Died, RemoteError

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
    two.start(first_contact.victim, how, what, next(_names), first)
    answer, gone = two.collect(30)
    if how in ("kill", "raise"):
        assert isinstance(gone, Died), gone
        two.respawn([1])
    assert isinstance(answer, tuple) and not isinstance(answer, RemoteError), answer
    text, took = answer
    assert took < 2.3, (took, text)  # 0.3 of which it is there
    for words in [*TOLD[how], *(["recv("] if what.startswith("recv") else [])]:
        assert words in text, text


def test_a_consequence_names_its_cause() -> None:
    """Who waits for a rank that waits for another one is told so, and not that it has ended."""
    env = [{"FUSEDPG_HOST_ID": f"chain{rank}"} for rank in range(3)]
    with harness.Workers(3, env=env, init=False, oracle=False, one_host=False) as workers:
        text, first, _ = workers.run(first_contact.chain, "chain")
    assert "recv(16 bytes, tag 0, from rank 2), failed on rank 1: timeout after 1500 ms" in first
    assert "rank 1 has ended" not in text, text
    assert "the first to fail was rank 1: " in text, text
    assert "recv(16 bytes, tag 0, from rank 2), failed on rank 1: timeout after 1500 ms" in text
    assert "nothing was heard since from rank 2" in text, text


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
            workers.start(first_contact.out_of_reach, what, timeout)
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
