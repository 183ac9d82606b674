"""What only moves data between pretended hosts, with one or several ranks on each."""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harness
import hosts
from checks import cases, collectives, p2p, several
from checks.cases import Case
from harness import Context, on_ranks

LARGE = 700_001


def usable(context: Context) -> None:
    """The group still moves what it should."""
    for numel in (5, LARGE):
        tensor = torch.full((numel,), float(context.rank + 1))
        dist.broadcast(tensor, context.world_size - 1)
        assert bool((tensor == context.world_size).all())
        parts = [torch.zeros(numel) for _ in range(context.world_size)]
        dist.all_gather(parts, torch.full((numel,), float(context.rank)))
        assert all(bool((part == rank).all()) for rank, part in enumerate(parts))


def _calls(context: Context, what: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What all ranks call, and what one calls instead."""
    n, size = (7, LARGE)[what.endswith("large")], context.world_size
    one = torch.ones(n)
    wide = torch.empty(n * size)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "count": (
            lambda: dist.broadcast(one, 0),
            lambda: dist.broadcast(torch.ones(n + 1), 0),
        ),
        "root": (lambda: dist.broadcast(one, 0), lambda: dist.broadcast(one, 1)),
        "dtype": (
            lambda: dist.all_gather_into_tensor(wide, one),
            lambda: dist.all_gather_into_tensor(wide.int(), one.int()),
        ),
        "operation": (
            lambda: dist.all_gather_into_tensor(wide, one),
            lambda: dist.barrier(),
        ),
        "sizes": (
            lambda: dist.all_to_all_single(torch.empty(n * size), torch.ones(n * size)),
            lambda: dist.all_to_all_single(
                torch.empty(n * size), torch.ones(n * size), None, [n - 1, n + 1] + [n] * (size - 2)
            ),
        ),
    }
    return calls[what.split()[0]]


def messages(context: Context) -> None:
    """Each rank sends to and hears from every other one, with collectives in between."""
    others = [rank for rank in range(context.world_size) if rank != context.rank]
    for numel in (0, 1, 3000, LARGE):
        got = {(p, tag): torch.zeros(numel) for p in others for tag in range(3)}
        works = [dist.irecv(got[key], key[0], tag=key[1]) for key in reversed(got)]
        usable(context)
        for rank in others:
            for tag in range(3):
                value = float(100 * context.rank + 10 * rank + tag)
                works.append(dist.isend(torch.full((numel,), value), rank, tag=tag))
        for work in works:
            work.wait()
        for (rank, tag), tensor in got.items():
            assert bool((tensor == 100 * rank + 10 * context.rank + tag).all())


pytestmark = pytest.mark.fused_only

SCRIPT = str(Path(__file__).resolve().parent / "scripts/moves_hosts.py")
OPS = [name for name, op in collectives.OPS.items() if not op.reduces]


NAMES = ["two of two", "crossed", *map(harness.slow, ("two", "two and one"))]


@pytest.fixture(params=NAMES)
def ranks(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool_of_hosts(request.param)


@pytest.mark.parametrize("op", OPS)
def test_collectives(ranks: harness.Workers, op: str) -> None:
    layouts = cases.LAYOUTS if collectives.OPS[op].layouts else ("contiguous",)
    for seed, numel in enumerate((0, 1, 1003, 9000, 70_001, 524_287)):
        case = Case(
            op,
            dtype=cases.GLOO[seed % len(cases.GLOO)],
            numel=numel,
            layout=layouts[seed % len(layouts)],
            async_op=seed % 2 == 1,
            root=seed % ranks.world_size,
            seed=seed,
        )
        ranks.run(collectives.check, case)


@on_ranks(*NAMES)
def test_several_tensors_in_one_call(context: Context) -> None:
    for name in ("broadcast", "all_gather"):
        several.check(context, name)


@on_ranks(*NAMES)
def test_they_are_ours(context: Context) -> None:
    """They are messages of ours, not the delegate's."""
    import fusedpg

    fusedpg.stats(reset=True)
    usable(context)
    stats = fusedpg.stats()
    for op in ("broadcast", "all_gather"):
        assert stats[op]["paths"] == {"messages": 2}, stats[op]


@pytest.mark.parametrize(
    "what",
    ["count", "count large", "root", "dtype", "dtype large", "operation", "sizes", "sizes large"],
)
@on_ranks(*NAMES)
def test_mismatch(context: Context, what: str) -> None:
    """Raised on all ranks, which then go on."""
    for odd in (0, context.world_size - 1):
        every, one = _calls(context, what)
        with pytest.raises(dist.DistBackendError, match="ranks disagree"):
            (one if context.rank == odd else every)()
        usable(context)


@on_ranks(*NAMES)
def test_one_rank_refuses(context: Context) -> None:
    """What one rank finds wrong in its turn is heard by all."""
    n = 1000
    out = torch.empty(n * context.world_size)
    if context.rank == 1:
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_gather_into_tensor(torch.empty(1).expand(out.numel()), torch.ones(n))
    else:
        with pytest.raises(dist.DistBackendError, match="rank 1 refused"):
            dist.all_gather_into_tensor(out, torch.ones(n))
    usable(context)


def message_sizes(context: Context) -> None:
    """A message that is too long or too short raises on both sides, and the next one arrives."""
    last = context.world_size - 1
    for n, m in ((10, 11), (11, 10), (LARGE, 10), (10, LARGE), (0, 1), (1, 0)):
        if context.rank == 0:
            with pytest.raises(dist.DistBackendError, match=f"expects {4 * m} bytes"):
                dist.send(torch.ones(n), last)
            dist.send(torch.full((n,), 3.0), last)
        elif context.rank == last:
            with pytest.raises(dist.DistBackendError, match=f"sent {4 * n} bytes"):
                dist.recv(torch.zeros(m), 0)
            tensor = torch.zeros(n)
            dist.recv(tensor, 0)
            assert bool((tensor == 3).all())
    usable(context)


def pair(context: Context) -> None:
    """Two ranks alone, in a group that has done nothing else."""
    group = dist.new_group()
    if context.rank == 0:
        dist.send(torch.arange(1000.0), context.world_size - 1, group=group)
    elif context.rank == context.world_size - 1:
        tensor = torch.zeros(1000)
        assert dist.recv(tensor, group=group) == 0
        assert torch.equal(tensor, torch.arange(1000.0))
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(*NAMES)
def test_messages(context: Context) -> None:
    pair(context)
    messages(context)
    message_sizes(context)
    for numel in (1, 1000, 100_003):
        p2p.tags_out_of_order(context, numel)
        p2p.batch(context, numel)
        p2p.any_source(context, numel)
    for memory in cases.MEMORY:
        p2p.exchange(context, Case("send", numel=65_537, memory=memory, seed=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch keeps batches there: limits.md")
@on_ranks(*NAMES)
def test_batches_beside_others(context: Context) -> None:
    p2p.batches_beside_others(context, 50)
    p2p.sum_after_a_refused_batch(context)


@pytest.mark.parametrize("what", ["receive", "collective"])
@on_ranks(*NAMES)
def test_abort(context: Context, what: str) -> None:
    """A rank that waits hears of its own abort."""
    group: Any = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    tensor = torch.ones(LARGE)
    dist.all_gather([torch.empty(LARGE) for _ in range(context.world_size)], tensor, group=group)
    if context.rank == 0:
        dist.barrier()
        return
    begun = [0.0]

    def abort() -> None:
        begun[0] = time.monotonic()
        backend.abort()

    timer = threading.Timer(0.3, abort)
    timer.start()
    with pytest.raises(dist.DistBackendError):
        if what == "receive":
            dist.recv(tensor, 0, group=group)
        else:
            dist.broadcast(tensor, 0, group=group)
    took = time.monotonic() - begun[0]
    timer.join()
    dist.barrier()
    assert took < 1.0


def killed(context: Context, what: str) -> float:
    """The last rank dies while all others need it; the seconds until this one knew."""
    usable(context)
    last = context.world_size - 1
    if what == "receive":
        messages(context)
    if context.rank == last:
        if what == "first receive":
            # Where it can be reached is known; it has never said anything.
            pending = dist.irecv(torch.empty(1))
            time.sleep(0.5)
            assert pending is not None and not pending.is_completed()
        time.sleep(0.3)
        context.store.set("killed", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(LARGE)
    with pytest.raises(dist.DistBackendError):
        if "receive" in what:
            dist.recv(tensor, last)
        else:
            while True:
                dist.all_to_all_single(
                    torch.empty(LARGE * context.world_size), torch.ones(LARGE * context.world_size)
                )
    context.store.wait(["killed"], datetime.timedelta(seconds=5))
    return time.monotonic() - float(context.store.get("killed"))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        *(("two", what) for what in ("receive", "first receive", "collective")),
        *(("two of two", what) for what in ("receive", "collective")),
    ],
)
def test_killed_peer(names: str, what: str) -> None:
    ranks = harness.pool_of_hosts(names)
    ranks.start(killed, what)
    answers = ranks.collect(30)
    ranks.close()
    assert isinstance(answers[-1], harness.Died)
    assert all(isinstance(seconds, float) and seconds < 5 for seconds in answers[:-1]), answers


@pytest.mark.long
@pytest.mark.skipif(hosts.why_not() is not None, reason=f"no hosts: {hosts.why_not()}")
def test_bytes_on_the_wire() -> None:
    """What all ranks get crosses each host's link once."""
    count, numel = 4, 1_000_000
    with hosts.Hosts(2) as made:
        sent = _sent(made, [str(count), str(count)])
    # All-gathers: two ranks of a host have a tensor each. Broadcasts are the first host's. Headers
    # and acknowledgements come on top.
    for host, tensors in enumerate((3, 2)):
        assert 0.98 < sent[host] / (count * tensors * 4 * numel) < 1.08, sent


def _sent(made: hosts.Hosts, arguments: list[str]) -> list[int]:
    before = made.sent_bytes()
    outputs = made.run([SCRIPT, *arguments], ranks=2, timeout=120)
    assert all(json.loads(output.splitlines()[-1])["transport"] for output in outputs)
    return [now - then for now, then in zip(made.sent_bytes(), before, strict=True)]
