"""Programs of calls on a GPU by several ranks, which one process computes as well.

Ranks call the same in the same order, each from streams of its own choice and without waiting in
between: all order is the group's. Values are whole numbers, so sums are exact.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import harness
from checks.cuda_order import Scene
from checks.refused import refused
from fuzz.core import Choices, Pair, done
from harness import Context

WHERE = ("2", "3")
EXAMPLES = 11
COUNT = 384  # several chunks; for 2, 3 and 4 ranks
TENSORS = 5
PARAM = 0  # the tensor that fused operations change, and nothing else does
REDUCTIONS = {
    "SUM": lambda values: torch.stack(values).sum(0),
    "MAX": lambda values: torch.stack(values).amax(0),
    "MIN": lambda values: torch.stack(values).amin(0),
}


@dataclasses.dataclass(frozen=True)
class Call:
    kind: str  # fused, all_reduce, broadcast, gather, scatter, exchange or region
    source: int = 1
    target: int = 2
    root: int = 0
    op: str = "SUM"
    async_op: bool = False
    region: tuple[Call, ...] = ()


def draw_call(choose: Choices, size: int, free: list[int]) -> Call:
    """An ordinary collective of tensors that are free; it takes them."""
    kind = choose.choice(["all_reduce", "broadcast", "gather", "scatter"])
    target = free.pop()
    source = choose.choice([PARAM, free.pop()]) if kind in ("gather", "scatter") else target
    root, op = choose.randrange(size), choose.choice(list(REDUCTIONS))
    return Call(kind, source, target, root, op, choose.random() < 0.5)


@dataclasses.dataclass(frozen=True)
class Program:
    calls: tuple[Call, ...]
    seed: int  # of streams and times


def workers(where: str) -> harness.Workers:
    options = harness.fake_gpu() | {"options": {"cuda_chunk_bytes": 1 << 10}}
    return harness.pool(int(where), **options)


def draw(choose: Choices, where: str) -> Program:
    calls = []
    for _ in range(choose.randint(1, 25)):
        free = choose.sample(range(1, TENSORS), TENSORS - 1)
        kind = choose.choice(["fused", "ordinary", "ordinary", "exchange", "region"])
        async_op = choose.random() < 0.5
        if kind == "fused":
            calls.append(Call("fused", free.pop(), async_op=async_op))
        elif kind == "ordinary":
            calls.append(draw_call(choose, int(where), free))
        elif kind == "exchange":
            calls.append(Call("exchange", choose.choice([PARAM, free.pop()]), free.pop()))
        else:
            # What is launched together has no order.
            region = tuple(draw_call(choose, int(where), free) for _ in range(choose.randint(1, 2)))
            calls.append(Call("region", async_op=async_op, region=region))
    return Program(tuple(calls), choose.getrandbits(32))


def initial(rank: int) -> list[torch.Tensor]:
    """Parameters are the same on all ranks."""
    start = torch.arange(COUNT, dtype=torch.float64) % 7 - 3
    return [start] + [start + (rank + 1) * i for i in range(1, TENSORS)]


def model(state: list[list[torch.Tensor]], call: Call) -> None:
    """What the call does to the tensors of all ranks."""
    size = len(state)
    part = COUNT // size
    sources = [one[call.source].clone() for one in state]
    for each in call.region:
        model(state, each)
    for rank, mine in enumerate(state):
        if call.kind == "fused":
            mine[PARAM] -= torch.stack(sources).sum(0)
        elif call.kind == "all_reduce":
            mine[call.target].copy_(REDUCTIONS[call.op](sources))
        elif call.kind == "broadcast":
            mine[call.target].copy_(sources[call.root])
        elif call.kind == "gather":
            mine[call.target].copy_(torch.cat([one[:part] for one in sources]))
        elif call.kind == "scatter":
            total = REDUCTIONS[call.op](sources)
            mine[call.target][:part] = total[rank * part : (rank + 1) * part]
        elif call.kind == "exchange":
            mine[call.target].copy_(sources[rank - 1])


class Ranks(Scene):
    """A fresh group without any call so far, and this rank's tensors."""

    def __init__(self, context: Context) -> None:
        super().__init__(warm=False)
        self.rank, self.size = context.rank, context.world_size
        self.tensors = [self.fake.tensor(one, 0) for one in initial(self.rank)]
        self.state = [initial(rank) for rank in range(self.size)]
        self.works: list[Any] = []
        self.mistakes = self.fake.mismatches()

    def ordinary(self, call: Call, async_op: bool) -> Any:
        group, target, source = self.group, self.tensors[call.target], self.tensors[call.source]
        part = COUNT // self.size
        core = dist.distributed_c10d
        options: Any
        if call.kind == "all_reduce":
            options = core.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, call.op)
        elif call.kind == "broadcast":
            options = core.BroadcastOptions()
            options.rootRank = call.root
        elif call.kind == "gather":
            options = core.AllgatherOptions()
        else:
            options = core.ReduceScatterOptions()
            options.reduceOp = getattr(dist.ReduceOp, call.op)
        options.asyncOp = async_op
        if call.kind == "all_reduce":
            return group.allreduce([target], options)
        if call.kind == "broadcast":
            return group.broadcast([target], options)
        if call.kind == "gather":
            return group._allgather_base(target, source[:part], options)
        return group._reduce_scatter_base(target[:part], source, options)

    def messages(self, call: Call, order: list[str]) -> list[dist.P2POp]:
        there, back = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        made = {
            "send": lambda: dist.P2POp(
                dist.isend, self.tensors[call.source], group=self.group, group_peer=there
            ),
            "receive": lambda: dist.P2POp(
                dist.irecv, self.tensors[call.target], group=self.group, group_peer=back
            ),
        }
        return [made[kind]() for kind in order]

    def call(self, call: Call, reverse: bool = False) -> None:
        model(self.state, call)
        if call.kind == "fused":
            param, grad = self.tensors[PARAM], self.tensors[call.source]
            self.param, self.grad = param, grad
            work = self.step(call.async_op, reduce="sum")
        elif call.kind == "exchange":
            order = ["receive", "send"] if reverse else ["send", "receive"]
            self.works += dist.batch_isend_irecv(self.messages(call, order))
            return
        elif call.kind == "region":
            with dist._coalescing_manager(
                self.group, self.tensors[0].device, call.async_op
            ) as manager:
                for one in call.region:
                    self.ordinary(one, call.async_op)
            work = manager if call.async_op else None
        else:
            work = self.ordinary(call, call.async_op)
        if work is not None and call.async_op:
            self.works.append(work)

    def check(self, what: str) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()
        for stream in (0, self.a, self.b):
            self.sync(stream)
        for i, (found, wanted) in enumerate(zip(self.tensors, self.state[self.rank], strict=True)):
            assert torch.equal(self.fake.host(found), wanted), f"tensor {i}, {what}"
        assert self.fake.mismatches() == self.mistakes, what


