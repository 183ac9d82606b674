"""Random programs of sends and receives, and a model that knows which of them end.

A program is legal if it ends however the ranks are timed, and even if no send ends before
its receive has been posted: then MPI and Gloo end it, and so must we, however small the arena is.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from checks.cases import same
from harness import Context

ANY = 9
"""The tag of messages that are received from any source, and of no others."""
SIZES = (1, 100, 1024, 1025, 16_384, 40_000, 300_000, 700_000)


@dataclasses.dataclass(frozen=True)
class Post:
    """One step of a rank: a send to or a receive from `peer`, a wait for an earlier one, or a
    barrier."""

    what: str  # send, recv, wait, barrier
    number: int = -1  # of the rank's sends and receives, from 0
    peer: int | None = None
    tag: int = 0


Program = tuple[tuple[Post, ...], ...]


def numel(seed: int, source: int, target: int, tag: int, number: int) -> int:
    """Elements of the `number`-th message of a pair and tag."""
    if tag == ANY:
        return random.Random(f"{seed}").choice(SIZES)
    return random.Random(f"{seed} {source} {target} {tag} {number}").choice(SIZES)


def contents(seed: int, source: int, target: int, tag: int, number: int) -> torch.Tensor:
    code = random.Random(f"{seed} {source} {target} {tag} {number} x").randrange(1 << 22)
    return torch.arange(numel(seed, source, target, tag, number), dtype=torch.int32) + code


def draw_program(seed: int, world: int) -> Program:
    """One that may be legal or not."""
    rng = random.Random(seed)
    posts: list[list[Post]] = [[] for _ in range(world)]
    for _ in range(rng.randint(1, 40 if rng.random() < 0.2 else 12)):
        source, target = rng.sample(range(world), 2)
        tag = ANY if rng.random() < 0.25 else rng.randrange(3)
        posts[source].append(Post("send", peer=target, tag=tag))
        posts[target].append(Post("recv", peer=None if tag == ANY else source, tag=tag))
    blocking = rng.choice([0.0, 0.1, 0.4])
    barriers = rng.randrange(3)
    program = []
    for mine in posts:
        rng.shuffle(mine)
        steps: list[Post] = []
        open_: list[int] = []
        for number, post in enumerate(mine):
            steps.append(dataclasses.replace(post, number=number))
            open_.append(number)
            while open_ and rng.random() < blocking:
                steps.append(Post("wait", open_.pop(rng.randrange(len(open_)))))
        rng.shuffle(open_)
        steps += [Post("wait", number) for number in open_]
        for _ in range(barriers):
            steps.insert(rng.randint(0, len(steps)), Post("barrier"))
        program.append(tuple(steps))
    return tuple(program)


class _Model:
    """How far the ranks are, and what has met what."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = [0] * len(program)
        self.barriers = [0] * len(program)
        # Posted and not yet matched, in order: (source, target, tag) -> numbers of the source.
        self.sends: dict[tuple[int, int, int], list[int]] = {}
        self.receives: dict[tuple[int | None, int, int], list[int]] = {}
        self.done: set[tuple[int, int]] = set()

    def copy(self) -> _Model:
        new = _Model(self.program)
        new.at, new.barriers = list(self.at), list(self.barriers)
        new.sends = {key: list(value) for key, value in self.sends.items()}
        new.receives = {key: list(value) for key, value in self.receives.items()}
        new.done = set(self.done)
        return new

    def match(self, source: int, target: int, tag: int) -> None:
        receiver = self.receives[None if tag == ANY else source, target, tag].pop(0)
        self.done |= {(source, self.sends[source, target, tag].pop(0)), (target, receiver)}

    def step(self, rank: int) -> bool:
        """Whether the rank got further."""
        if self.at[rank] == len(self.program[rank]):
            return False
        post = self.program[rank][self.at[rank]]
        if post.what == "wait" and (rank, post.number) not in self.done:
            return False
        if post.what == "barrier":
            if self.barriers[rank] == sum(
                one.what == "barrier" for one in self.program[rank][: self.at[rank]]
            ):
                self.barriers[rank] += 1  # it has arrived
            if min(self.barriers) < self.barriers[rank]:
                return False
        elif post.what == "send":
            assert post.peer is not None
            self.sends.setdefault((rank, post.peer, post.tag), []).append(post.number)
        elif post.what == "recv":
            self.receives.setdefault((post.peer, rank, post.tag), []).append(post.number)
        self.at[rank] += 1
        return True

    def advance(self) -> None:
        """All that happens whatever the order is."""
        moved = True
        while moved:
            moved = sum(self.step(rank) for rank in range(len(self.program))) > 0
            for (source, target, tag), numbers in self.sends.items():
                while tag != ANY and numbers and self.receives.get((source, target, tag)):
                    self.match(source, target, tag)
                    moved = True

    @property
    def ended(self) -> bool:
        return all(at == len(steps) for at, steps in zip(self.at, self.program))


