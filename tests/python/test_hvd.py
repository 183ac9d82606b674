"""fusedpg.hvd: operations by name, against formulas in numpy."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import random
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusedpg.hvd as hvd
import harness
from checks.frames import during, watching
from harness import Context, on_ranks

pytestmark = pytest.mark.timeout(180)


@contextlib.contextmanager
def session(**settings: Any) -> Iterator[None]:
    """hvd, on the worker's process group, with some of Horovod's variables."""
    before = dict(os.environ)
    os.environ.update({f"HOROVOD_{name.upper()}": str(value) for name, value in settings.items()})
    try:
        hvd.init()
        yield
        hvd.barrier()
    finally:
        hvd.shutdown()
        os.environ.clear()
        os.environ.update(before)


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def everybody(
    context: Context, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> np.ndarray:
    """All ranks' tensors in double precision."""
    ranks = range(context.world_size)
    return np.stack([of_rank(rank, shape, dtype, seed).double().numpy() for rank in ranks])


DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32]
DTYPES += [torch.float64]


def reduced(values: np.ndarray, op: int, dtype: torch.dtype) -> torch.Tensor:
    """A reduction's result, by its formula."""
    functions = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    if op == hvd.Average:
        mean = values.sum(0) / len(values)
        return torch.from_numpy(mean if dtype.is_floating_point else np.trunc(mean)).to(dtype)
    return torch.from_numpy(np.asarray(functions[op](values, axis=0))).to(dtype)


@on_ranks(2)
def test_frames(context: Context) -> None:
    """An all-reduce takes few Python frames of ours."""
    tensor = torch.ones(4)
    with session(), watching():
        for _ in range(3):
            counted = during(lambda: hvd.allreduce(tensor, name="frames"), alone=True)
    assert counted.total() <= 30, f"{counted.total()}: {counted}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3)
def test_reductions(context: Context, dtype: torch.dtype) -> None:
    """All-reduce and reduce-scatter, of one tensor and of several, in place and not."""
    rows = context.world_size * 2 + 1
    shapes = [(rows, 3), (rows,), (rows, 1, 2)]
    own = [of_rank(context.rank, shape, dtype, i) for i, shape in enumerate(shapes)]
    first, count = context.rank * 2 + min(context.rank, 1), 2 + (context.rank < 1)
    with session():
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            want = [
                reduced(everybody(context, shape, dtype, i), op, dtype)
                for i, shape in enumerate(shapes)
            ]
            tensors = [tensor.clone() for tensor in own]
            torch.testing.assert_close(hvd.grouped_allreduce(tensors, op=op), want)
            torch.testing.assert_close(tensors, own, rtol=0, atol=0)
            torch.testing.assert_close(hvd.allreduce(tensors[0], op=op), want[0])
            hvd.grouped_allreduce_(tensors[1:], op=op)
            hvd.allreduce_(tensors[0], op=op)
            torch.testing.assert_close(tensors, want)
            parts = hvd.grouped_reducescatter(own, op=op)
            torch.testing.assert_close(parts, [w[first : first + count] for w in want])


