"""Asynchronous operations: who runs them, when their futures are complete."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import Context, on_ranks

TOTAL = [1.0, 3.0, 6.0]  # the sum of the ranks' own numbers, by world size - 1


def _filled(*numbers: float) -> list[torch.Tensor]:
    return [torch.full((2,), float(number)) for number in numbers]


def _empty(count: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(count)]


def _rooted(options: Any) -> Any:
    options.rootRank = 0
    return options


CALLS: list[Callable[[Any, int, int], Any]] = [
    lambda b, r, n: b.allreduce(_filled(r)),
    lambda b, r, n: b.allreduce(_filled(r, r)),
    lambda b, r, n: b.allreduce_coalesced(_filled(r, 3)),
    lambda b, r, n: b.broadcast(_filled(r + 1), _rooted(dist.BroadcastOptions())),
    # Gloo leaves parts of the sum on other ranks than the root.
    lambda b, r, n: b.reduce(_filled(0), _rooted(dist.ReduceOptions())),
    lambda b, r, n: b.allgather([_empty(n)], _filled(r)),
    lambda b, r, n: b.allgather([_empty(2 * n), _empty(2 * n)], _filled(r, r + 10)),
    lambda b, r, n: b.allgather_coalesced([_empty(1) for _ in range(n)], _filled(r)),
    lambda b, r, n: b.allgather_coalesced([_empty(2) for _ in range(n)], _filled(r, 7)),
    lambda b, r, n: b.gather([] if r else [_empty(n)], _filled(r), _rooted(dist.GatherOptions())),
    lambda b, r, n: b.scatter(
        _empty(1), [] if r else [_filled(*range(n))], _rooted(dist.ScatterOptions())
    ),
    lambda b, r, n: b.alltoall_base(torch.zeros(n), torch.arange(n) + 10.0 * r, [], []),
    lambda b, r, n: b.alltoall(_empty(n), _filled(*range(r, r + n))),
    lambda b, r, n: b.barrier(),
]
"""Calls of a backend on rank r of n, whose Works have a future in Gloo."""


def mine(context: Context, numel: int = 1024) -> torch.Tensor:
    return torch.full((numel,), float(context.rank + 1))


def check(context: Context, x: torch.Tensor) -> None:
    assert torch.equal(x, torch.full_like(x, TOTAL[context.world_size - 1])), x


pytestmark = pytest.mark.timeout(120)


@on_ranks(2, 3)
def test_future_is_complete(context: Context) -> None:
    """``get_future(); wait(); value()``, also where the operation has failed."""
    for _ in range(200):
        x = mine(context)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        future = work.get_future()
        work.wait()
        assert future.done()
        (result,) = future.value()
        check(context, result)
    world: Any = dist.group.WORLD
    for _ in range(200):
        several = [mine(context) for _ in range(3)]
        world._start_coalescing(torch.device("cpu"))
        for x in several:
            world.allreduce([x], dist.AllreduceOptions())
        together = world._end_coalescing(torch.device("cpu"))
        future = together.get_future()
        together.wait()
        assert future.done() and together.get_future().done()
        for x in future.value():
            check(context, x)
    group = dist.new_group(timeout=timedelta(milliseconds=200))
    if context.rank == 0:
        work = dist.all_reduce(mine(context), group=group, async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(RuntimeError, match="timeout"):
            work.wait()
        assert future.done()
        with pytest.raises(RuntimeError, match="timeout"):
            future.value()
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(2, 3)
def test_waits_in_callbacks(context: Context) -> None:
    """A callback waits for its own operation and for others that it starts."""
    for _ in range(20):
        x = mine(context)
        y = mine(context)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None

        def then(work: dist.Work, y: torch.Tensor, _: object) -> torch.Tensor:
            work.wait()
            dist.all_reduce(y)
            other = dist.all_reduce(y.clone(), async_op=True)
            assert other is not None
            other.get_future().wait()
            return y

        done = work.get_future().then(partial(then, work, y))
        work.wait()
        check(context, x)
        check(context, done.wait())


@on_ranks(2, 3)
def test_order_of_waits(context: Context) -> None:
    """Waits in any order, from any thread, among synchronous calls."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        tensors = [mine(context, 1 + 7 * i) for i in range(8)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        if torch.rand((), generator=generator) < 0.3:
            t = mine(context)
            dist.all_reduce(t)  # behind all of them
            check(context, t)
        order = torch.randperm(8, generator=generator).tolist()

        def wait(pair: tuple[dist.Work, torch.Tensor]) -> None:
            pair[0].wait()
            check(context, pair[1])

        pairs = [(works[i], tensors[i]) for i in order]
        with ThreadPoolExecutor(4) as threads:
            elsewhere = [threads.submit(wait, pair) for pair in pairs[:4]]
            for pair in pairs[4:]:
                wait(pair)
            for future in elsewhere:
                future.result()


