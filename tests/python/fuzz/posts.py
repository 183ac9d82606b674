"""Subject: random programs of sends and receives, and a model that knows which of them end.

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

import harness
from fuzz.core import (
    Choices,
    Entry,
    Fault,
    Trace,
    draw_fault,
    fill_arena,
    harm,
    has_faults,
)  # fmt: skip
from harness import Context

# Ranks, and how large their arena is; "full": nothing is free in it.
WHERE = ("2, full", "3, none", "4, 64 KB", "3, 4 MB, faults")
EXAMPLES = 50
ARENAS = {"full": 4 << 20, "4 MB": 4 << 20, "none": 0, "64 KB": 64 << 10}
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


Posts = tuple[tuple[Post, ...], ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What each rank posts, the seed of what is sent, and whether the arena has no room."""

    ranks: Posts
    seed: int
    full: bool
    fault: Fault | None = None


def numel(seed: int, source: int, target: int, tag: int, number: int) -> int:
    """Elements of the `number`-th message of a pair and tag."""
    if tag == ANY:
        return random.Random(f"{seed}").choice(SIZES)
    return random.Random(f"{seed} {source} {target} {tag} {number}").choice(SIZES)


def contents(seed: int, source: int, target: int, tag: int, number: int) -> torch.Tensor:
    code = random.Random(f"{seed} {source} {target} {tag} {number} x").randrange(1 << 22)
    return torch.arange(numel(seed, source, target, tag, number), dtype=torch.int32) + code


def draw(choose: Choices, where: str) -> Program:
    """A legal one."""
    import hypothesis

    world, arena = where.split(", ")[:2]
    ranks = _draw_posts(choose, int(world))
    hypothesis.assume(is_legal(ranks))
    most, fault = max(len(steps) for steps in ranks), None
    if has_faults(where) and harness.IS_FUSED:
        fault = draw_fault(choose, int(world), most, together=False)
    return Program(
        ranks,
        choose.getrandbits(30),
        arena == "full" and harness.IS_FUSED,
        fault,
    )


def _draw_posts(choose: Choices, world: int) -> Posts:
    """Some that may be legal or not."""
    posts: list[list[Post]] = [[] for _ in range(world)]
    for _ in range(choose.randint(1, 40 if choose.random() < 0.2 else 12)):
        source, target = choose.sample(range(world), 2)
        tag = ANY if choose.random() < 0.25 else choose.randrange(3)
        posts[source].append(Post("send", peer=target, tag=tag))
        posts[target].append(Post("recv", peer=None if tag == ANY else source, tag=tag))
    blocking = choose.choice([0.0, 0.1, 0.4])
    barriers = choose.randrange(3)
    program = []
    for mine in posts:
        choose.shuffle(mine)
        steps: list[Post] = []
        open_: list[int] = []
        for number, post in enumerate(mine):
            steps.append(dataclasses.replace(post, number=number))
            open_.append(number)
            while open_ and choose.random() < blocking:
                steps.append(Post("wait", open_.pop(choose.randrange(len(open_)))))
        choose.shuffle(open_)
        steps += [Post("wait", number) for number in open_]
        for _ in range(barriers):
            steps.insert(choose.randint(0, len(steps)), Post("barrier"))
        program.append(tuple(steps))
    return tuple(program)


class _Model:
    """How far the ranks are, and what has met what."""

    def __init__(self, program: Posts) -> None:
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


def is_legal(program: Posts, limit: int = 2000) -> bool:
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


def steps_from(text: str) -> tuple[Post, ...]:
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


def workers(where: str) -> harness.Workers:
    world, arena = where.split(", ")[:2]
    options = {"arena_bytes": ARENAS[arena]} if harness.IS_FUSED else {}
    timeout = 4.0 if has_faults(where) else 15.0
    return harness.pool(int(world), options=options, timeout=timeout)


def _tensor(like: torch.Tensor, in_arena: bool) -> torch.Tensor:
    if in_arena:
        import fusedpg

        try:
            return fusedpg.empty(like.numel(), dtype=like.dtype)
        except torch.OutOfMemoryError:
            pass
    return torch.empty_like(like)


def run(program: Program, context: Context) -> Trace:
    held = fill_arena() if program.full else []
    me, seed = context.rank, program.seed
    rng = random.Random(f"{seed} {me}")
    counts: Counter[Any] = Counter()
    works: dict[int, Any] = {}
    sent: dict[int, torch.Tensor] = {}
    received: dict[int, tuple[torch.Tensor, Post]] = {}
    for turn, post in enumerate(program.ranks[me]):
        harm(program.fault, me, turn, [dist.group.WORLD])
        in_arena = context.fused and rng.random() < 0.3
        if post.what == "barrier":
            dist.barrier()
        elif post.what == "wait":
            works[post.number].wait()
            if post.number in sent:
                yield Entry(f"{post.number}, sent", sent[post.number])
                sent[post.number].fill_(-1)  # it is ours again
            elif received[post.number][1].peer is not None:
                yield Entry(f"{post.number}, received", received[post.number][0])
        else:
            number = counts[post.what, post.peer, post.tag]
            counts[post.what, post.peer, post.tag] += 1
            if post.what == "send":
                assert post.peer is not None
                values = contents(seed, me, post.peer, post.tag, number)
                sent[post.number] = _tensor(values, in_arena).copy_(values)
                works[post.number] = dist.isend(sent[post.number], post.peer, tag=post.tag)
            else:
                source = (me + 1) % context.world_size if post.peer is None else post.peer
                values = contents(seed, source, me, post.tag, number)
                received[post.number] = _tensor(values, in_arena).fill_(-2), post
                works[post.number] = dist.irecv(received[post.number][0], post.peer, tag=post.tag)
    # Receives from any source take the messages of one rank in their order.
    for post_number, (tensor, post) in sorted(received.items()):
        if post.peer is None:
            source = works[post_number]._source_rank()
            number = counts["any", source]
            counts["any", source] += 1
            first = contents(seed, source, me, ANY, number)[0]
            yield Entry(f"{post_number}, received from any", tensor - first)
    dist.barrier()
    del held


def oracle(program: Program, world: int, rank: int) -> Trace:
    counts: Counter[Any] = Counter()
    values: dict[int, torch.Tensor] = {}
    for post in program.ranks[rank]:
        if post.what in ("send", "recv") and post.peer is not None:
            number = counts[post.what, post.peer, post.tag]
            counts[post.what, post.peer, post.tag] += 1
            ends = (rank, post.peer) if post.what == "send" else (post.peer, rank)
            values[post.number] = contents(program.seed, *ends, post.tag, number)
    what = {post.number: post.what for post in program.ranks[rank] if post.what != "wait"}
    for post in program.ranks[rank]:
        if post.what == "wait" and post.number in values:
            done = "sent" if what[post.number] == "send" else "received"
            yield Entry(f"{post.number}, {done}", values[post.number])
    for post in program.ranks[rank]:
        if post.what == "recv" and post.peer is None:
            # Whoever has sent it, all are of one size, and count from their first number.
            length = numel(program.seed, 0, rank, ANY, 0)
            yield Entry(
                f"{post.number}, received from any", torch.arange(length, dtype=torch.int32)
            )
