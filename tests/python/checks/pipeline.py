"""Fused functions of pipeline stages, on each rank, against plain torch in one process."""

from __future__ import annotations

import datetime
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks.fusion import Contributions, reference_all_reduce, reference_dropout, shard
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import (
    Partial,
    Replicate,
    Shard,
    all_reduce,
    dropout,
    recv,
    reduce_scatter,
    send,
)
from fusedpg.fusion.ir import carried
from harness import Context

P_DROP = 0.25
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@fusedpg.fuse
def first(x: Partial, b, r, seed: int):
    return send(dropout(all_reduce(x) + b, P_DROP, seed) + r)


@fusedpg.fuse
def middle(like, w):
    return send(torch.sigmoid(recv(like)) * w)


@fusedpg.fuse
def last(like, w):
    y = recv(like)
    return torch.tanh(y) * w, y


class Place:
    """This rank's stage, and its groups in a stage and over stages."""

    def __init__(
        self, context: Context, backend: str, stages: int = 2, seconds: float = 60
    ) -> None:
        limit = datetime.timedelta(seconds=seconds)
        size = context.world_size // stages
        self.stage, self.rank = divmod(context.rank, size)
        self.size, self.count, self.last = size, stages, self.stage == stages - 1
        parts = [list(range(s * size, (s + 1) * size)) for s in range(stages)]
        across = [list(range(r, context.world_size, size)) for r in range(size)]
        made = [
            [dist.new_group(ranks, backend=backend, timeout=limit) for ranks in g]
            for g in (parts, across)
        ]
        self.group, self.stages = made[0][self.stage], made[1][self.rank]
        self.groups = {"group": self.group, "stages": self.stages}
        self._all = context.oracle

    def close(self) -> None:
        dist.barrier(group=self._all)
        dist.destroy_process_group(self.stages)
        dist.destroy_process_group(self.group)


def backends(context: Context) -> list[str]:
    return ["fused", "gloo"] if context.fused else ["gloo"]