@on_ranks(2, 3)
def test_scales(context: Context) -> None:
    """Factors before and after, in double precision for integers."""
    for dtype in (torch.int32, torch.float64):
        own = of_rank(context.rank, (7,), dtype)
        each = everybody(context, (7,), dtype) * 2.5
        total = (np.trunc(each) if dtype == torch.int32 else each).sum(0) * 0.5
        want = torch.from_numpy(np.trunc(total) if dtype == torch.int32 else total).to(dtype)
        with session():
            scale = {"op": hvd.Sum, "prescale_factor": 2.5, "postscale_factor": 0.5}
            torch.testing.assert_close(hvd.allreduce(own, **scale), want)
            rows = [7 // context.world_size + (r < 7 % context.world_size) for r in range(3)]
            part = torch.split(want, rows[: context.world_size])[context.rank]
            torch.testing.assert_close(hvd.reducescatter(own, **scale), part)


@on_ranks(2, 3, 4)
def test_scales_of_halves_round_twice(context: Context) -> None:
    """Once after the factor, which is single precision's, and once after the sum."""
    size, factor = context.world_size, 0.1915194503788923
    own = torch.randint(-100, 100, (4 * size, 9), generator=torch.Generator().manual_seed(4))
    each = (own.float() * factor).half().double()
    want = (size * each).half()
    # Single precision's sums, which Horovod's own test demands, are none of a half on 3 ranks.
    assert torch.equal(want.double(), size * each) == (size != 3)
    with session():
        scale = {"op": hvd.Sum, "prescale_factor": factor}
        assert torch.equal(hvd.allreduce(own.half(), **scale), want)
        mine = want[4 * context.rank : 4 * context.rank + 4]
        assert torch.equal(hvd.reducescatter(own.half(), **scale), mine)
        assert torch.equal(hvd.grouped_reducescatter([own.half()], **scale)[0], mine)


@on_ranks(2, 3)
def test_memory_that_is_not_contiguous(context: Context) -> None:
    own = of_rank(context.rank, (4, 6), torch.float32)
    want = reduced(everybody(context, (4, 6), torch.float32), hvd.Sum, torch.float32)
    with session():
        view = own.clone().t()
        assert hvd.allreduce_(view, op=hvd.Sum) is view
        torch.testing.assert_close(view, want.t())
        torch.testing.assert_close(hvd.allreduce(own.t(), op=hvd.Sum), want.t())
        view = own.clone()[:, ::2]
        hvd.broadcast_(view, root_rank=1)
        torch.testing.assert_close(view, of_rank(1, (4, 6), torch.float32)[:, ::2])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.int16], ids=str)
@on_ranks(2, 3)
def test_moves(context: Context, dtype: torch.dtype) -> None:
    """All-gather, broadcast and all-to-all, with other numbers of rows on each rank."""
    rank, size = context.rank, context.world_size
    rows = [[3, 0, 20], [2, 2, 2]]
    with session():
        for number, of in enumerate(rows):
            parts = [of_rank(r, (of[r], 2), dtype, number) for r in range(size)]
            torch.testing.assert_close(hvd.allgather(parts[rank]), torch.cat(parts))
        root = size - 1
        own = of_rank(rank, (2, 5), dtype)
        torch.testing.assert_close(hvd.broadcast(own, root), of_rank(root, (2, 5), dtype))
        table = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
        sent = [of_rank(r, (sum(table[r]) + 1, 2), dtype) for r in range(size)]
        got, received = hvd.alltoall(sent[rank], torch.tensor(table[rank], dtype=torch.int32))
        begins = [sum(table[r][:rank]) for r in range(size)]
        want = [sent[r][begins[r] : begins[r] + table[r][rank]] for r in range(size)]
        torch.testing.assert_close(got, torch.cat(want))
        assert received.tolist() == [table[r][rank] for r in range(size)]
        own = of_rank(rank, (2 * size,), dtype)
        want = [of_rank(r, (2 * size,), dtype)[2 * rank : 2 * rank + 2] for r in range(size)]
        torch.testing.assert_close(hvd.alltoall(own), torch.cat(want))


