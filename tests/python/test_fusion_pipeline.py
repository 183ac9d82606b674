"""Fused functions that send to the next pipeline stage, and receive from the previous one."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks.fusion import shard
from checks.pipeline import (
    DEADLINE,
    Place,
    agree,
    backends,
    drawer,
    first,
    last,
    middle,
    raises,
    run_first,
)
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import (
    IllegalProgram,
    Overlap,
    Partial,
    Replicate,
    Shard,
    all_reduce,
    dropout,
    messages,
    recv,
    reduce_scatter,
    send,
)
from fusedpg.fusion.errors import IllegalTransformation
from fusedpg.fusion.ir import carried
from harness import Context, on_ranks

SHAPE = (3, 7)


@functools.cache
def exchange(order: str, stage: int, tag: int = 0) -> Any:
    """A function of one of two stages, which sends and receives."""
    other = 1 - stage

    def sends_first(x, like):
        return send(all_reduce(x) * 2, dst=other, tag=tag), recv(like, src=other, tag=tag) + 1

    def receives_first(x, like):
        taken = recv(like, src=other, tag=tag) + 1
        return taken, send(all_reduce(x) * 2, dst=other, tag=tag)

    def answers(x, like):
        taken = recv(like, src=other, tag=tag) + 1
        return taken, send(taken * 2 + x, dst=other, tag=tag)

    return fusedpg.fuse({f.__name__: f for f in (sends_first, receives_first, answers)}[order])


def _call(place: Place, order: str, x: Any, like: Any, async_op: bool) -> Any:
    result = exchange(order, place.stage)(x, like, async_op=async_op, **place.groups)
    return result.wait() if async_op else result


def _right(place: Place, orders: tuple[str, str], what: str) -> None:
    """A call in which nothing differs."""
    mine, theirs = orders[place.stage], orders[1 - place.stage]
    got = _call(place, mine, torch.ones(SHAPE), torch.empty(SHAPE), False)
    total = 2.0 * place.size
    want = ((total + 1) * 2 + 1 if theirs == "answers" else total) + 1
    taken = got[1 if mine == "sends_first" else 0]
    assert torch.equal(taken, torch.full(SHAPE, want)), (what, taken, want)


def _chain(tag: int) -> tuple[Any, Any, Any]:
    """Of three stages: the last one sends back to the first."""

    def begins(x, like):
        t = send(x * 2, dst=1, tag=tag)
        return t, recv(like, src=2, tag=tag) + 1

    def goes_on(like, p: float):
        return send(dropout(recv(like, tag=tag), p, 3) + 1, tag=tag)

    def ends(like):
        y = recv(like, tag=tag)
        return y, send(y * 3, dst=0, tag=tag)

    return fusedpg.fuse(begins), fusedpg.fuse(goes_on), fusedpg.fuse(ends)


@fusedpg.fuse
def _from(x: Partial, b, scale: float = 2.0):
    return send(all_reduce(x) * scale + b)


@fusedpg.fuse
def _to(like):
    return recv(like) + 1


_WRONG: dict[str, tuple[type[Exception], Callable[..., Any]]] = {
    "schedule": (IllegalTransformation, lambda x, b, g: _from.scheduled(Overlap())(x, b, **g)),
    "missing": (TypeError, lambda x, b, g: _from(x, **g)),
    "kind": (TypeError, lambda x, b, g: _from(x, b, "much", **g)),
    "shape": (ValueError, lambda x, b, g: _from(x, b[:2], **g)),
    "layout": (TypeError, lambda x, b, g: _from(x, b.to_sparse(), **g)),
}


@functools.cache
def _swaps(other: int) -> tuple[Any, Any]:
    def swaps(x, like, w):
        y = w * 3
        return recv(like, src=other) * y, send(y, dst=other)

    def sums(x, like, w):
        y = all_reduce(x) * w
        return recv(like, src=other) + y, send(y, dst=other)

    return fusedpg.fuse(swaps), fusedpg.fuse(sums)


def sliced(schedule: fusion.Schedule) -> list[bool]:
    """Of each message, whether slices are sent."""
    return [carried(node).layout.kind == "Shard" for node in schedule.program.messages]


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


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_schedules(world_size: int, dtype: torch.dtype) -> None:
    seen = 0
    for shape in ((6, 40), (33,), (1,), (3, 0)):
        counts = harness.pool(world_size).run(values, shape, dtype)
        assert len(set(counts)) == 1
        seen += counts[0]
    assert seen > 20 * (world_size // 2)


@pytest.mark.parametrize("shape", [(6, 40), (7,)])
@on_ranks(2, 4)
def test_slices_as_they_are(context: Context, shape: tuple[int, ...]) -> None:
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


@pytest.mark.parametrize(
    ("order", "async_op"),
    # Waited for at once, a forward and a backward would wait for each other one by one.
    [("all forward first", True), ("all forward first", False), ("one by one", True)],
)
@pytest.mark.parametrize(
    ("world_size", "stages"), [(4, 2), (3, 3), harness.slow(6, 3), harness.slow(4, 4)]
)
def test_training(world_size: int, stages: int, async_op: bool, order: str) -> None:
    harness.pool(world_size).run(train, stages, torch.float64, order, async_op)


@on_ranks(2, 4)
def test_backwards_in_another_order(context: Context) -> None:
    """A gradient says of which message it is: sides would take that of another micro-batch."""
    for backend in backends(context):
        place = Place(context, backend, 2, 20)
        xs = [_leaf(torch.full((4, 40), float(n + context.rank))) for n in range(3)]
        b, w = torch.ones(40), torch.ones(4, 40)

        def forward(n: int, xs: Any = xs, b: Any = b, w: Any = w, place: Any = place) -> Any:
            if place.stage == 0:
                return first(xs[n], b, w, 3, **place.groups)
            return last(torch.empty(4, 40, requires_grad=True), w, **place.groups)[1].sum()

        calls = [forward(n) for n in range(2)]
        for n in (0, 1) if place.stage == 0 else (1, 0):
            with pytest.raises(dist.DistBackendError, match="gradient of message"):
                calls[n].backward()
        assert all(x.grad is None for x in xs)
        forward(2).backward()
        if place.stage == 0:
            own = [_leaf(torch.full((4, 40), float(2 + r))) for r in range(place.size)]
            run_first(own, b, w, 3).sum().backward()
            agree(xs[2].grad, own[0].grad, backend)
        place.close()


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


def test_mismatches() -> None:
    harness.pool(4).run(mismatches)


def differ(context: Context, *orders: str) -> None:
    """What one side expects is not what comes, where both send and receive."""
    for backend in backends(context):
        place = Place(context, backend, seconds=DEADLINE)
        what = f"{backend}, {orders}, stage {place.stage}"
        _right(place, orders, what)
        for wrong in (0, 1):
            for async_op in (False, True):
                like = torch.empty((1, 7) if place.stage == wrong else SHAPE)
                x, mine = torch.ones(SHAPE), orders[place.stage]
                call = functools.partial(_call, place, mine, x, like, async_op)
                name = f"{what}, wrong {wrong}, async {async_op}"
                raises(call, name, dist.DistBackendError, "shape")
                _right(place, orders, what)
        place.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sends_first", "answers"),
        ("answers", "receives_first"),
        harness.slow("receives_first", "receives_first"),
        harness.slow("sends_first", "receives_first"),
        harness.slow("sends_first", "sends_first"),
    ],
)
def test_mismatches_both_ways(first: str, second: str) -> None:
    harness.pool(4).run(differ, first, second)


@on_ranks(3)
def test_others_hear(context: Context) -> None:
    """A stage in the middle raises, of a mismatch or by itself: so do all that wait for it."""
    functions = _chain(1)
    x = torch.ones(SHAPE)
    for backend in backends(context):
        place = Place(context, backend, 3, seconds=DEADLINE)
        mine = functions[place.stage]

        def call(like: torch.Tensor, p: float, place: Place = place, mine: Any = mine) -> Any:
            given = ((x, like), (like, p), (like,))[place.stage]
            return mine(*given, **place.groups)

        for turn in range(4):
            right = call(torch.empty(SHAPE), 0.0)
            if place.stage != 1:
                want = (10.0, None, 3.0)[place.stage]
                assert torch.equal(right[place.stage == 0], torch.full(SHAPE, want)), right
            middle = place.stage == 1
            like = torch.empty((1, 7) if middle and turn == 0 else SHAPE)
            p = 1.5 if middle and turn == 1 else 0.0
            like = like.to_sparse() if middle and turn == 2 else like
            if turn == 3:
                break
            own = (dist.DistBackendError, ValueError, TypeError)[turn]
            kind = own if middle else dist.DistBackendError
            what = f"{backend}, {('mismatch', 'probability', 'sparse')[turn]}, stage {place.stage}"
            text = ("shape", "p is a probability", "ordinary tensors")[turn]
            raises(lambda k=like, q=p: call(k, q), what, kind, text)
        place.close()


@on_ranks(4)
def test_refused_at_once(context: Context) -> None:
    """One rank's call is refused before it has a schedule: its stage and the other one hear."""
    for backend in backends(context):
        place = Place(context, backend, seconds=DEADLINE)
        size = place.size if backend == "fused" else 1  # another group cannot be told
        for name, (own, wrong) in _WRONG.items():
            for odd in range(size):
                what = f"{backend}, {name}, rank {odd} of its stage, on rank {context.rank}"
                x, b, like = torch.ones(SHAPE), torch.ones(SHAPE), torch.empty(SHAPE)

                def fine(x=x, b=b, like=like, place=place) -> Any:
                    given, function = ((x, b), _from) if place.stage == 0 else ((like,), _to)
                    return function(*given, **place.groups)

                if place.stage == 0 and (place.rank == odd or backend != "fused"):
                    raises(functools.partial(wrong, x, b, place.groups), what, own)
                else:
                    raises(fine, what, dist.DistBackendError)
                right = fine()
                expected = torch.full(SHAPE, 2.0 * place.size + 2)
                assert place.stage == 0 or torch.equal(right, expected), what
        place.close()


