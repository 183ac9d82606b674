"""Groups that span machines, as far as FUSEDPG_HOST_ID can pretend."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checks import collectives
from checks.cases import Case, same
from harness import Context


def engine(context: Context, local: list[int]) -> None:
    """The group knows that it spans machines."""
    import fusedpg

    info = fusedpg.group_info()
    assert info["engine"] == "tcp"
    assert info["world_size"] == context.world_size
    assert info["local_world_size"] == local[context.rank]


def transport(context: Context) -> None:
    """A new group adds up, and says what carries its messages."""
    import fusedpg

    group = torch.distributed.new_group()
    x = torch.ones(1000)
    fusedpg.sparse_all_reduce(x, group=group)
    assert bool((x == context.world_size).all())
    assert fusedpg.group_info(group)["transport"] == "tcp"
    torch.distributed.destroy_process_group(group)


def choice(context: Context, option: Any, refused: bool) -> None:
    """A group whose messages go by TCP; or an error that says what to do instead."""
    import fusedpg

    create = functools.partial(
        torch.distributed.init_process_group,
        context.backend,
        store=torch.distributed.PrefixStore("choice", context.store),
        rank=context.rank,
        world_size=context.world_size,
        pg_options=fusedpg.Options(transport=option),
    )
    if refused:
        with pytest.raises(ValueError, match=r'"ucx" has been removed.* set it to tcp'):
            create()
        return
    create()
    x = torch.ones(1000)
    torch.distributed.all_reduce(x)
    assert bool((x == context.world_size).all())
    assert fusedpg.group_info()["transport"] == "tcp"


def sums(context: Context, kind: str, numel: int) -> str:
    """A digest of an all-reduce's result."""
    generator = torch.Generator().manual_seed(100 + context.rank)
    x = (1000 * torch.randn(numel, generator=generator)).to(getattr(torch, kind))
    torch.distributed.all_reduce(x)
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def by_hosts(xs: list[torch.Tensor], hosts: list[str], op: str) -> torch.Tensor:
    """The reduction in the documented order: a host's ranks, then the hosts by their first rank."""
    half = xs[0].dtype in (torch.float16, torch.bfloat16) and op not in ("MIN", "MAX")
    wide = [x.float() if half else x for x in xs]
    join = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}.get(op, torch.add)
    groups = [
        [x for x, host in zip(wide, hosts, strict=True) if host == name]
        for name in dict.fromkeys(hosts)
    ]
    total = functools.reduce(join, [functools.reduce(join, group) for group in groups])
    if op == "AVG":
        total = (
            total / len(xs)
            if total.is_floating_point()
            else total.div(len(xs), rounding_mode="trunc")
        )
    return total.to(xs[0].dtype)


def order(context: Context, hosts: list[str], numel: int) -> None:
    """Bits of all_reduce, reduce and reduce_scatter, for all types and reductions."""
    dist = torch.distributed
    for kind in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ):
        whole = []
        for rank in range(context.world_size):
            generator = torch.Generator().manual_seed(100 + rank)
            whole.append((100 * torch.randn(numel, generator=generator)).to(kind))
        for op in REDUCTIONS:
            wanted = by_hosts(whole, hosts, op)
            x = whole[context.rank].clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            assert same(x, wanted), (kind, op)
            x = whole[context.rank].clone()
            root = context.world_size - 1
            dist.reduce(x, root, getattr(dist.ReduceOp, op))
            assert same(x, wanted if context.rank == root else whole[context.rank]), (kind, op)
            parts = list(whole[context.rank].tensor_split(context.world_size))
            mine = wanted.tensor_split(context.world_size)[context.rank]
            out = torch.empty_like(mine)
            dist.reduce_scatter(out, parts, getattr(dist.ReduceOp, op))
            assert same(out, mine), (kind, op)


def skipping(context: Context, hosts: list[str]) -> None:
    """Blocks of zeros stay at home, and the bits are those of the dense sum."""
    import fusedpg

    for kind in (torch.float32, torch.bfloat16):
        whole = []
        for rank in range(context.world_size):
            generator = torch.Generator().manual_seed(7 + rank)
            x = torch.randn(100_003, generator=generator)
            x.view(-1)[: 256 * 390].view(390, 256)[
                torch.randperm(390, generator=generator)[60:]
            ] = 0
            whole.append(x.to(kind))
        x = whole[context.rank].clone()
        fusedpg.sparse_all_reduce(x)
        assert same(x, by_hosts(whole, hosts, "SUM")), kind


def memory(context: Context, local: list[int]) -> None:
    """empty gives memory that the ranks of a host share, or what there is."""
    import fusedpg

    tensor = fusedpg.empty(1000)
    shares = local[context.rank] > 1
    assert fusedpg.in_arena(tensor) == shares
    assert (fusedpg.group_info()["arena_used"] >= 4000) == shares
    assert not fusedpg.in_arena(torch.empty(1000))
    tensor.fill_(2)
    assert bool((tensor == 2).all())
    torch.distributed.all_reduce(tensor)
    assert bool((tensor == 2 * context.world_size).all())