def is_legal(program: Program, limit: int = 2000) -> bool:
    """Whether the program ends whichever message each receive from any source takes. Programs
    with more than `limit` different courses count as illegal."""
    seen = set()
    todo = [_Model(program)]
    while todo:
        model = todo.pop()
        model.advance()
        state = (tuple(model.at), frozenset(model.done), str(sorted(model.sends.items())))
        if state in seen:
            continue
        seen.add(state)
        if len(seen) > limit:
            return False
        choices = [
            key
            for key, numbers in model.sends.items()
            if key[2] == ANY and numbers and model.receives.get((None, key[1], ANY))
        ]
        for choice in choices:
            other = model.copy()
            other.match(*choice)
            todo.append(other)
        if not choices and not model.ended:
            return False
    return True


def program_from(text: str) -> tuple[Post, ...]:
    """A rank's steps as "send PEER TAG", "recv PEER|any TAG", "barrier" or "wait", which is for
    the first post that has not been waited for."""
    steps: list[Post] = []
    posted = waited = 0
    for what, *rest in (one.split() for one in text.split(", ")):
        if what == "wait":
            steps.append(Post("wait", waited))
            waited += 1
        elif what == "barrier":
            steps.append(Post("barrier"))
        else:
            peer = None if rest[0] == "any" else int(rest[0])
            steps.append(Post(what, posted, peer, int(rest[1])))
            posted += 1
    return tuple(steps)


def legal_programs(seed: int, count: int, world: int) -> list[tuple[int, Program]]:
    """The first `count` legal programs of `world` ranks from a seed on, with their seeds."""
    found: list[tuple[int, Program]] = []
    while len(found) < count:
        program = draw_program(seed, world)
        if is_legal(program):
            found.append((seed, program))
        seed += 1
    return found


def _filling(context: Context) -> list[torch.Tensor]:
    """Tensors that leave no room in the arena."""
    import fusedpg

    held: list[torch.Tensor] = []
    for size in (1 << 18, 1 << 10, 1):
        try:
            while True:
                held.append(fusedpg.empty(size, dtype=torch.int32))
        except torch.OutOfMemoryError:
            pass
    return held


def _tensor(like: torch.Tensor, in_arena: bool) -> torch.Tensor:
    if in_arena:
        import fusedpg

        try:
            return fusedpg.empty(like.numel(), dtype=like.dtype)
        except torch.OutOfMemoryError:
            pass
    return torch.empty_like(like)


def run_programs(context: Context, programs: list[tuple[int, Program]], full: bool) -> None:
    """Runs programs, one after another; `full`: with an arena that has no room."""
    held = _filling(context) if full else []
    for seed, program in programs:
        print(f"program {seed}", flush=True)
        try:
            _run(context, seed, program)
        except Exception as error:
            raise AssertionError(f"program {seed}: {program[context.rank]}") from error
        dist.barrier()
    del held


def _run(context: Context, seed: int, program: Program) -> None:
    me = context.rank
    rng = random.Random(f"{seed} {me}")
    counts: Counter[Any] = Counter()
    works: dict[int, Any] = {}
    sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    received: dict[int, tuple[torch.Tensor, Post, torch.Tensor | None]] = {}
    for post in program[me]:
        in_arena = context.fused and rng.random() < 0.3
        if post.what == "barrier":
            dist.barrier()
        elif post.what == "wait":
            works[post.number].wait()
            if post.number in sent:
                tensor, values = sent[post.number]
                assert same(tensor, values), f"the sent tensor of {post.number} has changed"
                tensor.fill_(-1)  # it is ours again
            elif (expected := received[post.number][2]) is not None:
                assert same(received[post.number][0], expected), f"a message of {post.number}"
        elif post.what == "send":
            number = counts["send", post.peer, post.tag]
            counts["send", post.peer, post.tag] += 1
            assert post.peer is not None
            values = contents(seed, me, post.peer, post.tag, number)
            tensor = _tensor(values, in_arena).copy_(values)
            sent[post.number] = tensor, values
            works[post.number] = dist.isend(tensor, post.peer, tag=post.tag)
        else:
            number = counts["recv", post.peer, post.tag]
            counts["recv", post.peer, post.tag] += 1
            source = (me + 1) % context.world_size if post.peer is None else post.peer
            values = contents(seed, source, me, post.tag, number)
            tensor = _tensor(values, in_arena).fill_(-2)
            received[post.number] = tensor, post, None if post.peer is None else values
            works[post.number] = dist.irecv(tensor, post.peer, tag=post.tag)
    # Receives from any source take the messages of one rank in their order.
    for post_number in sorted(received):
        tensor, post, _ = received[post_number]
        if post.peer is None:
            source = works[post_number]._source_rank()
            number = counts["any", source]
            counts["any", source] += 1
            assert same(tensor, contents(seed, source, me, ANY, number)), (
                f"{post_number} from any source: message {number} of rank {source}"
            )
