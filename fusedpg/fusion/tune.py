"""Times the schedules of a program on the group that runs it, and agrees on one.

What ranks decide by goes through a collective of the group first, so that all decide alike: what
each schedule took on its slowest rank, whether a rank raised, whether the time is over.

Choices are remembered in the process, and under FUSEDPG_CACHE_DIR. A choice is the title of a
schedule, found by the program (with its shapes and types) and by where it was timed. A file that is
damaged, or of schedules that there are no longer, is as good as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from fusedpg._refusal import telling
from fusedpg._registration import load_extension
from fusedpg.functional import group_info
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.ir import Node, Program
from fusedpg.fusion.places import Ranks, held
from fusedpg.fusion.plan import complete, start
from fusedpg.fusion.private import content, directory
from fusedpg.fusion.schedule import Schedule, ordered

_log = logging.getLogger("fusedpg")
SECONDS = 5.0
# A sample is of so many calls that it takes about this long.
_SAMPLE = 500e-6
_ROUNDS = (3, 15)
# What was so many times as slow as the fastest in a first run is not timed again.
_HOPELESS = 3.0
_memory: dict[str, str] = {}
_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a schedule took."""

    schedule: Schedule
    seconds: float | None  # the median of its slowest rank; None: it has none
    samples: int = 0
    note: str = ""  # why there is none, or fewer samples

    @property
    def bytes(self) -> int:
        """What a rank sends."""
        return self.schedule.program.bytes()


@dataclasses.dataclass(frozen=True)
class Report:
    """What tuning a program found; printed, a table."""

    program: Program
    rows: tuple[Timed, ...]
    chosen: Schedule
    source: str  # "timed", "memory" or "disk": where the choice comes from
    cost: float  # seconds that tuning took on the slowest rank
    limit: float  # that it might take
    backward: Report | None = None  # of the program's backward, where it has one

    def __str__(self) -> str:
        return self._table() if self.backward is None else f"{self._table()}\n{self.backward}"

    def _table(self) -> str:
        shapes = ", ".join(node.type for node in self.program.inputs if not node.scalar)
        head = f"{self.program.name}({shapes}) on {self.program.world_size} ranks"
        if self.source != "timed":
            return f"{head}: {self.chosen.title} (timed before, from {self.source})"
        lines = [f"{head}: tuned in {self.cost:.2f} s (limit {self.limit:g} s)"]
        lines.append(f"  {'ms':>9} {'bytes sent':>12} {'samples':>7}  schedule")
        slowest = float("inf")
        for row in sorted(self.rows, key=lambda row: row.seconds or slowest):
            shown = "-" if row.seconds is None else f"{1e3 * row.seconds:.4g}"
            mark = "* " if row.schedule is self.chosen else "  "
            text = f"{mark}{shown:>9} {row.bytes:>12} {row.samples:>7}  {row.schedule.title}"
            lines.append(text + (f"  ({row.note})" if row.note else ""))
        return "\n".join(lines)


class _Group:
    """The group, and collectives by which its ranks agree."""

    def __init__(self, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device

    def most(self, *values: float) -> list[float]:
        """The largest of each over the ranks: the same everywhere, as it is one of them."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.group)
        found: list[float] = total.tolist()
        return found

    def sample(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one of so many calls, on this rank, of ranks that begin together."""
        self.most(0.0)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) / calls


