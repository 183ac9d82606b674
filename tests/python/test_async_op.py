"""Asynchronous operations: who runs them, when their futures are complete."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
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