@on_ranks(2, 3)
def test_gradients(context: Context) -> None:
    """The operations' gradients, by formulas: averages where Horovod has them."""
    rank, size = context.rank, context.world_size

    def leaf(rows: int) -> torch.Tensor:
        return of_rank(rank, (rows, 2), torch.float64).requires_grad_()

    def weight(r: int, rows: int) -> torch.Tensor:
        return of_rank(r, (rows, 2), torch.float64, seed=9)

    with session():
        x = leaf(3)
        (hvd.allreduce(x, op=hvd.Sum) * weight(rank, 3)).sum().backward()
        torch.testing.assert_close(x.grad, sum(weight(r, 3) for r in range(size)))
        x, rows = leaf(rank + 1), size * (size + 1) // 2
        (hvd.allgather(x) * weight(rank, rows)).sum().backward()
        begin = rank * (rank + 1) // 2
        mean = sum(weight(r, rows) for r in range(size)) / size
        torch.testing.assert_close(x.grad, mean[begin : begin + rank + 1])
        x = leaf(3)
        (hvd.broadcast(x, root_rank=1) * weight(rank, 3)).sum().backward()
        mean = sum(weight(r, 3) for r in range(size)) / size
        torch.testing.assert_close(x.grad, mean if rank == 1 else torch.zeros(3, 2).double())
        x = leaf(size + 1)
        splits = torch.ones(size, dtype=torch.int32)
        got, _ = hvd.alltoall(x, splits)
        (got * (rank + 1)).sum().backward()
        want = [float(r + 1) for r in range(size)] + [0.0]
        assert x.grad is not None and x.grad[:, 0].tolist() == want
        x = leaf(2 * size)
        (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1)).sum().backward()
        want = [float(size * (r + 1)) for r in range(size) for _ in range(2)]
        assert x.grad is not None and x.grad[:, 0].tolist() == want


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_ranks(2, 3)
def test_gradients_of_gradients(context: Context, compiled: bool) -> None:
    """Second gradients are those of the operations that the first ones are made of."""
    rank, size = context.rank, context.world_size
    split = torch.ones(size, dtype=torch.int32)
    calls: dict[str, Any] = {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0),
        "gather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, root_rank=1),
        "exchange": lambda x: hvd.alltoall(x, split)[0],
        "scatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=3.0),
    }

    def model(call: Any, x: torch.Tensor) -> torch.Tensor:
        return (call(x * x) ** 2).sum()

    # What follows from a direction v: the derivative of every rank's first gradient.
    with session():
        for name, call in calls.items():
            rows = size + 1 if name == "exchange" else 2 * size
            x = of_rank(rank, (rows, 2), torch.float64, 3).requires_grad_()
            v = of_rank(rank, (rows, 2), torch.float64, 5)
            loss = torch.compile(model, backend="eager")(call, x) if compiled else model(call, x)
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad((first * v).sum(), x)
            want = _by_hand(name, x.detach(), v)
            for found, wanted in zip((first.detach(), second), want, strict=True):
                torch.testing.assert_close(found, wanted, msg=lambda text, n=name: f"{n}: {text}")


