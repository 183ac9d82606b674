"""SwitchML's protocol by UDP: sums, losses, strangers, and what happens when somebody dies."""

from __future__ import annotations

import contextlib
import json
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import harness
from checks import aggregators_udp as checks
from checks.faults import rejoin
from harness import Died
from test_aggregators import KEY, SOON, Aggregator, on_hosts, wait_for

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]

LISTENS = "fusedpg-aggregator: listens by UDP at "


class Udp(Aggregator):
    def __init__(self, listen: str = "127.0.0.1:0", key: str = KEY, *more: str) -> None:
        super().__init__("127.0.0.1:0", key, "--udp", listen, *more)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(LISTENS), self.process.communicate()
        self.place = line.removeprefix(LISTENS).strip()


class Bad:
    """A way to an aggregator that loses, doubles and delays datagrams, by a seed."""

    def __init__(self, to: tuple[str, int], lost: float, doubled: float, late: float) -> None:
        self.lost, self.doubled, self.late = lost, doubled, late
        self._to = to
        self._draw = random.Random(11)
        self._door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._door.bind(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._ways: dict[Any, socket.socket] = {}  # by the worker's address
        self._late: list[tuple[float, socket.socket, bytes, Any]] = []
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _pass(self, way: socket.socket, data: bytes, to: Any) -> None:
        if self._draw.random() < self.lost:
            return
        for _ in range(2 if self._draw.random() < self.doubled else 1):
            delay = self._draw.random() * 0.01 if self._draw.random() < self.late else 0.0
            self._late.append((time.monotonic() + delay, way, data, to))

    def _run(self) -> None:
        while not self._ends:
            ready, _, _ = select.select([self._door, *self._ways.values()], [], [], 0.002)
            for one in ready:
                data, worker = one.recvfrom(2000)
                if one is self._door:
                    if worker not in self._ways:
                        way = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                        way.bind(("127.0.0.1", 0))
                        self._ways[worker] = way
                    self._pass(self._ways[worker], data, self._to)
                else:
                    to = next(key for key, way in self._ways.items() if way is one)
                    self._pass(self._door, data, to)
            now = time.monotonic()
            due = [one for one in self._late if one[0] <= now]
            self._late = [one for one in self._late if one[0] > now]
            for _, way, data, to in due:
                with contextlib.suppress(OSError):
                    way.sendto(data, to)

    def __enter__(self) -> Bad:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()
        for one in (self._door, *self._ways.values()):
            one.close()


@pytest.fixture(scope="module")
def one() -> Iterator[Udp]:
    with Udp() as first:
        yield first


@pytest.fixture
def ranks() -> Any:
    return harness.pool(3, env=on_hosts(3), oracle=False, one_host=False)


def workers(size: int) -> Any:
    env = on_hosts(size)
    return harness.Workers(size, env=env, init=False, oracle=False, one_host=False)


SIZES = [1, 255, 256, 257, 5000, 100_003, 0, 7]


@pytest.mark.parametrize(
    "more",
    [{}, {"packet_numel": 64}, {"num_worker_threads": 3}, {"seal": False},
     {"max_outstanding_packets": 1}],
    ids=str,
)  # fmt: skip
def test_sums(ranks: Any, one: Udp, more: dict[str, Any]) -> None:
    for found in ranks.run(checks.sums, one.place, more, SIZES):
        assert found["wrong"] == 0 and found["packets_sent"] > 0


def test_several_aggregators(ranks: Any, one: Udp) -> None:
    with Udp() as other:
        both = f"{one.place},{other.place}"
        ranks.run(checks.sums, both, {"num_worker_threads": 4}, SIZES)


def test_lost_doubled_and_late(ranks: Any, one: Udp) -> None:
    with Bad(one.address, lost=0.05, doubled=0.05, late=0.05) as way:
        found = ranks.run(checks.sums, way.place, {}, [50_001, 3, 20_000])
        assert all(counted["retransmissions"] > 0 for counted in found)
        assert any(counted["repeated"] > 0 for counted in found)


def test_strangers(ranks: Any, one: Udp) -> None:
    """Datagrams from elsewhere, while ranks work: right sums."""
    draw = random.Random(8)
    ends = threading.Event()

    def strange() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
            while not ends.is_set():
                data = draw.randbytes(draw.choice([0, 8, 96, 266, 1034, 1042, 1400]))
                head = draw.choice([b"", b"\x13", b"\x11", b"\xf0", b"\xf4", b"\xf5"])
                mine.sendto(head + data[len(head) :], one.address)
                time.sleep(0.0005)

    thread = threading.Thread(target=strange)
    thread.start()
    try:
        ranks.run(checks.sums, one.place, {}, SIZES)
    finally:
        ends.set()
        thread.join()
    assert one.process.poll() is None


@pytest.mark.parametrize(
    ("more", "text"),
    [({"aggregators": ""}, "needs Config(aggregators"),
     ({"aggregators": "127.0.0.1"}, "host:port"),
     ({"packet_numel": 100}, "64 or 256"),
     ({"prepostprocessor": "own"}, "processor"),
     ({"num_workers": 7}, "num_workers is 7"),
     ({"aggregators": "127.0.0.1:9"}, "aggregator 127.0.0.1:9 (UDP) does not answer")],
    ids=str,
)  # fmt: skip
def test_refuses(ranks: Any, one: Udp, more: dict[str, Any], text: str) -> None:
    all_of_it = {"backend": "udp", "aggregators": one.place, "packet_numel": 256, **more}
    ranks.run(checks.refuses, all_of_it, text)


@pytest.mark.long
def test_another_key(ranks: Any) -> None:
    with Udp(key="f" * 32) as other:
        given = {"backend": "udp", "aggregators": other.place, "packet_numel": 256}
        ranks.run(checks.refuses, given, "another key")


def test_other_types(ranks: Any, one: Udp) -> None:
    ranks.run(checks.other_types, one.place)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_dies(tmp_path: Path, one: Udp, how: signal.Signals) -> None:
    """The others raise at the deadline, and name it; a context of these works."""
    with workers(3) as found:
        found.run(rejoin, "a", [0, 1, 2], 6.0)
        found.start(checks.until_it_fails, one.place, str(tmp_path / "go"))
        wait_for(tmp_path / "go")
        began = time.time()
        found.signal(1, how)
        answers = found.collect(30, ranks=[0, 2])
        if how == signal.SIGKILL:
            assert isinstance(found.collect(30, ranks=[1])[0], Died)
        for when, text in answers:
            assert when - began < 6.0 + SOON, answers
            assert one.place in text and "it waits for rank 1" in text, text
        if how == signal.SIGSTOP:
            found.signal(1, signal.SIGCONT)
            found.collect(30, ranks=[1])
        found.start(checks.leave, ranks=[0, 2])
        assert found.collect(30, ranks=[0, 2]) == [None, None]
        found.start(rejoin, "b", [0, 2], 20.0, ranks=[0, 2])
        assert found.collect(30, ranks=[0, 2]) == [None, None]


def test_worker_fails(one: Udp) -> None:
    """The others hear of it soon."""
    with workers(3) as found:
        found.run(rejoin, "a", [0, 1, 2], 60.0)
        answers = found.run(checks.fails_by_itself, one.place)
        for rank in (0, 2):
            seconds, text = answers[rank]
            assert seconds < SOON and "rank 1 left the session" in text, answers
        assert "its own" in answers[1][1]


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_aggregator_dies(tmp_path: Path, again: bool) -> None:
    """All raise soon, and name it; a new context works once it is there again."""
    with workers(3) as found, contextlib.ExitStack() as later:
        first = later.enter_context(Udp())
        found.run(rejoin, "a", [0, 1, 2], 60.0)
        found.start(checks.until_it_fails, first.place, str(tmp_path / "go"))
        wait_for(tmp_path / "go")
        began = time.time()
        first.close()
        if again:
            later.enter_context(Udp(first.place))
        for when, text in found.collect(30):
            assert when - began < SOON, text
            assert first.place in text, text
            # Whichever is seen first: Python may take longer to start than a second.
            assert "started again" in text or "nobody listens" in text, text
        if not again:
            later.enter_context(Udp(first.place))
        found.run(checks.sums, first.place, {}, [1000])


def test_nothing_comes_through(tmp_path: Path, one: Udp) -> None:
    """All raise at the deadline, and name the aggregator, whatever it said before."""
    with workers(2) as found, Bad(one.address, 0, 0, 0) as way:
        found.run(rejoin, "a", [0, 1], 4.0)
        found.start(checks.until_it_fails, way.place, str(tmp_path / "go"))
        wait_for(tmp_path / "go")
        found.signal(1, signal.SIGSTOP)
        time.sleep(1)  # rank 0 is told that rank 1 is waited for
        began = time.time()
        way.lost = 1.0
        found.signal(1, signal.SIGCONT)
        for when, text in found.collect(30):
            assert when - began < 4.0 + SOON, text
            assert f"no sum from aggregator {way.place} (UDP) within 4000 ms" in text, text
            assert "stopped or out of reach" in text, text


def test_stats_and_drain(ranks: Any) -> None:
    """Counters as JSON; SIGTERM: new sessions are refused, and it ends with the last one."""
    with Udp("127.0.0.1:0", KEY, "--stats", "0.1") as own:
        ranks.run(checks.sums, own.place, {}, SIZES)
        out = own.process.stdout
        assert out is not None
        deadline = time.monotonic() + 20
        while True:
            stats = json.loads(out.readline())["udp"]
            if stats["sessions"] == 1 and stats["active"] == 0:
                break
            assert time.monotonic() < deadline, stats
        assert stats["sums"] > 0 and stats["packets"] == 3 * stats["sums"]
        assert stats["wrong"] == stats["refused"] == 0
        ranks.run(checks.start, own.place)
        own.signal(signal.SIGTERM)
        while "no more jobs" not in out.readline():
            assert time.monotonic() < deadline
        given = {"backend": "udp", "aggregators": own.place, "packet_numel": 256}
        ranks.run(checks.refuses, given, "takes nobody in any more")
        assert own.process.poll() is None
        ranks.run(checks.one_more_and_stop)
        assert own.process.wait(10) == 0
