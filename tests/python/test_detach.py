"""A group fails: what its tensors hold on the ranks that live on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harness
from checks.cases import digest, randn
from checks.faults import mark, rejoin, works
from checks.optim_state import fused
from harness import Context, on_ranks


def wait_for(context: Context, name: str, ranks: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not all((Path(context.scratch) / f"{name}{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, f"no {name} from {ranks}"
        time.sleep(0.002)


def barrier_within(seconds: float) -> None:
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=seconds)
    dist.distributed_c10d._get_default_group().barrier(options).wait()


def fail_group(context: Context, how: str, victim: int) -> str:
    """One rank goes, or stays away; the error of this one, if it survives."""
    dist.barrier()
    if context.rank == victim:
        if how == "stop":
            return ""
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "abort":
            dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
    try:
        barrier_within(1.5 if how == "stop" else 20)
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the group did not fail")


_kept: dict[str, torch.nn.Module] = {}

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

# All notice the failure, or one does not : then the arena is copied.
WAYS = ["kill", "stop"]


def write_through_failure(context: Context, how: str, numel: int) -> str:
    """Threads add to tensors of the arena all the time: every addition counts."""
    tensors = [context.empty(numel, dtype=torch.int64, arena=True).zero_() for _ in range(2)]
    added = [0] * len(tensors)
    stop = threading.Event()

    def add(i: int) -> None:
        while not stop.is_set():
            tensors[i].add_(1)
            added[i] += 1

    threads = [threading.Thread(target=add, args=(i,)) for i in range(len(tensors))]
    for thread in threads:
        thread.start()
    try:
        text = fail_group(context, how, 2)
        time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for tensor, count in zip(tensors, added, strict=True):
        lost = int((tensor != count).sum())
        assert lost == 0, f"{lost} of {numel} elements lost one of {count} additions"
    return text


def broadcast_through_failure(context: Context, how: str, numel: int) -> str:
    """A group that is well receives into memory of the one that fails."""
    pair = dist.new_group([0, 1])
    tensor = context.empty(numel, dtype=torch.int64, arena=True).zero_()
    if context.rank == 2:
        return fail_group(context, how, 2)
    over = threading.Event()
    wrong: list[str] = []

    def broadcast() -> None:
        goes_on = torch.ones(1, dtype=torch.int64)
        calls = 0
        while goes_on.item():
            calls += 1
            if context.rank == 0:
                tensor.fill_(calls)
            dist.broadcast(tensor, 0, group=pair)
            bad = int((tensor != calls).sum())
            if bad:
                wrong.append(f"{bad} elements of call {calls} are wrong")
            goes_on.fill_(not over.is_set())
            dist.all_reduce(goes_on, dist.ReduceOp.MAX, group=pair)

    thread = threading.Thread(target=broadcast)
    thread.start()
    try:
        text = fail_group(context, how, 2)
        time.sleep(0.05)
    finally:
        over.set()
        thread.join()
    assert not wrong, wrong
    return text


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [write_through_failure, broadcast_through_failure])
def test_no_write_is_lost(check: Callable[..., Any], how: str) -> None:
    with harness.Workers(3, timeout=20, oracle=False) as workers:
        workers.start(check, how, 3_000_000)
        for text in workers.collect(40, ranks=[0, 1]):
            assert isinstance(text, str), text
            assert "rank 2" in text, text


def share_and_fail(context: Context, how: str, victim: int) -> tuple[str, str]:
    """Shared parameters before and after one rank goes."""
    torch.manual_seed(context.rank)
    module = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Linear(700, 5))
    _kept["module"] = module
    own = context.empty(100_003, arena=True).fill_(context.rank)  # between the parameters' blocks
    optimizer = fused(module, "adamw", share_parameters=True)
    for step in range(2):
        x = randn(step, context.rank, numel=600).view(2, 300)
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = digest([param.detach() for param in module.parameters()])
    dist.barrier()
    mark(context, "shared")
    if how != "stop":
        fail_group(context, how, victim)
    elif context.rank == victim:
        # As one that is stopped in the middle of a step, and goes on with it later.
        wait_for(context, "raised", [rank for rank in range(context.world_size) if rank != victim])
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(99)
        mark(context, "late")
    else:
        with contextlib.suppress(dist.DistBackendError):
            barrier_within(1.5)
            raise AssertionError("the group did not fail")
        assert digest([param.detach() for param in module.parameters()]) == before
        mark(context, "raised")
        wait_for(context, "late", [victim])
    assert bool((own == context.rank).all())
    return before, digest([param.detach() for param in module.parameters()])


def write_parameters(context: Context) -> None:
    """After the failure each rank has parameters of its own."""
    with torch.no_grad():
        for param in _kept["module"].parameters():
            param.fill_(context.rank)
    mark(context, "written")


def read_parameters(context: Context, survivors: list[int]) -> None:
    wait_for(context, "written", survivors)
    params = [param.detach() for param in _kept["module"].parameters()]
    assert all(bool((param == context.rank).all()) for param in params)
    with contextlib.suppress(dist.DistBackendError):
        dist.destroy_process_group()
    rejoin(context, "survivors", survivors)
    works()
    for param in params:
        dist.all_reduce(param)
        assert bool((param == sum(survivors)).all())
    dist.barrier()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["kill", "abort", "stop"])
def test_shared_parameters_survive(how: str, victim: int) -> None:
    with harness.Workers(3, timeout=20, oracle=False) as workers:
        workers.start(share_and_fail, how, victim)
        survivors = [rank for rank in range(3) if how == "abort" or rank != victim]
        answers = workers.collect(40, ranks=survivors)
        assert not any(isinstance(a, harness.RemoteError | harness.Died) for a in answers), answers
        assert len({digest for pair in answers for digest in pair}) == 1, answers
        workers.start(write_parameters, ranks=survivors)
        assert workers.collect(20, ranks=survivors) == [None] * len(survivors)
        workers.start(read_parameters, survivors, ranks=survivors)
        assert workers.collect(30, ranks=survivors) == [None] * len(survivors)


@on_ranks(2)
def test_impossible_sizes(context: Context) -> None:
    import fusedpg
    from fusedpg.functional import _backend

    backend = _backend(None)
    for make in (
        lambda sizes: fusedpg.empty(*sizes),
        lambda sizes: backend.empty_shared(sizes, torch.float32),
    ):
        for sizes, words in [
            ([-3], ["-3", "dimension 0", "negative"]),
            ([4, 0, -1], ["dimension 2", "negative"]),
            ([1 << 40, 1 << 40], ["1099511627776", "64 bits"]),
            ([1 << 61, 2], ["64 bits"]),
            ([1 << 62, 4, 16], ["64 bits"]),
        ]:
            try:
                make(sizes)
            except ValueError as error:
                text = str(error)
                assert text.startswith("fused:"), text
                assert all(word in text for word in words), text
            else:
                raise AssertionError(f"{sizes}: no error")
    assert fusedpg.empty(3, 0, 1 << 40).numel() == 0
    works()
