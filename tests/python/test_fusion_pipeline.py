"""Fused functions that send to the next pipeline stage, and receive from the previous one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import pipeline, pipeline_chunks
from checks.pipeline import Place, backends
from fusedpg import fusion
from fusedpg.fusion import (
    IllegalProgram,
    Overlap,
    Partial,
    all_reduce,
    dropout,
    messages,
    recv,
    send,
)
from fusedpg.fusion.errors import IllegalTransformation
from harness import Context, on_ranks

# Of the groups; who waits for one has not been told.
DEADLINE = 20.0
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


def raises(call: Callable[[], Any], what: str, kind: type[Exception], text: str = "") -> None:
    begun = time.monotonic()
    try:
        call()
    except kind as error:
        assert text in str(error), f"{what}: {error}"
    else:
        raise AssertionError(f"{what} raised nothing")
    took = time.monotonic() - begun
    assert took < DEADLINE / 4, f"{what} raised after {took:.1f} s"


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


def _numbers_again(context: Context, backend: str) -> None:
    place = Place(context, backend, seconds=DEADLINE)

    def three(x, y, z, place: Place = place) -> Any:
        if place.stage == 0:
            return _THREE[0](x, y, z, **place.groups)
        return _THREE[1](x, y, z, **place.groups)

    for turn in range(7):
        parts = [torch.full((n,), float(turn + n)) for n in (9, 4, 3)]
        if turn % 3 == 1:
            parts[0] = parts[0] if place.stage == 0 else torch.empty(2)
            raises(lambda p=parts: three(*p), f"{backend}", dist.DistBackendError, "shape")
        else:
            got = three(*parts)
            for part, value in zip(parts, got):
                assert place.stage == 0 or torch.equal(value, part + 1), (turn, got)
    place.close()


def _sending(x, y, z):
    return tuple(send(value, tag=tag) for tag, value in enumerate((x, y, z)))


def _receiving(x, y, z):
    return tuple(recv(like, tag=tag) + 1 for tag, like in enumerate((x, y, z)))


_THREE = fusedpg.fuse(_sending), fusedpg.fuse(_receiving)


@functools.cache
def _swaps(other: int) -> tuple[Any, Any]:
    def swaps(x, like, w):
        y = w * 3
        return recv(like, src=other) * y, send(y, dst=other)

    def sums(x, like, w):
        y = all_reduce(x) * w
        return recv(like, src=other) + y, send(y, dst=other)

    return fusedpg.fuse(swaps), fusedpg.fuse(sums)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_schedules(world_size: int, dtype: torch.dtype) -> None:
    seen = 0
    for shape in ((6, 40), (33,), (1,), (3, 0)):
        counts = harness.pool(world_size).run(pipeline.values, shape, dtype)
        assert len(set(counts)) == 1
        seen += counts[0]
    assert seen > 20 * (world_size // 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_as_they_are(world_size: int) -> None:
    for shape in ((6, 40), (7,)):
        harness.pool(world_size).run(pipeline.shards, shape)


@pytest.mark.parametrize(
    ("order", "async_op"),
    # Waited for at once, a forward and a backward would wait for each other one by one.
    [("all forward first", True), ("all forward first", False), ("one by one", True)],
)
@pytest.mark.parametrize(
    ("world_size", "stages"), [(4, 2), (3, 3), harness.slow(6, 3), harness.slow(4, 4)]
)
def test_training(world_size: int, stages: int, async_op: bool, order: str) -> None:
    harness.pool(world_size).run(pipeline.train, stages, torch.float64, order, async_op)


@pytest.mark.parametrize("seed", [1, 2, 3, harness.slow(4), harness.slow(5)])
def test_sequences(seed: int) -> None:
    harness.pool(4).run(pipeline.sequence, seed)


def test_mismatches() -> None:
    harness.pool(4).run(pipeline.mismatches)


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


@on_ranks(4)
def test_numbers_again(context: Context) -> None:
    """Messages that nobody took are out of the way when their numbers are used again."""
    before, messages._IN_FLIGHT = messages._IN_FLIGHT, 2
    try:
        for backend in backends(context):
            _numbers_again(context, backend)
    finally:
        messages._IN_FLIGHT = before


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


def test_arguments() -> None:
    harness.pool(4).run(pipeline.arguments)


@pytest.mark.long
@pytest.mark.fused_only
@pytest.mark.parametrize("sends", [True, False])
def test_killed(sends: bool) -> None:
    with harness.Workers(4) as workers:
        workers.start(pipeline.dies, sends, 8.0)
        answers = workers.collect(50)
    dead = 2 if sends else 0
    assert isinstance(answers.pop(dead), harness.Died), answers
    assert all(isinstance(answer, harness.RemoteError) for answer in answers), answers
    counterpart = answers[0 if sends else 1]
    assert "DistBackendError" in counterpart.bases, counterpart


@pytest.mark.fused_only
def test_between_hosts() -> None:
    workers = harness.pool_of_hosts("two of two")
    workers.run(pipeline.values, (6, 4000), torch.float32)
    workers.run(pipeline.train, 2, torch.float64, "one by one", True)
    workers.run(pipeline.mismatches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 6, harness.slow(8)])
def test_chunks(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(pipeline_chunks.values, dtype)


@pytest.mark.parametrize("check", ["one_rank_fails", "ranks_differ", "without_a_compiler"])
@pytest.mark.fused_only
def test_chunks_on_one_rank(check: str) -> None:
    harness.pool(4).run(getattr(pipeline_chunks, check))


@pytest.mark.parametrize("in_flight", [2, harness.slow(1 << 10)])
def test_chunks_that_differ(in_flight: int) -> None:
    harness.pool(4).run(pipeline_chunks.mistakes, in_flight)


@pytest.mark.parametrize("check", ["gradients", "both_ways"])
def test_chunks_of_calls(check: str) -> None:
    harness.pool(4).run(getattr(pipeline_chunks, check))


@pytest.mark.fused_only
def test_chunks_between_hosts() -> None:
    workers = harness.pool_of_hosts("two of two")
    workers.run(pipeline_chunks.values, torch.float32)
    workers.run(pipeline_chunks.mistakes, 2)


def test_printed() -> None:
    """A slice is sent after one operation, and its gradient comes as one."""
    x = torch.ones(4, 60)
    schedule = pipeline.first.schedule(x, x[0], x, 3, world_size=2)
    program = schedule.program
    assert "send(add_1, dst='next', tag=0)" in str(program)
    assert [str(group) for group in program.groups] == ["fused collective"]
    assert (program.crossing(), program.bytes()) == (480, 480)
    received = pipeline.last.schedule(x, x, world_size=2).program
    assert (received.crossing(), received.bytes()) == (480, 480)
    assert "recv_slice = recv(like, src='previous', tag=0)" in str(received)
    backward = fusion.schedules(pipeline.first.derivative(x, x[0], x, 3, world_size=2).program)
    assert "recv(src='next', tag=0, gradient=True)" in str(backward[0])
    assert min(schedule.program.crossing() for schedule in backward) == 480
    back = pipeline.last.derivative(x, x, world_size=2).program
    assert "send(grad_recv_1, dst='previous', tag=0, gradient=True)" in str(back)


def test_no_gradient_to_send_back() -> None:
    def signs(like):
        return torch.sign(recv(like))

    with pytest.raises(IllegalProgram, match=r"test_fusion_pipeline.py:\d+: `recv`: no result"):
        fusedpg.fuse(signs).derivative(torch.ones(3), world_size=2)


def test_names() -> None:
    with pytest.raises(TypeError, match=r"send of fusedpg\.fusion"):
        send(torch.ones(3))
