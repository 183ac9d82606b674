"""Search for plans, after Aceso: relieve the bottleneck, by several primitives if need be.

Each number of stages is searched by itself, from a seed of its own, so that an answer does not
depend on how many processes work.
"""

from __future__ import annotations

import dataclasses
import heapq
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue

from fusedpg.plan.config import Plan
from fusedpg.plan.primitives import (
    PRIMITIVES,
    Primitive,
    balance,
    finetune,
    uniform_state,
    with_micro_batch,
)
from fusedpg.plan.space import Candidate, Space, State

__all__ = ["Found", "Limits", "NoPlanFits", "Search", "Step", "search"]

# A candidate this much slower than the best may be where a later trial starts.
_POOL_SLACK = 1.2
_POOL_SIZE = 2000
# So many candidates of a group are followed, best first.
_BEAM = 3
_START_WIDTHS = 3


_BEGINNINGS = {
    "start": "equal devices and times",
    "hops": "the best plan of those not yet changed",
    "restart": "random devices, equal times",
}


class NoPlanFits(ValueError):
    """No plan that was looked at fits into memory, or none could be priced."""


@dataclass(frozen=True)
class Limits:
    """When a search ends.

    Args:
        steps: trials, for each number of stages.
        seconds: of wall-clock time for all, or None. With it the answer depends on the machine.
        hops: primitives in a row that may make a plan worse.
        plans_per_step: plans that one trial may price.
        finetune: rounds of fine-tuning of each result.
    """

    steps: int = 100
    seconds: float | None = None
    hops: int = 7
    plans_per_step: int = 400
    finetune: int = 3


@dataclass(frozen=True)
class Step:
    """A trial of a search, and why it did what it did.

    Args:
        trial: its number.
        kind: where it began: "start", "hops" (at a plan seen before) or "restart".
        why: where it began, and the reason of each primitive that was applied.
        before: milliseconds of the best plan before; None if none fitted.
        after: milliseconds of what was found.
        memory: MB that it needs.
        better: whether it is the best so far.
        plan: its stages in short.
        priced: plans that were priced until then.
        seconds: since the search of this number of stages began.
    """

    trial: int
    kind: str
    why: tuple[str, ...]
    before: float | None
    after: float
    memory: float
    better: bool
    plan: str
    priced: int
    seconds: float


@dataclass
class Found:
    """The result of a search for one number of stages.

    Args:
        stages: the number of stages.
        plans: the best plans that fit, best first.
        steps: its trials.
        priced: plans that were priced.
        left_out: plans that could not be priced, by the reason.
        least_memory: MB of the plan that needed least, to say how far it is from fitting.
        seconds: it took.
    """

    stages: int
    plans: list[Plan] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    priced: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    least_memory: float | None = None
    seconds: float = 0.0

    @property
    def time(self) -> float:
        """Milliseconds of the best plan."""
        return _predicted(self.plans[0]) if self.plans else float("inf")

    def to_json(self) -> dict[str, object]:
        result = dataclasses.asdict(self)
        result["plans"] = [plan.to_json() for plan in self.plans]
        return result


class _Enough(Exception):
    """The trial has priced as many plans as it may, or time is up."""


def in_short(space: Space, state: State) -> str:
    """A line that tells plans apart."""
    settings = space.model.tables(state.micro_batch).settings
    parts = []
    for stage, width in enumerate(state.widths):
        degrees = sorted({settings[i][:2] for i in state.numbers(stage)})
        said = "+".join(f"tp{tp} dp{dp}" for tp, dp in degrees)
        parts.append(f"{state.counts[stage]} ops on {width} ({said})")
    return f"micro-batch {state.micro_batch}: " + " | ".join(parts)


def bottlenecks(candidate: Candidate) -> list[int]:
    """Stages by how much they need relief: of memory if one does not fit, else of time."""
    loads = candidate.loads
    return sorted(range(len(loads)), key=lambda stage: -loads[stage])


