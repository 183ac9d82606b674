"""What random programs of all subjects share: how they are drawn, run, compared and shrunk.

A subject is a module with

- ``draw(choose, where)``: a program, of frozen dataclasses. `choose` has the methods of
  random.Random, and hypothesis draws what they return, so that a program that fails shrinks.
- ``run(program, context)``: what this rank sees of the program, as Entries in an order that the
  program gives. Whatever it raises is a finding.
- ``oracle(program, world, rank)``: the same Entries, of one process that knows everything.
- ``bound(program)``: how far they may be apart, of the value or as it is; where it has none, all
  bits are the same.
- ``WHERE``: on which pools of ranks its programs run, and ``EXAMPLES``: how many programs one seed
  draws. ``workers(where)`` where a subject needs pools of its own; ``check(program)`` where its
  parent does more than wait.

Both traces may be generators: the oracle says what comes next when the rank has got there. A run
whose oracle takes each step beside it yields Pairs, and there is no ``oracle``. Where the next step
depends on what the steps before have made, a program is a Tape of choices.

A program may have a Fault, which its ``run`` lets happen (`harm`) before each of its steps. Of one
that is fatal all ranks have to hear in time, and what has come until then is right; after any
other the program goes on as if nothing had been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import harness
from checks import cases
from harness import Context

T = TypeVar("T")
# Modules of subjects.
SUBJECTS = {
    "aggregators": "fuzz.aggregators",
    "compressed": "fuzz.compressed",
    "kernels": "fuzz.compress_kernels",
    "hooked": "fuzz.hooked",
    "optimizers": "fuzz.optimizers",
    "scripts": "fuzz.scripts",
    "trips": "fuzz.trips",
    "collectives": "fuzz.collectives",
    "messages": "fuzz.posts",
    "functions": "fuzz.functions",
    "rows": "fuzz.rows",
    "lists": "test_fusion_lists",
    "sums": "test_fusion_sums",
    "tuning": "fuzz.tuning",
    "pipelines": "fuzz.pipelines",
    "targets": "fuzz.targets",
    "layers": "fuzz.layers",
    "shortcuts": "test_fusion_plan_cache",
    "plans": "fuzz.plans",
    "horovod": "test_hvd_calls",
    "gpu": "checks.cuda_ranks",
    "chaos": "fuzz.chaos",
}
SECONDS = 90.0
"""How long ranks may take for one program."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing that a rank sees: a tensor, or anything else that can be compared."""

    label: str
    value: Any
    alike: Any = None  # what must have the same bits on all ranks that have this entry
    bound: tuple[float, float] | None = None  # in place of the program's


@dataclasses.dataclass(frozen=True)
class Pair:
    """What a run sees whose oracle takes each step beside it: there is no ``oracle`` then."""

    found: Entry
    wanted: Entry


Trace = Iterable[Entry]


def done(label: str) -> Pair:
    """A step of which the run itself has compared everything."""
    return Pair(Entry(label, None), Entry(label, None))


class Wrong(AssertionError):
    """The product did something wrong."""


class Failure(AssertionError):
    """Something is wrong; says how to see it again."""


def seed(usual: int) -> int:
    """That of a test, or SEED=..."""
    return int(os.environ.get("SEED", usual))


def subject(name: str) -> Any:
    return importlib.import_module(SUBJECTS[name])


# --- faults ---------------------------------------------------------------------------------------

FATAL = ("kill", "stop", "abort", "leave")
CALM = ("late", "fork", "no memory", "mistake")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong on a rank before one of a program's steps."""

    kind: str
    rank: int
    step: int

    @property
    def fatal(self) -> bool:
        return self.kind in FATAL

    def explains(self, error: BaseException) -> bool:
        """Whether a rank may end its program with this error."""
        return self.fatal and (
            isinstance(error, Ended) or (isinstance(error, RuntimeError) and "fused:" in str(error))
        )


class Ended(Exception):
    """This rank has left its groups, as its program wants."""


def draw_fault(choose: Choices, world: int, steps: int, *, together: bool) -> Fault:
    """`together`: all ranks have all steps, and come to them in one order."""
    kinds = [kind for kind in CALM + FATAL if together or kind != "mistake"]
    return Fault(choose.choice(kinds), choose.randrange(world), choose.randrange(steps))


_held: list[torch.Tensor] = []


def harm(fault: Fault | None, rank: int, step: int, groups: Sequence[Any]) -> None:
    """Does what is to happen before this step; `groups`: the program's that this rank is in."""
    if fault is None or step != fault.step:
        return
    if fault.kind == "mistake":
        _mistake(rank == fault.rank)
    if rank != fault.rank:
        return
    if fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.kind])
    elif fault.kind == "late":
        time.sleep(0.3)
    elif fault.kind == "fork":
        _fork(groups[0] if groups else None)
    elif fault.kind == "no memory":
        for group in groups:
            _held.extend(fill_arena(group))
    elif fault.kind in ("abort", "leave"):
        for group in groups:
            if fault.kind == "leave":
                dist.destroy_process_group(group)
            else:
                group._get_backend(torch.device("cpu")).abort()
        raise Ended


