"""Point to point: order, tags, any source, batches."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from checks.cases import Case, Placed, same, values
from harness import Context


def exchange(context: Context, case: Case) -> None:
    """Every rank sends to every other, blocking, in a deadlock-free order."""
    for source in range(context.world_size):
        for target in range(context.world_size):
            contents = values(case.seed + 10 * source + target, case.numel, case.dtype)
            if source == target:
                continue
            if context.rank == source:
                placed = Placed(context, case, contents, layout="contiguous")
                dist.send(placed.tensor, target)
                placed.untouched()
            elif context.rank == target:
                zeros = torch.zeros_like(contents)
                placed = Placed(context, case, zeros, layout="contiguous")
                assert dist.recv(placed.tensor, source) == source
                assert same(placed.tensor, contents)


def tags_out_of_order(context: Context, numel: int) -> None:
    """Messages are matched by tag, not by arrival."""
    ranks = context.world_size
    right, left = (context.rank + 1) % ranks, (context.rank - 1) % ranks
    tags = [5, 0, 9, 3]
    sends = [
        dist.isend(torch.full((numel + tag,), float(10 * context.rank + tag)), right, tag=tag)
        for tag in tags
    ]
    for tag in sorted(tags):
        tensor = torch.zeros(numel + tag)
        dist.recv(tensor, left, tag=tag)
        assert bool((tensor == 10 * left + tag).all()), tag
    for work in sends:
        work.wait()


def same_tag_keeps_order(context: Context, numel: int) -> None:
    """Messages between two ranks with one tag do not overtake each other."""
    ranks = context.world_size
    right, left = (context.rank + 1) % ranks, (context.rank - 1) % ranks
    sends = [dist.isend(torch.full((numel,), float(i)), right) for i in range(20)]
    tensors = [torch.zeros(numel) for _ in range(20)]
    for work in [dist.irecv(tensor, left) for tensor in tensors]:
        work.wait()
    for work in sends:
        work.wait()
    assert [int(tensor[numel - 1]) for tensor in tensors] == list(range(20))


def receives_first(context: Context, numel: int) -> None:
    """Both sides post their receives before any send: no deadlock."""
    others = [rank for rank in range(context.world_size) if rank != context.rank]
    buffers = {rank: torch.zeros(numel) for rank in others}
    receives = [dist.irecv(buffers[rank], rank) for rank in others]
    # A collective in between must not wait for the receives.
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    assert bool((tensor == context.world_size).all())
    sends = [dist.isend(torch.full((numel,), float(context.rank)), rank) for rank in others]
    for work in receives + sends:
        work.wait()
    for rank in others:
        assert bool((buffers[rank] == rank).all())


def any_source(context: Context, numel: int) -> None:
    """recv without a source takes one message of each sender."""
    if context.rank == 0:
        seen = []
        for _ in range(context.world_size - 1):
            tensor = torch.zeros(numel)
            source = dist.recv(tensor)
            assert bool((tensor == source).all())
            seen.append(source)
        assert sorted(seen) == list(range(1, context.world_size))
    else:
        # Late senders must be found too.
        time.sleep(0.05 * (context.world_size - context.rank))
        dist.send(torch.full((numel,), float(context.rank)), 0)
    dist.barrier()


def any_source_tags(context: Context) -> None:
    """recv without a source still asks for a tag."""
    if context.rank == 0:
        for tag in (2, 1):
            for _ in range(context.world_size - 1):
                tensor = torch.zeros(10)
                source = dist.recv(tensor, tag=tag)
                assert bool((tensor == source * 10 + tag).all())
    else:
        works = [
            dist.isend(torch.full((10,), float(context.rank * 10 + tag)), 0, tag=tag)
            for tag in (1, 2)
        ]
        for work in works:
            work.wait()
    dist.barrier()


def batch(context: Context, numel: int) -> None:
    """batch_isend_irecv around the ring, in both directions at once."""
    ranks = context.world_size
    right, left = (context.rank + 1) % ranks, (context.rank - 1) % ranks
    mine = torch.full((numel,), float(context.rank))
    from_left, from_right = torch.zeros(numel), torch.zeros(numel)
    operations = [
        dist.P2POp(dist.isend, mine, right, tag=1),
        dist.P2POp(dist.irecv, from_right, right, tag=2),
        dist.P2POp(dist.irecv, from_left, left, tag=1),
        dist.P2POp(dist.isend, mine, left, tag=2),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert bool((from_left == left).all())
    assert bool((from_right == right).all())


def subgroup(context: Context) -> None:
    """Ranks of a group are translated."""
    ranks = list(range(1, context.world_size))
    group = dist.new_group(ranks)
    if len(ranks) > 1 and context.rank in ranks:
        if context.rank == ranks[-1]:
            dist.send(torch.full((9,), 4.0), ranks[0], group)
        elif context.rank == ranks[0]:
            tensor = torch.zeros(9)
            dist.recv(tensor, ranks[-1], group)
            assert bool((tensor == 4).all())
    if context.rank in ranks:
        dist.destroy_process_group(group)
    dist.barrier()


def interleaved(context: Context, rounds: int) -> None:
    """Messages of changing size between collectives."""
    ranks = context.world_size
    right, left = (context.rank + 1) % ranks, (context.rank - 1) % ranks
    for i in range(rounds):
        numel = (i * 7919) % 5000 + 1
        work = dist.isend(torch.full((numel,), float(context.rank + i)), right)
        total = torch.full((numel,), 1.0)
        dist.all_reduce(total)
        assert bool((total == ranks).all())
        got = torch.zeros(numel)
        dist.recv(got, left)
        assert bool((got == left + i).all())
        work.wait()