def _by_hand(name: str, x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first gradient of `sum(f(x * x) ** 2)`, and that of its product with `v`.

    With y = x * x and B for the operation's backward, linear in the gradient 2 f(y): the first is
    2 x B(2 f(y)). The second is 2 v B(2 f(y)) + 2 x F'(2 B'(2 x v)), where B' is B's backward, and
    F' is f's.
    """
    rank, size = hvd.rank(), hvd.size()

    def total(t: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(t, op=hvd.Sum)

    def own(t: torch.Tensor) -> torch.Tensor:
        rows = len(t) // size
        return t[rank * rows : (rank + 1) * rows]

    def padded(t: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(len(t) * size, *t.shape[1:], dtype=t.dtype)
        own(whole).copy_(t)
        return whole

    root = float(rank == 1)
    splits = [*[1] * size]

    def moved(t: torch.Tensor) -> torch.Tensor:
        return hvd.alltoall(t[:size].contiguous(), torch.tensor(splits, dtype=torch.int32))[0]

    def rest(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, t.new_zeros(1, *t.shape[1:])])

    # By operation: f, its backward B, and B's backward.
    functions: dict[str, tuple[Any, Any, Any]] = {
        "sum": (lambda t: 2 * total(t),) * 3,
        "gather": (
            lambda t: total(padded(t)),
            lambda t: own(total(t)) / size,
            lambda t: total(padded(t)) / size,
        ),
        "broadcast": (
            lambda t: total(root * t),
            lambda t: root * total(t) / size,
            lambda t: total(root * t) / size,
        ),
        "exchange": (moved, lambda t: rest(moved(t)), moved),
        "scatter": (
            lambda t: own(3 * total(t)),
            lambda t: total(padded(3 * size * t)),
            lambda t: own(total(t)) * 3,
        ),
    }
    there, back, backward_of_back = functions[name]
    with torch.no_grad():
        given = back(2 * there(x * x))
        return 2 * x * given, 2 * v * given + 2 * x * back(2 * backward_of_back(2 * x * v))


# --- the controller -------------------------------------------------------------------------


MISMATCHES = {
    "shape": lambda rank: hvd.allreduce(torch.zeros(3 + rank), name="x"),
    "dimensions": lambda rank: hvd.allreduce(torch.zeros((4, 1) if rank else (4,)), name="x"),
    "dtype": lambda rank: hvd.allreduce(torch.zeros(3, dtype=DTYPES[5 + rank % 2]), name="x"),
    "op": lambda rank: hvd.allreduce(torch.zeros(3), name="x", op=hvd.Min if rank else hvd.Max),
    "scale": lambda rank: hvd.allreduce(torch.zeros(3), name="x", prescale_factor=1.0 + rank),
    "root": lambda rank: hvd.broadcast(torch.zeros(3), rank, name="x"),
    "columns": lambda rank: hvd.allgather(torch.zeros(3, 1 + rank), name="x"),
    "columns of alltoall": lambda rank: hvd.alltoall(torch.zeros(6, 1 + rank), name="x"),
    "rows of reducescatter": lambda rank: hvd.reducescatter(torch.zeros(6 + rank), name="x"),
    "sets": lambda rank: hvd.add_process_set([rank]),
}


@pytest.mark.parametrize("what", MISMATCHES)
@on_ranks(2, 3)
def test_mismatch_raises_everywhere_and_ends_nothing(context: Context, what: str) -> None:
    """Also where an operation of the name has been done before, and is remembered."""
    with session():
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match="different"):
                MISMATCHES[what](context.rank)
            for _ in range(2):
                total = hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum)
                assert total.tolist() == [context.world_size] * 3


@on_ranks(2, 3)
def test_one_name_at_a_time(context: Context) -> None:
    """A second pending operation raises at once, where peers have not called the first one."""
    with session():
        if context.rank == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="x")
            assert not hvd.poll(handle)
            with pytest.raises(ValueError, match="same name"):
                hvd.allreduce_async(torch.ones(2), name="x")
        hvd.barrier()
        if context.rank > 0:
            handle = hvd.allreduce_async(torch.ones(2), name="x")
        assert hvd.synchronize(handle).tolist() == [1, 1]
        assert hvd.synchronize(handle) is None


@pytest.mark.parametrize("remembered", [False, True])
@on_ranks(2, 3)
def test_join(context: Context, remembered: bool) -> None:
    """Joined ranks add zeros; what needs their data raises on the others; the last one is known."""
    rank, size = context.rank, context.world_size
    calls = {
        "allgather": lambda: hvd.allgather(torch.ones(2), name="gathered"),
        "broadcast": lambda: hvd.broadcast(torch.ones(2), size - 1, name="sent"),
        "alltoall": lambda: hvd.alltoall(torch.ones(size), name="moved"),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(size), name="scattered"),
        "sums and averages": lambda: hvd.allreduce(torch.ones(2), name="least", op=hvd.Min),
    }
    with session():
        for joins_first in range(size):
            if remembered:
                hvd.allreduce(torch.ones(2), name="mean")
                for call in calls.values():
                    call()
            if rank != joins_first:
                mean = hvd.allreduce(torch.full((2,), 6.0), name="mean")
                torch.testing.assert_close(mean, torch.full((2,), 6.0 * (size - 1) / size))
                total = hvd.allreduce(torch.ones(3, dtype=torch.int64), op=hvd.Sum, name="sum")
                assert total.tolist() == [size - 1] * 3
                hvd.barrier()
                for name, call in calls.items():
                    with pytest.raises(hvd.HorovodInternalError, match=f"{name}.*joined"):
                        call()
            last = hvd.join()
            assert last != joins_first
            # Without a name: ranks have called different numbers of operations.
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
            assert hvd.allgather_object(last) == [last] * size


@on_ranks(3)
def test_process_sets(context: Context) -> None:
    rank = context.rank
    with session():
        with pytest.raises(ValueError, match="already"):
            hvd.add_process_set([0, 1, 2])
        pair, rest = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1]))
        assert pair.size() == 2 and rest.size() == 1
        here = rest if rank == 1 else pair
        assert here.included() and here.rank() == (0, 0, 1)[rank]
        # The same name in two sets, at once.
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="x", process_set=here)
        assert total.tolist() == [float(here.size() or 0)] * 2
        if rank != 1:
            assert hvd.broadcast(torch.tensor([rank]), 2, process_set=pair).item() == 2
            with pytest.raises(ValueError, match="root_rank 1"):
                hvd.broadcast(torch.tensor([rank]), 1, process_set=pair)
        else:
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 is not in"):
                hvd.allreduce(torch.ones(2), process_set=pair)
        waits = hvd.allreduce_async(torch.ones(1), name="y", process_set=pair) if rank == 2 else 0
        hvd.barrier()
        assert hvd.remove_process_set(pair) and not hvd.remove_process_set(pair)
        if waits:
            with pytest.raises(hvd.HorovodInternalError, match="removed"):
                hvd.synchronize(waits)
        with pytest.raises(ValueError, match="not added"):
            hvd.allreduce(torch.ones(2), process_set=pair)
        assert hvd.remove_process_set(rest)
        again = hvd.add_process_set([0, 2])
        if again.included():
            hvd.barrier(again)
        assert not hvd.remove_process_set(hvd.global_process_set)


RANDOM = [(1, 400, 0), (1, 400, 7), (1, 400, 1024)]
RANDOM += [harness.slow(2, 20_000, 7), harness.slow(3, 20_000, 1024), harness.slow(4, 20_000, 0)]


def _one_of_many(
    number: int, context: Context, process_set: hvd.ProcessSet, ranks: list[int]
) -> Any:
    """Begins an operation that its number describes.

    Returns its handle and what it must give: None for an error, as one rank's shape differs.
    """
    draw = random.Random(number)
    name, rows = f"op{number % 40}.{len(ranks)}", draw.randrange(1, 40)
    dtype = draw.choice([torch.float32, torch.int64])
    parts = [of_rank(r, (rows, 2), dtype, number) for r in ranks]
    mine = ranks.index(context.rank)
    values = np.stack([part.double().numpy() for part in parts])
    kind = draw.randrange(5)
    if len(ranks) > 1 and draw.random() < 0.05:
        own = parts[mine][:, : 1 + (mine == draw.randrange(len(ranks)))]
        begin = draw.choice([hvd.allreduce_async, hvd.allgather_async, hvd.reducescatter_async])
        return begin(own, name=name, process_set=process_set), None
    if kind <= 1:
        op = draw.choice([hvd.Sum, hvd.Max, hvd.Average])
        begin = hvd.allreduce_async_ if kind else hvd.allreduce_async
        handle = begin(parts[mine].clone(), name=name, op=op, process_set=process_set)
        return handle, reduced(values, op, dtype)
    if kind == 2:
        cut = [part[: 1 + (number + r) % rows] for r, part in zip(ranks, parts)]
        handle = hvd.allgather_async(cut[mine], name=name, process_set=process_set)
        return handle, torch.cat(cut)
    if kind == 3:
        root = draw.randrange(len(ranks))
        handle = hvd.broadcast_async(parts[mine], ranks[root], name=name, process_set=process_set)
        return handle, parts[root]
    handle = hvd.reducescatter_async(parts[mine], name=name, op=hvd.Sum, process_set=process_set)
    sizes = [rows // len(ranks) + (r < rows % len(ranks)) for r in range(len(ranks))]
    return handle, reduced(values, hvd.Sum, dtype).split(sizes)[mine]


def _many(
    numbers: range, context: Context, process_set: hvd.ProcessSet, ranks: list[int], seed: int
) -> None:
    """Operations in an order of this rank's own, 20 at a time."""
    order = random.Random(f"{seed}.{context.rank}.{numbers[0]}")
    for first in range(0, len(numbers), 20):
        some = list(numbers[first : first + 20])
        order.shuffle(some)
        begun = [_one_of_many(number, context, process_set, ranks) for number in some]
        order.shuffle(begun)
        for handle, want in begun:
            if want is None:
                with pytest.raises(hvd.HorovodInternalError) as told:
                    hvd.synchronize(handle)
                if "different shapes" not in str(told.value):
                    raise told.value
            else:
                torch.testing.assert_close(hvd.synchronize(handle), want)


