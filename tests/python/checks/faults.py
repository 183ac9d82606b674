"""What ranks do while something goes wrong around them."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checks.cases import digest, values
from harness import Context


def mark(context: Context, name: str) -> None:
    """Tells the parent how far this rank has come."""
    (Path(context.scratch) / f"{name}{context.rank}").touch()


def rejoin(
    context: Context,
    name: str | None,
    ranks: Sequence[int] | None = None,
    seconds: float = 20,
    backend: str | None = None,
    **options: Any,
) -> None:
    """A new default group of some ranks, or of all; without a name under the test's own store."""
    import fusedpg

    ranks = ranks or range(context.world_size)
    dist.init_process_group(
        backend or context.backend,
        store=dist.PrefixStore(name, context.store) if name else context.store,
        rank=ranks.index(context.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=seconds),
        pg_options=fusedpg.Options(**options) if options else None,
    )


def works(numel: int = 1000) -> None:
    """The default group adds up."""
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    assert bool((tensor == dist.get_world_size()).all())


def until_failure(
    context: Context, operation: Callable[[], Any], name: str = "running"
) -> tuple[str, float]:
    """Calls an operation until it fails; the error and when it came. Marks the third call."""
    calls = 0
    try:
        while True:
            operation()
            calls += 1
            if calls == 3:
                mark(context, name)
    except dist.DistBackendError as error:
        return str(error), time.monotonic()


def loop(context: Context, what: str, numel: int, arena: bool) -> tuple[str, float]:
    """One collective until it fails."""
    tensor = context.empty(numel, arena=arena).fill_(1)
    out = [torch.zeros(numel) for _ in range(context.world_size)]

    def recv() -> None:
        if context.rank == context.world_size - 1:
            time.sleep(1)
        else:
            mark(context, "running")
            dist.recv(tensor, context.world_size - 1)

    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        "all_reduce async": lambda: dist.all_reduce(
            tensor, dist.ReduceOp.MAX, async_op=True
        ).wait(),
        "all_gather": lambda: dist.all_gather(out, tensor),
        "barrier": dist.barrier,
        "recv": recv,
        "fused_adamw_": lambda: fused_step(numel),
    }
    return until_failure(context, operations[what])


def fused_step(
    numel: int, lr: float = 1e-3, param: torch.Tensor | None = None, group: Any = None
) -> None:
    """A first step of one parameter: ones, as its gradient is."""
    import fusedpg

    param = torch.ones(numel) if param is None else param
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    state = [[torch.zeros(fusedpg.shard_range(numel, size, rank)[1])] for _ in range(2)]
    hyper = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    lists = [param], [torch.ones(numel)], *state, [], [torch.tensor(0.0)]
    fusedpg.fused_adamw_(*lists, **hyper, group=group)


