"""What a process is not allowed, or is allowed for ever, and memory that is not there."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks.faults import rejoin
from harness import Context, on_ranks

MIB = 1 << 20


@contextlib.contextmanager
def _limited(what: int, limit: int | None) -> Iterator[None]:
    before, most = resource.getrlimit(what)
    if limit is not None:
        resource.setrlimit(what, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(what, (before, most))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _is_ours() -> bool:
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    return type(backend).__name__ == "ProcessGroupFused"


def _future_threads() -> int:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return names.count("fusedpg-future")


def _freed(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    t = torch.ones(*sizes, dtype=dtype)
    t.untyped_storage().resize_(4)
    return t


def _adamw(which: int) -> None:
    part = fusedpg.shard_range(100, dist.get_world_size(), dist.get_rank())[1]
    sizes = [100, 100, part, part]
    p, g, m, v = (_freed(n) if i == which else torch.ones(n) for i, n in enumerate(sizes))
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    fusedpg.fused_adamw_([p], [g], [m], [v], [], [torch.zeros(())], **hyper)


def _two() -> list[torch.Tensor]:
    return [torch.ones(4), torch.ones(4)]


def _coo() -> None:
    indices, values = torch.tensor([[0, 2]]), torch.ones(2)
    t = torch.sparse_coo_tensor(indices, values, (4,)).coalesce()
    t.values().untyped_storage().resize_(0)
    dist.all_reduce(t)


def _compress(t: torch.Tensor) -> None:
    from fusedpg._registration import load_extension

    load_extension().find_blocks(t, 2)


FREED: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(_freed(4)),
    "all_reduce of a view": lambda: dist.all_reduce(_freed(4, 4)[1:, ::2]),
    "broadcast": lambda: dist.broadcast(_freed(4), 0),
    "reduce": lambda: dist.reduce(_freed(4), 0),
    "all_gather": lambda: dist.all_gather(_two(), _freed(4)),
    "all_gather into": lambda: dist.all_gather([torch.ones(4), _freed(4)], torch.ones(4)),
    "all_to_all": lambda: dist.all_to_all_single(_freed(4), torch.ones(4)),
    "send": lambda: dist.send(_freed(4), 1 - dist.get_rank()),
    "recv": lambda: dist.recv(_freed(4), 1 - dist.get_rank()),
    "sparse": lambda: fusedpg.sparse_all_reduce(_freed(4)),
    "coo": _coo,
    "blocks": lambda: _compress(_freed(4)),
    **{f"fused_adamw_ {i}": lambda i=i: _adamw(i) for i in range(4)},  # type: ignore[misc]
}

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

numbers = itertools.count()


def train(context: Context, name: str, kind: str, left: list[int | None], served: bool) -> Any:
    """A step of DDP by a new group, in a process with a limit ("v" or "f", in bytes)."""
    mine = left[context.rank]
    if kind == "v" and mine is not None:
        mine += _address_space()
    fusedpg.serve_gloo(served)
    try:
        with _limited(resource.RLIMIT_AS if kind == "v" else resource.RLIMIT_FSIZE, mine):
            rejoin(context, name, backend="gloo" if served else "fused")
            try:
                t = torch.full((1 << 20,), float(context.rank + 1))
                dist.all_reduce(t)
                assert t.eq(3).all()
                if not _is_ours():
                    # No DDP: a module that outlives Gloo's group may hang in its destructor,
                    # which joins threads that want the GIL.
                    return "Gloo's"
                model = DistributedDataParallel(torch.nn.Linear(30, 30))
                model(torch.ones(2, 30)).sum().backward()
                return fusedpg.group_info()["arena_reserved"]
            finally:
                dist.destroy_process_group()
    finally:
        fusedpg.serve_gloo(False)


@pytest.mark.parametrize(
    ("kind", "left", "most"),
    [
        ("v", [2000 * MIB, 2000 * MIB], 512 * MIB),
        ("v", [None, 2000 * MIB], 512 * MIB),
        ("f", [20 * MIB, None], 16 * MIB),
        ("f", [8 * MIB, 8 * MIB], 4 * MIB),
    ],
)
@pytest.mark.parametrize("served", [False, True], ids=["fused", "served"])
def test_arena_takes_what_fits(kind: str, left: list[int | None], most: int, served: bool) -> None:
    workers = harness.pool(2, init=False, oracle=False)
    sizes = workers.run(train, f"limit{next(numbers)}", kind, left, served)
    assert sizes[0] == sizes[1], "ranks agree"
    assert sizes[0] <= most


def test_nothing_fits() -> None:
    """ "fused" says what to do; served, all ranks have Gloo's group."""
    workers = harness.pool(2, init=False, oracle=False)
    left = [None, MIB]
    served = workers.run(train, f"limit{next(numbers)}", "f", left, True)
    assert served == ["Gloo's", "Gloo's"]
    errors = workers.errors(train, f"limit{next(numbers)}", "f", left, False)
    for error in errors:
        assert "ulimit -f" in error.text
        assert "raise that limit" in error.text


@on_ranks(2)
def test_timeouts_without_end(context: Context) -> None:
    """``timedelta.max`` wherever a timeout is taken."""
    end = datetime.timedelta.max
    group = dist.new_group(timeout=end)
    t = torch.ones(10)
    dist.all_reduce(t, group=group)
    assert dist.all_reduce(t, group=group, async_op=True).wait(end)
    dist.barrier(group=group)
    work = dist.isend(t, 1) if context.rank == 0 else dist.irecv(t, 0)
    assert work is not None
    work.wait(end)
    default: Any = dist.group.WORLD
    default.monitored_barrier(timeout=end)
    group._get_backend(torch.device("cpu"))._set_default_timeout(end)
    dist.all_reduce(t, group=group)
    options: Any = fusedpg.Options(timeout=end)
    dist.all_reduce(t, group=dist.new_group(pg_options=options))
    assert t.eq(2**4).all()


def blocked_callbacks(context: Context, count: int, waits_for_last: bool) -> int:
    """On rank 0 the threads that so many callbacks have which wait.

    Args:
        waits_for_last: for the last of them, else for this thread.
    """
    given = Path(context.scratch) / f"given-{count}"
    if context.rank != 0:
        # Or a callback would run at once, on the thread that gives it.
        while not given.exists():
            time.sleep(0.01)
        for _ in range(count):
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        return 0
    go = threading.Event()
    done = []
    for i in range(count):
        sets = waits_for_last and i == count - 1
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        done.append(future.then(lambda _, sets=sets: go.set() if sets else go.wait()))
    given.touch()
    most = 0
    begin = time.monotonic()
    while not all(future.done() for future in done):
        most = max(most, _future_threads())
        passed = time.monotonic() - begin
        assert passed < 30, "callbacks that wait for each other never end"
        if passed > 2 and not waits_for_last:
            go.set()
        time.sleep(0.02)
    dist.barrier()
    return most


def test_callbacks_that_block_have_a_bounded_number_of_threads() -> None:
    most = max(harness.pool(2).run(blocked_callbacks, 200, False))
    assert 10 < most <= 80, most
    harness.pool(2).run(blocked_callbacks, 67, True)


@on_ranks(2)
def test_memory_that_was_freed(context: Context) -> None:
    """Each operation raises for a tensor whose storage was resized."""
    for operation in FREED.values():
        with pytest.raises((ValueError, RuntimeError), match="storage"):
            operation()
    dist.all_reduce(torch.ones(1))