def in_arenas(context: Context, case: Case) -> None:
    """What ranks have in their arenas gives the bits of ordinary memory, whoever else has."""
    op = collectives.OPS[case.op]
    got = op.run(context, case, None)
    plain = op.run(context, dataclasses.replace(case, memory="ordinary"), None)
    collectives.compare(context, case, got, op.expect(context, case))
    for mine, other in zip(got, plain, strict=True):
        assert same(mine, other), f"rank {context.rank}: {case}"


def freed_in_flight(context: Context, numel: int, rounds: int) -> None:
    """Peers write to a tensor that its owner has let go; not to what comes after it."""
    import fusedpg

    dist = torch.distributed
    for i in range(rounds):
        x = fusedpg.empty(numel).fill_(context.rank + i)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        result = work.get_future()
        del x
        after = fusedpg.empty(numel).fill_(-1)
        work.wait()
        assert bool((after == -1).all())
        total = sum(rank + i for rank in range(context.world_size))
        (value,) = result.value()
        assert bool((value == total).all())


def lost_in_arenas(context: Context, how: str, numel: int) -> str:
    """A neighbour goes while tensors of the arena are under way: afterwards they change no more."""
    import fusedpg

    dist = torch.distributed
    x, other = fusedpg.empty(numel).fill_(1), fusedpg.empty(numel).fill_(3)
    dist.all_reduce(x)
    dist.barrier()
    try:
        for step in range(1000):
            if context.rank == 1 and step == 20:
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            x.fill_(1)
            dist.all_reduce(x)
    except dist.DistBackendError as error:
        x.fill_(5)
        other.fill_(6)
        if how == "stop" and context.rank == 0:
            Path(context.scratch, "failed").touch()
        time.sleep(1)
        assert bool((x == 5).all())
        assert bool((other == 6).all())
        return str(error)
    raise AssertionError("the group did not fail")


def info_while_waiting(context: Context) -> None:
    """Who asks what a group is does not wait for ranks that have not come yet."""
    import fusedpg

    group = torch.distributed.new_group()
    store = torch.distributed.PrefixStore("info", context.store)
    if context.rank != 0:
        store.wait(["asked"])
        fusedpg.sparse_all_reduce(torch.ones(10), group=group)
        torch.distributed.destroy_process_group(group)
        return
    thread = threading.Thread(target=lambda: fusedpg.sparse_all_reduce(torch.ones(10), group=group))
    thread.start()
    time.sleep(0.3)
    # Would wait for ever: the others come when this has answered.
    info = fusedpg.group_info(group)
    store.set("asked", "")
    thread.join()
    assert "transport" in info
    torch.distributed.destroy_process_group(group)


def cannot_listen(context: Context, name: str, value: str, here: str, text: str) -> None:
    """What keeps one rank from listening is raised by all, and the next group works."""
    os.environ.update({name: value} if context.rank == 0 else {})
    begin = time.monotonic()
    with pytest.raises((RuntimeError, ValueError), match=here if context.rank == 0 else text):
        torch.distributed.new_group()
    assert time.monotonic() - begin < 5
    os.environ.pop(name, None)
    group = torch.distributed.new_group()
    torch.distributed.all_reduce(torch.ones(10), group=group)
    torch.distributed.destroy_process_group(group)


def store_is_busy(context: Context) -> None:
    """A thread that waits for a key keeps its client of the store, and nothing of the group's."""
    dist = torch.distributed
    group = dist.new_group()
    assert context.store is not None
    waits = threading.Thread(target=context.store.wait, args=(["store_is_busy"],))
    if context.rank == 0:
        waits.start()
    x = torch.ones(10)
    dist.all_reduce(x, group=group)
    assert bool((x == context.world_size).all())
    for rank in range(1, context.world_size):
        if context.rank == 0:
            dist.send(x, rank, group=group)
        elif context.rank == rank:
            dist.recv(x.zero_(), 0, group=group)
    assert bool((x == context.world_size).all())
    assert waits.is_alive() == (context.rank == 0)
    dist.barrier(group=group)
    if context.rank != 0:
        context.store.set("store_is_busy", "")
    else:
        waits.join()
        context.store.delete_key("store_is_busy")
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def timeout_of_messages(context: Context) -> None:
    """A group's new timeout is also that of messages, whoever carries them."""
    dist = torch.distributed
    group = dist.new_group(timeout=datetime.timedelta(seconds=90))
    group.set_timeout(datetime.timedelta(seconds=1))
    store = dist.PrefixStore("timeout_of_messages", context.store)
    if context.rank == 0:
        begin = time.monotonic()
        with pytest.raises((dist.DistBackendError, RuntimeError), match=r"(?i)timed out|timeout"):
            dist.recv(torch.empty(10), 1, group=group)
        took = time.monotonic() - begin
        store.set("raised", "")
        assert took < 60, took
    store.wait(["raised"])
    dist.destroy_process_group(group)


def meet_at(context: Context, port: int, seconds: float) -> None:
    """A default group under another store than the test's."""
    dist = torch.distributed
    dist.init_process_group(
        context.backend,
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=context.rank,
        world_size=context.world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def without_store(context: Context, what: str) -> float:
    """Seconds that the first operation takes."""
    dist = torch.distributed
    begin = time.monotonic()
    x = torch.ones(10)
    if what == "all_reduce":
        dist.all_reduce(x)
    elif context.rank == 0:
        dist.send(x + 1, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)
    assert bool((x == 2).all())
    return time.monotonic() - begin