def _join_one_by_one(context: Context, seed: int) -> None:
    """Ranks that have not joined go on, with zeros of those that have."""
    active = list(range(context.world_size))
    random.Random(seed).shuffle(active)
    last = active[-1]
    while active[0] != context.rank:
        del active[0]
        for number in range(3):
            parts = [of_rank(r, (9,), torch.float32, seed + number) for r in active]
            own = parts[active.index(context.rank)]
            op = hvd.Average if number else hvd.Sum
            got = hvd.allreduce(own, name=f"late{number}", op=op)
            want = torch.stack(parts).sum(0) / (context.world_size if number else 1)
            torch.testing.assert_close(got, want)
    assert hvd.join() == last


def _random_work(context: Context, seed: int, operations: int, capacity: int) -> None:
    """Blocks of up to 400 operations a rank by two threads, in two sets; joins between them."""
    size = context.world_size
    ranks = [0, size - 1] if size > 2 else [1]
    done = 0

    def thread(*job: Any) -> None:
        try:
            _many(*job, seed)
        except BaseException as error:
            failures.append(error)

    with session(cache_capacity=capacity, cycle_time=0.3):
        other = hvd.add_process_set(ranks)
        for block in range(-(-operations // 400)):
            failures: list[BaseException] = []
            first = seed * 1_000_000 + 1000 * block
            jobs: list[Any] = [
                (range(first, first + 200), context, hvd.global_process_set, list(range(size)))
            ]
            if context.rank in ranks:
                jobs.append((range(first + 500, first + 700), context, other, ranks))
            threads = [threading.Thread(target=thread, args=job) for job in jobs]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            if failures:
                raise failures[0]
            _join_one_by_one(context, first)
            done += 200 * len(jobs)
    print(f"seed {seed}: {done} operations besides those of joins")


@pytest.mark.parametrize("seed, operations, capacity", RANDOM)
@on_ranks(2, 3, timeout=400)
def test_random_work(context: Context, seed: int, operations: int, capacity: int) -> None:
    """Named operations in two threads and two sets, in orders of each rank's own, and mismatches.

    Names come back with other kinds, shapes and types; a cache of 7 requests forgets all the time.
    """
    _random_work(context, seed, operations, capacity)


def _work_and_die(context: Context, seed: int) -> None:
    victim = seed % context.world_size
    hvd.init()
    everybody = list(range(context.world_size))
    with contextlib.suppress(hvd.HorovodInternalError):  # where the victim is ahead
        _many(range(1000, 1200), context, hvd.global_process_set, everybody, seed)
    if context.rank == victim:
        hvd.allreduce_async(torch.ones(2), name="last")
        os._exit(3)
    with pytest.raises(hvd.HorovodInternalError):
        _many(range(2000, 2040), context, hvd.global_process_set, everybody, seed)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(2), name="after")
    hvd.shutdown()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", [1, 2, harness.slow(3), harness.slow(4)])
def test_death_among_many_operations(seed: int, size: int) -> None:
    with harness.Workers(size, oracle=False) as workers:
        workers.start(_work_and_die, seed)
        answers = workers.collect(60)
    assert isinstance(answers[seed % size], harness.Died)
    assert sum(answer is None for answer in answers) == size - 1, answers


# --- beginning and end ----------------------------------------------------------------------


@on_ranks(2, 3)
def test_shutdown_of_one_rank_ends_the_others(context: Context) -> None:
    hvd.init()
    hvd.init()  # does nothing
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (context.rank, context.world_size)
    assert (hvd.local_rank(), hvd.local_size()) == (context.rank, context.world_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1) and hvd.is_homogeneous()
    if context.rank == 0:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"ranks \[0\] called shutdown"):
            hvd.allreduce(torch.ones(2), name="x")
        with pytest.raises(hvd.HorovodInternalError, match="shutdown"):
            hvd.allreduce(torch.ones(2), name="y")
        hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="init"):
        hvd.rank()
    with session():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == context.world_size


