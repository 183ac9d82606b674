"""Every collective against the reference and against Gloo."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist

import harness
from checks import cases, collectives, groups
from checks.cases import Case, same, values
from harness import Context

SMALL = [0, 1, 2, 3, 7, 31, 32, 33, 127, 997, 1000]
# In elements: the byte boundaries at which algorithms change, for several types.
EDGES = [1021, 1023, 1024, 1025, 4095, 4097, 8191, 16383, 16384, 16385, 65537]
LARGE = [131071, 262143, 262145, 262157, 524287]
REDOPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


@st.composite
def calls(
    draw: st.DrawFn, op: str, world_sizes: tuple[int, ...] = (2, 3, 4, 1)
) -> tuple[int, Case]:
    """A world size and a call of `op`."""
    kind = collectives.OPS[op]
    world_size = draw(st.sampled_from(world_sizes))
    redop = draw(st.sampled_from(REDOPS)) if kind.reduces else "SUM"
    types = cases.REDUCIBLE if kind.reduces else cases.MOVABLE
    types = tuple(dtype for dtype in types if cases.supported(redop, dtype))
    sizes = st.one_of(
        *[st.sampled_from(SMALL)] * 4, *[st.sampled_from(EDGES)] * 3, st.sampled_from(LARGE)
    )
    layouts = cases.LAYOUTS if kind.layouts else ("contiguous",)
    case = Case(
        op,
        dtype=draw(st.sampled_from(types)),
        numel=draw(sizes),
        layout=draw(st.sampled_from(layouts)),
        memory=draw(st.sampled_from(cases.MEMORY)),
        async_op=draw(st.booleans()),
        redop=redop,
        root=draw(st.integers(0, world_size - 1)),
        seed=draw(st.integers(0, 1000)),
    )
    return world_size, case


@pytest.mark.parametrize("op", collectives.OPS)
def test_against_reference_and_gloo(op: str) -> None:
    @hypothesis.settings(max_examples=12)
    @hypothesis.given(calls(op))
    def examples(call: tuple[int, Case]) -> None:
        world_size, case = call
        harness.pool(world_size).run(collectives.check, case)

    examples()


@pytest.mark.parametrize("dtype", cases.REDUCIBLE, ids=str)
@pytest.mark.parametrize("redop", REDOPS)
def test_every_reduction_of_every_type(
    trio: harness.Workers, redop: str, dtype: torch.dtype
) -> None:
    case = Case("all_reduce", dtype, 1003, redop=redop, seed=3)
    if cases.supported(redop, dtype):
        for numel in (1003, 70001):
            trio.run(collectives.check, Case("all_reduce", dtype, numel, redop=redop, seed=3))
    elif redop == "AVG" and dtype in cases.INTS:
        trio.run(collectives.integer_average, dtype)
    elif redop != "PREMUL_SUM" and harness.IS_FUSED:
        trio.run(collectives.refused, case)


@pytest.mark.fused_only
@pytest.mark.parametrize("op", [name for name, op in collectives.OPS.items() if not op.reduces])
@pytest.mark.parametrize("dtype", cases.MOVABLE, ids=str)
def test_every_move_of_every_type(trio: harness.Workers, op: str, dtype: torch.dtype) -> None:
    for memory in ("ordinary", "arena"):
        trio.run(collectives.check, Case(op, dtype, 1003, memory=memory, seed=4, root=1))


def test_many_in_flight(workers: harness.Workers) -> None:
    workers.run(collectives.many_in_flight, 10)
    workers.run(collectives.many_in_flight, 30_000)


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_futures(context: Context) -> None:
    """getFuture gives the tensors, and callbacks may start collectives."""
    tensor = torch.full((1000,), float(context.rank + 1))
    work = dist.all_reduce(tensor, async_op=True)

    def again(future: Any) -> torch.Tensor:
        other = future.value()[0].clone()
        dist.all_reduce(other)
        return other

    result = work.get_future().then(again).wait()
    total = context.world_size * (context.world_size + 1) / 2
    assert bool((tensor == total).all())
    assert bool((result == total * context.world_size).all())
    assert work.is_success()


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_barrier(context: Context) -> None:
    """Nobody leaves before the last one has come."""
    dist.barrier()
    last = context.world_size - 1
    if context.rank == last:
        time.sleep(0.3)
    came = torch.tensor(time.monotonic(), dtype=torch.float64)  # the clock of all processes
    dist.barrier()
    left = time.monotonic()
    dist.broadcast(came, last)
    assert left >= came
    work = dist.barrier(async_op=True)
    work.wait()
    group = dist.distributed_c10d._get_default_group()
    group.monitored_barrier(timedelta(seconds=10), wait_all_ranks=True)
    group.monitored_barrier(timedelta(seconds=10), wait_all_ranks=False)


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_empty_and_scalar_tensors(context: Context) -> None:
    """Empty tensors and tensors without dimensions."""
    for shape in ((0,), (0, 5), (3, 0), ()):
        tensor = torch.ones(shape)
        dist.all_reduce(tensor)
        assert tensor.shape == torch.Size(shape)
        assert bool((tensor == context.world_size).all())
        dist.broadcast(tensor, 0)
    scalars = [torch.zeros(()) for _ in range(context.world_size)]
    dist.all_gather(scalars, torch.tensor(float(context.rank)))
    assert [int(one) for one in scalars] == list(range(context.world_size))


@pytest.mark.fused_only
@harness.on_ranks(3)
def test_float8_can_be_moved(context: Context) -> None:
    """Types nobody reduces can still be moved."""
    case = Case("broadcast", torch.float8_e4m3fn, 301)
    got = values(context.rank, 301, torch.float32).to(case.dtype)
    want = values(0, 301, torch.float32).to(case.dtype)
    dist.broadcast(got, 0)
    assert same(got, want)


@pytest.mark.fused_only
@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_sequence_numbers(context: Context) -> None:
    """Every collective takes one number, the same on all ranks."""
    import fusedpg

    before = fusedpg.group_info()["sequence_number"]
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    assert fusedpg.group_info()["sequence_number"] == before + 3


@pytest.mark.parametrize("where", [2, 3, "two"])
def test_more_tensors_in_a_call_than_a_table_holds(where: Any) -> None:
    ranks = harness.pool_of_hosts(where) if isinstance(where, str) else harness.pool(where)
    ranks.run(collectives.many_tensors, 9001)


def test_object_collectives(workers: harness.Workers) -> None:
    workers.run(groups.objects)


def test_subgroups(workers: harness.Workers) -> None:
    workers.run(groups.subgroups)


@pytest.mark.fused_only
def test_groups_meet_again() -> None:
    with harness.Workers(3, oracle=False) as workers:
        workers.run(groups.meeting_again)
        workers.run(groups.parting)


def test_groups_overlap(workers: harness.Workers) -> None:
    workers.run(groups.overlapping)


def test_groups_from_many_threads(workers: harness.Workers) -> None:
    workers.run(groups.threads, 6, 20)


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_threads_share_a_group(context: Context) -> None:
    """Several threads issue asynchronous calls on one group, kept in order by a lock."""
    count = 16
    lock = threading.Lock()
    turn = [0]
    results: dict[int, torch.Tensor] = {}

    def issue(index: int) -> None:
        while True:
            with lock:
                if turn[0] == index:
                    tensor = torch.full((2000,), float(index))
                    work = dist.all_reduce(tensor, async_op=True)
                    turn[0] += 1
                    break
        work.wait()
        results[index] = tensor

    running = [threading.Thread(target=issue, args=(index,)) for index in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for index in range(count):
        assert bool((results[index] == index * context.world_size).all())


@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_split(context: Context) -> None:
    """split_group works or says why it does not."""
    half = [[rank] for rank in range(context.world_size)]
    try:
        group = dist.split_group(split_ranks=half)
    except (RuntimeError, ValueError) as error:
        assert "split" in str(error)
    else:
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=group)
        assert bool((tensor == 1).all())
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert bool((tensor == context.world_size).all())


@pytest.mark.fused_only
@harness.on_ranks(1, 2, 3)
def test_split_without_devices(context: Context) -> None:
    """What split_group calls, which asks for an accelerator first."""
    import fusedpg

    world = dist.distributed_c10d._get_default_group()
    timeout, name = timedelta(seconds=77), f"alone-{context.rank}"
    group = world.split_group([context.rank], timeout, fusedpg.Options(), name, "one")
    backend = group._get_backend(torch.device("cpu"))
    options = backend.options
    assert (options._timeout, options.group_name, backend.size()) == (timeout, name, 1)
    tensor = torch.ones(4)
    backend.allreduce([tensor]).wait()
    assert bool((tensor == 1).all())
    backend.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_shrink(size: int) -> None:
    # The group is another one afterwards: not for the shared pool.
    with harness.Workers(size, oracle=False) as workers:
        workers.run(groups.shrinking)


@pytest.mark.fused_only
@harness.on_ranks(1, 2, 3, harness.slow(4))
def test_group_info(context: Context) -> None:
    """Names and sizes of the group, and what fusedpg tells about it."""
    import fusedpg

    assert dist.get_backend() == "fused"
    assert dist.get_world_size() == context.world_size
    info = fusedpg.group_info()
    assert info["engine"] == ("shm" if context.one_host else "gloo")
    assert info["world_size"] == context.world_size
    assert info["local_world_size"] == (context.world_size if context.one_host else 1)
    assert info["state"] == "ok"
    assert info["threads"] >= 1
    assert isinstance(info["isa"], str)
    assert info["arena_used"] <= info["arena_reserved"]


@pytest.mark.fused_only
def test_arena(workers: harness.Workers) -> None:
    workers.run(groups.arena)


@harness.on_ranks(2)
def test_profiler_titles_and_shapes(context: Context) -> None:
    """Events carry the backend's name and the shapes of their inputs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        tensor = torch.ones(123, 7)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        out = [torch.zeros(5) for _ in range(context.world_size)]
        dist.all_gather(out, torch.ones(5))
    events = list(recorded.events())
    names = [event.name for event in events]
    for op in ("all_reduce", "broadcast", "all_gather"):
        assert f"{context.backend}:{op}" in names, sorted(set(names))
    mine = [event for event in events if event.name == f"{context.backend}:all_reduce"]
    assert len(mine) == 2
    assert all([123, 7] in [list(shape) for shape in event.input_shapes] for event in mine)
