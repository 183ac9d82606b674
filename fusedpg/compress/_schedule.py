"""Which gradients are compressed together: fixed ways, and a search by measured times.

MergeComp (Wang et al. 2023) merges the tensors of a backward into few groups, since each call of
a compressor and of a collective costs something, and more than one, since a group cannot begin
before its last gradient is there.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Generator, Sequence

import numpy as np

MOST_GROUPS = 4
Agree = Callable[[Sequence[float]], list[float]]
Timing = Callable[[float, float, int], None]
"""Gets when a unit began and ended, and its elements."""


def untimed(begin: float, end: float, numel: int) -> None:
    """The `Timing` of units that no search measures."""


class Layout:
    """DDP's buckets in the order of a backward: parameters' elements, and the bucket's type."""

    def __init__(self) -> None:
        self.numels: list[int] = []
        self.buckets: list[tuple[int, object]] = []  # parameters, type and device

    def add(self, numels: Sequence[int], kind: object) -> None:
        self.numels += numels
        self.buckets.append((len(numels), kind))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self.numels == other.numels
            and self.buckets == other.buckets
        )

    __hash__ = None  # type: ignore[assignment]

    def begins(self, other: Layout) -> bool:
        """Whether this is how the other one begins."""
        return (
            self.buckets == other.buckets[: len(self.buckets)]
            and self.numels == other.numels[: len(self.numels)]
        )

    def ends(self) -> list[int]:
        """Positions at which buckets end."""
        found, position = [], 0
        for count, _ in self.buckets:
            position += count
            found.append(position)
        return found

    def forced(self) -> set[int]:
        """Positions at which a group has to end, as what follows is of another type."""
        kinds = [kind for _, kind in self.buckets]
        after = [*kinds[1:], None]
        return {end for end, a, b in zip(self.ends(), kinds, after) if a != b}

    def equal(self, groups: int) -> frozenset[int]:
        """Positions that cut the elements into groups of about equal size."""
        total = np.cumsum([0, *self.numels])
        wanted = [total[-1] * n / groups for n in range(1, groups)]
        cuts = {int(np.abs(total - at).argmin()) for at in wanted}
        return frozenset((cuts | self.forced()) - {0})


class Fixed:
    """Buckets, parameters, or a number of groups."""

    plain = False

    def __init__(self, groups: int | None, by_layer: bool = False) -> None:
        self.groups, self.by_layer = groups, by_layer

    def begin(self, layout: Layout) -> frozenset[int] | None:
        """Positions at which units end; None: at buckets' ends, or those of parameters."""
        if self.groups is None or not layout.buckets:
            return None
        return layout.equal(self.groups)

    def timing(self, position: int) -> Timing:
        return untimed

    def finish(self, agree: Agree) -> None:
        pass

    def restart(self) -> None:
        pass

    def report(self) -> Report:
        raise ValueError('there is a report of schedule="auto" alone')


def make(schedule: str | int, with_plain: bool) -> Fixed | Auto:
    """The schedule of this name. ``with_plain``: "auto" may choose no compression."""
    if schedule == "auto":
        return Auto(with_plain)
    if schedule == "one":
        return Fixed(1)
    if schedule in ("bucket", "layer"):
        return Fixed(None, schedule == "layer")
    if isinstance(schedule, int) and not isinstance(schedule, bool) and schedule >= 1:
        return Fixed(schedule)
    raise ValueError(
        f'schedule is "bucket", "layer", "one", "auto" or a number of groups, got {schedule!r}'
    )


