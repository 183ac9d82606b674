"""What ranks on a GPU do while something goes wrong around them."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_checks.device import DEVICE, FAKE, synchronize
from harness import Context

# Enough for the first call, which loads the kernels and connects the ranks.
PATIENCE = timedelta(seconds=90)


def rejoin(context: Context, name: str, members: list[int]) -> None:
    """A new default group of some ranks."""
    import fusedpg

    options = fusedpg.Options(timeout=PATIENCE, **({"_cpu_as_cuda": True} if FAKE else {}))
    dist.init_process_group(
        "fused",
        store=dist.PrefixStore(name, context.store),
        rank=members.index(context.rank),
        world_size=len(members),
        timeout=PATIENCE,
        pg_options=options,
    )


def begin(context: Context, timeout: float) -> Any:
    """A group whose operations have that long, once it is warm."""
    from fusedpg.functional import _backend

    if dist.is_initialized():
        dist.destroy_process_group()
    rejoin(context, "faults", list(range(context.world_size)))
    assert step(1000) is None
    synchronize()
    group = _backend(None)
    group.set_timeout(timedelta(seconds=timeout))
    dist.barrier()
    return group


def step(numel: int, lr: float = 1e-3, async_op: bool = False) -> Any:
    import fusedpg

    length = fusedpg.shard_range(numel, dist.get_world_size(), dist.get_rank())[1]

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, device=DEVICE)

    return fusedpg.fused_adamw_(
        [zeros(numel)],
        [zeros(numel) + 1],
        [zeros(length)],
        [zeros(length)],
        [],
        [zeros(())],
        lr=lr,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        async_op=async_op,
    )


def outcome(call: Any, seconds: float = 60) -> tuple[str, float]:
    """The error that a call, or the operation behind it, ends with; and when it came."""
    try:
        work = call()
        assert work is not None
        # A wait() with a timeout blocks the host; without, only the stream would wait.
        work.wait(timedelta(seconds=seconds))
    except dist.DistBackendError as error:
        return str(error), time.monotonic()
    raise AssertionError("nothing raised")


def loop(context: Context, timeout: float) -> tuple[str, float]:
    """Steps until one fails."""
    begin(context, timeout)
    for calls in range(100_000):
        if calls == 3:
            (Path(context.scratch) / f"running{context.rank}").touch()
        try:
            step(100_003, async_op=True).wait(timedelta(seconds=60))
        except dist.DistBackendError as error:
            return str(error), time.monotonic()
    raise AssertionError("nothing has failed")


def mismatch(context: Context, what: str) -> str:
    """Rank 0 calls another operation than the rest; nothing is left hanging."""
    group = begin(context, 60)
    odd = context.rank == 0
    calls: dict[str, Any] = {
        "learning rate": lambda: step(1000, lr=0.1 if odd else 0.2, async_op=True),
        "order": lambda: step(1000 if odd else 992, async_op=True),
        "operation": lambda: (
            step(1000, async_op=True)
            if odd
            else group.reduce_shards_([torch.ones(1000, device=DEVICE)], async_op=True)
        ),
    }
    text, _ = outcome(calls[what])
    refused()
    again(context, "after")
    return text


def refused() -> None:
    """A failed group says no at once."""
    start = time.monotonic()
    try:
        step(10)
    except dist.DistBackendError as error:
        assert str(error).startswith("fused:"), error
        assert time.monotonic() - start < 1
    else:
        raise AssertionError("a failed group worked")


def again(context: Context, name: str, members: list[int] | None = None) -> None:
    """A new group of the survivors works."""
    dist.destroy_process_group()
    rejoin(context, name, members or list(range(context.world_size)))
    for numel in (1000, 300_001):
        step(numel, async_op=True).wait(PATIENCE)
    tensor = torch.ones(100, device=DEVICE)
    dist.all_reduce(tensor)
    assert bool((tensor == dist.get_world_size()).all())
    synchronize()


def survivors(context: Context, members: list[int]) -> None:
    refused()
    again(context, "survivors", members)


def absent(context: Context, timeout: float) -> tuple[str, float]:
    """Rank 1 does not come; it learns of it when it does."""
    begin(context, timeout)
    start = time.monotonic()
    if context.rank == 1:
        time.sleep(timeout + 3)
    text, when = outcome(lambda: step(1000, async_op=True))
    refused()
    again(context, "after")
    return text, when - start


def aborted(context: Context) -> str:
    """abort() ends what waits on the GPU, from another thread."""
    import threading

    group = begin(context, 60)
    if context.rank == 0:
        timer = threading.Timer(1.0, group.abort)
        timer.start()
        text, _ = outcome(lambda: step(1000, async_op=True))
        timer.join()
        context.store.set("aborted", "yes")
    else:
        context.store.wait(["aborted"], PATIENCE)
        text, _ = outcome(lambda: step(1000, async_op=True))
    again(context, "after")
    return text


def torn_down_under_way(context: Context) -> None:
    """A group may be destroyed with work on the way; tensors stay valid."""
    for number in range(3):
        if dist.is_initialized():
            dist.destroy_process_group()
        rejoin(context, f"life{number}", list(range(context.world_size)))
        works = [step(10_007, async_op=True) for _ in range(4)]
        if number == 0:
            for work in works:
                work.wait()
    synchronize()


def out_of_memory(context: Context) -> None:
    """torch's allocator refuses one rank's buffers; that raises, and its next call is right."""
    import fusedpg

    begin(context, PATIENCE.total_seconds())
    param = torch.zeros(8 << 20, device=DEVICE)
    grad = torch.full_like(param, -1.0)

    def update() -> None:
        flags = {"nesterov": False, "is_first_step": True, "dampening": 0.0}
        fusedpg.fused_sgd_([param], [grad], [], lr=1.0, momentum=0.0, weight_decay=0.0, **flags)
        synchronize()

    if context.rank == 1:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(DEVICE) / total)
        try:
            update()
        except torch.OutOfMemoryError as error:
            assert "the group works on" in str(error), error
        else:
            raise AssertionError("it had memory")
        synchronize()
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert not param.any(), "it was updated"
    update()
    assert param.eq(1).all()
