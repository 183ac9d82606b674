"""Groups, object collectives and the group's own methods."""

from __future__ import annotations

import itertools
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from harness import Context


def objects(context: Context) -> None:
    """The object collectives."""
    size = context.world_size
    mine = {"rank": context.rank, "text": "x" * (1000 * context.rank + 1), "none": None}
    everyone = [
        {"rank": rank, "text": "x" * (1000 * rank + 1), "none": None} for rank in range(size)
    ]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    assert gathered == everyone

    root = size - 1
    collected: list[Any] | None = [None] * size if context.rank == root else None
    dist.gather_object(mine, collected, dst=root)
    assert collected == (everyone if context.rank == root else None)

    sent: list[Any] = [mine, [1, 2], "three"] if context.rank == root else [None] * 3
    dist.broadcast_object_list(sent, src=root)
    assert sent == [everyone[root], [1, 2], "three"]

    out: list[Any] = [None]
    dist.scatter_object_list(out, everyone if context.rank == 0 else None, src=0)
    assert out == [mine]

    if size > 1:
        if context.rank == 0:
            dist.send_object_list([mine, 5], dst=1)
        elif context.rank == 1:
            received: list[Any] = [None, None]
            dist.recv_object_list(received, src=0)
            assert received == [everyone[0], 5]


def subgroups(context: Context) -> None:
    """Groups over some ranks, in an order of their own, next to each other."""
    size = context.world_size
    pairs = [[rank, (rank + 1) % size] for rank in range(size)] if size > 1 else [[0]]
    groups = [dist.new_group(sorted(set(pair))) for pair in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if context.rank not in pair:
            assert dist.get_rank(group) == -1
            continue
        tensor = torch.full((1000,), float(context.rank))
        dist.all_reduce(tensor, group=group)
        assert bool((tensor == sum(set(pair))).all())
        dist.broadcast(tensor, src=pair[0], group=group)
        last = torch.full((3,), float(context.rank))
        dist.broadcast(last, group=group, group_src=dist.get_world_size(group) - 1)
        assert bool((last == max(pair)).all())
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.barrier()


def meeting_again(context: Context) -> None:
    """Groups of ranks that know each other: of one name again, and cheap until they are used."""
    size, rank = context.world_size, context.rank
    store = dist.distributed_c10d._get_default_store()
    pair = [0, size - 1]
    for _ in range(20):
        # Before 2.15 torch names such a group by its ranks: one like it that is gone had the same
        # name. Since then it numbers them, and all ranks must make as many of them.
        ranks = pair if rank in pair else [rank]
        again = dist.new_group(ranks, use_local_synchronization=True)
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=again)
        assert bool((tensor == sum(set(ranks))).all())
        dist.destroy_process_group(again)
    dist.barrier()
    before, keys = committed(), store.num_keys()
    dist.barrier()
    groups = [dist.new_group() for _ in range(4)]
    assert committed() - before <= len(groups) * (64 << 10)
    dist.barrier()
    # torch's own barrier leaves two keys for a group, and we leave none.
    assert store.num_keys() <= keys + 3 * len(groups)
    for group in groups:
        dist.destroy_process_group(group)


def parting(context: Context) -> None:
    """A rank's FUSEDPG_HOST_ID changes after the default group was made, and changes back."""
    size, rank = context.world_size, context.rank
    for moved in (False, True, True, False):
        if moved and rank == 1:
            os.environ["FUSEDPG_HOST_ID"] = "elsewhere"
        group = dist.new_group()
        os.environ.pop("FUSEDPG_HOST_ID", None)
        others = [r for r in range(size) if r != 1]
        there = list(range(size)) if not moved else [1] if rank == 1 else others
        assert fusedpg.group_info(group)["local_ranks"] == there
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert bool((tensor == size * (size - 1) / 2).all())
        dist.destroy_process_group(group)


def committed() -> int:
    """Bytes of shared memory that this rank's arenas hold."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and "fusedpg-arena" in os.readlink(path):
            total += os.stat(path).st_blocks * 512
    return total


def overlapping(context: Context) -> None:
    """Asynchronous calls on three groups of the same ranks at once."""
    groups = [None, dist.new_group(), dist.new_group(timeout=timedelta(seconds=30))]
    works = []
    tensors = []
    for i in range(30):
        tensor = torch.full((5000,), float(context.rank + i))
        tensors.append(tensor)
        works.append(dist.all_reduce(tensor, group=groups[i % 3], async_op=True))
    for work in works:
        work.wait()
    base = sum(range(context.world_size))
    for i, tensor in enumerate(tensors):
        assert bool((tensor == base + i * context.world_size).all())
    for group in groups[1:]:
        dist.destroy_process_group(group)


def threads(context: Context, count: int, calls: int) -> None:
    """Many threads, each with a group of its own, in no common order."""
    groups = [dist.new_group() for _ in range(count)]
    failures: list[BaseException] = []

    def loop(index: int) -> None:
        try:
            for call in range(calls):
                tensor = torch.full((100 + 1000 * index,), float(context.rank + index))
                dist.all_reduce(tensor, group=groups[index])
                want = sum(range(context.world_size)) + index * context.world_size
                assert bool((tensor == want).all()), (index, call)
        except BaseException as error:
            failures.append(error)

    # Each rank starts its threads in another order.
    order = sorted(range(count), key=lambda index: (index * (context.rank + 3)) % 7)
    running = [threading.Thread(target=loop, args=(index,)) for index in order]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for group in groups:
        dist.destroy_process_group(group)
    if failures:
        raise failures[0]


def shrinking(context: Context) -> None:
    """shrink_group leaves out the last rank, or says why it does not."""
    last = context.world_size - 1
    if context.rank == last:
        return
    want = last
    try:
        dist.shrink_group([last])
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        assert "shrink" in str(error)
        return
    assert dist.get_world_size() == want
    for numel in (4, 100_000):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        assert bool((tensor == want).all())


def arena(context: Context) -> None:
    """Tensors in the arena: of every type, apart from each other, given back."""
    import fusedpg

    used = fusedpg.group_info()["arena_used"]
    tensors = [
        fusedpg.empty(1001, dtype=dtype)
        for dtype in (torch.float32, torch.int8, torch.complex128, torch.bool)
    ]
    assert fusedpg.group_info()["arena_used"] > used
    for tensor in tensors:
        assert fusedpg.in_arena(tensor)
        assert fusedpg.in_arena(tensor[1:])
        assert tensor.data_ptr() % 64 == 0
        tensor.zero_()
    ends = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert not fusedpg.in_arena(torch.empty(5))
    assert fusedpg.empty(2, 3, 4).shape == (2, 3, 4)
    assert fusedpg.empty(0).numel() == 0
    # Local: one rank may allocate what the others do not.
    if context.rank == 0:
        alone = fusedpg.empty(100_000)
        alone.fill_(1)
    del tensors, tensor
    for _ in range(100):
        fusedpg.empty(1 << 20).zero_()
    dist.barrier()
    if context.rank == 0:
        del alone
    assert fusedpg.group_info()["arena_used"] <= used + (8 << 20)
