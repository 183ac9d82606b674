"""What the benchmarks share: processes, groups, interleaved timing, statistics, tables, bars.

A benchmark is cases, which are data, and a function that measures one of them on a rank. `run` has
it called by ranks of this machine, of mpirun, or of hosts that are network namespaces.

An operation's time is the *wall*: the last rank's end minus the first rank's start, on the
monotonic clock that all processes of one machine share. (Medians per rank mislead when ranks
outnumber cores: a rank that starts late finds the work done.) The arms of a comparison run in
turn, round by round, so that a drift of the machine meets all of them alike; and a plain copy of
the same bytes by all ranks at once runs among them as the limit that memory sets.

Gloo at 2 ranks and up to 1 MB is bimodal (about 0.3 or 3 ms a call). Ratios to a peer use the
peer's *fast mode*: the median of its lower cluster where its samples split in two, else its median.
Our own time is always the median of all samples.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import datetime
import functools
import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import platform
import random
import shlex
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# One thread a rank; before torch, which reads the first when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FUSEDPG_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor

import _mpi
import _words as words

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = RESULTS.parent.parent / "build/figures"  # drawn from the results, and not kept
COPY = "copy"  # the arm that copies the same bytes: the limit
TIMEOUT = datetime.timedelta(minutes=5)
PEERS_OF_THEIR_OWN = ("deepspeed", "mpi")  # in --backends, but none of c10d's

# ---------------------------------------------------------------------------------------------
# Processes


class Clock:
    """Common start and common clock of the ranks, in shared memory.

    None of it is the operation under test: every rank owns one cell of each array and polls the
    others'. Before a sample the ranks poll hard, for a close start; after it they sleep, so that
    early ones leave the cores to late ones.
    """

    def __init__(self, rank: int, world_size: int, cells: Any) -> None:
        self._rank = rank
        self._world_size = world_size
        self._cells = cells  # world_size arrivals, then starts, then ends
        self._epoch = 0
        self._parent = os.getppid()

    def barrier(self, *, sleep: bool = True) -> None:
        self._epoch += 1
        self._cells[self._rank] = self._epoch
        polls = 0
        # Many ranks that wait would take all cores from those that are late.
        patience, pause = (20000, 50e-6) if self._world_size <= 16 else (20, 1e-3)
        while min(self._cells[: self._world_size]) < self._epoch:
            polls += 1
            if (sleep and polls > 20) or polls > patience:
                time.sleep(pause)
                if os.getppid() != self._parent:
                    raise RuntimeError("the process that started the ranks is gone")
            else:
                os.sched_yield()

    def sample(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds that one of `calls` back-to-back calls takes; the same figure on every rank."""
        world_size, rank = self._world_size, self._rank
        self.barrier(sleep=False)
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        end = time.perf_counter_ns()
        self._cells[world_size + rank] = start
        self._cells[2 * world_size + rank] = end
        self.barrier()
        starts = self._cells[world_size : 2 * world_size]
        ends = self._cells[2 * world_size : 3 * world_size]
        # Cells are written again only after the next barrier, which waits for this reader.
        return (max(ends) - min(starts)) / calls * 1e-9


