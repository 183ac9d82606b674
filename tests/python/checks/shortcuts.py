"""Calls of a fused function that are like earlier ones, and calls that only look like them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fusedpg
from checks.compiled import compiles
from checks.compiled import done as operations
from fusedpg import fusion
from fusedpg.fusion import plan as plans
from harness import Context

SCHEDULE = (fusion.Split(), fusion.AsShard(), fusion.Reorder(), fusion.FuseCollective())


def step(
    g: fusion.Partial,
    w: fusion.Replicate,
    m: fusion.Shard,
    lr: float,
    nesterov: bool,
    seed: int = 5,
) -> Any:
    g = fusion.all_reduce(g, "mean")
    m = 0.5 * m + g
    d = 0.5 * m + g if nesterov else m
    return w - fusion.dropout(2 * (1 - lr * lr) * d, 0.25, seed), m


@contextlib.contextmanager
def taken() -> Iterator[list[bool]]:
    """Of each call that might be like an earlier one: whether its plan was found by that."""
    found: list[bool] = []
    real = plans.EarlierCalls.repeat

    def repeat(self: Any, *args: Any) -> Any:
        result = real(self, *args)
        found.append(result is not None)
        return result

    with mock.patch.object(plans.EarlierCalls, "repeat", repeat):
        yield found


class Calls:
    """A sequence of calls on this rank, beside what operation by operation makes of it."""

    def __init__(self, context: Context, numel: int) -> None:
        self.context, self.numel = context, numel
        self.run = fusedpg.fuse(step).scheduled(*SCHEDULE)
        self.plain = fusedpg.fuse(step).scheduled()
        length = fusedpg.shard_range(numel, context.world_size, context.rank)[1]
        self.w, self.m, self.g = torch.ones(numel), torch.zeros(length), torch.ones(numel)

    def call(self, drawn: random.Random) -> None:
        """Against the same function by torch's operations: all but the last places."""
        given = torch.Generator().manual_seed(drawn.randrange(1 << 30) + self.context.rank)
        self.g.copy_(torch.randn(self.numel, generator=given))
        numbers = {"lr": drawn.random(), "nesterov": False, "seed": drawn.randrange(1 << 40)}
        w, m = self.w, self.m
        with torch.no_grad():
            want = self.plain(
                self.g.clone(), self.w.clone(), self.m.clone(), group=self.context.oracle, **numbers
            )
            versions = w._version, m._version
            got = self.run.into((w, m), self.g, self.w, self.m, **numbers)
        assert got[0] is w and got[1] is m
        assert w._version > versions[0] and m._version > versions[1], "autograd was not told"
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def without_function(context: Context) -> None:
    """A rank loses its function while all take shortcuts: all go on operation by operation."""
    drawn = random.Random(1)
    with compiles(context), taken() as found:
        calls = Calls(context, 100)
        for _ in range(4):
            calls.call(drawn)
        assert found[-1]
        before, count = operations(), len(found)
        if context.rank == context.world_size - 1:
            earlier = calls.run._earlier._of_groups[dist.group.WORLD].known
            assert earlier
            for known in earlier.values():
                for step in known.plan.fused:
                    step.function = 0
        for _ in range(3):
            calls.call(drawn)
        # Beside each is one of `plain`. The first finds it out; no other is found.
        assert found[count:] == [False, True, *[False] * 4]
        # The one that found it out, and each call's reduction, which has a function of its own.
        assert operations() <= before + 1 + 3


def beside_others(context: Context) -> None:
    """A rank whose tensors lie elsewhere each time, and others, which take shortcuts."""
    drawn = random.Random(2)
    with compiles(context), taken() as found:
        calls = Calls(context, 3000)
        kept = []
        for _ in range(8):
            calls.call(drawn)
            if context.rank == 0:
                kept.append((calls.w, calls.m))
                calls.w, calls.m = calls.w.clone(), calls.m.clone()
        assert any(found) == (context.rank != 0)
        # Another group of the same ranks does not take what was found for this one.
        other = dist.new_group(backend="fused")
        w, count = calls.w.clone(), len(found)
        with torch.no_grad():
            calls.run.into(
                (calls.w, calls.m), calls.g, calls.w, calls.m, lr=0.5, nesterov=False, group=other
            )
        assert not any(found[count:]) and not torch.equal(w, calls.w)
        dist.destroy_process_group(other)


def groups_that_go(context: Context) -> None:
    """What is remembered for a group, with its shared memory, goes with it."""
    counts = []
    with compiles(context), taken() as found:
        step = fusedpg.fuse(lambda g, w: w - fusion.all_reduce(g)).scheduled(
            *SCHEDULE[:1], *SCHEDULE[2:]
        )
        for _ in range(6):
            group = dist.new_group(backend="fused")
            tensors = [torch.ones(500) for _ in range(4)]
            for w in tensors * 3:
                step.into(w, torch.ones(500), w, group=group)
            dist.barrier(group=context.oracle)
            dist.destroy_process_group(group)
            del group
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
    assert any(found) and counts[1] == counts[-1], counts