def run(program: Program, context: Context) -> Iterator[Pair]:
    """Each rank draws the streams that it calls from, and how long one of them is held."""
    ranks = Ranks(context)
    rng = random.Random(f"{program.seed}, {context.rank}")
    ranks.fake.set_delay(rng.choice([0, 200, 1000]))
    streams = [0, ranks.a, ranks.b]
    hold = ranks.fake.Hold(rng.choice(streams))
    timer = threading.Timer(rng.choice([0.0, 0.02]), hold.release)
    timer.start()
    for i, call in enumerate(program.calls):
        with ranks.on(rng.choice(streams)):
            ranks.call(call, rng.random() < 0.5)
        if rng.random() < 0.1:
            ranks.check(f"after call {i}")
            yield done(f"call {i}")
    ranks.check("after all calls")
    yield done("all calls")
    timer.join()
    ranks.fake.set_delay(0)
    ranks.close()


REGION = (Call("gather", PARAM, 3), Call("all_reduce", 4, 4))
PROGRAMS = {
    # The first call of a group is a coalesced one.
    "fresh region": [Call("region", region=REGION), Call("fused"), Call("gather", PARAM, 4)],
    "fresh asynchronous region": [
        Call("region", async_op=True, region=REGION),
        Call("fused", 4),
        Call("broadcast", 3, 3, root=1),
    ],
    "fresh messages": [Call("exchange", PARAM, 2), Call("exchange", 2, 3), Call("fused", 3)],
    "fresh step": [Call("fused", 1), Call("exchange", PARAM, 2), Call("all_reduce", 2, 2)],
    "synchronous behind fused": [
        call
        for kind in (
            Call("gather", PARAM, 1),
            Call("region", region=(Call("gather", PARAM, 1), Call("scatter", PARAM, 2))),
            Call("exchange", PARAM, 1),
        )
        for call in (Call("fused", 1, async_op=True), kind, Call("fused", 2))
    ],
    "interleaved": [
        call
        for turn in range(6)
        for call in (
            Call("all_reduce", 1, 1, async_op=turn % 2 == 0),
            Call("fused", 1, async_op=turn % 3 == 0),
            Call("scatter", PARAM, 2, op="MAX", async_op=turn % 2 == 1),
            Call("broadcast", 2, 2, root=turn % 2),
            Call("fused", 2),
        )
    ],
}


