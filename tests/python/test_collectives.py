"""Every collective against the reference and against Gloo."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import harness
from checks import cases, collectives, groups
from checks.cases import Case

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


def test_futures(workers: harness.Workers) -> None:
    workers.run(collectives.futures)


def test_barrier(workers: harness.Workers) -> None:
    workers.run(collectives.barrier)


def test_empty_and_scalar_tensors(workers: harness.Workers) -> None:
    workers.run(collectives.shapes_of_zero)


@pytest.mark.fused_only
def test_float8_can_be_moved(trio: harness.Workers) -> None:
    trio.run(collectives.float8_moves)


@pytest.mark.fused_only
def test_sequence_numbers(workers: harness.Workers) -> None:
    workers.run(collectives.sequence_numbers)


def test_object_collectives(workers: harness.Workers) -> None:
    workers.run(groups.objects)


def test_subgroups(workers: harness.Workers) -> None:
    workers.run(groups.subgroups)


def test_groups_overlap(workers: harness.Workers) -> None:
    workers.run(groups.overlapping)


def test_groups_from_many_threads(workers: harness.Workers) -> None:
    workers.run(groups.threads, 6, 20)


def test_threads_share_a_group(workers: harness.Workers) -> None:
    workers.run(groups.threads_one_group, 16)


def test_split(workers: harness.Workers) -> None:
    workers.run(groups.splitting)


@pytest.mark.parametrize("size", [2, 3])
def test_shrink(size: int) -> None:
    # The group is another one afterwards: not for the shared pool.
    with harness.Workers(size, oracle=False) as workers:
        workers.run(groups.shrinking)


@pytest.mark.fused_only
def test_group_info(workers: harness.Workers) -> None:
    workers.run(groups.introspection)


@pytest.mark.fused_only
def test_arena(workers: harness.Workers) -> None:
    workers.run(groups.arena)


def test_profiler_titles_and_shapes(pair: harness.Workers) -> None:
    pair.run(groups.profiler)