@fusedpg.fuse
def _three_sent(x: Partial, y, z):
    return send(all_reduce(x), tag=0), send(y * 2, tag=1), send(z * 3, tag=2)


@fusedpg.fuse
def _three_received(x, y, z):
    return recv(x, tag=0) + 1, recv(y, tag=1) + 1, recv(z, tag=2) + 1


@pytest.mark.parametrize("in_flight", [2, 1 << 10])
@on_ranks(4)
def test_one_of_several_messages_differs(context: Context, in_flight: int) -> None:
    """Both sides raise, and the next call is right.

    Args:
        in_flight: after how many messages their numbers are used again.
    """
    with mock.patch.object(messages, "_IN_FLIGHT", in_flight):
        for backend in backends(context):
            place = Place(context, backend, seconds=DEADLINE)
            for number, wrong in enumerate((None, 0, None, 1, 2, 2, None) * 2):
                given = [torch.full(shape, number + 1.0) for shape in ((9,), (4, 5), (3,))]
                want = [x * factor + 1 for x, factor in zip(given, (place.size, 2, 3))]
                if wrong is not None and place.stage:
                    given[wrong] = torch.empty(11)

                def call(given: Any = given, async_op: bool = number > 6, place: Any = place):
                    function = _three_received if place.stage else _three_sent
                    got = function(*given, **place.groups, async_op=async_op)
                    return got.wait() if async_op else got

                if wrong is not None:
                    raises(call, f"{backend}, {wrong}", dist.DistBackendError, "shape")
                else:
                    got = call()
                    assert place.stage == 0 or all(map(torch.equal, got, want)), (number, got)
            place.close()