def fixed(context: Context, name: str) -> None:
    for seed in range(4):
        list(run(Program(tuple(PROGRAMS[name]), seed), context))


def ends_beside_a_caller(context: Context, how: str) -> None:
    """Another thread's call hangs inside NCCL, and holds the group: its end waits for nobody."""
    ranks = Ranks(context)
    call = Call("fused", 1)
    ranks.call(call)
    ranks.check("before")
    ranks.fake.fail("ncclReduceScatter", -1)  # hangs
    found: list[str] = []

    def caller() -> None:
        try:
            ranks.call(call)
        except RuntimeError as error:
            found.append(str(error))

    threads = [threading.Thread(target=caller, daemon=True)]
    threads[0].start()
    time.sleep(0.3)
    end = ranks.group.abort if how == "abort" else ranks.group.shutdown
    threads.append(threading.Thread(target=end, daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(8 if how == "abort" else 20)
        assert not thread.is_alive(), how
    assert len(found) == 1, found
    assert "aborted" in found[0] or "destroyed" in found[0], found


@contextlib.contextmanager
def nccl_group(depth: int) -> Iterator[None]:
    """What another library of this thread begins and ends, directly with NCCL."""
    nccl = ctypes.CDLL(os.environ["FUSEDPG_NCCL_LIB"])
    for _ in range(depth):
        assert nccl.ncclGroupStart() == 0
    try:
        yield
    finally:
        for _ in range(depth):
            assert nccl.ncclGroupEnd() == 0


def inside_a_group_of_nccl(context: Context, warm: bool) -> None:
    """NCCL would hold back what fused operations exchange, so all of them are refused."""
    ranks = Ranks(context)
    fused = Call("fused", 1)
    if warm:
        ranks.call(fused)
        ranks.check("before")
    param, other = ranks.tensors[PARAM], ranks.tensors[2]
    backend = ranks.group._get_backend(param.device)
    ranks.param, ranks.grad = param, ranks.tensors[1]
    calls = {
        "step": lambda: ranks.step(reduce="sum"),
        "asynchronous step": lambda: ranks.step(True, reduce="sum"),
        "reduce_shards": lambda: backend.reduce_shards_([other]),
    }
    for call, depth in itertools.product(calls.values(), (1, 2)):
        with nccl_group(depth):
            with refused("ncclGroupStart", ValueError):
                call()
    # A group is one thread's alone.
    with nccl_group(1):
        thread = threading.Thread(target=ranks.call, args=(fused,))
        thread.start()
        thread.join()
    ranks.call(fused)
    ranks.check("afterwards")
    ranks.close()


def ends_with_an_ordinary_one_outstanding(context: Context, why: str) -> None:
    """The peer never joins rank 0's collective; the end of the group is an end all the same."""
    ranks = Ranks(context)
    if why != "no engine":
        ranks.call(Call("fused", 1))
    ranks.call(Call("all_reduce", 2, 2))
    ranks.check("before")
    if context.rank == 0:
        coalesced = why == "coalesced"
        with ranks.on(ranks.a):
            if coalesced:
                ranks.call(Call("region", async_op=True, region=(Call("all_reduce", 3, 3),)))
            else:
                ranks.ordinary(Call("all_reduce", 3, 3), async_op=why == "async")
    if why == "failed":
        ranks.fake.fail("ncclReduceScatter", 1)
        with refused("ncclReduceScatter"), ranks.on(ranks.b):
            ranks.call(Call("fused", 1))
    end = threading.Thread(target=ranks.group.shutdown, daemon=True)
    end.start()
    end.join(25)
    assert not end.is_alive(), "the group does not come to an end"


def one_rank_cannot_start(context: Context, what: str) -> None:
    """All ranks hear of it at once, and may try again."""
    failing = 1
    library = os.environ["FUSEDPG_NCCL_LIB"]
    if what == "library" and context.rank == failing:
        os.environ["FUSEDPG_NCCL_LIB"] = "/none.so"
    ranks = Ranks(context)
    os.environ["FUSEDPG_NCCL_LIB"] = library
    ranks.param, ranks.grad = ranks.tensors[PARAM], ranks.tensors[1]
    for turn in range(2):
        if context.rank == failing and what == "symmetric memory":
            os.environ["FUSEDPG_FAKE_SYMM_MEM"] = "full"
        elif context.rank == failing and what != "library":
            ranks.fake.fail(what, 2)
        begin = time.monotonic()
        try:
            ranks.step(reduce="sum")
        except RuntimeError as error:
            if context.rank != failing:
                assert f"another rank has failed: rank {failing}: " in str(error), error
        else:
            raise AssertionError(f"{what}: it has not failed")
        assert time.monotonic() - begin < 12, (what, turn)
        time.sleep(0.3 * context.rank)
    os.environ.pop("FUSEDPG_FAKE_SYMM_MEM", None)
    if what != "library":
        ranks.call(Call("fused", 1))
        ranks.call(Call("all_reduce", 2, 2))
        ranks.check("afterwards")
    all_have_heard(context)
    ranks.close()


def all_have_heard(context: Context) -> None:
    """For who is about to leave: to the others that would be a cause, too."""
    scratch = Path(context.scratch)
    (scratch / f"heard{context.rank}").touch()
    while not all((scratch / f"heard{rank}").exists() for rank in range(context.world_size)):
        time.sleep(0.01)


def one_rank_cannot_connect(context: Context, what: str, failing: int) -> None:
    """The other waits inside NCCL for it: it hears of it, and its communicator is lost."""
    ranks = Ranks(context)
    ranks.param, ranks.grad = ranks.tensors[PARAM], ranks.tensors[1]
    left = "has left a call inside NCCL"
    wanted = [f"another rank has failed: rank {failing}: ", left]
    if context.rank == failing:
        ranks.fake.fail(what, 2)
        wanted = [what, f"another rank has failed: rank {1 - failing}: "]
    for text in wanted:
        begin = time.monotonic()
        try:
            ranks.step(reduce="sum")
        except RuntimeError as error:
            assert text in str(error), error
        else:
            raise AssertionError("it has not failed")
        assert time.monotonic() - begin < 12
    if context.rank != failing:
        try:
            dist.all_reduce(ranks.tensors[2], group=ranks.group)
        except RuntimeError as error:
            assert left in str(error), error
        else:
            raise AssertionError("an ordinary one has not failed")
    all_have_heard(context)
    ranks.close()


def peer_dies_before_its_start(context: Context) -> tuple[str, float]:
    ranks = Ranks(context)
    Path(context.scratch, f"running{context.rank}").touch()
    if context.rank == 1:
        time.sleep(600)
    ranks.param, ranks.grad = ranks.tensors[PARAM], ranks.tensors[1]
    try:
        ranks.step(reduce="sum")
    except RuntimeError as error:
        return str(error), time.monotonic()
    raise AssertionError("a step without its peer")


def out_of_memory(context: Context, what: str, elements: int = 40_000) -> int:
    """Allocations of a step fail on one rank, which calls it again; returns how many did."""
    ranks = Ranks(context)
    ranks.call(Call("fused", 1))
    ranks.check("a smaller one")
    param = ranks.fake.tensor(torch.zeros(elements, dtype=torch.float64), 0)
    grad = ranks.fake.tensor(torch.full((elements,), -1.0, dtype=torch.float64), 0)
    ranks.param, ranks.grad = param, grad
    for nth in itertools.count(1):
        ranks.fake.fail(what, 2 if context.rank == 1 else 0, nth)
        try:
            work = ranks.step(nth % 2 == 0, reduce="sum")
        except torch.OutOfMemoryError as error:
            assert "the group works on" in str(error), error
            assert "fused_sgd_" in str(error) and "sequence" in str(error), error
            assert context.rank == 1, "the others wait for its next call"
            ranks.sync(0)
            assert not ranks.fake.host(param).any(), "it was updated"
        else:
            if work is not None:
                work.wait()
            break
        assert nth < 20
    ranks.sync(0)
    assert ranks.fake.host(param).eq(context.world_size).all()
    ranks.call(Call("fused", 1))
    ranks.check("afterwards")
    ranks.close()
    return nth - 1