def refusal(call: Callable[[], object]) -> RuntimeError:
    """The error of a call on a failed group: one that waited for peers would outlast the test."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(hours=1))
    try:
        call()
    except RuntimeError as error:
        return error
    raise AssertionError("a failed group worked")


def after_failure(context: Context, survivors: list[int], how: str) -> None:
    """The old group says no at once; a new one of the survivors works."""
    error = refusal(lambda: dist.all_reduce(torch.ones(3)))
    assert isinstance(error, dist.DistBackendError), error
    assert str(error).startswith("fused:"), error
    if how == "abort":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    rejoin(context, "survivors", survivors)
    works()
    works(300_000)


def mismatch(context: Context, what: str, numel: int, async_op: bool) -> None:
    """Rank 0 does one thing and the others another."""
    odd = context.rank == 0
    tensor = torch.ones(numel)
    work: Any = None
    if what == "op":
        if odd:
            work = dist.all_reduce(tensor, async_op=async_op)
        else:
            work = dist.broadcast(tensor, 0, async_op=async_op)
    elif what == "dtype":
        work = dist.all_reduce(tensor.double() if odd else tensor, async_op=async_op)
    elif what == "size":
        work = dist.all_reduce(torch.ones(numel + 1) if odd else tensor, async_op=async_op)
    elif what == "root":
        work = dist.broadcast(tensor, 0 if odd else 1, async_op=async_op)
    elif what == "redop":
        op = dist.ReduceOp.SUM if odd else dist.ReduceOp.MAX
        work = dist.all_reduce(tensor, op, async_op=async_op)
    elif what == "gather size":
        tensor = torch.ones(numel + 1) if odd else tensor
        out = torch.zeros(tensor.numel() * context.world_size)
        work = dist.all_gather_into_tensor(out, tensor, async_op=async_op)
    elif what == "learning rate":
        fused_step(numel, lr=0.1 if odd else 0.2)
    else:
        raise AssertionError(what)
    if work is not None:
        work.wait()


def still_works(context: Context) -> None:
    for numel in (1, 1000, 300_000):
        works(numel)
    dist.barrier()


def sleep_through(context: Context, sleeper: int, seconds: float) -> None:
    """All but one call a collective of a group with a timeout of one second."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    begin = time.monotonic()
    if context.rank == sleeper:
        time.sleep(seconds)
    else:
        try:
            dist.all_reduce(torch.ones(100), group=group)
        except dist.DistBackendError as error:
            assert 0.8 < time.monotonic() - begin < 4
            assert f"rank {sleeper}" in str(error), error
            assert "all_reduce" in str(error), error
        else:
            raise AssertionError("an absent rank was not missed")
    # The default group knows nothing of it.
    works()


def monitored(context: Context, sleeper: int) -> str:
    """monitored_barrier with one rank missing; what rank 0 hears."""
    if context.rank == sleeper:
        time.sleep(3)
        return ""
    group = dist.distributed_c10d._get_default_group()
    try:
        group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a missing rank was not missed")


def large_loop(context: Context, numel: int, seed: int) -> str:
    """Large all_reduces in the arena until a peer is stopped; keeps the memory."""
    global _kept
    _kept = [context.empty(numel, arena=True) for _ in range(2)]
    for i, tensor in enumerate(_kept):
        tensor.copy_(values(seed + 10 * context.rank + i, numel, torch.float32))
    # On a busy machine a rank may take longer for its values than the group's timeout.
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    calls = 0
    try:
        while True:
            dist.all_reduce(_kept[calls % 2], dist.ReduceOp.AVG)
            calls += 1
            if calls == 3:
                mark(context, f"large{seed}-")
    except dist.DistBackendError as error:
        return str(error)


def send_large(context: Context, numel: int) -> None:
    """A message that its receiver has not asked for yet, and a short one after it."""
    dist.isend(torch.ones(numel), 0)
    dist.isend(torch.ones(1), 0, tag=1)
    time.sleep(1000)


def hear(context: Context, source: int) -> None:
    """Receives the short message, before which the first part of the large one has come."""
    dist.recv(torch.zeros(1), source, tag=1)


def receive_from_any(context: Context, numel: int) -> str:
    mark(context, "receives")
    try:
        dist.recv(torch.zeros(numel), None)
    except dist.DistBackendError as error:
        return str(error)
    return ""


_kept: list[torch.Tensor] = []


def recover(context: Context, survivors: list[int], name: str) -> str:
    """A new group of the survivors; the digest of what they hold."""
    with contextlib.suppress(dist.DistBackendError):
        dist.destroy_process_group()
    rejoin(context, name, survivors)
    works()
    return digest(_kept)


def recovered(context: Context, before: str) -> None:
    """Not one bit has changed, and the new group works on that memory."""
    assert digest(_kept) == before, "a stopped peer changed our memory"
    works()
    for tensor in _kept:
        tensor.fill_(1)
        dist.all_reduce(tensor)
        assert bool((tensor == dist.get_world_size()).all())
        tensor.fill_(5)
    time.sleep(0.2)
    assert all(bool((tensor == 5).all()) for tensor in _kept)