@on_ranks(3)
def test_waits_in_another_order(context: Context) -> None:
    """Calls that are waited for in another order than they began in have their own messages."""
    for backend in backends(context):
        place = Place(context, backend, 3, 20)
        generator = torch.Generator().manual_seed(4)
        xs = torch.randn(3, 5, 7, generator=generator)
        b, w = torch.randn(7, generator=generator), torch.randn(5, 7, generator=generator)
        calls = []
        for x in xs:
            if place.stage == 0:
                calls.append(first(x, b, x, 3, async_op=True, **place.groups))
            else:
                function = last if place.last else middle
                calls.append(function(torch.empty(5, 7), w, async_op=True, **place.groups))
        for number in (2, 0, 1):
            result = calls[number].wait()
            if place.last:
                want = torch.sigmoid(run_first([xs[number]], b, xs[number], 3)) * w
                torch.testing.assert_close(result[1], want)
        place.close()


@pytest.mark.parametrize("every", [False, harness.slow(True)])
@on_ranks(4)
def test_both_ways(context: Context, every: bool) -> None:
    """What is sent does not wait for what is received, in whichever order they are written."""
    for backend in backends(context):
        place = Place(context, backend, seconds=DEADLINE)
        for function, total in zip(_swaps(1 - place.stage), (9.0, 2.0 * place.size)):
            w, x = torch.ones(SHAPE).requires_grad_(), torch.ones(SHAPE)
            like = torch.empty(SHAPE).requires_grad_()
            if every:
                w, like = w.detach(), like.detach()
            known = function.schedules(x, like, w, world_size=place.size) if every else [None]
            for found in known:
                run = function if found is None else function.scheduled(*found.transformations)
                begun = time.monotonic()
                got, token = run(x, like, w, **place.groups)
                assert torch.equal(got, torch.full(SHAPE, total)), (backend, found, got)
                if not every:
                    torch.autograd.backward([got.sum(), token])
                took = time.monotonic() - begun
                assert took < DEADLINE / 4, f"{backend}, {took:.1f} s\n{found}"
        place.close()