def fill_arena(group: Any = None) -> list[torch.Tensor]:
    """Tensors that leave no room in an arena of a few megabytes."""
    import fusedpg

    held: list[torch.Tensor] = []
    for size in (1 << 18, 1 << 10, 1):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(fusedpg.empty(size, dtype=torch.int32, group=group))
    return held


def _fork(group: Any) -> None:
    """A child may do anything but harm its parent's group."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except dist.DistBackendError:
            code = 7
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 7:
        raise Wrong(f"a forked child ended with {os.waitstatus_to_exitcode(status)}")


def _mistake(mine: bool) -> None:
    """An illegal call on one rank: all hear of it, and their group goes on."""
    length = 4 * dist.get_world_size()
    output = torch.zeros(1).expand(length) if mine else torch.zeros(length)
    try:
        dist.all_gather_into_tensor(output, torch.ones(4))
    except (ValueError, RuntimeError) as error:
        if mine == isinstance(error, dist.DistBackendError):
            raise Wrong(f"a mistake raised {error!r}") from error
    else:
        raise Wrong("a mistake raised nothing")


# --- drawing --------------------------------------------------------------------------------------


class Choices:
    """random.Random's methods. They shrink to what comes first, and to what is not rare."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self._integer = integer

    def randint(self, low: int, high: int) -> int:
        return self._integer(low, high)

    def randrange(self, stop: int) -> int:
        return self.randint(0, stop - 1)

    def getrandbits(self, bits: int) -> int:
        return self.randrange(1 << bits)

    def random(self) -> float:
        return 1 - self.randint(1, 100) / 100

    def choice(self, some: Sequence[T]) -> T:
        return some[self.randrange(len(some))]

    def weighted(self, some: dict[T, int]) -> T:
        return self.choice([one for one, weight in some.items() for _ in range(weight)])

    def sample(self, some: Iterable[T], count: int) -> list[T]:
        left = list(some)
        return [left.pop(self.randrange(len(left))) for _ in range(count)]

    def shuffle(self, some: MutableSequence[Any]) -> None:
        some[:] = self.sample(some, len(some))


@dataclasses.dataclass(frozen=True)
class Tape:
    """The choices of a program whose next step depends on what the steps before have made.

    Such a program is drawn by the ranks while it runs, each of them the same.
    """

    numbers: bytes

    def choices(self) -> TapeChoices:
        return TapeChoices(self.numbers)


class TapeChoices(Choices):
    """They take some of the tape; behind its end they are what comes first."""

    def __init__(self, numbers: bytes) -> None:
        super().__init__(self._next)
        self._numbers, self._at = numbers, 0

    @property
    def left(self) -> int:
        return len(self._numbers) - self._at

    def _next(self, low: int, high: int) -> int:
        count = ((high - low).bit_length() + 7) // 8
        taken = self._numbers[self._at : self._at + count]
        self._at += count
        return low + int.from_bytes(taken, "big") % (high - low + 1)


def draw_tape(choose: Choices, least: int, most: int) -> Tape:
    return Tape(bytes(choose.randrange(256) for _ in range(choose.randint(least, most))))


def each(
    draw: Callable[[Choices], Any],
    seed: int,
    examples: int,
    body: Callable[[Any], Any],
    *,
    shrink: bool = False,
) -> list[Any]:
    """What `body` returns of the simplest program and of those of a seed; the smallest that fails
    comes last."""
    import hypothesis  # not in workers
    import hypothesis.strategies as st

    @st.composite
    def programs(of: st.DrawFn) -> Any:
        return draw(Choices(lambda low, high: int(of(st.integers(low, high)))))

    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]
    returned = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=1 + examples,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def run(program: Any) -> None:
        returned.append(body(program))

    run()
    return returned


# --- running --------------------------------------------------------------------------------------


def workers(where: str) -> harness.Workers:
    """So many ranks, ranks that take each other for those of several hosts, or Gloo's."""
    where = where.removesuffix(", faults")
    if where in harness.HOSTS:
        return harness.pool_of_hosts(where)
    if where == "gloo":
        return harness.pool(3, backend="gloo")
    return harness.pool(int(where))


def world_of(where: str) -> int:
    where = where.removesuffix(", faults")
    return 3 if where == "gloo" else len(harness.HOSTS.get(where, ())) or int(where)


def between_hosts(where: str) -> bool:
    return where in harness.HOSTS


def has_faults(where: str) -> bool:
    return where.endswith(", faults")


@dataclasses.dataclass
class Answer:
    """What a rank says of a program."""

    wrong: list[str] = dataclasses.field(default_factory=list)
    alike: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int = 0