@dataclass(eq=False)
class Context:
    """One rank's view of a benchmark: its place, its groups by backend, the clock."""

    rank: int
    world_size: int
    clock: Clock
    groups: dict[str, dist.ProcessGroup]
    made: dict[Any, Any] = field(default_factory=dict)

    def once(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """`make(self, *arguments)`, which all cases share.

        It ends before the groups do: Python cannot exit while one of Gloo's is left.
        """
        key = make, arguments
        if key not in self.made:
            self.made[key] = make(self, *arguments)
        return self.made[key]


Measure = Callable[[Context, argparse.Namespace, Any], "list[Row]"]
FOLDER = "FUSEDPG_BENCH_FOLDER"  # where ranks that a launcher has started find their job


@dataclass(frozen=True)
class Hosts:
    """Hosts with so many ranks each, whose links have a rate, as `tc` writes it; None: no limit.

    They are network namespaces; a single one is this machine. `others` are hosts without ranks;
    `start` runs servers on the namespaces, and gives what ranks have in their environment.
    """

    count: int
    ranks: int = 1
    rate: str | None = None
    others: int = 0
    start: Callable[[Any], dict[str, str]] | None = None


@dataclass(frozen=True)
class Job:
    """What the ranks of a run do: they measure case after case."""

    measure: Measure
    args: argparse.Namespace
    cases: Sequence[Any]
    titles: Sequence[str]
    own_cores: bool = True  # for each host's ranks, where there are enough

    def work(self, context: Context, send: Callable[[list[Row]], object]) -> None:
        """One rank's part; rank 0 sends the rows of each case."""
        for case in self.cases:
            rows = self.measure(context, self.args, case)
            if context.rank == 0:
                send(rows)
        context.made.clear()
        context.clock.barrier()

    def bar(self, done: Callable[[], int | None]) -> None:
        """Shows how many cases are done, until that is None."""
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own one leaks a semaphore where a rank is killed
        # Runs beside each other, in threads, would write over each other's bars.
        quiet = threading.current_thread() is not threading.main_thread()
        with tqdm(total=len(self.cases), unit="case", ncols=90, disable=quiet) as bar:
            bar.set_description(self.titles[0])
            while (count := done()) is not None:
                if count > bar.n:
                    bar.update(count - bar.n)
                    bar.set_description(self.titles[min(count, len(self.cases) - 1)])


def run(
    measure: Measure,
    args: argparse.Namespace,
    cases: Sequence[Any],
    *,
    title: Callable[[Any], str] = str,
    hosts: Hosts | None = None,
    each_a_host: bool = False,
) -> list[Row]:
    """The rows of all cases, each measured by args.world_size processes, or by the ranks on hosts.

    Exits non-zero if a rank fails, and with 2 where there can be no hosts. With ``each_a_host``
    every rank takes itself for that of a host of its own; there may be many, so they are forks of
    this process and share the memory of what it has imported.
    """
    import _hosts

    if FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
        file = folder / "rows"

        def send(rows: list[Row]) -> None:
            with file.open("a") as lines:
                lines.write(json.dumps([asdict(row) for row in rows]) + "\n")

        be_rank = _mpi.be_rank if _mpi.is_rank() else _hosts.be_rank
        be_rank(pickle.loads((folder / "job").read_bytes()), send)
        sys.exit()
    if not cases:
        return []
    servers = hosts is not None and hosts.start is not None
    job = Job(measure, args, cases, [title(case) for case in cases], own_cores=not servers)
    if hosts is not None:
        return _hosts.launch(job, hosts)
    if "mpi" in args.backends:
        reason = _mpi.why_not()
        if reason is None:
            return _mpi.launch(job)
        print(f"mpi skipped: {reason}", file=sys.stderr)
    return _run_here(job, each_a_host)


def launched(
    job: Job,
    start: Callable[[list[str], dict[str, str]], object],
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> list[Row]:
    """The rows of this program's ranks, which `start` starts as a command with an environment.

    `within` ends before `start` is waited for, so that what it ends cannot be waited for in vain.
    """
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        within or contextlib.nullcontext(),
    ):
        file = Path(name) / "rows"
        file.touch()
        (Path(name) / "job").write_bytes(pickle.dumps(job))
        program = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
        running = pool.submit(start, program, {FOLDER: name})

        def done() -> int | None:
            going = concurrent.futures.wait([running], timeout=0.5).not_done
            return file.read_text().count("\n") if going else None

        job.bar(done)
        running.result()
        lines = file.read_text().splitlines()
        return [Row(**row) for line in lines for row in json.loads(line)]


def _run_here(job: Job, each_a_host: bool) -> list[Row]:
    """On processes that this one starts itself."""
    world_size = job.args.world_size
    mp: Any = multiprocessing.get_context("fork" if each_a_host else "spawn")
    cells = mp.RawArray(ctypes.c_int64, 3 * world_size)
    port = mp.RawArray(ctypes.c_int, 1)
    receiver, sender = mp.Pipe(duplex=False)
    processes = [
        mp.Process(
            target=rank_main,
            args=(job, rank, cells, port, sender.send),
            kwargs={"host": f"host {rank}" if each_a_host else ""},
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    sender.close()
    # The parent hosts the store on a port that the system chose: no two runs can collide. Its
    # thread begins when all ranks are there, as a fork may not hold what another thread locked.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port[0] = store.port
    found: list[list[Row]] = []
    alive: dict[Any, Any] = {process.sentinel: process for process in processes}
    watched: list[Any] = [receiver, *alive]

    def done() -> int | None:
        for ready in multiprocessing.connection.wait(watched) if watched else ():
            if ready is receiver:
                try:
                    found.append(receiver.recv())
                except EOFError:
                    watched.remove(receiver)
                continue
            watched.remove(ready)
            process = alive.pop(ready)
            process.join()
            if process.exitcode != 0:
                sys.exit(f"a rank failed with exit code {process.exitcode}")
        return len(found) if watched else None

    try:
        job.bar(done)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if len(found) < len(job.cases):
        sys.exit("rank 0 ended with no result")
    return [row for rows in found for row in rows]


def rank_main(
    job: Job,
    rank: int,
    cells: Any,
    port: Any,
    send: Callable[[list[Row]], object],
    *,
    host: str = "",
) -> None:
    """The whole life of a rank whose clock is in `cells`."""
    try:
        while not port[0]:
            time.sleep(1e-3)
        if host:
            os.environ["FUSEDPG_HOST_ID"] = host
        torch.set_num_threads(1)
        world_size = job.args.world_size
        groups = _make_groups(job.args.backends, rank, world_size, port[0])
        job.work(Context(rank, world_size, Clock(rank, world_size, cells), groups), send)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # The parent ends the other ranks, which may be waiting for this one.
        os._exit(1)


def _make_groups(
    backends: Sequence[str], rank: int, world_size: int, port: int
) -> dict[str, dist.ProcessGroup]:
    """A group of every c10d backend; "fused" is the default group, as in a user's script."""
    names = [name for name in backends if name not in PEERS_OF_THEIR_OWN]
    names.sort(key=lambda name: name != "fused")
    if "fused" in names:
        import fusedpg  # noqa: F401  (registers the backend)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    first = names[0] if names else "gloo"
    dist.init_process_group(first, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    groups = {first: dist.group.WORLD}
    for name in names[1:]:
        groups[name] = dist.new_group(backend=name, timeout=TIMEOUT)
    return groups


@functools.cache
def fake_group() -> dist.ProcessGroup:
    """A group of torch's backend that communicates nothing."""
    # It is registered where it is imported.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    return dist.new_group(backend="fake")


@functools.cache
def load_deepspeed(rank: int, world_size: int) -> Callable[[Tensor], object] | None:
    """DeepSpeed's shared-memory all-reduce, or None (with one line on rank 0) without it."""
    os.environ["LOCAL_SIZE"] = str(world_size)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")  # it only names its segment by these
    try:
        from deepspeed.accelerator import get_accelerator

        module = get_accelerator().create_op_builder("ShareMemCommBuilder").load()
        module.initialize(world_size, rank)
    except Exception as error:  # an optional peer: whatever stops it, the others are measured
        if rank == 0:
            print(f"deepspeed skipped: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    all_reduce: Callable[[Tensor], object] = torch.ops.deepspeed.inference_all_reduce_
    return all_reduce


# ---------------------------------------------------------------------------------------------
# Measurement


@dataclass
class Row:
    """Times in seconds of one arm in one case."""

    case: str
    size: int  # bytes
    arm: str
    median: float
    p25: float
    p75: float
    fast: float  # fast mode, see the head of this file
    calls: int  # per sample
    samples: int
    bus_factor: float | None = None  # bus bandwidth over algorithm bandwidth, as in nccl-tests
    more: dict[str, Any] = field(default_factory=dict)  # what else a benchmark notes, by name

    @classmethod
    def of(
        cls,
        case: str,
        size: int,
        arm: str,
        samples: Sequence[float],
        *,
        modes: bool = True,
        **others: Any,
    ) -> Row:
        """The quartiles of samples; one alone is all of them. `modes`: they may have two."""
        some = [*samples] * (2 if len(samples) == 1 else 1)
        p25, median, p75 = statistics.quantiles(some, n=4, method="inclusive")
        given = {"calls": 1, "samples": len(samples), **others}
        fast = fast_mode(samples) if modes else median
        return cls(case, size, arm, median, p25, p75, fast, **given)

    @property
    def iqr(self) -> float:
        return self.p75 - self.p25

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size / self.median


def fast_mode(samples: Sequence[float]) -> float:
    """Median of the lower cluster of two-mode samples, else of all.

    Two modes: neighbours in sorted order lie a factor 1.5 apart with at least a tenth of the
    samples (and two) on the lower side.
    """
    ordered = sorted(samples)
    at_least = max(2, math.ceil(len(ordered) / 10))
    cuts = range(at_least, len(ordered))
    cut = max(cuts, key=lambda i: ordered[i] / ordered[i - 1], default=len(ordered))
    if cut < len(ordered) and ordered[cut] >= 1.5 * ordered[cut - 1]:
        return statistics.median(ordered[:cut])
    return statistics.median(ordered)


def measure(
    context: Context,
    arms: Mapping[str, Callable[[], object]],
    *,
    case: str,
    size: int,
    rounds: int,
    bus_factor: float | None = None,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> list[Row]:
    """Time the arms in turn, `rounds` times; every rank gets the same rows.

    Short calls are timed in batches, back to back: of about 300 us, or 3 ms where ranks outnumber
    cores and have to be scheduled before they can start together. An arm in `prepare` is timed
    one call at a time, and what stands there runs before each, outside the timed part.
    """
    clock = context.clock
    prepare = prepare or {}
    cores = len(os.sched_getaffinity(0))
    span = 300e-6 if context.world_size <= cores else 3e-3
    batch: dict[str, int] = {}
    for name, call in arms.items():
        if name in prepare:
            prepare[name]()
            clock.sample(call)
            batch[name] = 1
            continue
        warm = min(clock.sample(call) for _ in range(3))
        batch[name] = min(256, math.ceil(span / warm))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    shuffled = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        shuffled.shuffle(order)  # no arm always follows the same one
        for name in order:
            if name in prepare:
                prepare[name]()
            samples[name].append(clock.sample(arms[name], batch[name]))
    return [
        Row.of(case, size, name, values, calls=batch[name], bus_factor=bus_factor)
        for name, values in samples.items()
    ]


def copy_arm(size: int) -> Callable[[], object]:
    """A plain copy of `size` bytes between two buffers of this rank."""
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    return lambda: target.copy_(source)


def alone(context: Context, threads: int, call: Callable[[], object]) -> None:
    """A call on rank 0, with so many threads, while the others wait."""
    if context.rank == 0:
        torch.set_num_threads(threads)
        call()
        torch.set_num_threads(1)


class Incorrect(Exception):
    """A result is wrong: nothing is timed after that."""


def same_on_all_ranks(tensor: Tensor) -> bool:
    """Whether every rank holds the same bits."""
    digest = hashlib.sha256(tensor.numpy().tobytes()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return all(torch.equal(own, other) for other in everyone)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Incorrect(what)


# ---------------------------------------------------------------------------------------------
# Bars


@dataclass(frozen=True)
class Bar:
    """One promise: so many times as fast as `peer` at least, or so many times its time at most."""

    world_size: int
    case: str
    arm: str
    size: int
    peer: str
    at_least: float | None = None  # peer's fast mode / our median
    at_most: float | None = None  # our median / peer's median


def ratio_to_peer(row: Row, peer: Row) -> float:
    return peer.fast / row.median


def ratio_to_limit(row: Row, limit: Row) -> float:
    return row.median / limit.median


def find(rows: Sequence[Row], case: str, size: int, arm: str) -> Row | None:
    return next((r for r in rows if (r.case, r.size, r.arm) == (case, size, arm)), None)


def judged(
    rows: Sequence[Row], bars: Iterable[Bar], world_size: int
) -> list[tuple[Bar, str, str, bool]]:
    """Those bars that the rows say something about: what is wanted, what was measured, if met."""
    found = []
    for bar in bars:
        row, peer = (find(rows, bar.case, bar.size, arm) for arm in (bar.arm, bar.peer))
        if bar.world_size != world_size or row is None or peer is None:
            continue
        if bar.at_least is not None:
            measured, wanted = ratio_to_peer(row, peer), f">= {bar.at_least:g}x"
            good = measured >= bar.at_least
        else:
            assert bar.at_most is not None
            measured, wanted = ratio_to_limit(row, peer), f"<= {bar.at_most:g}x"
            good = measured <= bar.at_most
        found.append((bar, wanted, f"{measured:.2f}x", good))
    return found


def print_bars(rows: Sequence[Row], bars: Sequence[Bar], world_size: int) -> None:
    """Which bars are met. Timing on a shared machine is noise, so nothing fails by it."""
    found = judged(rows, bars, world_size)
    lines = [
        [*work_of(bar), arm_title(bar.peer), wanted, measured,
         "[green]met" if good else "[red]missed"]
        for bar, wanted, measured, good in found
    ]  # fmt: skip
    if lines:
        show("Bars", [*WORK, "against", "bar", "measured", ""], [], lines, wrap=True)
    met = sum(good for *_, good in found)
    print(f"{met} of {len(lines)} bars met at world size {world_size}")


# ---------------------------------------------------------------------------------------------
# Output


def parse_size(text: str) -> int:
    """`64K`, `1M`, `100M` or a number of bytes; K and M are powers of 1024."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        size = int(float(text[:-1]) * units[text[-1].upper()]) if text[-1:].isalpha() else int(text)
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"not a size: {text!r}") from None
    if size < 4:
        raise argparse.ArgumentTypeError(f"smaller than one element: {text!r}")
    return size


def parse_sizes(text: str) -> list[int]:
    """`64K,1M`."""
    return [parse_size(part.strip()) for part in text.split(",")]


def parse_shares(text: str) -> list[float]:
    """`1,.1,.01`: densities."""
    shares = [float(part) for part in text.split(",")]
    if not all(0 < share <= 1 for share in shares):
        raise argparse.ArgumentTypeError("shares above 0, 1 at most")
    return shares


def format_size(size: int) -> str:
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if size >= 1 << power:
            return f"{size / (1 << power):.4g} {unit}B"
    return f"{size} B"


def _comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class Parser(argparse.ArgumentParser):
    """The options that all benchmarks share."""

    def __init__(
        self,
        description: str | None,
        *,
        backends: str = "fused,gloo",
        sizes: str | None = None,
        rounds: int,
    ) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        flag = self.add_argument
        flag("--backends", type=_comma_list, default=backends)
        flag("--world-size", type=int, default=2)
        flag("--rounds", type=int, default=rounds, help="samples of each arm")
        if sizes is not None:
            flag("--sizes", type=parse_sizes, default=sizes)
        flag("--check-bars", action="store_true", help="print which bars are met")
        flag("--plot", nargs="?", type=Path, help="PNG (default: build/figures)")
        flag("--json", nargs="?", type=Path, help="JSON (default: benchmarks/results)")
        flag("--no-save", action="store_true", help="write neither")

    def names(self, flag: str, known: Iterable[str], **more: Any) -> None:
        """An option that takes some of `known`, by comma; by default all of them."""

        def some(text: str) -> list[str]:
            names = _comma_list(text)
            if unknown := set(names) - set(known):
                what = ", ".join(sorted(unknown))
                raise argparse.ArgumentTypeError(f"{what}: choose from {', '.join(known)}")
            return names

        self.add_argument(flag, type=some, **{"default": ",".join(known), **more})


def finish(
    name: str,
    rows: list[Row],
    args: argparse.Namespace,
    *,
    limit: str = COPY,
    bars: Sequence[Bar] = (),
    facts: Mapping[str, Any] | None = None,
) -> int:
    """Table, JSON, PNG, bars; the program's exit status."""
    import _plots

    peer = next((b for b in args.backends if b not in ("fused", *PEERS_OF_THEIR_OWN)), "gloo")
    print_table(rows, peer=peer, limit=limit, title=f"{name}, world size {args.world_size}")
    if not args.no_save:
        stem = f"{name}_p{args.world_size}"
        path, plot = args.json or RESULTS / f"{stem}.json", args.plot or FIGURES / f"{stem}.png"
        save_rows(path, rows, args.world_size, facts=facts)
        print(f"saved {os.path.relpath(path)}")
        for stem, draw in _plots.pictures(name, plot.stem, rows, args.world_size).items():
            _plots.save(plot.with_stem(stem), draw)
            print(f"saved {os.path.relpath(plot.with_stem(stem))}")
    if args.check_bars:
        print_bars(rows, bars, args.world_size)
    return 0


def show(
    title: str,
    texts: Sequence[str],
    figures: Sequence[str],
    lines: Iterable[Sequence[str] | None],
    *,
    wrap: bool = False,
) -> None:
    """Prints a table whose columns are texts, then figures; a line of None begins a section."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for columns, justify in ((texts, "left"), (figures, "right")):
        for column in columns:
            table.add_column(column, justify=justify, no_wrap=not wrap)  # type: ignore[arg-type]
    for line in lines:
        if line is None:
            table.add_section()
        else:
            table.add_row(*line)
    # A file has no width of its own.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def work_of(row: Row | Bar) -> tuple[str, str, str]:
    """Case, size and arm as tables show them."""
    return words.case(row.case), format_size(row.size), arm_title(row.arm)


WORK = ("work", "size", "arm")


def peer_row(rows: Sequence[Row], row: Row, peer: str) -> Row | None:
    """Of the same case: `peer`'s own row for this arm, else the row of `peer`, or its first."""
    same = {r.arm: r for r in rows if (r.case, r.size) == (row.case, row.size)}
    if f"{peer} {row.arm}" in same:
        return same[f"{peer} {row.arm}"]
    return next((r for arm, r in same.items() if arm == peer or arm.startswith(peer + " ")), None)


def arm_title(name: str) -> str:
    """In words, after the letter that the command line knows it by."""
    return f"{name}  {words.arm(name)}" if len(name) == 1 else words.arm(name)


def print_table(rows: Sequence[Row], *, peer: str, limit: str, title: str) -> None:
    bandwidth = any(row.bus_factor is not None for row in rows)
    lines: list[list[str] | None] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and (before.case, before.size) != (row.case, row.size):
            lines.append(None)
        against, bound = peer_row(rows, row, peer), find(rows, row.case, row.size, limit)
        rate = row.algorithm_bandwidth * 1e-9
        bus = f"{rate * row.bus_factor:.2f}" if row.bus_factor and row.arm != limit else ""
        lines.append(
            [
                *work_of(row),
                *(f"{1e3 * t:.4g}" for t in (row.median, row.iqr, row.p25)),
                *((f"{rate:.2f}", bus) if bandwidth else (f"{1 / row.median:.4g}",)),
                f"{ratio_to_peer(row, against):.2f}" if against and row.arm != limit else "",
                f"{ratio_to_limit(row, bound):.2f}" if bound else "",
            ]
        )
    rates = ("alg GB/s", "bus GB/s") if bandwidth else ("per s",)
    figures = ["median ms", "IQR ms", "p25 ms", *rates, f"x {peer}", f"/ {limit}"]
    show(title, WORK, figures, lines)


def about() -> dict[str, Any]:
    """The command and the machine, as results record them."""
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }


def write(path: Path, head: Mapping[str, Any], rows: Iterable[Any]) -> None:
    """JSON with a row a line, so that a difference of two results can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**head, "rows": []}, indent=1).removesuffix("]\n}")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f"{text}\n{lines}\n ]\n}}\n")


COLUMNS = [column.name for column in fields(Row) if column.name != "more"]


def save_rows(
    path: Path,
    rows: Sequence[Row],
    world_size: int,
    *,
    unit: str = "seconds",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """A line for each case, size and arm; what none of them has is left out."""
    columns = [name for name in COLUMNS if any(getattr(row, name) is not None for row in rows)]
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    head = {**(facts or {}), **about(), "world_size": world_size, "unit": unit}
    lines = (
        [*(getattr(row, name) for name in columns), *(row.more.get(name) for name in more)]
        for row in rows
    )
    write(path, {**head, "columns": columns + more}, lines)


def load(path: Path) -> dict[str, Any]:
    """A saved report, with its rows as such."""
    report: dict[str, Any] = json.loads(path.read_text())
    report["rows"] = [_row(dict(zip(report["columns"], line))) for line in report["rows"]]
    return report


def _row(values: dict[str, Any]) -> Row:
    more = {n: v for n, v in values.items() if n not in COLUMNS and v is not None}
    return Row(**{n: v for n, v in values.items() if n in COLUMNS}, more=more)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