# ---------------------------------------------------------------------------------------------
# The search, apart from training


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Where groups end, and whether they are sent as they are."""

    splits: frozenset[int]
    plain: bool = False


@dataclasses.dataclass
class Measured:
    """The time of a candidate: seconds from the first gradient to the last result; what each group
    took (elements, seconds); and when the gradients before each of the positions were there."""

    seconds: float
    groups: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    ready: dict[int, float] = dataclasses.field(default_factory=dict)


Search = Generator[Candidate, Measured, Candidate]


def search(layout: Layout, with_plain: bool, within: float = 0.03) -> Search:
    """Yields candidates, is sent what each took, and returns the fastest.

    First what anybody would try: no compression, one group, DDP's buckets, equal groups. From their
    groups' times a line (seconds by elements) is fitted, under which the best one to four groups
    are found exactly; these are tried, and then the neighbours of the best. What comes within
    3 % of the best is tried once more, and no compression within 50 %; the least time counts.
    """
    results: dict[Candidate, list[Measured]] = {}

    def tried(candidate: Candidate) -> Generator[Candidate, Measured, None]:
        if candidate not in results:
            results[candidate] = [(yield candidate)]

    ends = frozenset(layout.ends())
    if with_plain:
        yield from tried(Candidate(ends, True))
    for count in range(1, MOST_GROUPS + 1):
        yield from tried(Candidate(layout.equal(count)))
    if len(ends) <= 2 * MOST_GROUPS:
        yield from tried(Candidate(ends))
    for splits in _by_model(layout, results):
        yield from tried(Candidate(splits))
    for step in (0.25, 0.1):
        best = min(results, key=lambda one: results[one][0].seconds)
        if not best.plain:
            for splits in _neighbours(layout, best.splits, step):
                yield from tried(Candidate(splits))
    first = min(found[0].seconds for found in results.values())
    # No compression was tried first, when memory was new to everybody.
    close = [
        c for c, found in results.items()
        if found[0].seconds <= (1.5 if c.plain else 1 + within) * first
    ]  # fmt: skip
    if len(close) > 1:
        for candidate in close:
            results[candidate].append((yield candidate))
    return min(close, key=lambda one: min(m.seconds for m in results[one]))


def _by_model(layout: Layout, results: dict[Candidate, list[Measured]]) -> list[frozenset[int]]:
    compressed = [m for c, found in results.items() if not c.plain for m in found]
    groups = [group for measured in compressed for group in measured.groups]
    ready: dict[int, float] = {}
    for measured in compressed:
        for position, seconds in measured.ready.items():
            ready[position] = min(seconds, ready.get(position, seconds))
    if len({numel for numel, _ in groups}) < 2 or not ready:
        return []
    sizes, seconds = np.array(groups, dtype=np.float64).T
    slope, fixed = np.polyfit(sizes, seconds, 1)
    slope, fixed = max(slope, 0.0), max(fixed, 0.0)
    return best_splits(layout, _when(layout, ready), float(fixed), float(slope))


def _when(layout: Layout, ready: dict[int, float]) -> np.ndarray:
    """When the gradients before each position are there: its bucket's end, by what was seen."""
    seen = sorted(ready.items())
    positions = np.array([0, *(p for p, _ in seen)])
    times = np.maximum.accumulate([0.0, *(t for _, t in seen)])
    ends = np.array([0, *layout.ends()])
    at_ends = np.interp(ends, positions, times)
    count = len(layout.numels)
    return at_ends[np.searchsorted(ends, np.arange(count + 1))]


def best_splits(
    layout: Layout, when: np.ndarray, fixed: float, slope: float
) -> list[frozenset[int]]:
    """The best splits into 1 to 4 groups, where a group of n elements takes fixed + slope * n
    seconds, begins when its gradients are there and the group before it has ended.

    By dynamic programming over the last group: the earliest end of k groups up to a position.
    """
    total = np.cumsum([0, *layout.numels]).astype(np.float64)
    forced = sorted(layout.forced())
    segment = np.searchsorted(forced, np.arange(len(total)), side="left")
    count = len(total)
    end = np.full(count, np.inf)
    end[0] = 0.0
    befores: list[np.ndarray] = []
    found = []
    # A group from i to j lies between two forced ends.
    start_segment = np.searchsorted(forced, np.arange(len(total)), side="right")
    for groups in range(1, MOST_GROUPS + len(forced)):
        costs = fixed + slope * (total[None, :] - total[:, None])
        allowed = (np.arange(count)[:, None] < np.arange(count)[None, :]) & (
            start_segment[:, None] == segment[None, :]
        )
        ends = np.where(allowed, np.maximum(end[:, None], when[None, :]) + costs, np.inf)
        befores.append(ends.argmin(0))
        end = ends.min(0)
        if groups >= len(forced) and np.isfinite(end[-1]):
            position, splits = count - 1, set()
            for before in reversed(befores):
                splits.add(position)
                position = int(before[position])
            found.append(frozenset(splits))
    return found


def _neighbours(layout: Layout, splits: frozenset[int], step: float) -> list[frozenset[int]]:
    """Splits of which one is moved, by a share of the groups on either side."""
    total = np.cumsum([0, *layout.numels])
    order = [0, *sorted(splits)]
    found = []
    for before, at, after in zip(order, order[1:], order[2:]):
        if at in layout.forced():
            continue
        for other in (before, after):
            wanted = total[at] + step * (total[other] - total[at])
            moved = int(np.abs(total - wanted).argmin())
            if moved not in (before, at, after):
                found.append((splits - {at}) | {moved})
    return found


# ---------------------------------------------------------------------------------------------
# The search, in training


