"""Rounds of faults of aggregators: who raises, when, and whether a new group works.

    python tests/python/scripts/aggregator_faults.py --rounds 50 [--udp]

Three ranks and two aggregators (by UDP one). In turn an aggregator is killed and started again, a
rank is killed, a rank is stopped, and strangers talk to the aggregators; each time after a random
moment in the middle of sums, all of which are compared. Prints a row for each fault with the
seconds until the others raised, and ends with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from checks import aggregators as by_tcp
from checks import aggregators_udp as by_udp
from harness import Died, RemoteError
from test_aggregators import Aggregator, on_hosts, wait_for
from test_aggregators_udp import Udp

FAULTS = ("aggregator killed", "rank killed", "rank stopped", "strangers")
DEADLINE = 4.0  # of groups in which a rank is stopped, or killed by UDP
LONG = 60.0


class Rounds:
    def __init__(self, udp: bool, seed: int) -> None:
        self.udp = udp
        self.draw = random.Random(seed)
        self.make: Any = Udp if udp else Aggregator
        self.aggregators = [self.make() for _ in range(1 if udp else 2)]
        self.ranks = harness.Workers(3, env=on_hosts(3), init=False, oracle=False, one_host=False)
        self.scratch = Path(tempfile.mkdtemp(prefix="fusedpg-faults-"))
        self.number = 0

    @property
    def places(self) -> str:
        return ",".join(one.place for one in self.aggregators)

    def run(self, function: Any, *args: Any, ranks: list[int] | None = None) -> list[Any]:
        ranks = [0, 1, 2] if ranks is None else ranks
        self.ranks.start(function, *args, ranks=ranks)
        found = self.ranks.collect(LONG, ranks=ranks)
        for one in found:
            assert not isinstance(one, RemoteError | Died), getattr(one, "trace", one)
        return found

    def join(self, ranks: list[int], seconds: float) -> None:
        self.number += 1
        name = f"round{self.number}"
        if self.udp:
            self.run(by_udp.join, name, ranks, seconds, ranks=ranks)
        else:
            self.run(by_tcp.join, name, ranks, self.places, seconds, ranks=ranks)

    def works(self, ranks: list[int]) -> None:
        """A new group of these."""
        self.join(ranks, LONG)
        if self.udp:
            self.run(by_udp.sums, self.places, {}, [20_000, 3], ranks=ranks)
            self.run(by_udp.leave, ranks=ranks)
        else:
            self.run(by_tcp.some_rounds, 3, ranks=ranks)
            self.run(by_tcp.leave, ranks=ranks)

    def begin(self, seconds: float) -> None:
        self.join([0, 1, 2], seconds)
        go = self.scratch / f"{self.number}"
        if self.udp:
            self.ranks.start(by_udp.until_it_fails, self.places, str(go))
        else:
            self.ranks.start(by_tcp.until_it_fails, str(go))
        wait_for(go)
        time.sleep(self.draw.random() * 0.3)

    def end(self, began: float, ranks: list[int], names: str) -> list[float]:
        """When these had raised, by the errors' text the right thing."""
        took = []
        for found in self.ranks.collect(LONG, ranks=ranks):
            assert not isinstance(found, RemoteError | Died), getattr(found, "trace", found)
            when, text = found
            assert names in text, (names, text)
            took.append(when - began)
        if self.udp:
            self.run(by_udp.leave, ranks=ranks)
        return took

    def aggregator_killed(self) -> list[float]:
        self.begin(LONG)
        which = self.draw.randrange(len(self.aggregators))
        place = self.aggregators[which].place
        began = time.time()
        self.aggregators[which].close()
        if self.draw.random() < 0.5:  # at once, or when all have raised
            self.aggregators[which] = self.make(place)
            took = self.end(began, [0, 1, 2], place)
        else:
            took = self.end(began, [0, 1, 2], place)
            self.aggregators[which] = self.make(place)
        self.works([0, 1, 2])
        return took

    def rank_killed(self) -> list[float]:
        self.begin(DEADLINE if self.udp else LONG)
        which = self.draw.randrange(3)
        others = [rank for rank in range(3) if rank != which]
        began = time.time()
        self.ranks.signal(which, signal.SIGKILL)
        took = self.end(began, others, f"rank {which}")
        self.works(others)
        self.ranks.respawn([which])
        self.works([0, 1, 2])
        return took

    def rank_stopped(self) -> list[float]:
        self.begin(DEADLINE)
        which = self.draw.randrange(3)
        others = [rank for rank in range(3) if rank != which]
        began = time.time()
        self.ranks.signal(which, signal.SIGSTOP)
        try:
            took = self.end(began, others, f"rank {which}")
        finally:
            self.ranks.signal(which, signal.SIGCONT)
        late = self.ranks.collect(LONG, ranks=[which])[0]
        assert not isinstance(late, RemoteError | Died), getattr(late, "trace", late)
        if self.udp:
            self.run(by_udp.leave, ranks=[which])
        self.works([0, 1, 2])
        return took

    def strangers(self) -> list[float]:
        ends = threading.Event()
        thread = threading.Thread(target=self._strange, args=(ends,))
        thread.start()
        try:
            for _ in range(3):
                self.works([0, 1, 2])
        finally:
            ends.set()
            thread.join()
        return []

    def _strange(self, ends: threading.Event) -> None:
        draw = random.Random(self.number)
        magic = (0x3130706370736466).to_bytes(8, "little")
        door = (1).to_bytes(8, "little")
        with contextlib.ExitStack() as open_:
            while not ends.wait(0.002):
                to = draw.choice(self.aggregators).address
                kind = socket.SOCK_DGRAM if self.udp else socket.SOCK_STREAM
                one = socket.socket(socket.AF_INET, kind)
                data = draw.choice(
                    [b"", draw.randbytes(100), magic, magic + door + bytes(24),
                     b"\x13" + draw.randbytes(1041), b"\xf0" + draw.randbytes(95),
                     magic + door + bytes(8) + draw.randbytes(60)]
                )  # fmt: skip
                with contextlib.suppress(OSError):
                    one.settimeout(1)
                    one.connect(to)
                    one.sendall(data)
                if draw.random() < 0.02:
                    open_.enter_context(one)  # and stays
                else:
                    one.close()

    def close(self) -> None:
        self.ranks.close()
        for one in self.aggregators:
            one.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--udp", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6, help="no round begins after that")
    args = parser.parse_args()
    rounds = Rounds(args.udp, args.seed)
    took: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    done = dict.fromkeys(FAULTS, 0)
    wrong = 0
    ends = time.monotonic() + args.seconds
    for n in range(args.rounds):
        if time.monotonic() > ends:
            break
        fault = FAULTS[n % len(FAULTS)]
        try:
            took[fault] += getattr(rounds, fault.replace(" ", "_"))()
        except Exception as error:
            wrong += 1
            print(f"round {n}, {fault}: {type(error).__name__}: {error}"[:3000], flush=True)
            rounds.close()
            rounds = Rounds(args.udp, args.seed + n + 1)
        done[fault] += 1
    rounds.close()
    for fault, seconds in took.items():
        row = f"{fault}: {done[fault]} rounds"
        if seconds:
            row += f", s to the errors: median {statistics.median(seconds):.2f}"
            row += f", most {max(seconds):.2f}"
        print(row)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
