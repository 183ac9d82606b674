"""What random programs of all subjects share: how they are drawn, run, compared and shrunk.

A subject is a module with

- ``draw(choose, where)``: a program, of frozen dataclasses. `choose` has the methods of
  random.Random, and hypothesis draws what they return, so that a program that fails shrinks.
- ``run(program, context)``: what this rank sees of the program, as Entries in an order that the
  program gives. Whatever it raises is a finding.
- ``oracle(program, world, rank)``: the same Entries, of one process that knows everything.
- ``bound(program)``: how far they may be apart; 0 where all bits are the same.
- ``WHERE``: on which pools of ranks its programs run, and ``EXAMPLES``: how many programs one seed
  draws. ``workers(where)`` where a subject needs pools of its own; ``check(program)`` where its
  parent does more than wait.

Both traces may be generators: the oracle says what comes next when the rank has got there.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Protocol, TypeVar

import torch

import harness
from checks import cases
from harness import Context

T = TypeVar("T")
# Modules of subjects.
SUBJECTS = {
    "collectives": "fuzz.collectives",
    "messages": "fuzz.posts",
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


Trace = Iterable[Entry]


class Subject(Protocol):
    WHERE: Sequence[str]
    EXAMPLES: int

    def draw(self, choose: Choices, where: str) -> Any: ...
    def run(self, program: Any, context: Context) -> Trace: ...
    def oracle(self, program: Any, world: int, rank: int) -> Trace: ...
    def bound(self, program: Any) -> float: ...


class Wrong(AssertionError):
    """The product did something wrong."""


class Failure(AssertionError):
    """Something is wrong; says how to see it again."""


def seed(usual: int) -> int:
    """That of a test, or SEED=..."""
    return int(os.environ.get("SEED", usual))


def subject(name: str) -> Any:
    return importlib.import_module(SUBJECTS[name])


# --- drawing --------------------------------------------------------------------------------------


class Choices:
    """random.Random's methods. They shrink to what comes first, and to what is not rare."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        import hypothesis.strategies as st  # not in workers

        self.draw, self._integers = draw, st.integers

    def randint(self, low: int, high: int) -> int:
        return int(self.draw(self._integers(low, high)))

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


def programs(name: str, where: str) -> Any:
    """The strategy of a subject's programs."""
    import hypothesis.strategies as st

    @st.composite
    def drawn(draw: st.DrawFn) -> Any:
        return subject(name).draw(Choices(draw), where)

    return drawn()


def each(
    name: str, where: str, seed: int, body: Callable[[Any], None], *, shrink: bool = False
) -> None:
    """Calls `body` with every program of a seed; the smallest that fails comes last."""
    import hypothesis

    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=subject(name).EXAMPLES,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(name, where))
    def run(program: Any) -> None:
        body(program)

    run()


# --- running --------------------------------------------------------------------------------------


def workers(where: str, **options: Any) -> harness.Workers:
    """So many ranks, ranks that take each other for those of several hosts, or Gloo's."""
    if where in harness.HOSTS:
        return harness.pool_of_hosts(where)
    if where == "gloo":
        return harness.pool(3, backend="gloo")
    return harness.pool(int(where), **options)


def world_of(where: str) -> int:
    return 3 if where == "gloo" else len(harness.HOSTS.get(where, ())) or int(where)


def between_hosts(where: str) -> bool:
    return where in harness.HOSTS


@dataclasses.dataclass
class Answer:
    """What a rank says of a program."""

    wrong: list[str] = dataclasses.field(default_factory=list)
    alike: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int = 0


def on_rank(context: Context, name: str, program: Any, *more: Any) -> Answer:
    """Runs a program here, beside its oracle, up to the first difference."""
    module = subject(name)
    answer, limit = Answer(), module.bound(program)
    oracle = iter(module.oracle(program, context.world_size, context.rank))
    for found in module.run(program, context, *more):
        wanted = next(oracle, None)
        text = difference(found, wanted, limit)
        if text is not None:
            answer.wrong.append(text)
            return answer
        answer.count += 1
        if found.alike is not None:
            answer.alike[found.label] = digest(found.alike)
    answer.wrong += [f"{left.label} has not come" for left in itertools.islice(oracle, 1)]
    return answer


def difference(found: Entry, wanted: Entry | None, limit: float) -> str | None:
    """What is wrong with an entry."""
    if wanted is None or found.label != wanted.label:
        return f"{found.label} came in place of {wanted.label if wanted else 'the end'}"
    if not isinstance(found.value, torch.Tensor) or not isinstance(wanted.value, torch.Tensor):
        if found.value == wanted.value:
            return None
        both = (found.value, wanted.value)
        texts = ["\n".join(one) if isinstance(one, list) else repr(one) for one in both]
        return f"{found.label}: {texts[0]:.9000}, not {texts[1]:.9000}"
    if limit == 0 and not cases.same(found.value, wanted.value):
        return f"{found.label}: other bits\n{found.value}\n{wanted.value}"
    try:
        torch.testing.assert_close(
            found.value, wanted.value, rtol=limit, atol=limit, equal_nan=True, check_stride=False
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
    answers = pool.run(on_rank, name, program, *more, timeout=SECONDS)
    wrong = [f"rank {rank}: {text}" for rank, one in enumerate(answers) for text in one.wrong]
    for label in {label for one in answers for label in one.alike}:
        if len({one.alike[label] for one in answers if label in one.alike}) > 1:
            wrong.append(f"ranks have different bits after {label}")
    if wrong:
        pool.close()  # its groups are in whatever state
        # What others only waited for comes last.
        raise Wrong("\n".join(sorted(wrong, key=lambda text: "timeout after" in text)))
    return sum(one.count for one in answers)


def search(name: str, where: str, seed: int, *, shrink: bool = False) -> int:
    """All programs of a seed; raises Failure, and returns how much their ranks have seen."""
    seen: list[int] = []
    try:
        each(
            name, where, seed, lambda program: seen.append(check(name, where, program)),
            shrink=shrink,
        )  # fmt: skip
    except Exception as error:
        again = f"make fuzz SUBJECT={name} WHERE='{where}' SEED={seed}"
        notes = "\n".join(getattr(error, "__notes__", ()))
        raise Failure(f"replay: {again}\n{error}\n{notes}") from error
    return sum(seen)


def drawn(name: str, where: str, seed: int) -> Iterator[Any]:
    """The programs of a seed."""
    found: list[Any] = []
    each(name, where, seed, found.append)
    return iter(found)