def _own_group(context: Context, port: int) -> None:
    rank, size = context.rank, context.world_size
    os.environ.update(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), FUSEDPG_HVD_BACKEND=context.backend)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    for _ in range(3):
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        hvd.shutdown()
        assert not torch.distributed.is_initialized()


def test_init_makes_the_group_that_is_not_there() -> None:
    with harness.Workers(2, init=False) as workers:
        workers.run(_own_group, workers.store.port)


def _dies(context: Context) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(2), name="x")
    if context.rank == 0:
        os._exit(3)
    with pytest.raises(hvd.HorovodInternalError):
        for _ in range(2):
            hvd.allreduce(torch.ones(2), name="x")
    hvd.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_death_raises_on_the_others(size: int) -> None:
    with harness.Workers(size, oracle=False) as workers:
        workers.start(_dies)
        answers = workers.collect(60)
    assert isinstance(answers[0], harness.Died)
    assert answers[1:] == [None] * (size - 1)


def _has_no_memory(context: Context, in_set: bool) -> None:
    """One rank cannot allocate the result of an all-gather that all have agreed on."""
    hvd.init()
    pair = hvd.add_process_set([0, context.world_size - 1])
    here = pair if in_set else hvd.global_process_set
    rows = torch.ones(64 << 20, dtype=torch.uint8)
    if context.rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        used = pages * resource.getpagesize()
        # Earlier groups may give address space back until then: far less than the result needs.
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        with pytest.raises(hvd.HorovodInternalError) as told:
            if here.included():
                hvd.allgather(rows, name="big", process_set=here)
            hvd.allreduce(torch.ones(16), name="next", op=hvd.Sum)
    finally:
        if context.rank == 0:
            resource.setrlimit(resource.RLIMIT_AS, before)
    if context.rank == 0:
        assert re.search("rank 0 failed in allgather.big: .*memory", str(told.value))
    hvd.shutdown()
    with session():
        total = hvd.allreduce(torch.ones(16), op=hvd.Sum)
        assert total.tolist() == [context.world_size] * 16