def nan(context: Context, dtype: torch.dtype, numel: int) -> None:
    """One NaN on the last rank."""
    tensor = torch.ones(numel, dtype=dtype)
    if context.rank == context.world_size - 1:
        tensor[-1] = torch.nan
    dist.all_reduce(tensor)


def full_arena(context: Context) -> str:
    """More than the arena holds; the text of the error."""
    import fusedpg

    small = fusedpg.empty(1000).fill_(context.rank)
    try:
        fusedpg.empty(256 << 20)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        text = str(error)
    else:
        raise AssertionError("a gigabyte fitted into a small arena")
    dist.all_reduce(small)
    assert bool((small == sum(range(context.world_size))).all())
    again = fusedpg.empty(1000)
    assert fusedpg.in_arena(again)
    return text


def ddp_without_arena(context: Context) -> None:
    """DDP whose buckets do not fit takes ordinary memory."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    module = torch.nn.Linear(3001, 3001)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    for _ in range(3):
        module.zero_grad()
        x = torch.full((1, 3001), float(context.rank + 1))
        ddp(x).sum().backward()
    grad = module.weight.grad
    assert grad is not None
    assert bool((grad == (context.world_size + 1) / 2).all())


def outlive(context: Context) -> None:
    """Arena tensors stay readable and writable without their group."""
    import fusedpg

    tensors = [fusedpg.empty(100_000).fill_(i) for i in range(4)]
    dist.all_reduce(tensors[3])
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    for i, tensor in enumerate(tensors[:3]):
        assert bool((tensor == i).all())
        tensor.add_(1)
        assert bool((tensor == i + 1).all())
    rejoin(context, "after")
    # Memory of another group is ordinary memory to this one.
    dist.all_reduce(tensors[0])
    assert bool((tensors[0] == context.world_size).all())
    assert not fusedpg.in_arena(tensors[0])


def again_and_again(context: Context, times: int) -> None:
    """Default groups one after the other on one and the same store."""
    dist.destroy_process_group()
    for turn in range(times):
        rejoin(context, None)
        works()
        works(100_000)
        if turn % 2:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def resources() -> dict[str, int]:
    """What a process holds."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": len(maps),
        "shared": sum("memfd" in line for line in maps),
        "rss": int(rss.split()[1]) // 1024,
    }


def churn(context: Context, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Groups created, used and destroyed; resources before and after."""
    before: dict[str, int] = {}
    for turn in range(count + 20):
        if turn == 20:
            before = resources()
        group = dist.new_group()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        if turn % 3 == 0 and context.fused:
            import fusedpg

            shared = fusedpg.empty(100_000, group=group).fill_(1)
            dist.all_reduce(shared, group=group)
            del shared
        dist.destroy_process_group(group)
    return before, resources()


def calls_leak_nothing(context: Context, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Many calls of every kind; resources before and after."""
    before: dict[str, int] = {}
    for turn in range(count + 50):
        if turn == 50:
            before = resources()
        tensor = torch.ones(5000 + turn)
        dist.all_reduce(tensor, async_op=True).wait()
        out = [torch.zeros(100) for _ in range(context.world_size)]
        dist.all_gather(out, torch.ones(100))
        work = dist.isend(tensor, (context.rank + 1) % context.world_size)
        dist.recv(tensor, (context.rank - 1) % context.world_size)
        work.wait()
    return before, resources()


def small_calls(context: Context, count: int) -> float:
    """Seconds for many small all_reduces."""
    tensor = torch.zeros(256)
    dist.barrier()
    begin = time.monotonic()
    for _ in range(count):
        dist.all_reduce(tensor)
    return time.monotonic() - begin


def forked_children(context: Context) -> None:
    """Children neither share the arena nor disturb it when they end."""
    tensor = context.empty(100_000, arena=True).fill_(3)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ordinary = torch.ones(10).sum()
            del tensor
            gc.collect()
            code = 7 if float(ordinary) == 10 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert bool((tensor == 3 * context.world_size).all())
    works()


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set that knows nothing of the arena."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index * index))


def data_loader(context: Context) -> None:
    """DataLoader workers are forked in the middle of training."""
    # A daemonic process may not have children of its own.
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = torch.nn.Linear(1, 1)
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        seen = 0.0
        for batch in loader:
            optimizer.zero_grad()
            ddp(batch[:, None]).mean().backward()
            optimizer.step()
            seen += float(batch.sum())
        assert seen == sum(index * index for index in range(32))
    works()


def leave(context: Context) -> None:
    """Ends the process in the middle of things, without a word to its peers."""
    sys.stdout.flush()
    os._exit(0)


def resized(context: Context, sizes: list[int], file_store: bool, permuted: bool) -> None:
    """Default groups of changing size under one store, one after the other.

    A rank that sits out goes on to the next group at once, unless ranks change their places.
    """
    store: Any = context.store
    if file_store:
        store = dist.FileStore(str(Path(context.scratch) / "store"))
    for turn, size in enumerate(sizes):
        rank = (context.rank + turn * permuted) % context.world_size
        if rank < size:
            dist.init_process_group(
                context.backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=30),
            )
            works()
            dist.destroy_process_group()
        if permuted:
            if context.store.add(f"turn{turn}", 1) == context.world_size:
                context.store.set(f"over{turn}", "")
            context.store.wait([f"over{turn}"])


