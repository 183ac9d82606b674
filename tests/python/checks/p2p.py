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