def tune(
    program: Program,
    group: dist.ProcessGroup,
    rank: int,
    arguments: Mapping[str, object],
    targets: Sequence[torch.Tensor] = (),
    *,
    seconds: float = SECONDS,
    again: bool = False,
) -> Report:
    """The fastest schedule of a program on these arguments; a collective of the group.

    Args:
        targets: what `into` was given.
        seconds: no further schedule is begun when the slowest rank has spent these.
        again: time also what is known.
    """
    begun = time.perf_counter()
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    ranks = _Group(group, rank, device)
    candidates = ordered(program, Ranks.of(group).one_host)
    found, source = known(program, group, device.type, bool(targets)) if rank == 0 else (None, "")
    titles = [schedule.title for schedule in candidates]
    index = titles.index(found) if found in titles and not again else -1
    same = float(_fingerprint(titles))
    number, disk, high, low = ranks.most(
        float(index) if rank == 0 else -1.0, float(source == "disk"), same, -same
    )
    if high != -low:
        raise FusionError(f"{program.name}: the ranks' programs differ, so they cannot be tuned")
    if number >= 0:
        chosen = candidates[int(number)]
        cost = time.perf_counter() - begun
        return Report(program, (), chosen, "disk" if disk else "memory", cost, seconds)
    rows = _timed(candidates, ranks, arguments, targets, begun, seconds)
    timed = [row for row in rows if row.seconds is not None]
    if not timed:
        notes = "; ".join(f"{row.schedule.title}: {row.note}" for row in rows)
        raise FusionError(f"{program.name}: no schedule could be timed: {notes}")
    best = min(timed, key=lambda row: row.seconds or 0.0)
    (cost,) = ranks.most(time.perf_counter() - begun)
    report = Report(program, tuple(rows), best.schedule, "timed", cost, seconds)
    if rank == 0:
        remember(program, group, device.type, bool(targets), best.schedule.title)
    _log.info("%s", report)
    return report


def _fingerprint(titles: Sequence[str]) -> int:
    """The same where ranks have the same list; small enough for a float64."""
    result = 7
    for text in titles:
        for character in text.encode():
            result = (result * 257 + character) % ((1 << 52) - 47)
    return result


def _timed(
    candidates: Sequence[Schedule],
    ranks: _Group,
    arguments: Mapping[str, object],
    targets: Sequence[torch.Tensor],
    begun: float,
    limit: float,
) -> list[Timed]:
    """Each schedule once, with its compilation; then those that may win in turn, round by round."""
    calls: dict[int, Callable[[], object]] = {}
    first: dict[int, float] = {}
    notes: dict[int, str] = {}
    mine, into = _copies(ranks.group, arguments, targets)

    def renew() -> None:
        # What calls have written over and over would end in infinities.
        with torch.no_grad():
            for copy, target in zip(into, targets):
                copy.copy_(target)

    for number, schedule in enumerate(candidates):
        (spent,) = ranks.most(time.perf_counter() - begun)
        if spent > limit and first:
            notes[number] = "not timed: the time was over"
            continue
        call = _call(schedule, ranks, mine, into)
        error, slowest = "", 0.0
        for alone in (True, False):  # first it compiles, and touches memory
            taken = 0.0
            try:
                if alone:
                    renew()
                    call()
                else:
                    taken = ranks.sample(call, 1)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}".split("\n")[0]
            # Where the group has failed this raises, too: then there is nothing to choose.
            failed, slowest = ranks.most(float(bool(error)), taken)
            if failed:
                notes[number] = error or "another rank raised"
                break
        if number in notes:
            continue
        calls[number], first[number] = call, slowest
    fast = min(first.values(), default=0.0)
    for number, slowest in first.items():
        if slowest > _HOPELESS * fast:
            del calls[number]
            notes[number] = "far slower in the first run"
    batch = {n: max(1, min(64, int(_SAMPLE / max(first[n], 1e-7)))) for n in calls}
    samples: dict[int, list[float]] = {number: [] for number in calls}
    order = list(calls)
    for done in range(_ROUNDS[1]):
        (spent,) = ranks.most(time.perf_counter() - begun)
        if spent > limit and done >= _ROUNDS[0]:
            break
        for number in order:
            renew()
            samples[number].append(ranks.sample(calls[number], batch[number]))
        order.append(order.pop(0))  # none always follows the same one
    medians = {number: statistics.median(values) for number, values in samples.items()}
    slowest_of = dict(zip(medians, ranks.most(*medians.values()))) if medians else {}
    return [
        Timed(
            schedule,
            slowest_of.get(number, first.get(number)),
            len(samples.get(number, ())) or int(number in first),
            notes.get(number, ""),
        )
        for number, schedule in enumerate(candidates)
    ]