def drawer(seed: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def agree(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    bound = BOUNDS.get(want.dtype, 2e-2)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound, msg=lambda m: f"{m}\n{what}")


def sliced(schedule: fusion.Schedule) -> list[bool]:
    """Of each message, whether slices are sent."""
    return [carried(node).layout.kind == "Shard" for node in schedule.program.messages]


def run_first(x: list[torch.Tensor], b: Any, r: Any, seed: int) -> torch.Tensor:
    return reference_dropout(reference_all_reduce(Contributions(x)) + b, P_DROP, seed) + r


def values(context: Context, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """All schedules of both sides, in pairs that send alike; how many pairs."""
    count = 0
    for backend in backends(context):
        place = Place(context, backend)
        draw = drawer(5, dtype)
        x = [draw(*shape) for _ in range(place.size)]
        b, r, w, like = (
            draw(*shape[-1:]),
            draw(*shape),
            draw(*shape),
            torch.empty(shape, dtype=dtype),
        )
        want = run_first(x, b, r, 7)
        args = {0: (x[place.rank], b, r, 7), 1: (like, w)}
        known = {
            s: f.schedules(*args[s], world_size=place.size) for s, f in ((0, first), (1, last))
        }
        for whole in (True, False):
            fit = {s: [k for k in found if sliced(k) == [not whole]] for s, found in known.items()}
            for number in range(max(map(len, fit.values())) if all(fit.values()) else 0):
                pair = {s: found[number % len(found)] for s, found in fit.items()}
                mine = pair[place.stage]
                what = f"{backend}\n{pair[0]}\n{pair[1]}"
                run = (first, last)[place.stage].scheduled(*mine.transformations)
                result = run(*args[place.stage], **place.groups)
                if place.stage == 0:
                    assert result.shape == (), what
                else:
                    agree(result[1], want, what)
                    agree(result[0], torch.tanh(want) * w, what)
                count += 1
        place.close()
    return count


def shards(context: Context, shape: tuple[int, ...]) -> None:
    """A Shard is sent as it is, and can be taken as it comes."""

    def sending(g: Partial, m: Shard) -> Any:
        return send(reduce_scatter(g) + m, tag=3)

    def receiving(like: Replicate, m: Shard) -> tuple[Shard]:
        return (recv(like, src=0, tag=3) * m,)

    for backend in backends(context):
        place = Place(context, backend)
        draw = drawer(6, torch.float32)
        g, m = [draw(*shape) for _ in range(place.size)], draw(*shape)
        mine = shard(m, place.size, place.rank)
        want = (sum(g[1:], g[0]) + m) * m
        if place.stage == 0:
            fusedpg.fuse(sending)(g[place.rank], mine, **place.groups)
        else:
            (got,) = fusedpg.fuse(receiving)(torch.empty(shape), mine, **place.groups)
            agree(got, shard(want, place.size, place.rank), backend)
        place.close()


# --- training ------------------------------------------------------------------------------


def train(context: Context, stages: int, dtype: torch.dtype, order: str, async_op: bool) -> None:
    """Micro-batches forward and back through all stages: the gradients of one process."""
    for backend in backends(context):
        _train(context, backend, stages, dtype, order, async_op)


def _train(
    context: Context, backend: str, stages: int, dtype: torch.dtype, order: str, async_op: bool
) -> None:
    shape, batches = (6, 40), 4
    place = Place(context, backend, stages)
    draw = drawer(9, dtype)
    xs = [[draw(*shape) for _ in range(place.size)] for _ in range(batches)]
    b, r, w = draw(shape[-1]), draw(*shape), [draw(*shape) for _ in range(stages)]
    want = _in_one_process(xs, b, r, w)
    b, r, w = (_leaf(b), _leaf(r), _leaf(w[place.stage]))
    mine = [_leaf(x[place.rank]) for x in xs]
    kept: dict[int, torch.Tensor] = {}

    def forward(n: int) -> None:
        if place.stage == 0:
            kept[n] = first(mine[n], b, r, 11 + n, async_op=async_op, **place.groups)
        else:
            like = torch.empty(shape, dtype=dtype, requires_grad=True)
            function = last if place.last else middle
            kept[n] = function(like, w, async_op=async_op, **place.groups)

    def backward(n: int) -> None:
        result = kept[n].wait() if async_op else kept[n]
        (result[0].sum() + (result[1] ** 2).sum() if place.last else result).backward()

    if order == "all forward first":
        for n in range(batches):
            forward(n)
        for n in range(batches):
            backward(n)
    else:  # one forward, one backward, after as many forwards as stages follow
        ahead = min(batches, stages - place.stage)
        for n in range(batches + ahead - 1):
            if n < batches:
                forward(n)
            if n >= ahead - 1:
                backward(n - ahead + 1)
    what = f"{backend}, stage {place.stage}"
    if place.stage == 0:
        agree(b.grad, want["b"], what)
        agree(r.grad, want["r"], what)
        for n, x in enumerate(mine):
            agree(x.grad, want["x"][n], f"{what}, batch {n}")
    else:
        agree(w.grad, want["w"][place.stage], what)
    place.close()


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def _in_one_process(xs: Any, b: Any, r: Any, w: list[torch.Tensor]) -> dict[str, Any]:
    xs = [[_leaf(x) for x in batch] for batch in xs]
    b, r, w = _leaf(b), _leaf(r), [_leaf(x) for x in w]
    for n, batch in enumerate(xs):
        y = run_first(batch, b, r, 11 + n)
        for factor in w[1:-1]:
            y = torch.sigmoid(y) * factor
        ((torch.tanh(y) * w[-1]).sum() + (y**2).sum()).backward()
    return {"b": b.grad, "r": r.grad, "w": [x.grad for x in w], "x": [x[0].grad for x in xs]}


# --- sequences -----------------------------------------------------------------------------

_BY_TAG: dict[tuple[int, bool], tuple[Any, Any]] = {}


def _pair(tag: int, back: bool) -> tuple[Any, Any]:
    """A function that sends with a tag, to the next stage or back, and one that receives."""
    if (tag, back) not in _BY_TAG:
        dst, src = (0, 1) if back else (1, 0)

        def sending(x: Partial):
            return send(2 * all_reduce(x), dst=dst, tag=tag)

        def receiving(like):
            return recv(like, src=src, tag=tag) + 1

        _BY_TAG[tag, back] = fusedpg.fuse(sending), fusedpg.fuse(receiving)
    return _BY_TAG[tag, back]


def sequence(context: Context, seed: int) -> None:
    """Messages of several sizes, tags and directions among collectives, waited for later."""
    for backend in backends(context):
        _sequence(context, backend, seed)


def _sequence(context: Context, backend: str, seed: int) -> None:
    place = Place(context, backend)
    chosen, draw = random.Random(seed), drawer(seed, torch.float32)
    open_calls: list[tuple[Any, torch.Tensor | None]] = []

    def end(call: tuple[Any, torch.Tensor | None]) -> None:
        result, want = call
        if isinstance(result, fusion.Pending):
            result = result.wait()
        if want is not None:
            agree(result, want, f"seed {seed}, {backend}")

    for _ in range(25):
        kind = chosen.choice(["send", "send", "send", "sum", "all", "wait"])
        shape = chosen.choice([(1,), (5,), (40,), (7, 33), (3, 50, 9), (70_001,)])
        tag, back, async_op = chosen.randrange(3), chosen.random() < 0.3, chosen.random() < 0.7
        parts = [draw(*shape) for _ in range(place.size)]
        if kind == "send":
            sending, receiving = _pair(tag, back)
            if (place.stage == 0) != back:
                call = sending(parts[place.rank], async_op=async_op, **place.groups), None
            else:
                like = torch.empty(shape)
                want = 2 * sum(parts[1:], parts[0]) + 1
                call = receiving(like, async_op=async_op, **place.groups), want
            open_calls.append(call)
        elif kind == "sum":
            total = parts[place.rank].clone()
            dist.all_reduce(total, group=place.group)
            agree(total, sum(parts[1:], parts[0]), f"seed {seed}")
        elif kind == "all":
            total = torch.ones(3)
            dist.all_reduce(total, group=context.oracle if backend == "gloo" else None)
            agree(total, torch.full((3,), float(context.world_size)), f"seed {seed}")
        else:
            while open_calls:
                end(open_calls.pop(0))
    while open_calls:
        end(open_calls.pop(0))
    place.close()


# --- errors --------------------------------------------------------------------------------


def mismatches(context: Context) -> None:
    """What two stages do differently raises on both, and the next message is received."""
    whole = first.scheduled()
    for backend in backends(context):
        place = Place(context, backend)
        x, b = torch.ones(4, 40), torch.ones(40)
        for what, give, take in (
            ("shape is [4, 40]", (first, x), (last, torch.empty(4, 41))),
            ("shape is [4, 40]", (first, x), (last, torch.empty(40, 4))),
            ("type is float32", (first, x), (last, torch.empty(4, 40, dtype=torch.float64))),
            ("sent as is a whole", (whole, x), (last, torch.empty(4, 40))),
            ("kind is a value whose", (first, _leaf(x)), (last, torch.empty(4, 40))),
        ):
            if place.stage == 1 and backend == "fused":
                what = what.split(" is ")[0]
            function, like = (give, take)[place.stage]
            extra = (b, x, 3) if place.stage == 0 else (torch.ones_like(like),)
            try:
                function(like, *extra, **place.groups)
            except dist.DistBackendError as error:
                assert what.split(" is ")[0] in str(error), f"{backend}: {error}"
                assert place.stage == 1 or what in str(error), f"{backend}: {error}"
                assert ("send(" if place.stage == 0 else "recv(") in str(error), error
            else:
                raise AssertionError(f"{backend}: {what} raised nothing")
            if place.stage == 0:
                first(x, b, x, 3, **place.groups)
            else:
                _, y = last(torch.empty(4, 40), torch.ones(4, 40), **place.groups)
                agree(y, run_first([x] * place.size, b, x, 3), f"after {what}, {backend}")
        place.close()


def arguments(context: Context) -> None:
    """What one rank alone can tell raises before anything is sent."""
    place = Place(context, context.backend)
    x = torch.ones(4, 40)

    with refused("stages=", ValueError):
        last(x, x, group=place.group)
    with refused("`into`", ValueError):
        last.into([x, x.clone()], x, x, group=place.group)
    with refused("tune", ValueError):
        last.tune(x, x, group=place.group)
    if place.last:
        with refused("no other stage dst='next'", ValueError):
            first(x, x[0], x, 3, **place.groups)
    else:
        with refused("no other stage src='previous'", ValueError):
            last(x, x, **place.groups)
    place.close()


def dies(context: Context, sends: bool, seconds: float) -> None:
    """A rank of the stage that receives, or of the one that sends, is killed: all others raise."""
    place = Place(context, context.backend, seconds=seconds)
    x = torch.ones(400, 100)
    if place.stage == int(sends) and place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        if place.stage == 0:
            first(x, x[0], x, 3, **place.groups)
        else:
            last(x, x, **place.groups)