def on_rank(context: Context, name: str, program: Any, *more: Any) -> Answer:
    """Runs a program here, beside its oracle, up to the first difference."""
    module = subject(name)
    answer, limit = Answer(), module.bound(program) if hasattr(module, "bound") else 0.0
    fault: Fault | None = getattr(program, "fault", None)
    oracle: Iterator[Entry] = iter(())
    if hasattr(module, "oracle"):
        oracle = iter(module.oracle(program, context.world_size, context.rank))
    try:
        for found in module.run(program, context, *more):
            if isinstance(found, Pair):
                oracle, found = iter([found.wanted]), found.found
            if fault is not None and fault.fatal:  # what was under way then has not come
                label = found.label
                oracle = itertools.dropwhile(lambda one, label=label: one.label != label, oracle)
            text = difference(found, next(oracle, None), limit)
            if text is not None:
                answer.wrong.append(text)
                return answer
            answer.count += 1
            if found.alike is not None:
                answer.alike[found.label] = digest(found.alike)
    except Exception as error:
        if fault is None or not fault.explains(error):
            raise
    finally:
        _held.clear()
    if fault is None or not fault.fatal:
        answer.wrong += [f"{left.label} has not come" for left in itertools.islice(oracle, 1)]
    return answer


def difference(found: Entry, wanted: Entry | None, limit: Any) -> str | None:
    """What is wrong with an entry."""
    if wanted is None or found.label != wanted.label:
        return f"{found.label} came in place of {wanted.label if wanted else 'the end'}"
    limit = wanted.bound or found.bound or limit
    kind = (torch.Tensor, float) if limit else torch.Tensor
    if not isinstance(found.value, kind) or not isinstance(wanted.value, kind):
        if found.value == wanted.value:
            return None
        both = (found.value, wanted.value)
        texts = ["\n".join(one) if isinstance(one, list) else repr(one) for one in both]
        return f"{found.label}: {texts[0]:.9000}, not {texts[1]:.9000}"
    if limit == 0 and not cases.same(found.value, wanted.value):
        return f"{found.label}: other bits\n{found.value}\n{wanted.value}"
    rtol, atol = limit if isinstance(limit, tuple) else (limit, limit)
    try:
        torch.testing.assert_close(
            found.value, wanted.value, rtol=rtol, atol=atol, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        return f"{found.label}: {error}"
    return None


def digest(value: Any) -> str:
    return cases.digest([value]) if isinstance(value, torch.Tensor) else repr(value)


def check(name: str, where: str, program: Any, *more: Any) -> int:
    """Runs a program on all ranks, and judges what they say together; how much they have seen.

    `more` is for the subject's own run, which the tests of this test give.
    """
    module = subject(name)
    if hasattr(module, "check"):
        return int(module.check(program))
    pool = getattr(module, "workers", workers)(where)
    fault: Fault | None = getattr(program, "fault", None)
    if fault is None:
        answers = pool.run(on_rank, name, program, *more, timeout=SECONDS)
    else:
        answers = _endure(pool, fault, name, program)
    wrong = [f"rank {rank}: {text}" for rank, one in enumerate(answers) for text in one.wrong]
    for label in {label for one in answers for label in one.alike}:
        if len({one.alike[label] for one in answers if label in one.alike}) > 1:
            wrong.append(f"ranks have different bits after {label}")
    if wrong:
        pool.close()  # its groups are in whatever state
        # What others only waited for comes last.
        raise Wrong("\n".join(sorted(wrong, key=lambda text: "timeout after" in text)))
    return sum(one.count for one in answers)


def _endure(pool: harness.Workers, fault: Fault, name: str, program: Any) -> list[Answer]:
    """The answers of all but those that the fault has killed."""
    pool.start(on_rank, name, program)
    others = [rank for rank in range(pool.world_size) if rank != fault.rank]
    answers = pool.collect(SECONDS, ranks=others)
    if fault.kind == "stop":
        pool.signal(fault.rank, signal.SIGCONT)
    victim = pool.collect(SECONDS, ranks=[fault.rank])
    if fault.kind == "kill" and isinstance(victim[0], harness.Died):
        victim = []
    bad = [one for one in answers + victim if not isinstance(one, Answer)]
    if bad or fault.fatal:
        pool.close()
    if bad:
        raise Wrong("\n".join(getattr(one, "trace", repr(one)) for one in bad))
    return answers + victim


def search(name: str, where: str, seed: int, *, shrink: bool = False) -> int:
    """All programs of a seed; raises Failure, and returns how much their ranks have seen."""
    try:
        return sum(_each(name, where, seed, lambda one: check(name, where, one), shrink))
    except Exception as error:
        again = f"make fuzz SUBJECT={name} WHERE='{where}' SEED={seed}"
        notes = "\n".join(getattr(error, "__notes__", ()))
        raise Failure(f"replay: {again}\n{error}\n{notes}") from error


def drawn(name: str, where: str, seed: int) -> list[Any]:
    """The programs of a seed."""
    return _each(name, where, seed, lambda one: one, False)


def _each(name: str, where: str, seed: int, body: Callable[[Any], Any], shrink: bool) -> list[Any]:
    module = subject(name)
    # A fatal fault takes new processes.
    examples = min(module.EXAMPLES, 8) if has_faults(where) else module.EXAMPLES
    return each(lambda choose: module.draw(choose, where), seed, examples, body, shrink=shrink)