@on_ranks(2, 3)
def test_every_mode(context: Context) -> None:
    """The waiter's modes do not reach what it executes."""

    def strided() -> torch.Tensor:  # is copied into a new tensor
        return torch.full((64, 32), float(context.rank + 1)).t()

    for _ in range(50):
        x = strided()
        work = dist.all_reduce(x, async_op=True)
        with FakeTensorMode():
            work.wait()
        check(context, x)
        x = strided()
        work = dist.all_reduce(x, async_op=True)
        with torch.inference_mode():
            work.wait()
        check(context, x)
        x.add_(1)  # is no inference tensor now
        with torch.inference_mode():
            x = strided()
            work = dist.all_reduce(x, async_op=True)
        work.wait()
        check(context, x)
        x = strided()
        work = dist.all_reduce(x, async_op=True)

        def mapped(v: torch.Tensor, work: dist.Work = work) -> torch.Tensor:
            work.wait()
            return v

        torch.vmap(mapped)(torch.zeros(3))
        check(context, x)
        gradient = mine(context).requires_grad_()
        with torch.no_grad():
            work = dist.all_reduce(gradient, async_op=True)
        with torch.enable_grad():
            work.wait()
        check(context, gradient.detach())


@on_ranks(2, 3)
def test_time_limit(context: Context) -> None:
    """A wait with a limit ends by it, and the operation goes on."""
    for _ in range(3):
        x = mine(context)
        dist.barrier()
        if context.rank == 0:
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="timed out"):
                work.wait(timedelta(milliseconds=50))
            assert time.monotonic() - begin < 5
            context.store.set("late", "1")
            work.wait()
        else:
            context.store.wait(["late"])
            dist.all_reduce(x)
        check(context, x)
        dist.barrier()
        if context.rank == 0:
            context.store.delete_key("late")


@on_ranks(2, 3)
def test_needs_no_wait(context: Context) -> None:
    """Operations end though nobody waits, and futures though nobody helps."""
    for pause in (0.0, 0.001, 0.01):
        for _ in range(10):
            x = mine(context)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            deadline = time.monotonic() + 20
            while not work.is_completed():
                assert time.monotonic() < deadline
                time.sleep(pause)
            check(context, x)
            x = mine(context)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            (result,) = work.get_future().wait()
            check(context, result)
            dist.all_reduce(mine(context), async_op=True).wait()


def lists(value: Any) -> Any:
    """Tensors in lists as lists of numbers."""
    return value.tolist() if isinstance(value, torch.Tensor) else [lists(one) for one in value]


@pytest.mark.parametrize("before_wait", [True, False])
@pytest.mark.fused_only
@on_ranks(1, 2, 3)
def test_values_of_futures_are_those_of_gloo(context: Context, before_wait: bool) -> None:
    """Lists of tensors, or of lists; all_gather_into_tensor gives its output, as with NCCL."""
    ours = dist.group.WORLD._get_backend(torch.device("cpu"))
    gloo = context.oracle._get_backend(torch.device("cpu"))
    lacking = 0
    for call in CALLS:
        values = []
        for backend in (ours, gloo):
            try:
                work = call(backend, context.rank, context.world_size)
            except RuntimeError as error:  # Gloo of torch 2.11 has no alltoall
                assert backend is gloo and "does not support alltoall" in str(error)
                lacking += 1
                break
            future = work.get_future() if before_wait else None
            work.wait()
            values.append((future or work.get_future()).value())
        else:
            assert lists(values[0]) == lists(values[1]), call
    assert lacking <= (torch.__version__ < "2.12")
    output = torch.zeros(2 * context.world_size)
    work = ours._allgather_base(output, torch.ones(2))
    work.wait()
    assert lists(work.get_future().value()) == [[1.0] * (2 * context.world_size)]


@pytest.mark.fused_only
@on_ranks(2)
def test_forked_child(context: Context) -> None:
    """A child does not run what its parent has submitted."""
    x = mine(context)
    if context.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        pid = os.fork()
        if pid == 0:
            try:
                work.wait()
            except ValueError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        context.store.set("forked", "1")
        work.wait()
    else:
        context.store.wait(["forked"])
        dist.all_reduce(x)
    check(context, x)
    dist.barrier()
    if context.rank == 0:
        context.store.delete_key("forked")
