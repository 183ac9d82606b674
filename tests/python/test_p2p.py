"""Point to point on two to four ranks."""

from __future__ import annotations

import threading
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import harness
from checks import cases, p2p
from checks.cases import Case
from fuzz import core, posts
from harness import Context

SIZES = [1, 1000, 100_003]


@pytest.fixture(params=[2, 3, 4], ids=lambda size: f"world{size}")
def ranks(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool(request.param)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    world_size=st.sampled_from([2, 3]),
    case=st.builds(
        Case,
        op=st.just("send"),
        dtype=st.sampled_from(cases.MOVABLE if harness.IS_FUSED else cases.GLOO),
        numel=st.sampled_from([0, 1, 31, 1021, 4096, 16385, 65537, 262157]),
        memory=st.sampled_from(cases.MEMORY),
        seed=st.integers(0, 100),
    ),
)
def test_send_and_receive(world_size: int, case: Case) -> None:
    harness.pool(world_size).run(p2p.exchange, case)


@pytest.mark.parametrize("numel", SIZES)
def test_tags_out_of_order(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.tags_out_of_order, numel)


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 7))])
@pytest.mark.parametrize("where", posts.WHERE)
def test_every_legal_program_ends(where: str, seed: int) -> None:
    """No message that nobody has received yet keeps another one back, whatever the arena has."""
    core.search("messages", where, core.seed(seed))


@pytest.mark.parametrize(
    ("steps", "legal"),
    [
        (["send 1 0, wait", "recv 0 0, wait"], True),
        (["send 1 0, wait, recv 1 0, wait", "send 0 0, wait, recv 0 0, wait"], False),
        (["send 1 0, send 1 1, wait, wait", "recv 0 1, wait, recv 0 0, wait"], True),
        (["send 1 0, wait, send 1 1, wait", "recv 0 1, wait, recv 0 0, wait"], False),
        (["send 1 0, barrier, wait", "barrier, recv 0 0, wait"], True),
        (["send 1 0, wait, barrier", "barrier, recv 0 0, wait"], False),
        # Whom the first receive of rank 0 takes is open.
        (
            [
                "recv any 9, wait, send 1 0, wait, recv any 9, wait",
                "send 0 9, recv 0 0, wait, wait",
                "send 0 9, wait",
            ],
            True,
        ),
        (
            [
                "recv any 9, wait, send 1 0, wait, recv any 9, wait",
                "send 0 9, wait, recv 0 0, wait",
                "send 0 9, wait",
            ],
            False,
        ),
    ],
)
def test_model_of_legal_programs(steps: list[str], legal: bool) -> None:
    program = tuple(posts.steps_from(text) for text in steps)
    assert posts.is_legal(program) == legal


@pytest.mark.parametrize("numel", SIZES)
def test_any_source(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.any_source, numel)


@harness.on_ranks(2, 3, 4)
def test_any_source_with_tags(context: Context) -> None:
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


@pytest.mark.parametrize("numel", SIZES)
def test_batch(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.batch, numel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch keeps batches there: limits.md")
def test_batches_beside_others(ranks: harness.Workers) -> None:
    ranks.run(p2p.batches_beside_others, 50)
    ranks.run(p2p.sum_after_a_refused_batch)


@pytest.mark.fused_only
@harness.on_ranks(2, 3)
def test_tensors_that_are_not_contiguous(context: Context) -> None:
    sent = torch.arange(12.0).view(3, 4).t()
    if context.rank == 0:
        dist.send(sent, 1)
    elif context.rank == 1:
        memory = torch.zeros(8, 3)
        dist.recv(memory[::2], 0)
        assert torch.equal(memory[::2], sent) and not memory[1::2].any()


@pytest.mark.parametrize("numel", SIZES)
@harness.on_ranks(2)
def test_threads_wait_for_messages_in_another_order(context: Context, numel: int) -> None:
    """A thread that waits for a late message keeps none from the others that wait."""
    peer = 1 - context.rank
    tags = range(4)
    tensors = [torch.zeros(numel) for _ in tags]
    receives = [dist.irecv(tensor, peer, tag=tag) for tag, tensor in zip(tags, tensors)]
    threads = [threading.Thread(target=work.wait) for work in receives]
    for thread in threads:
        thread.start()
    for tag in reversed(tags):
        dist.send(torch.full((numel,), float(tag)), peer, tag=tag)
        threads[tag].join(60)
        assert not threads[tag].is_alive()
        assert bool((tensors[tag] == tag).all())


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("how", ["poll", "future"])
@harness.on_ranks(2)
def test_nobody_waits(context: Context, how: str, numel: int) -> None:
    """Messages end where a program only asks whether they have, or waits for their futures."""
    peer = 1 - context.rank
    got = torch.zeros(numel)
    works = [dist.isend(torch.full((numel,), 3.0), peer), dist.irecv(got, peer)]
    if how == "future":
        for work in works:
            work.get_future().wait()
    end = time.monotonic() + 60
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < end
    assert bool((got == 3).all())


@pytest.mark.fused_only
@harness.on_ranks(2)
def test_waits_within_modes_of_torch(context: Context) -> None:
    """A thread that waits may have a mode in which tensors are none; what it receives is real."""
    memory = torch.zeros(500, 2)
    if context.rank == 0:
        time.sleep(0.2)  # most likely the other rank waits
        dist.send(torch.ones(500), 1)
        return
    work = dist.irecv(memory[:, 0], 0)  # which is copied there at the end
    with FakeTensorMode():
        work.wait()
    assert bool((memory[:, 0] == 1).all()) and not memory[:, 1].any()


@harness.on_ranks(2, 3, 4)
def test_in_a_subgroup(context: Context) -> None:
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
