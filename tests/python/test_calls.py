"""What a call may be given: views of one memory, several tensors, and what is refused."""

from __future__ import annotations

import pytest

import harness
from checks import errors, memory, several

LAYOUTS = list(memory.layouts(2, 2))
pytestmark = pytest.mark.fused_only


def pools(names: tuple[object, ...] = (2, 3, "two", harness.slow("three"))) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pool", names, ids=str)


def workers_of(pool: int | str) -> harness.Workers:
    return harness.pool_of_hosts(pool) if isinstance(pool, str) else harness.pool(pool)


@pools()
@pytest.mark.parametrize("op", memory.OPS)
def test_views(op: str, pool: int | str) -> None:
    for layout in LAYOUTS:
        for n in (6, 30_000):
            workers_of(pool).run(memory.check, op, layout, n)


@pools()
def test_elements_that_share_memory(pool: int | str) -> None:
    workers_of(pool).run(memory.expanded)


@pools((2, "two"))
def test_different_values_for_one_element(pool: int | str) -> None:
    workers_of(pool).run(memory.shared_elements_refused)


@pools((2, 3, "two"))
def test_a_scalar_is_not_split(pool: int | str) -> None:
    workers_of(pool).run(memory.scalar_split)


@pools((1, 2, 3, "two"))
@pytest.mark.parametrize("op", several.OPS)
def test_several_tensors(op: str, pool: int | str) -> None:
    workers_of(pool).run(several.check, op)


@pools((1, 2, "two"))
def test_one_tensor_several_times(pool: int | str) -> None:
    workers_of(pool).run(several.repeated)


@pools((2, "two"))
def test_several_tensors_refused(pool: int | str) -> None:
    workers_of(pool).run(several.errors)


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_refuses(size: int) -> None:
    harness.pool(size).run(errors.one_rank_refuses)


def test_ranks_adapt_alike_after_errors() -> None:
    harness.pool(2, options={"block_skip": "auto"}).run(errors.mismatch_then_adapt)


@pytest.mark.parametrize("size", [1, 2])
def test_abort_and_shutdown(size: int) -> None:
    harness.pool(size).run(errors.abort_and_shutdown, 30)


@pools((2, "two"))
def test_abort_without_peers(pool: int | str) -> None:
    workers_of(pool).run(errors.abort_without_peers)


@pools((2, 3, "two"))
def test_wrong_on_one_rank(pool: int | str) -> None:
    """Each of the mistakes that the fuzzer draws: all ranks raise soon, and the group works on."""
    workers_of(pool).run(errors.wrong_on_one_rank, timeout=120)
