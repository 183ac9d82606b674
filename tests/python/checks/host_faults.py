"""What ranks of several hosts do while something goes wrong between them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checks import faults
from fuzz import resources
from harness import Context

# Of this process, before it was in any group but the first.
_held: resources.Held = {}


def _join(context: Context, ranks: list[int], seconds: float) -> None:
    """A default group of some ranks, under the store that all groups here have had."""
    dist.init_process_group(
        context.backend,
        store=context.store,
        rank=ranks.index(context.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=seconds),
    )


def _operation(context: Context, what: str, numel: int) -> Callable[[], None]:
    """One that checks its own result."""
    tensor = torch.empty(numel)
    size, rank = dist.get_world_size(), dist.get_rank()

    def all_reduce() -> None:
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert bool((tensor == size * (size + 1) / 2).all())

    def fused_adamw() -> None:
        import fusedpg

        length = fusedpg.shard_range(numel, size, rank)[1]
        tensor.fill_(1)
        moments = torch.zeros(length), torch.zeros(length)
        fusedpg.fused_adamw_(
            [tensor],
            [torch.full((numel,), float(rank + 1))],
            [moments[0]],
            [moments[1]],
            [],
            [torch.tensor(0.0)],
            lr=0.5,
            beta1=0.5,
            beta2=0.5,
            weight_decay=0.0,
            eps=0.0,
        )
        # The first step's direction is the gradient's sign.
        assert bool((tensor == 0.5).all()), tensor

    def all_to_all() -> None:
        output = torch.empty(size * numel)
        dist.all_to_all_single(output, torch.full((size * numel,), float(rank)))
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(numel))

    def all_gather() -> None:
        output = torch.empty(size * numel)
        dist.all_gather_into_tensor(output, tensor.fill_(rank))
        assert torch.equal(output, torch.arange(float(size)).repeat_interleave(numel))

    def messages() -> None:
        """Round the ring, from any host to any other."""
        received = torch.empty(numel)
        before = (rank - 1) % size
        works = [dist.irecv(received, before), dist.isend(tensor.fill_(rank), (rank + 1) % size)]
        for work in works:
            work.wait()
        assert bool((received == before).all())

    return {
        "all_reduce": all_reduce,
        "fused_adamw_": fused_adamw,
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "messages": messages,
    }[what]


def prepare(context: Context, ranks: list[int]) -> None:
    """Whatever a process keeps from its first group on is there."""
    join(context, ranks, 30)
    dist.destroy_process_group()
    if not _held:
        _held.update(resources.held())


def join(context: Context, ranks: list[int], seconds: float) -> None:
    _join(context, ranks, seconds)
    _operation(context, "all_reduce", 1000)()
    _operation(context, "fused_adamw_", 1000)()


def until_failure(context: Context, what: str, numel: int, name: str) -> tuple[str, float]:
    """The error, and when it came."""
    operation = _operation(context, what, numel)
    calls = 0
    try:
        while True:
            operation()
            calls += 1
            if calls == 3:
                faults.mark(context, name)
    except dist.DistBackendError as error:
        return str(error), time.monotonic()


def late(context: Context, ranks: list[int], what: str, numel: int, name: str) -> tuple[str, float]:
    """Like `until_failure`; some ranks do not come before the file `name` with "go" is there."""
    operation = _operation(context, what, numel)
    for _ in range(3):
        operation()
    faults.mark(context, name)
    go = Path(context.scratch) / f"{name}go"
    deadline = time.monotonic() + 30
    while context.rank in ranks and not go.exists():
        assert time.monotonic() < deadline, f"no {go}"
        time.sleep(0.01)
    return until_failure(context, what, numel, "never")


def abort_from_a_thread(context: Context, what: str, numel: int, name: str) -> tuple[str, float]:
    """Like `until_failure`; on rank 0 another thread aborts. That rank says how long it took."""
    if context.rank != 0:
        return until_failure(context, what, numel, name)
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    aborted = []

    def abort() -> None:
        while not (Path(context.scratch) / f"{name}0").exists():
            time.sleep(0.01)
        time.sleep(0.2 + 0.05 * random.random())
        aborted.append(time.monotonic())
        backend.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    text, when = until_failure(context, what, numel, name)
    thread.join()
    return text, when - aborted[0]


def abort_when_idle(context: Context, what: str, name: str) -> tuple[str, float]:
    """Rank 0 does nothing but abort, when the others wait for it."""
    if context.rank != 0:
        faults.mark(context, name)
        return until_failure(context, what, 1000, "never")
    assert dist.group.WORLD is not None
    faults.mark(context, name)
    time.sleep(0.5)
    when = time.monotonic()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    return "fused: aborted", when


def again(context: Context, ranks: list[int], patience: float) -> None:
    """A failed group refuses at once; nothing is left of it, and a new one works."""
    error = faults.refusal(lambda: dist.all_reduce(torch.ones(3)))
    assert isinstance(error, dist.DistBackendError), error
    error = faults.refusal(lambda: faults.fused_step(context, 100))
    assert isinstance(error, dist.DistBackendError), error
    leave(context, patience)
    join(context, ranks, 20)
    leave(context, patience)


def leave(context: Context, patience: float) -> None:
    dist.destroy_process_group()
    if left := resources.leaks(_held, patience):
        raise AssertionError(f"{left}, before: {_held}")


def mismatch(context: Context, what: str, numel: int) -> str:
    with pytest.raises(dist.DistBackendError) as error:
        faults.mismatch(context, what, numel, async_op=False)
    return str(error.value)
