"""Asynchronous operations: who runs them, when their futures are complete."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import harness
from checks import async_op
from harness import Context

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "check",
    [
        async_op.future_is_complete,
        async_op.waits_in_callbacks,
        async_op.order_of_waits,
        async_op.modes,
        async_op.time_limit,
        async_op.needs_no_wait,
    ],
    ids=lambda check: check.__name__,
)
def test_async(check: Callable[[harness.Context], None]) -> None:
    for size in (2, 3):
        harness.pool(size).run(check)


@pytest.mark.parametrize("before_wait", [True, False])
@pytest.mark.fused_only
@harness.on_ranks(1, 2, 3)
def test_values_of_futures_are_those_of_gloo(context: Context, before_wait: bool) -> None:
    """Lists of tensors, or of lists; all_gather_into_tensor gives its output, as with NCCL."""
    ours = dist.group.WORLD._get_backend(torch.device("cpu"))
    gloo = context.oracle._get_backend(torch.device("cpu"))
    lacking = 0
    for call in async_op.CALLS:
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
            assert async_op.lists(values[0]) == async_op.lists(values[1]), call
    assert lacking <= (torch.__version__ < "2.12")
    output = torch.zeros(2 * context.world_size)
    work = ours._allgather_base(output, torch.ones(2))
    work.wait()
    assert async_op.lists(work.get_future().value()) == [[1.0] * (2 * context.world_size)]


@pytest.mark.fused_only
@harness.on_ranks(2)
def test_forked_child(context: Context) -> None:
    """A child does not run what its parent has submitted."""
    x = async_op.mine(context)
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
    async_op.check(context, x)
    dist.barrier()
    if context.rank == 0:
        context.store.delete_key("forked")
