"""Subject: rounds of chaos, in which a group's life ends in one of many ways.

The parent starts the ranks, does the harm, and judges what they say: that all hear of it soon, that
what has come until then is right, and that nothing is left behind.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import harness
from fuzz import ranks
from fuzz.core import Choices, Wrong
from fuzz.rounds import CREW, LEFT_OUT, SCENARIOS, Round, draw_round

# Seconds within which ranks must hear of a dead peer, on a machine that has time for them.
SOON = 2.0
KILLS = ("kill", "kill in creation", "kill behind messages")


WHERE = ("any", *SCENARIOS)
EXAMPLES = 10


@dataclasses.dataclass
class Tally:
    """What has been done so far."""

    rounds: int = 0
    turns: int = 0
    wrong: int = 0
    hangs: int = 0
    leaks: int = 0
    slowest: float = 0.0  # from a death to the last survivor's error
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {name}" for name, count in self.faults.most_common())
        return (
            f"{self.rounds} rounds: {self.wrong} wrong, {self.hangs} hangs, {self.leaks} leaks "
            f"({self.turns} turns, slowest notice {self.slowest:.2f} s; {faults})"
        )


def slack() -> float:
    """By how much a busy machine may be slower."""
    return max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


class Crew:
    """Processes for all rounds; only those that a round kills are replaced."""

    def __init__(self, tally: Tally | None = None) -> None:
        self.tally = tally or Tally()
        self.workers = self._hire()

    def _hire(self) -> harness.Workers:
        return harness.Workers(CREW, init=False, oracle=False)

    def close(self) -> None:
        self.workers.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, one: Round) -> None:
        """One round; raises Wrong, after which the crew is a new one."""
        self.tally.rounds += 1
        one = dataclasses.replace(one, number=self.tally.rounds)
        self.tally.faults[one.scenario] += 1
        try:
            problems = self._play(one)
        except harness.WorkerFailure as error:
            hung = "no answer" in str(error)
            self.tally.hangs += hung
            self.tally.wrong += not hung
            problems = [str(error)]
        else:
            leaks = sum("leaked" in text for text in problems)
            self.tally.leaks += bool(leaks)
            self.tally.wrong += leaks < len(problems)
        if problems:
            logs = self._logs(one)
            self.workers.close()
            self.workers = self._hire()
            raise Wrong("\n".join([str(one), *problems, *logs]))

    def _logs(self, one: Round) -> list[str]:
        texts = {rank: self.workers.log(rank)[-1500:] for rank in one.members}
        return [f"--- log of rank {rank} ---\n{text}" for rank, text in texts.items() if text]

    def _play(self, one: Round) -> list[str]:
        workers, members = self.workers, list(one.members)
        workers.start(ranks.begin, one, ranks=members)
        harmed = self._harm(one)
        answering = members if one.scenario not in (*KILLS, "stop") else list(one.survivors)
        outcomes = self._collect(one, answering, 25)
        problems = self._judge(one, outcomes, harmed)
        alive = [rank for rank in answering if isinstance(outcomes[rank], ranks.Outcome)]
        problems += self._phase(one, ranks.aftermath, alive)
        if one.scenario == "stop":
            workers.signal(one.victim, signal.SIGCONT)
            slept = self._collect(one, [one.victim], 25)
            problems += self._judge(one, slept, None)
            problems += self._phase(one, ranks.aftermath, [one.victim])
            alive = members
        problems += self._phase(one, ranks.settle, alive)
        dead = [rank for rank in members if rank not in alive]
        if dead and not problems:
            workers.respawn(dead)
        return problems

    def _harm(self, one: Round) -> float | None:
        """Does what the parent has to do; when it was done."""
        quiet = ("descriptors", "address space", "small arena", "resize", "fork")
        if one.scenario in quiet or one.scenario.startswith("self-test"):
            return None
        keys = [f"{one.number}/running/{rank}" for rank in one.members]
        if one.scenario == "exit":
            keys.remove(f"{one.number}/running/{one.victim}")
        deadline = time.monotonic() + 20
        while not self.workers.store.check(keys) and time.monotonic() < deadline:
            if one.scenario in ("abort", "leave", "abort and leave", "exit"):
                return None
            time.sleep(0.0005)
        time.sleep(one.delay)
        if one.scenario in ("kill", "kill in creation", "kill behind messages", "writers") or (
            one.scenario == "shared parameters" and one.variant % 2 == 0
        ):
            self.workers.signal(one.victim, signal.SIGKILL)
        elif one.scenario == "stop":
            self.workers.signal(one.victim, signal.SIGSTOP)
        return time.monotonic()

    def _collect(self, one: Round, who: Sequence[int], seconds: float) -> dict[int, Any]:
        answers = self.workers.collect(seconds, ranks=who)
        return dict(zip(who, answers, strict=True))

    def _phase(self, one: Round, function: Any, who: Sequence[int]) -> list[str]:
        self.workers.start(function, one, ranks=who)
        return self._judge(one, self._collect(one, who, 25), None)

    def _judge(self, one: Round, answers: dict[int, Any], harmed: float | None) -> list[str]:
        problems = []
        for rank, answer in answers.items():
            if isinstance(answer, harness.RemoteError):
                problems.append(f"rank {rank}: {answer.trace}")
            elif isinstance(answer, harness.Died):
                if rank != one.victim:
                    problems.append(f"rank {rank} died with {answer.exitcode}")
            else:
                self.tally.turns += answer.turns
                problems += [f"rank {rank}: {text}" for text in answer.wrong]
                if harmed is not None and answer.error and rank != one.victim:
                    problems += self._late(one, rank, answer.when - harmed)
        return problems

    def _late(self, one: Round, rank: int, seconds: float) -> list[str]:
        limit = SOON * slack() + (one.timeout if one.short else 0)
        if not one.short:
            self.tally.slowest = max(self.tally.slowest, seconds)
        if seconds <= limit:
            return []
        return [f"rank {rank} heard of it after {seconds:.1f} s, not within {limit:.1f} s"]


def draw(choose: Choices, where: str) -> Round:
    if where == "any":
        where = choose.weighted({name: n for name, n in SCENARIOS.items() if name not in LEFT_OUT})
    return draw_round(choose, where)


_crew: Crew | None = None


def crew() -> Crew:
    """That of all rounds that core.check plays."""
    global _crew
    if _crew is None:
        _crew = Crew()
        atexit.register(_crew.close)
    return _crew


def check(one: Round) -> int:
    before = crew().tally.turns
    crew().play(one)
    return crew().tally.turns - before
