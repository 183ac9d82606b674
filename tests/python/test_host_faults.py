"""Ranks of several hosts that die, stop, cannot be reached, abort or disagree."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harness
import hosts
from checks import faults
from fuzz import resources
from harness import Context, Died, RemoteError

# Of this process, before it was in any group but the first.
_held: resources.Held = {}


def _operation(context: Context, what: str, numel: int) -> Callable[[], None]:
    """One that checks its own result."""
    tensor = torch.empty(numel)
    size, rank = dist.get_world_size(), dist.get_rank()

    def all_reduce() -> None:
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert bool((tensor == size * (size + 1) / 2).all())

    def fused_adamw() -> None:
        import fusedpg

        length = fusedpg.shard_range(numel, size, rank)[1]
        tensor.fill_(1)
        moments = torch.zeros(length), torch.zeros(length)
        fusedpg.fused_adamw_(
            [tensor],
            [torch.full((numel,), float(rank + 1))],
            [moments[0]],
            [moments[1]],
            [],
            [torch.tensor(0.0)],
            lr=0.5,
            beta1=0.5,
            beta2=0.5,
            weight_decay=0.0,
            eps=0.0,
        )
        # The first step's direction is the gradient's sign.
        assert bool((tensor == 0.5).all()), tensor

    def all_to_all() -> None:
        output = torch.empty(size * numel)
        dist.all_to_all_single(output, torch.full((size * numel,), float(rank)))
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(numel))

    def all_gather() -> None:
        output = torch.empty(size * numel)
        dist.all_gather_into_tensor(output, tensor.fill_(rank))
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(numel))

    def messages() -> None:
        """Round the ring, from any host to any other."""
        received = torch.empty(numel)
        before = (rank - 1) % size
        works = [dist.irecv(received, before), dist.isend(tensor.fill_(rank), (rank + 1) % size)]
        for work in works:
            work.wait()
        assert bool((received == before).all())

    return {
        "all_reduce": all_reduce,
        "fused_adamw_": fused_adamw,
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "messages": messages,
    }[what]


def prepare(context: Context, ranks: list[int]) -> None:
    """Whatever a process keeps from its first group on is there."""
    join(context, ranks, 30)
    dist.destroy_process_group()
    if not _held:
        _held.update(resources.held())


def join(context: Context, ranks: list[int], seconds: float) -> None:
    # Under the store that all groups here have had.
    faults.rejoin(context, None, ranks, seconds)
    _operation(context, "all_reduce", 1000)()
    _operation(context, "fused_adamw_", 1000)()


def until_failure(context: Context, what: str, numel: int, name: str) -> tuple[str, float]:
    """The error, and when it came."""
    return faults.until_failure(context, _operation(context, what, numel), name)


def abort_from_a_thread(context: Context, what: str, numel: int, name: str) -> tuple[str, float]:
    """Like `until_failure`; on rank 0 another thread aborts. That rank says how long it took."""
    if context.rank != 0:
        return until_failure(context, what, numel, name)
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    aborted = []

    def abort() -> None:
        while not (Path(context.scratch) / f"{name}0").exists():
            time.sleep(0.01)
        time.sleep(0.2 + 0.05 * random.random())
        aborted.append(time.monotonic())
        backend.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    text, when = until_failure(context, what, numel, name)
    thread.join()
    return text, when - aborted[0]


def again(context: Context, ranks: list[int], patience: float) -> None:
    """A failed group refuses at once; nothing is left of it, and a new one works."""
    error = faults.refusal(lambda: dist.all_reduce(torch.ones(3)))
    assert isinstance(error, dist.DistBackendError), error
    error = faults.refusal(lambda: faults.fused_step(100))
    assert isinstance(error, dist.DistBackendError), error
    leave(context, patience)
    join(context, ranks, 20)
    leave(context, patience)


def leave(context: Context, patience: float) -> None:
    dist.destroy_process_group()
    if left := resources.leaks(_held, patience):
        raise AssertionError(f"{left}, before: {_held}")


pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]

LAYOUTS = {"2x1": [0, 1], "2x2": [0, 0, 1, 1]}
TIMEOUT = 2.0
OPERATIONS = [("all_reduce", 100), ("all_reduce", 3_000_000), ("fused_adamw_", 300_000)]
NO_LINKS = pytest.mark.skipif(hosts.why_not() is not None, reason=f"no links: {hosts.why_not()}")


class Crew:
    """Processes that stay while their groups come and go, all under one store."""

    def __init__(self, place: str, layout: str) -> None:
        self._exit = contextlib.ExitStack()
        self.at_rest = True
        self.on = LAYOUTS[layout]
        self.all = list(range(len(self.on)))
        self._names = (f"group{n}-" for n in itertools.count())
        links = self._exit.enter_context(hosts.Hosts(2)) if place == "links" else None
        self.links = links
        env = [
            {"FUSEDPG_HOST_ID": str(host)} if links is None else links.environment(host)
            for host in self.on
        ]
        self.workers = self._exit.enter_context(
            harness.Workers(
                len(self.on),
                env=env,
                init=False,
                oracle=False,
                one_host=False,
                hosts=links,
                on=self.on,
            )
        )
        self.workers.run(prepare, self.all)

    def close(self) -> None:
        self._exit.close()

    def start(self, function: Any, *args: Any, timeout: float = TIMEOUT) -> Path:
        """A new group, and the ranks in the middle of operations. What `late` ranks wait for."""
        self.workers.run(join, self.all, timeout)
        name = next(self._names)
        self.workers.start(function, *args, name)
        deadline = time.monotonic() + 20
        while not all((self.workers.scratch / f"{name}{rank}").exists() for rank in self.all):
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.005)
        time.sleep(0.05)
        return self.workers.scratch / f"{name}go"

    def results(self, ranks: list[int]) -> list[tuple[str, float]]:
        answers = self.workers.collect(TIMEOUT + 20, ranks=ranks)
        for answer in answers:
            if isinstance(answer, Died):
                raise AssertionError(f"{answer}\n{self.workers.log(answer.rank)[-8000:]}")
            assert isinstance(answer, tuple) and not isinstance(answer, RemoteError), answer
            assert answer[0].startswith("fused:"), answer[0]
        return answers

    def again(self, ranks: list[int]) -> None:
        self._end(again, ranks, TIMEOUT + 5, ranks=ranks)

    def leave(self, ranks: list[int]) -> None:
        self._end(leave, TIMEOUT + 5, ranks=ranks)

    def _end(self, function: Any, *args: Any, ranks: list[int]) -> None:
        self.workers.start(function, *args, ranks=ranks)
        answers = self.workers.collect(60, ranks=ranks, grace=10)
        traces = [getattr(answer, "trace", "") for answer in answers]
        assert answers == [None for _ in ranks], "\n".join([str(answers), *traces])
        self.at_rest = True


@functools.cache
def crew_of(place: str, layout: str) -> Crew:
    return Crew(place, layout)


def crews() -> list[Any]:
    """Quick: over links with two ranks a host; pretended with one."""
    found = []
    for place, layout in itertools.product(("links", "pretended"), LAYOUTS):
        marks = [NO_LINKS] if place == "links" else []
        if (place == "links") != (layout == "2x2"):
            marks.append(pytest.mark.slow)
        values = place, layout
        found.append(pytest.param(values, marks=marks, id="-".join(values)))
    return found


@pytest.fixture(scope="module", params=crews())
def places(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    yield request.param
    crew_of(*request.param).close()
    crew_of.cache_clear()


@pytest.fixture
def crew(places: tuple[str, str]) -> Iterator[Crew]:
    """At rest: in no group. What a test has left elsewhere is thrown away."""
    crew = crew_of(*places)
    crew.at_rest = False
    yield crew
    if not crew.at_rest or crew.workers.broken:
        crew.close()
        crew_of.cache_clear()


def operations(quick: int) -> Any:
    """All of them; the normal run has one."""
    values = [
        operation if i == quick else harness.slow(*operation)
        for i, operation in enumerate(OPERATIONS)
    ]
    return pytest.mark.parametrize(("what", "numel"), values)


def named(text: str, what: str, ranks: list[int]) -> None:
    assert what in text, text
    assert any(f"rank {rank}" in text for rank in ranks), text


@operations(quick=1)
def test_killed(crew: Crew, what: str, numel: int) -> None:
    _killed(crew, what, numel, what)


def _killed(crew: Crew, what: str, numel: int, name: str) -> None:
    victim = crew.all[-1]
    others = crew.all[:-1]
    crew.start(until_failure, what, numel)
    killed = time.monotonic()
    crew.workers.signal(victim, signal.SIGKILL)
    results = [(round(when - killed, 2), text) for text, when in crew.results(others)]
    for after, text in results:
        named(text, name, [victim])
        assert after < 2, results
    if len(others) > 1:
        crew.again(others)
    crew.workers.respawn([victim])
    if len(others) == 1:
        # One rank is no group that spans hosts: with the one that has come instead.
        crew.leave(others)
    crew.workers.run(prepare, crew.all)


def late(context: Context, ranks: list[int], what: str, numel: int, name: str) -> tuple[str, float]:
    """Like `until_failure`; some ranks do not come before the file `name` with "go" is there."""
    operation = _operation(context, what, numel)
    for _ in range(3):
        operation()
    faults.mark(context, name)
    go = Path(context.scratch) / f"{name}go"
    deadline = time.monotonic() + 30
    while context.rank in ranks and not go.exists():
        assert time.monotonic() < deadline, f"no {go}"
        time.sleep(0.01)
    return until_failure(context, what, numel, "never")


def test_killed_beside_one_that_waits_for_another_host(crew: Crew) -> None:
    """Its neighbour hears of it at once, though nobody has come who could fail first."""
    if len(crew.all) == 2:
        crew.at_rest = True
        pytest.skip("no rank has a neighbour")
    (victim, neighbour), away = crew.all[:2], crew.all[2:]
    go = crew.start(late, away, "all_reduce", 100, timeout=30)
    begin = time.monotonic()
    crew.workers.signal(victim, signal.SIGKILL)
    for ranks in ([neighbour], away):
        for text, when in crew.results(ranks):
            named(text, "all_reduce", [victim])
            assert when - begin < 2, (ranks, when - begin, text)
        begin = time.monotonic()
        go.touch()
    crew.again([neighbour, *away])
    crew.workers.respawn([victim])
    crew.workers.run(prepare, crew.all)


def test_stopped_before_an_operation(crew: Crew) -> None:
    """Also where Gloo would do it, which a rank that is alone in it waits for in vain."""
    *others, victim = crew.all
    go = crew.start(late, [victim], "all_reduce", 100)
    stopped = time.monotonic()
    crew.workers.signal(victim, signal.SIGSTOP)
    try:
        for text, when in crew.results(others):
            named(text, "all_reduce", [victim])
            assert TIMEOUT - 0.5 < when - stopped < TIMEOUT + 4, (when - stopped, text)
    finally:
        crew.workers.signal(victim, signal.SIGCONT)
        go.touch()
    crew.results([victim])
    crew.again(crew.all)


@operations(quick=1)
def test_stopped(crew: Crew, what: str, numel: int) -> None:
    _stopped(crew, what, numel, what)


def _stopped(crew: Crew, what: str, numel: int, name: str) -> None:
    victim = crew.all[-1]
    others = crew.all[:-1]
    crew.start(until_failure, what, numel)
    stopped = time.monotonic()
    crew.workers.signal(victim, signal.SIGSTOP)
    try:
        for text, when in crew.results(others):
            named(text, name, [victim])
            assert TIMEOUT - 0.5 < when - stopped < TIMEOUT + 4, (when - stopped, text)
    finally:
        crew.workers.signal(victim, signal.SIGCONT)
    crew.results([victim])
    crew.again(crew.all)


@operations(quick=2)
def test_link_down(crew: Crew, what: str, numel: int) -> None:
    if crew.links is None:
        crew.at_rest = True
        pytest.skip("pretended hosts have no links")
    crew.start(until_failure, what, numel)
    cut = time.monotonic()
    crew.links.cut(1)
    try:
        results = crew.results(crew.all)
    finally:
        crew.links.mend(1)
    for rank, (text, when) in enumerate(results):
        if crew.on[rank] == 0 or "the store does not answer" not in text:
            # Who has the store, or knows the connection.
            named(text, what, [p for p in crew.all if crew.on[p] != crew.on[rank]])
        assert TIMEOUT - 0.5 < when - cut < TIMEOUT + 4, (when - cut, text)
    crew.again(crew.all)


@operations(quick=0)
def test_abort(crew: Crew, what: str, numel: int) -> None:
    _abort(crew, what, numel, what)


def _abort(crew: Crew, what: str, numel: int, name: str) -> None:
    for _ in range(3):
        crew.start(abort_from_a_thread, what, numel)
        (text, took), *others = crew.results(crew.all)
        assert "abort" in text, text
        for other, _ in others:
            named(other, name, [0])
        crew.again(crew.all)
        if took < 0.1:
            return
    raise AssertionError(f"an abort took {took:.2f} s, three times")  # on a busy machine, once


def abort_when_idle(context: Context, what: str, name: str) -> tuple[str, float]:
    """Rank 0 does nothing but abort, when the others wait for it."""
    if context.rank != 0:
        faults.mark(context, name)
        return until_failure(context, what, 1000, "never")
    assert dist.group.WORLD is not None
    faults.mark(context, name)
    time.sleep(0.5)
    when = time.monotonic()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    return "fused: aborted", when


@pytest.mark.parametrize("what", ["all_reduce", harness.slow("fused_adamw_")])
def test_abort_without_an_operation(crew: Crew, what: str) -> None:
    """Who waits for a rank that aborts hears of it, and not at the deadline."""
    crew.start(abort_when_idle, what, timeout=30)
    (_, aborted), *others = crew.results(crew.all)
    for text, when in others:
        named(text, what, [0])
        assert "aborted" in text, text
        assert when - aborted < 5, text
    crew.again(crew.all)


MISMATCHES = {
    "size": ("{0}", "{1}"),
    "dtype": ("float32", "float64"),
    "redop": ("SUM", "MAX"),
    "learning rate": ("fused_adamw",),
}


def mismatch(context: Context, what: str, numel: int) -> str:
    with pytest.raises(dist.DistBackendError) as error:
        faults.mismatch(context, what, numel, async_op=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "numel"),
    [
        *((what, 100) for what in MISMATCHES),
        ("size", 40_000),  # Gloo's own, where it is allowed
        *(harness.slow(what, 1_000_000) for what in MISMATCHES),
    ],
)
def test_mismatch(crew: Crew, what: str, numel: int) -> None:
    crew.workers.run(join, crew.all, 20)
    for rank, text in enumerate(crew.workers.run(mismatch, what, numel)):
        for word in MISMATCHES[what]:
            assert word.format(numel, numel + 1) in text, text
        # Rank 0 is the odd one: who is not hears of it, and it of somebody.
        assert f"rank {rank}" in text, text
        named(text, "", [0] if rank != 0 else crew.all[1:])
    crew.workers.run(faults.still_works)
    crew.leave(crew.all)


@pytest.mark.parametrize("numel", [100, harness.slow(700_001)])
@pytest.mark.parametrize("what", ["all_to_all", harness.slow("all_gather"), "messages"])
def test_moves_killed(crew: Crew, what: str, numel: int) -> None:
    _killed(crew, what, numel, "")


@pytest.mark.parametrize("numel", [harness.slow(100), 700_001])
@pytest.mark.parametrize("what", ["all_to_all", harness.slow("all_gather"), "messages"])
def test_moves_stopped(crew: Crew, what: str, numel: int) -> None:
    _stopped(crew, what, numel, "")


@pytest.mark.parametrize("what", [harness.slow("all_to_all"), "messages"])
def test_moves_abort(crew: Crew, what: str) -> None:
    _abort(crew, what, 700_001, "")