@pytest.mark.parametrize("in_set", [False, True], ids=["all", "set"])
@pytest.mark.parametrize("backend", [harness.BACKEND, "gloo"])
def test_failure_of_one_rank_ends_the_others(backend: str, in_set: bool) -> None:
    """At once, on any backend: no rank waits, or takes another message for its data."""
    harness.pool(3, backend=backend).run(_has_no_memory, in_set, timeout=60)


def _refuses(context: Context) -> None:
    with session():
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match=r"does not reduce torch\.int16"):
                hvd.allreduce(torch.ones(2, dtype=torch.int16), name="x")
        assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [2, 2]


def test_types_that_gloo_refuses_end_nothing() -> None:
    harness.pool(2, backend="gloo").run(_refuses)


def _moves(context: Context) -> None:
    rows = torch.complex(torch.ones(2, 1), torch.arange(2.0).reshape(2, 1))
    with session():
        for own in (rows, rows.conj(), rows.conj().imag, rows.imag.bool()):
            first, second = own.tolist()
            assert hvd.allgather(own).tolist() == [first, second] * 2
            assert hvd.broadcast(own, 0).tolist() == [first, second]
            assert hvd.alltoall(own).tolist() == [own.tolist()[context.rank]] * 2


def test_bytes_of_any_type_move_on_gloo() -> None:
    """Conjugated and negated elements, too, whose bytes are others than their memory's."""
    harness.pool(2, backend="gloo").run(_moves)


@on_ranks(2)
def test_a_timeline_that_cannot_be_written_ends_nothing(context: Context) -> None:
    with session(timeline="/dev/full"):
        for number in range(60):
            hvd.allreduce(torch.ones(2), name=f"x{number}")
        hvd.stop_timeline()
        hvd.start_timeline("/dev/full")
    # The engine's thread closes it, and tells what is pending that it has ended.
    assert not hvd.is_initialized()


