"""Point to point: order, tags, any source, batches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

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


def batches_beside_others(context: Context, rounds: int) -> None:
    """Two threads with batches and one with sums, in one group: each does what it says."""
    errors: list[str] = []

    def batches(tag: int) -> None:
        right = (context.rank + 1) % context.world_size
        left = (context.rank - 1) % context.world_size
        for number in range(rounds):
            mine, theirs = torch.full((100,), float(number + tag)), torch.zeros(100)
            operations = [
                dist.P2POp(dist.isend, mine, right, tag=tag),
                dist.P2POp(dist.irecv, theirs, left, tag=tag),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert bool((theirs == number + tag).all()), f"message {number} of tag {tag}"

    def sums() -> None:
        for number in range(rounds):
            x = torch.full((10,), float(context.rank + number))
            dist.all_reduce(x)
            expected = sum(rank + number for rank in range(context.world_size))
            assert bool((x == expected).all()), f"sum {number} is {x[0]} and not {expected}"

    def noted(function: Callable[..., None], *arguments: int) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=noted, args=one) for one in ((batches, 1), (batches, 2), (sums,))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def sum_after_a_refused_batch(context: Context) -> None:
    """torch's Python refuses an operation of a batch; what comes next is done all the same."""
    operation = dist.P2POp(dist.isend, torch.zeros(4), (context.rank + 1) % context.world_size)
    operation.tag = 1 << 31
    with contextlib.suppress(TypeError):
        dist.batch_isend_irecv([operation])
    x = torch.full((3,), float(context.rank))
    dist.all_reduce(x)
    assert bool((x == sum(range(context.world_size))).all()), x
