"""The same checks as everywhere, on ranks that mpirun has started."""

from __future__ import annotations

import hypothesis
import pytest

import harness
from checks import collectives, ddp, fused_ops, groups, numerics, p2p
from checks.cases import MEMORY, Case
from test_collectives import calls

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("op", collectives.OPS)
def test_collectives(context: harness.Context, op: str) -> None:
    # Examples are derandomised: all ranks draw the same ones. Pools of ranks run many more.
    @hypothesis.settings(max_examples=5)
    @hypothesis.given(calls(op, world_sizes=(context.world_size,)))
    def examples(call: tuple[int, Case]) -> None:
        collectives.check(context, call[1])

    examples()


@pytest.mark.parametrize("memory", MEMORY)
def test_numerics(context: harness.Context, memory: str) -> None:
    for numel in (1000, 300_007):
        case = Case("all_reduce", numel=numel, memory=memory)
        if context.exact:
            numerics.all_reduce(context, case)
        else:
            collectives.check(context, case)


@pytest.mark.parametrize("memory", MEMORY)
def test_fused_adamw(context: harness.Context, memory: str) -> None:
    if not context.fused:
        pytest.skip("our own op")
    fused_ops.parity(context, fused_ops.Run(steps=20, memory=memory))


def test_point_to_point(context: harness.Context) -> None:
    p2p.tags_out_of_order(context, 1000)
    p2p.any_source(context, 1000)
    p2p.batch(context, 1000)


def test_objects_and_groups(context: harness.Context) -> None:
    groups.objects(context)
    groups.subgroups(context)


@pytest.mark.parametrize("name", ["plain", "view"])
def test_ddp(context: harness.Context, name: str) -> None:
    ddp.variant(context, name)