@on_ranks(2)
def test_autotuning_that_fails_ends_alone(context: Context) -> None:
    options = {"autotune_warmup_samples": 0, "autotune_steps_per_sample": 1}
    log = Path(context.scratch, "folder", "log.csv")
    if context.rank == 0:
        log.parent.mkdir()
    said: list[str] = []
    logger, handler = logging.getLogger("fusedpg"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with session(autotune=1, autotune_log=log, **options):
        if context.rank == 0:
            log.unlink()
            log.parent.rmdir()  # the first point's line cannot be written
        for number in range(12):
            total = hvd.allreduce(torch.full((3,), float(context.rank)), op=hvd.Sum, name="x")
            assert total.tolist() == [sum(range(context.world_size))] * 3, number
    logger.removeHandler(handler)
    assert len(said) == (context.rank == 0), said
    assert all("autotuning ends" in text for text in said)


@on_ranks(2)
def test_autotuning_that_cannot_begin(context: Context) -> None:
    """All ranks raise the same where it needs what is missing; nothing is left of it."""
    known = sys.modules.get("sklearn")
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(ImportError, match="scikit-learn"):
            with session(autotune=1):
                pass
    finally:
        del sys.modules["sklearn"]
        if known is not None:
            sys.modules["sklearn"] = known
    assert not hvd.is_initialized()
    with session():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == context.world_size


@pytest.mark.long
@on_ranks(2, 3)
def test_stalls(context: Context) -> None:
    """Rank 0 warns with names and ranks, and the engine ends after the time that was set."""
    before = dict(os.environ)
    os.environ.update(
        HOROVOD_STALL_CHECK_TIME_SECONDS="0.5", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3"
    )
    try:
        hvd.init()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        for _ in range(6):  # each is waited for, but none for long
            time.sleep(0.6 * context.rank)
            hvd.allreduce(torch.ones(2), name="slow")
        name = "lonely" if context.rank == 0 else "other"
        with pytest.raises(hvd.HorovodInternalError, match="waited for others for more than 3 s"):
            hvd.allreduce(torch.ones(2), name=name)
    finally:
        hvd.shutdown()
    if context.rank == 0:
        log = Path(context.scratch, "rank0.log").read_text()
        missing = list(range(1, context.world_size))
        assert f"allreduce.lonely (process set 0): {missing}" in log


@on_ranks(2)
def test_timeline(context: Context) -> None:
    """Chrome's format, with Horovod's events: begins and ends match, on each tensor's line."""
    path = Path(context.scratch, "timeline.json")
    with session():
        hvd.start_timeline(str(path), mark_cycles=True)
        for _ in range(2):
            hvd.allreduce(torch.ones(2, 3), name="x")
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="y")
        hvd.allgather(torch.ones(2), name="z")
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(2 + context.rank), name="x")
        hvd.barrier()
        hvd.stop_timeline()
    if context.rank:
        return
    events = json.loads(path.read_text())
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    assert any(event["name"] == "CYCLE_START" for event in events)
    assert all(event["tid"] == 0 for event in events)
    lines = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert {"allreduce.x", "allreduce.y", "allgather.z", "barrier"} <= set(lines)
    for name, pid in lines.items():
        begun: list[Any] = []
        names = []
        for event in (e for e in events if e["pid"] == pid):
            if event["ph"] == "B":
                begun.append((event["name"], event.get("args")))
            elif event["ph"] == "E":
                assert (event["name"], event.get("args")) == begun.pop()
            names += [event["name"]] if event["ph"] in "BX" else []
        assert not begun, name
        assert {"0", "1", f"NEGOTIATE_{name.split('.')[0].upper()}"} <= set(names)
    x = [e["name"] for e in events if e["pid"] == lines["allreduce.x"] and e["ph"] == "B"]
    negotiated, done = "NEGOTIATE_ALLREDUCE", ["ALLREDUCE", "COLLECTIVE_ALLREDUCE"]
    assert x == [negotiated, *done, negotiated, *done, negotiated]


def test_forms_have_signatures_of_their_own() -> None:
    """Those for one tensor and those that wait are made from the others."""
    forms = {
        "allreduce": "(tensor: 'Tensor', average: 'bool | None' = None, name: ",
        "allreduce_async_": "(tensor: 'Tensor', average: 'bool | None' = None, ",
        "grouped_allreduce_": "(tensors: 'Sequence[Tensor]', average: 'bool | None' = None, ",
        "broadcast_": "(tensor: 'Tensor', root_rank: 'int', name: 'str | None' = None, ",
        "reducescatter_async": "(tensor: 'Tensor', name: 'str | None' = None, op: 'int' = 0, ",
    }
    for name, begin in forms.items():
        form = getattr(hvd, name)
        assert str(inspect.signature(form)).startswith(begin)
        assert form.__name__ == name and form.__doc__
    returns = {
        "allreduce": "Tensor",
        "allreduce_async": "int",
        "grouped_allreduce_": "list[Tensor]",
    }
    for name, kind in returns.items():
        assert inspect.signature(getattr(hvd, name)).return_annotation == kind
    with pytest.warns(DeprecationWarning) as told, pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.allreduce(torch.ones(1), average=True)
    assert told[0].filename == __file__


def _installed(_: Context) -> None:
    hvd.install()
    import horovod.torch
    import horovod.torch as named
    from horovod.torch import allreduce

    assert named is hvd and horovod.torch is hvd and allreduce is hvd.allreduce
    from horovod.common.exceptions import HorovodInternalError
    from horovod.runner import run
    from horovod.torch.compression import Compression
    from horovod.torch.mpi_ops import allgather

    assert allgather is hvd.allgather and Compression is hvd.Compression
    assert run is hvd.run and HorovodInternalError is hvd.HorovodInternalError
    sys.modules["horovod.torch"] = harness
    with pytest.raises(RuntimeError, match="already"):
        hvd.install()


def test_install() -> None:
    with harness.Workers(1, init=False) as workers:
        workers.run(_installed)