def groups(space: Space, candidate: Candidate, stage: int) -> Iterator[tuple[str, list[Primitive]]]:
    """Primitives that may relieve a stage, in the order in which to try them, with the reason."""
    left = list(PRIMITIVES)

    def take(why: str, **wanted: str) -> tuple[str, list[Primitive]]:
        chosen = [
            one for one in left if all(getattr(one, name) in of for name, of in wanted.items())
        ]
        for one in chosen:
            left.remove(one)
        return why, chosen

    if candidate.overrun > 0:
        most = candidate.stages[stage].memory
        yield take(
            f"it needs {most:,.0f} MB of {space.memory_limit:,.0f} MB: less memory", memory="-"
        )
        return
    shares = _shares(space, candidate)
    mean = [sum(column) / len(shares) for column in zip(*shares)]
    here = shares[stage]
    total = [sum(column) for column in zip(*shares)]
    part = [own / all_ if own > 0 and all_ > 0 else 0.0 for own, all_ in zip(here, total)]
    compute, loss, recompute = range(3)
    memory = "-0" if here[recompute] > 0 else "+-0"
    comm = "-0" if here[loss] > mean[loss] else "+-0"
    clock = "-0" if here[compute] > mean[compute] else "+-0"
    for share in sorted(range(3), key=lambda one: -part[one]):
        percent = f"{part[share]:.0%} of all stages'"
        if share == compute:
            why = f"it has {percent} computation: less of it"
            yield take(why, time="-", comm=comm, memory=memory)
            yield take(why, time="-")
        elif share == loss:
            why = f"it has {percent} loss of efficiency: less communication"
            yield take(why, time=clock, comm="-", memory=memory)
            yield take(why, comm="-")
        else:
            why = f"it has {percent} recomputation: less memory"
            yield take(why, time=clock, comm=comm, memory="-")
            yield take(why, memory="-")
    yield "what is left", left


def _shares(space: Space, candidate: Candidate) -> list[tuple[float, float, float]]:
    """For each stage milliseconds at its best, of lost efficiency, and of recomputation."""
    state = candidate.state
    tables = space.model.tables(state.micro_batch)
    result, first = [], 0
    for stage, count in enumerate(state.counts):
        kind = space.model.kind[first : first + count]
        ideal = float(tables.ideal[kind].sum()) / state.widths[stage]
        price = candidate.stages[stage]
        result.append((ideal, price.forward + price.backward - ideal, price.recompute))
        first += count
    return result