def short_of_descriptors(context: Context) -> list[str]:
    """One rank cannot open files; the errors of all, each time with a group after it that works."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    texts = []
    for room in range(2):  # a group of three takes three descriptors
        held = []
        if context.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for fd in held[len(held) - room :]:
                os.close(fd)
            del held[len(held) - room :]
        start = time.monotonic()
        try:
            dist.new_group()
        except dist.DistBackendError as error:
            texts.append(str(error))
        assert time.monotonic() - start < 20
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # It also ends what the failed attempt has left, files among it.
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=dist.new_group())
        assert tensor[0] == context.world_size
    return texts


def forbid(name: str) -> None:
    """This process's system call of that name fails with EPERM from now on, as under a seccomp
    profile."""
    import ctypes
    import platform

    numbers = {
        "x86_64": {"memfd_create": 319, "fallocate": 285},
        "aarch64": {"memfd_create": 279, "fallocate": 47},
    }
    number = numbers[platform.machine()][name]

    class Filter(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_uint16),
            ("jt", ctypes.c_uint8),
            ("jf", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        )

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter)))

    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD | W | ABS, BPF_JMP | JEQ | K, BPF_RET | K
    allow, deny = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW, _ERRNO | EPERM
    lines = (Filter * 4)(
        Filter(load, 0, 0, 0), Filter(equal, 0, 1, number), Filter(give, 0, 0, deny),
        Filter(give, 0, 0, allow),
    )  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    program = Program(4, lines)
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


def without_shared_memory(context: Context, call: str) -> str:
    """The error where the system refuses shared memory; what it advises helps."""
    forbid(call)
    try:
        rejoin(context, "refused")
    except dist.DistBackendError as error:
        text = str(error)
    else:
        raise AssertionError(f"a group without {call}")
    os.environ["FUSEDPG_HOST_ID"] = f"rank {context.rank}"
    rejoin(context, "advised")
    works()
    dist.send(torch.ones(3), 1) if context.rank == 0 else dist.recv(torch.ones(3), 0)
    dist.destroy_process_group()
    return text


def ends_by(context: Context, how: str) -> str | None:
    """Rank 1 ends its interpreter; the others say what they read."""
    if context.rank == 1:
        program = (
            "import sys, torch, torch.distributed as dist\n"
            "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False)\n"
            "store = dist.PrefixStore('ends', store)\n"
            "dist.init_process_group('fused', store=store, rank=1, world_size=2)\n"
            "dist.all_reduce(torch.ones(3))\n"
            f"{how}\n"
        )
        port = context.store.port
        subprocess.run([sys.executable, "-c", program, str(port)], timeout=60, check=False)
        return None
    rejoin(context, "ends", [0, 1])
    dist.all_reduce(torch.ones(3))
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    raise AssertionError("no error")
