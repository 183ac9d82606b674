"""Messages between stages in chunks, against the same schedule without chunks."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks.compiled import compiles, no_compiler
from checks.pipeline import DEADLINE, Place, backends, drawer, first, last, raises, run_first
from fusedpg import fusion
from fusedpg.fusion import (
    AsShard,
    FuseCollective,
    FuseSend,
    Overlap,
    Partial,
    Reorder,
    Split,
    all_reduce,
    messages,
    recv,
    send,
)
from fusedpg.fusion.errors import IllegalTransformation
from harness import Context, on_ranks

SHAPE = (7, 3, 11)  # rows that no number of chunks divides, columns that no line holds
Schedule = tuple[fusion.Transformation, ...]
SLICES: Schedule = (FuseSend(), AsShard(), FuseCollective())
WHOLE: Schedule = (Split(), Reorder(), FuseCollective())


def sent(chunks: int) -> Overlap:
    return Overlap("send", chunks=chunks)


def received(chunks: int) -> Overlap:
    return Overlap("recv", chunks=chunks)


@fusedpg.fuse
def takes(like):
    return recv(like)


@fusedpg.fuse
def layer(x: fusion.Shard(2), w: fusion.Shard(0), b):
    return send(torch.relu(all_reduce(x @ w) + b))


@fusedpg.fuse
def product(x, w):
    return send(x @ w)


def _done(place: Place) -> int:
    """How many operations of the stage have run as generated code."""
    if dist.get_backend(place.group) != "fused":
        return 0
    return int(fusedpg.stats(place.group).get("fused_program", {}).get("calls", 0))


def _equal(place: Place, schedules: tuple[Schedule, Schedule], chunks: int, f: Any, *args: Any):
    """Both stages with chunks and without: the same bits.

    Returns:
        What is received, and on the stage that sends how many operations ran as generated code.
    """
    mine = schedules[place.stage]
    if place.stage == 0:
        f.scheduled(*mine)(*args, **place.groups)
        before = _done(place)
        f.scheduled(*mine, sent(chunks))(*args, **place.groups)
        return _done(place) - before
    shape = (*args[0].shape[:-1], args[1].shape[-1])
    values = [
        takes.scheduled(*mine, *more)(torch.empty(shape, dtype=args[0].dtype), **place.groups)
        for more in ((), (received(chunks),))
    ]
    assert torch.equal(*values), (f, schedules, chunks)
    return values[1]


def values(context: Context, dtype: torch.dtype) -> None:
    """What is summed and computed, with a product before it or not, and a product alone."""
    for mode in (contextlib.nullcontext(), compiles(context)):
        with mode:
            for backend in backends(context):
                compiled = backend == "fused" and not isinstance(mode, contextlib.nullcontext)
                _values(context, backend, dtype, compiled)


def _values(context: Context, backend: str, dtype: torch.dtype, compiled: bool) -> None:
    place = Place(context, backend)
    draw = drawer(5, torch.float32)
    size, rank = place.size, place.rank
    pairs: list[tuple[Schedule, Schedule]] = [(WHOLE, ())]
    pairs += [(SLICES, (FuseSend(),))] if size > 1 else []
    x = [draw(*SHAPE).to(dtype) for _ in range(size)]
    b, r = draw(11).to(dtype), draw(*SHAPE).to(dtype)
    # Products of small whole numbers are exact, in whichever order they are added.
    rows = draw(7, 3, 4 * size).round().to(dtype)
    w = draw(4 * size, 11).round().to(dtype)
    part, block = rows.chunk(size, 2)[rank].contiguous(), w.chunk(size, 0)[rank].contiguous()
    total = (rows.double() @ w.double()).to(dtype)
    zeros = torch.zeros(11, dtype=dtype)
    for pair in pairs:
        alone: Schedule = pair[0][:1] if pair[0] is SLICES else ()
        for chunks in (2, 4, 21):
            summed = _equal(place, pair, chunks, first, x[rank], b, r, 7)
            multiplied = _equal(place, pair, chunks, layer, part, block, zeros)
            sent_alone = _equal(place, (alone, pair[1]), chunks, product, rows, w)
            if place.stage == 0:
                assert [summed, multiplied] == [chunks * compiled] * 2, (pair, summed, multiplied)
            else:
                if dtype != torch.bfloat16:
                    torch.testing.assert_close(summed, run_first(x, b, r, 7))
                assert torch.equal(multiplied, torch.relu(total)), pair
                assert torch.equal(sent_alone, total), pair
    # A whole that chunks have gathered is sent behind them.
    if place.stage == 0:
        layer.scheduled(*WHOLE, Overlap(chunks=4))(part, block, zeros, **place.groups)
    else:
        whole = takes.scheduled()(torch.empty_like(total), **place.groups)
        assert torch.equal(whole, torch.relu(total))
    place.close()


@pytest.mark.fused_only
@on_ranks(4)
def test_without_a_compiler_on_one_rank(context: Context) -> None:
    """On one rank of the stage that sends: all of it computes operation by operation."""
    with no_compiler(context.rank == 0):
        place = Place(context, context.backend)
        x, b, r = torch.ones(SHAPE), torch.ones(11), torch.ones(SHAPE)
        for _ in range(2):
            got = _equal(place, (SLICES, (FuseSend(),)), 3, first, x, b, r, 7)
            want = run_first([x] * place.size, b, r, 7)
            assert got == 0 if place.stage == 0 else torch.equal(got, want)
        place.close()


_SEND = messages.Sending.send


def _fails(sending: messages.Sending, part: torch.Tensor) -> None:
    if sending.sent == 1:
        raise RuntimeError("no second part")
    _SEND(sending, part)


def mistakes(context: Context, in_flight: int) -> None:
    """Another number of chunks, a schedule that is refused, a stage that raises between chunks:
    both stages raise at once, and the next message is right.

    Args:
        in_flight: after how many messages their numbers are used again.
    """
    with mock.patch.object(messages, "_IN_FLIGHT", in_flight), compiles(context):
        for backend in backends(context):
            _mistakes(context, backend)


def _mistakes(context: Context, backend: str) -> None:
    place = Place(context, backend, seconds=DEADLINE)
    x, b, r, like = torch.ones(SHAPE), torch.ones(11), torch.ones(SHAPE), torch.empty(SHAPE)
    want = run_first([x] * place.size, b, r, 7)

    def run(*overlap: Overlap, like: torch.Tensor = like) -> Any:
        if place.stage == 0:
            return first.scheduled(*SLICES, *overlap)(x, b, r, 7, **place.groups)
        return takes.scheduled(FuseSend(), *overlap)(like, **place.groups)

    def right(what: str) -> None:
        got = run(sent(3) if place.stage == 0 else received(3))
        assert place.stage == 0 or torch.equal(got, want), what

    differ = dist.DistBackendError
    right(backend)
    # By stage: what it does, and what that raises.
    for name, ways, kinds, text in (
        ("more parts", ([sent(4)], [received(2)]), (differ, differ), "parts is "),
        ("fewer parts", ([sent(2)], [received(4)]), (differ, differ), "parts is "),
        ("one of them", ([sent(3)], []), (differ, differ), "parts is "),
        ("the other", ([], [received(3)]), (differ, differ), "parts is "),
        ("refused here", ([sent(99)], [received(3)]), (IllegalTransformation, differ), "99"),
        ("refused there", ([sent(3)], [received(99)]), (differ, IllegalTransformation), "99"),
    ):
        what = f"{name}, {backend}, stage {place.stage}"
        raises(lambda w=ways: run(*w[place.stage]), what, kinds[place.stage], text)
        right(f"after {what}")

    what = f"no second part, {backend}, stage {place.stage}"
    with mock.patch.object(messages.Sending, "send", _fails):  # on all ranks of a stage
        kind = RuntimeError if place.stage == 0 else differ
        overlap = sent(3) if place.stage == 0 else received(3)
        raises(lambda: run(overlap), what, kind, "no second part")
    right(f"after {what}")
    place.close()


@pytest.mark.fused_only
@on_ranks(4)
def test_one_rank_fails(context: Context) -> None:
    """A rank raises between two chunks: its stage and the other one hear; no number is wrong.

    Without generated code all operations of its own stage are over then, and that hears nothing.
    """
    _one_rank_fails(context, heard=False)
    with compiles(context):
        _one_rank_fails(context, heard=True)


def _one_rank_fails(context: Context, heard: bool) -> None:
    place = Place(context, context.backend, seconds=DEADLINE)
    x, b, r, like = torch.ones(SHAPE), torch.ones(11), torch.ones(SHAPE), torch.empty(SHAPE)

    def run() -> Any:
        if place.stage == 0:
            return first.scheduled(*SLICES, sent(3))(x, b, r, 7, **place.groups)
        return takes.scheduled(FuseSend(), received(3))(like, **place.groups)

    for odd in range(place.size):
        mine = place.stage == 0 and place.rank == odd
        what = f"rank {context.rank}, rank {odd} fails"
        with mock.patch.object(messages.Sending, "send", _fails if mine else _SEND):
            if mine or heard or place.stage == 1:
                kind = RuntimeError if mine else dist.DistBackendError
                raises(run, what, kind, "no second part")
            else:
                run()
        got = run()
        assert place.stage == 0 or torch.equal(got, run_first([x] * place.size, b, r, 7)), what
    place.close()


@fusedpg.fuse
def summed(x: fusion.Shard(2), w: fusion.Shard(0)):
    return all_reduce(x @ w)


@pytest.mark.fused_only
@on_ranks(4)
def test_ranks_differ(context: Context) -> None:
    """Ranks of a stage have other numbers of chunks: a rank that raises begins no later chunk,
    which another rank's next call would take for one of its own.
    """
    place = Place(context, context.backend, seconds=DEADLINE)
    x, w, like = torch.ones(SHAPE), torch.ones(11, 33), torch.empty(*SHAPE[:2], 33)

    def stages(chunks: int) -> Any:
        if place.stage == 0:
            return product.scheduled(FuseSend(), sent(chunks))(x, w, **place.groups)
        return takes.scheduled(FuseSend(), received(chunks))(like, **place.groups)

    def alone(chunks: int) -> Any:
        return summed.scheduled(Overlap(chunks=chunks))(x, w, group=place.group)

    for run, total, raising in ((stages, 11.0, (1,)), (alone, 11.0 * place.size, (0, 1))):
        # Slices of two rows have as many lines as those of three.
        for mine in (2 + place.rank, 21 if place.rank else 2, 10 if place.rank else 7):
            what = f"{run.__name__}, {mine} chunks on rank {context.rank}"
            call = functools.partial(run, mine)
            if place.stage in raising:
                raises(call, what, dist.DistBackendError, "ranks disagree")
            else:
                call()
            got = run(3)
            assert place.stage not in raising or torch.equal(got, torch.full_like(like, total))
    place.close()


@on_ranks(4)
def test_gradients(context: Context) -> None:
    """Of a forward in chunks, waited for at once or later."""
    for backend in backends(context):
        place = Place(context, backend)
        draw = drawer(9, torch.float64)
        x, b, r, w = [draw(*SHAPE) for _ in range(place.size)], draw(11), draw(*SHAPE), draw(*SHAPE)
        whole = [t.clone().requires_grad_() for t in (*x, b, r, w)]
        y = run_first(whole[: place.size], whole[-3], whole[-2], 7)
        ((torch.tanh(y) * whole[-1]).sum() + y.sum()).backward()
        grads = [t.grad for t in whole]
        for async_op in (False, True):
            if place.stage == 0:
                mine = [t.clone().requires_grad_() for t in (x[place.rank], b, r)]
                run = first.scheduled(*SLICES, sent(3))
                token = run(*mine, 7, async_op=async_op, **place.groups)
                (token.wait() if async_op else token).backward()
                wanted = [grads[place.rank], grads[-3], grads[-2]]
            else:
                mine = [torch.empty(SHAPE, dtype=x[0].dtype).requires_grad_(), w.clone()]
                mine[1].requires_grad_()
                run = last.scheduled(FuseSend(), received(3))
                pending = run(*mine, async_op=async_op, **place.groups)
                got, y = pending.wait() if async_op else pending
                (got.sum() + y.sum()).backward()
                mine, wanted = mine[1:], [grads[-1]]
            for got, want in zip(mine, wanted, strict=True):
                torch.testing.assert_close(got.grad, want)
        place.close()


@functools.cache
def _swaps(other: int) -> Any:
    def swaps(like, x: Partial):
        taken = recv(like, src=other)
        return send(all_reduce(x) * 2, dst=other), taken

    return fusedpg.fuse(swaps)


@on_ranks(4)
def test_both_ways(context: Context) -> None:
    """What is sent does not wait for chunks that are received."""
    for backend in backends(context):
        place = Place(context, backend, seconds=DEADLINE)
        run = _swaps(1 - place.stage).scheduled(*SLICES, sent(3), received(3))
        begun = time.monotonic()
        _, got = run(torch.empty(SHAPE), torch.ones(SHAPE), **place.groups)
        assert torch.equal(got, torch.full(SHAPE, 2.0 * place.size))
        assert time.monotonic() - begun < DEADLINE / 4
        place.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 6, harness.slow(8)])
def test_values(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(values, dtype)


@pytest.mark.parametrize("in_flight", [2, harness.slow(1 << 10)])
def test_mistakes(in_flight: int) -> None:
    harness.pool(4).run(mistakes, in_flight)


@pytest.mark.fused_only
def test_between_hosts() -> None:
    workers = harness.pool_of_hosts("two of two")
    workers.run(values, torch.float32)
    workers.run(mistakes, 2)
