"""`fusedpg.all_reduce_`, an all-reduce without torch.distributed's Python.

Random programs have it, too, of all sizes and strides, beside ranks that call dist.all_reduce.
"""

from __future__ import annotations

import pytest

import harness
from checks import all_reduce_op as op
from test_faults import kill_last

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

CHECKS = [
    op.types,
    op.bits_of_views,
    op.seen,
    op.outsiders,
    op.order,
    op.refused,
]


@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
@pytest.mark.parametrize("check", CHECKS)
def test_it_is_an_all_reduce(check: object, world_size: int) -> None:
    harness.pool(world_size).run(check)


@pytest.mark.parametrize("check", CHECKS)
def test_between_hosts(check: object) -> None:
    harness.pool_of_hosts("two and one").run(check)


def test_compiled() -> None:
    harness.pool(2).run(op.compiled)


def test_a_dead_peer() -> None:
    with harness.Workers(3, timeout=20, oracle=False) as workers:
        workers.start(op.until_it_fails)
        kill_last(workers, "all_reduce")


def test_a_late_peer() -> None:
    with harness.Workers(2, timeout=2, oracle=False) as workers:
        texts = workers.run(op.alone)
    assert "timeout after 2000 ms" in texts[1] and "all_reduce" in texts[1]