@on_ranks(4)
def test_arguments(context: Context) -> None:
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


@pytest.mark.long
@pytest.mark.fused_only
@pytest.mark.parametrize("sends", [True, False])
def test_killed(sends: bool) -> None:
    with harness.Workers(4) as workers:
        workers.start(dies, sends, 8.0)
        answers = workers.collect(50)
    dead = 2 if sends else 0
    assert isinstance(answers.pop(dead), harness.Died), answers
    assert all(isinstance(answer, harness.RemoteError) for answer in answers), answers
    counterpart = answers[0 if sends else 1]
    assert "DistBackendError" in counterpart.bases, counterpart


@pytest.mark.fused_only
def test_between_hosts() -> None:
    workers = harness.pool_of_hosts("two of two")
    workers.run(values, (6, 4000), torch.float32)
    workers.run(train, 2, torch.float64, "one by one", True)
    workers.run(mismatches)


def test_printed() -> None:
    """A slice is sent after one operation, and its gradient comes as one."""
    x = torch.ones(4, 60)
    schedule = first.schedule(x, x[0], x, 3, world_size=2)
    program = schedule.program
    assert "send(add_1, dst='next', tag=0)" in str(program)
    assert [str(group) for group in program.groups] == ["fused collective"]
    assert (program.crossing(), program.bytes()) == (480, 480)
    received = last.schedule(x, x, world_size=2).program
    assert (received.crossing(), received.bytes()) == (480, 480)
    assert "recv_slice = recv(like, src='previous', tag=0)" in str(received)
    backward = fusion.schedules(first.derivative(x, x[0], x, 3, world_size=2).program)
    assert "recv(src='next', tag=0, gradient=True)" in str(backward[0])
    assert min(schedule.program.crossing() for schedule in backward) == 480
    back = last.derivative(x, x, world_size=2).program
    assert "send(grad_recv_1, dst='previous', tag=0, gradient=True)" in str(back)


def test_no_gradient_to_send_back() -> None:
    def signs(like):
        return torch.sign(recv(like))

    with pytest.raises(IllegalProgram, match=r"test_fusion_pipeline.py:\d+: `recv`: no result"):
        fusedpg.fuse(signs).derivative(torch.ones(3), world_size=2)


def test_names() -> None:
    with pytest.raises(TypeError, match=r"send of fusedpg\.fusion"):
        send(torch.ones(3))