def _call(
    schedule: Schedule,
    ranks: _Group,
    arguments: Mapping[str, object],
    targets: Sequence[torch.Tensor],
) -> Callable[[], object]:
    def call() -> None:
        with telling(ranks.group, *arguments.values()):  # the others are in its collectives
            complete(start(schedule.program, ranks.group, arguments, targets)[1])

    return call


def _copies(
    group: dist.ProcessGroup, arguments: Mapping[str, object], targets: Sequence[torch.Tensor]
) -> tuple[dict[str, object], list[torch.Tensor]]:
    """The arguments and targets again, in memory of their own and of the same kind."""
    made: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _like(tensor, group)
        return made[id(tensor)]

    mine = {
        name: copied(value) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    return mine, [copied(target) for target in targets]


def _like(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A copy; in the group's arena where the tensor is there, if there is room."""
    import fusedpg

    with torch.no_grad():
        source = tensor.detach()
        try:
            if tensor.device.type == "cpu" and fusedpg.in_arena(tensor, group):
                shape = list(tensor.shape)
                return fusedpg.empty(shape, dtype=tensor.dtype, group=group).copy_(source)
        except ValueError:  # another backend
            pass
        except torch.OutOfMemoryError:
            _log.info("the arena has no room for a copy: schedules are timed on ordinary memory")
        return source.clone()


def stand_ins(
    program: Program, rank: int, device: torch.device, numbers: Mapping[str, object]
) -> dict[str, object]:
    """Arguments for a backward program, whose own are not there yet."""

    def ones(node: Node) -> torch.Tensor:
        shape = held(node, program.world_size, rank)
        return torch.ones(shape, dtype=node.dtype, device=device)

    return {node.name: numbers[node.name] if node.scalar else ones(node) for node in program.inputs}


# --- what is remembered --------------------------------------------------------------------------


def _place(group: dist.ProcessGroup) -> str:
    """The facts of a group that its times depend on."""
    try:
        info = group_info(group)
    except ValueError:  # another backend
        return dist.get_backend(group)
    facts = ("engine", "world_size", "local_world_size", "threads", "isa", "transport")
    return ", ".join(f"{fact} {info.get(fact)}" for fact in facts)


def _key(program: Program, group: dist.ProcessGroup, device: str, into: bool) -> str:
    text = re.sub(r"  \S+:\d+$", "", str(program), flags=re.MULTILINE)  # lines of the user's file
    compiled = load_extension()._fusion_settings()[0]
    facts = [text, _place(group), device, "into" if into else "new", f"compiled {compiled}"]
    if device == "cuda":
        facts.append(torch.cuda.get_device_name())
    facts += [torch.__version__, platform.machine(), platform.node(), str(os.cpu_count())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:40]


def known(
    program: Program, group: dist.ProcessGroup, device: str, into: bool
) -> tuple[str | None, str]:
    """The title of what was chosen, and whether from "memory" or "disk"."""
    key = _key(program, group, device, into)
    if key in _memory:
        return _memory[key], "memory"
    try:
        with _directory() as place:
            lines = (content(place / key) or b"").decode().splitlines()
    except (OSError, FusionError, UnicodeDecodeError):
        return None, ""
    return (lines[0], "disk") if lines else (None, "")


def remember(
    program: Program, group: dist.ProcessGroup, device: str, into: bool, title: str
) -> None:
    key = _key(program, group, device, into)
    while len(_memory) >= _KEPT:
        del _memory[next(iter(_memory))]
    _memory[key] = title
    try:
        with _directory() as place:
            with tempfile.NamedTemporaryFile("w", dir=place, prefix=f"{key}.", delete=False) as new:
                new.write(f"{title}\n{program.name}, {_place(group)}\n")
            Path(new.name).replace(place / key)
    except (OSError, FusionError) as error:
        _log.info("what the tuner chose is not kept on disk: %s", error)


def _directory() -> AbstractContextManager[Path]:
    return directory(load_extension()._fusion_settings()[1], "tuned")