@dataclasses.dataclass(frozen=True)
class Tried:
    """One line of a report."""

    candidate: Candidate
    seconds: float
    elements: tuple[int, ...]  # of its groups
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """The trials of a search, in order: prints as a table; ``plot`` draws it."""

    tried: tuple[Tried, ...]
    steps: int

    def __str__(self) -> str:
        lines = [f"{'ms':>9}  groups (elements)"]
        for one in self.tried:
            what = "as they are: " if one.candidate.plain else ""
            sizes = ", ".join(f"{count:,}" for count in one.elements)
            mark = " *" if one.chosen else ""
            lines.append(f"{1e3 * one.seconds:9.2f}  {what}{sizes}{mark}")
        lines.append(f"{len(self.tried)} ways tried in {self.steps} steps of training")
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """Saves a figure: the time of each way that was tried, in order. Needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4))
        for number, one in enumerate(self.tried):
            color = "tab:gray" if one.candidate.plain else "tab:blue"
            axes.bar(number, 1e3 * one.seconds, color="tab:green" if one.chosen else color)
            text = "none" if one.candidate.plain else str(len(one.elements))
            axes.annotate(text, (number, 1e3 * one.seconds), ha="center", va="bottom", fontsize=7)
        axes.set_xlabel("tried, in order (number of groups above)")
        axes.set_ylabel("first gradient to last result, ms")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


class Auto:
    """Tries ways in the steps of training, each of which is an ordinary one, and keeps the fastest.

    All decisions are made from times that the ranks have agreed on (the slowest rank's).
    """

    by_layer = False
    # Steps of a candidate: the first ones are not counted, as memories are laid out anew in them.
    WARM, COUNTED = 1, 3

    def __init__(self, with_plain: bool = True) -> None:
        self.with_plain = with_plain  # whether sending gradients as they are is a choice
        self._clock = time.perf_counter
        self.restart()

    def restart(self) -> None:
        """DDP's buckets have changed."""
        self._search: Search | None = None
        self._layout = Layout()
        self._now: Candidate | None = None
        self._chosen: Candidate | None = None
        self._samples: list[Measured] = []
        self._skipped = self._steps = 0
        self._tried: list[tuple[Candidate, float]] = []

    @property
    def plain(self) -> bool:
        return self._now is not None and self._now.plain

    def begin(self, layout: Layout) -> frozenset[int] | None:
        if not layout.buckets:
            return None
        if self._search is None:
            self._layout = layout
            self._search = search(layout, self.with_plain)
            self._now = next(self._search)
        self._began = self._clock()
        self._ended = self._began
        self._groups: list[tuple[int, float]] = []
        self._ready: dict[int, float] = {}
        assert self._now is not None
        return self._now.splits

    def timing(self, position: int) -> Timing:
        if self._search is None:
            return untimed
        # On the thread of the hook; lists and dicts are each appended to by one thread.
        self._ready[position] = self._clock() - self._began
        groups = self._groups

        def took(begin: float, end: float, numel: int) -> None:
            groups.append((numel, end - begin))
            self._ended = end

        return took

    def finish(self, agree: Agree) -> None:
        """After the last group of a step."""
        if self._search is None or self._chosen is not None:
            return
        assert self._now is not None
        self._steps += 1
        if self._skipped < self.WARM:
            self._skipped += 1
            return
        self._samples.append(Measured(self._ended - self._began, self._groups, self._ready))
        if len(self._samples) < self.COUNTED:
            return
        measured = _agreed(self._samples, agree)
        self._samples, self._skipped = [], 0
        self._tried.append((self._now, measured.seconds))
        try:
            self._now = self._search.send(measured)
        except StopIteration as done:
            self._now = self._chosen = done.value

    def report(self) -> Report:
        found: dict[Candidate, float] = {}
        for candidate, seconds in self._tried:
            found[candidate] = min(seconds, found.get(candidate, seconds))
        total = np.cumsum([0, *self._layout.numels])
        return Report(
            tuple(
                Tried(
                    one, seconds,
                    tuple(int(n) for n in np.diff(total[[0, *sorted(one.splits)]])),
                    one == self._chosen,
                )
                for one, seconds in found.items()
            ),
            self._steps,
        )  # fmt: skip


def _agreed(samples: Sequence[Measured], agree: Agree) -> Measured:
    """Medians of the samples, of the slowest rank: the same on all ranks."""
    seconds = statistics.median(sample.seconds for sample in samples)
    groups = [
        statistics.median(sample.groups[n][1] for sample in samples)
        for n in range(len(samples[0].groups))
    ]
    positions = sorted(samples[0].ready)
    ready = [statistics.median(sample.ready[at] for sample in samples) for at in positions]
    numbers = agree([seconds, *groups, *ready])
    sizes = [numel for numel, _ in samples[0].groups]
    return Measured(
        numbers[0],
        list(zip(sizes, numbers[1 : 1 + len(groups)])),
        dict(zip(positions, numbers[1 + len(groups) :])),
    )