class Search:
    """A search for plans of one number of stages.

    Args:
        space: the plans.
        stages: how many stages.
        seed: of the restarts.
        limits: when to end.
        top: how many plans to keep.
    """

    def __init__(self, space: Space, stages: int, seed: int, limits: Limits, top: int = 1) -> None:
        self.space = space
        self.stages = stages
        self.limits = limits
        self.top = top
        self._random = random.Random(f"{seed}/{stages}")
        self._begun = time.monotonic()
        self._deadline = None if limits.seconds is None else self._begun + limits.seconds
        self._expanded: set[State] = set()
        self._pooled: set[State] = set()
        self._pool: list[tuple[tuple[float, float], int, Candidate]] = []
        self._best: Candidate | None = None
        self._kept: list[Candidate] = []
        self._least_memory: float | None = None
        self._trial_limit = 0
        self._steps: list[Step] = []

    def run(self, progress: Callable[[int, int, float], None] | None = None) -> Found:
        """Searches until a limit is reached.

        Args:
            progress: is told the number of stages, the trial and the best time so far.
        """
        for trial in range(self.limits.steps):
            if self._late():
                break
            self._trial_limit = self.space.priced + self.limits.plans_per_step
            if trial == 0:
                self._trial(trial, "start", self._start())
            elif self._pool and trial % 4:
                self._trial(trial, "hops", heapq.heappop(self._pool)[2])
            else:
                self._trial(trial, "restart", self._restart())
            if progress is not None:
                progress(self.stages, trial + 1, self._best.time if self._best else float("inf"))
        return Found(
            stages=self.stages,
            plans=[self.space.plan(one) for one in self._kept],
            steps=self._steps,
            priced=self.space.priced,
            left_out=dict(self.space.left_out),
            least_memory=self._least_memory,
            seconds=time.monotonic() - self._begun,
        )

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _trial(self, number: int, kind: str, start: Candidate | None) -> None:
        """Looks for something better than the best, from `start` on, as long as that helps."""
        if start is None:
            return
        before = self._best
        here = start
        why = [f"{_BEGINNINGS[kind]}: {in_short(self.space, here.state)}"]
        self._consider(here)
        nearest = here
        while True:
            try:
                found = self._relieve(here, 0, self._goal(), why)
            except _Enough:
                found = None
            if found is None:
                break
            here, path = found
            why += path
            nearest = here
        tuned = finetune(self.space, nearest, self.limits.finetune, self._late)
        self._consider(tuned)
        if tuned is not nearest:
            why.append("fine-tuning: degrees of single operators, and borders")
        self._record(number, kind, why, before, tuned)

    def _goal(self) -> tuple[float, float]:
        return self._best.rank if self._best is not None else (float("inf"), float("inf"))

    def _record(
        self, number: int, kind: str, why: list[str], before: Candidate | None, after: Candidate
    ) -> None:
        fitted = before is not None and before.overrun == 0
        self._steps.append(
            Step(
                trial=number,
                kind=kind,
                why=tuple(why),
                before=before.time if fitted and before is not None else None,
                after=after.time,
                memory=after.memory,
                better=before is None or after.rank < before.rank,
                plan=in_short(self.space, after.state),
                priced=self.space.priced,
                seconds=time.monotonic() - self._begun,
            )
        )

    def _relieve(
        self, here: Candidate, hop: int, goal: tuple[float, float], path: list[str]
    ) -> tuple[Candidate, list[str]] | None:
        """Something better than `goal`, and how it was reached; None if there is none.

        If no primitive is better at once, the best are followed, up to the limit of hops.
        """
        if hop == self.limits.hops or here.state in self._expanded:
            return None
        self._expanded.add(here.state)
        for stage in bottlenecks(here)[: None if hop == 0 else 1]:
            for why, primitives in groups(self.space, here, stage):
                found: list[tuple[Candidate, str]] = []
                for primitive in primitives:
                    said = f"stage {stage}: {why}; {primitive.name}"
                    for state in primitive.apply(self.space, here, stage):
                        if self.space.priced >= self._trial_limit or self._late():
                            raise _Enough
                        if state in self._expanded:
                            continue
                        candidate = self.space.candidate(state)
                        if candidate is not None:
                            self._consider(candidate)
                            found.append((candidate, said))
                found.sort(key=lambda one: one[0].rank)
                if found and found[0][0].rank < goal:
                    return found[0][0], [found[0][1]]
                for candidate, said in found[:_BEAM]:
                    further = self._relieve(candidate, hop + 1, goal, path)
                    if further is not None:
                        return further[0], [said, *further[1]]
        return None

    def _consider(self, candidate: Candidate) -> None:
        """Keeps a candidate, if it is among the best, and for a later trial."""
        if self._least_memory is None or candidate.memory < self._least_memory:
            self._least_memory = candidate.memory
        if self._best is None or candidate.rank < self._best.rank:
            self._best = candidate
        if candidate.overrun == 0 and all(one.state != candidate.state for one in self._kept):
            self._kept = sorted([*self._kept, candidate], key=lambda one: one.rank)[: self.top]
        state = candidate.state
        if state in self._pooled or state in self._expanded:
            return
        near = candidate.overrun == 0 and candidate.time < _POOL_SLACK * self._best.time
        if near or self._best.overrun > 0:
            self._pooled.add(state)
            heapq.heappush(self._pool, (candidate.rank, len(self._pooled), candidate))
            if len(self._pool) > _POOL_SIZE:
                self._pool = heapq.nsmallest(_POOL_SIZE // 2, self._pool)

    def _start(self) -> Candidate | None:
        """Equal devices and equal times, with the best micro-batch size for it."""
        best: Candidate | None = None
        for micro_batch in self.space.micro_batches:
            for widths in self._even_widths(micro_batch):
                if best is not None and self._late():
                    return best
                found = self._even(micro_batch, widths)
                if found is not None:
                    self._consider(found)
                    if best is None or found.rank < best.rank:
                        best = found
        return best

    def _even(self, micro_batch: int, widths: tuple[int, ...]) -> Candidate | None:
        ops = self.space.model.num_ops
        counts = [ops // self.stages] * self.stages
        counts[-1] += ops - sum(counts)
        rough = uniform_state(micro_batch, widths, counts, [0] * self.stages)
        state = with_micro_batch(self.space, rough, micro_batch)
        return None if state is None else balance(self.space, state)

    def _legal_widths(self, micro_batch: int) -> list[int]:
        widths = self.space.model.tables(micro_batch).width
        return sorted({int(width) for width in widths}, reverse=True)

    def _even_widths(self, micro_batch: int) -> list[tuple[int, ...]]:
        """Widths that add up to all devices, the most equal first."""
        legal = self._legal_widths(micro_batch)
        found: list[tuple[int, ...]] = []

        def extend(chosen: tuple[int, ...], left: int, largest: int) -> None:
            stages = self.stages - len(chosen)
            if not stages:
                if left == 0:
                    found.append(chosen)
                return
            for width in legal:
                # Descending, so that what is left can be neither too much nor too little.
                if width <= largest and width * stages >= left and left - width >= stages - 1:
                    extend((*chosen, width), left - width, width)

        extend((), self.space.model.num_devices, self.space.model.num_devices)
        found.sort(key=lambda widths: (sum(width**2 for width in widths), widths))
        return found[:_START_WIDTHS]

    def _restart(self) -> Candidate | None:
        """Random widths, borders of equal times, a random micro-batch size."""
        for _ in range(50):
            micro_batch = self._random.choice(self.space.micro_batches)
            legal = self._legal_widths(micro_batch)
            left = self.space.model.num_devices
            widths: list[int] = []
            for stage in range(self.stages):
                behind = self.stages - 1 - stage
                fit = [width for width in legal if width <= left - behind]
                if behind == 0:
                    fit = [width for width in fit if width == left]
                if not fit:
                    break
                widths.append(self._random.choice(fit))
                left -= widths[-1]
            else:
                self._random.shuffle(widths)
                found = self._even(micro_batch, tuple(widths))
                if found is not None:
                    return found
        return None


_Progress = tuple[int, int, float]
_worker: tuple[Callable[[], Space], SimpleQueue[_Progress]] | None = None


def _begin(make: Callable[[], Space], events: SimpleQueue[_Progress]) -> None:
    global _worker
    _worker = make, events
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one


def _work(stages: int, seed: int, limits: Limits, top: int) -> Found:
    assert _worker is not None
    make, events = _worker
    return Search(make(), stages, seed, limits, top).run(lambda *event: events.put(event))


def search(
    make: Callable[[], Space],
    stages: Sequence[int],
    seed: int = 0,
    limits: Limits | None = None,
    top: int = 1,
    workers: int = 1,
    progress: Callable[[int, int, float], None] | None = None,
) -> list[Found]:
    """Searches plans of several numbers of stages, each by itself.

    Args:
        make: makes the plans' space; once for each number of stages.
        stages: the numbers of stages.
        seed: of the restarts. With it and a number of steps the answer is always the same.
        limits: when to end.
        top: how many plans of each number of stages to keep.
        workers: processes; 1 means this one.
        progress: is told a number of stages, the trial and the best time so far.

    Returns:
        The results for each number of stages, in their order.
    """
    limits = limits or Limits()
    workers = min(workers, len(stages))
    if limits.seconds is not None:
        each = limits.seconds * workers / len(stages)
        limits = dataclasses.replace(limits, seconds=each)
    if workers <= 1:
        return [Search(make(), one, seed, limits, top).run(progress) for one in stages]
    context = multiprocessing.get_context("fork")
    events: SimpleQueue[_Progress] = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, context, _begin, (make, events)) as pool:
        # The most stages take longest.
        order = sorted(stages, reverse=True)
        futures = {one: pool.submit(_work, one, seed, limits, top) for one in order}
        mine = set(multiprocessing.active_children()) - others
        waiting = set(futures.values())
        try:
            while waiting:
                _, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                while not events.empty():
                    event = events.get()
                    if progress is not None:
                        progress(*event)
            return [futures[one].result() for one in stages]
        except BaseException:
            # Else the pool would wait for searches that nobody asks for any more.
            for process in mine:
                process.terminate()
            raise


def best_plans(found: Sequence[Found], top: int, memory_limit: float) -> list[Plan]:
    """The best plans over all numbers of stages.

    Raises:
        NoPlanFits: if there is none, with what would be needed.
    """
    plans = sorted((plan for one in found for plan in one.plans), key=_predicted)
    if plans:
        return plans[:top]
    least = [one.least_memory for one in found if one.least_memory is not None]
    if least:
        priced = sum(one.priced for one in found)
        raise NoPlanFits(
            f"no plan fits into {memory_limit:,.0f} MB a device: of {priced:,} plans the smallest "
            f"needs {min(least):,.0f} MB"
        )
    reasons = sorted({reason for one in found for reason in one.left_out})
    raise NoPlanFits("no plan could be priced" + "".join(f"\n  {reason}" for reason in reasons[:5]))


def _predicted(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.time_ms
