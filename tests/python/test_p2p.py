"""Point to point on two to four ranks."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

import harness
from checks import cases, p2p
from checks.cases import Case

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


@pytest.mark.parametrize("numel", SIZES)
def test_one_tag_keeps_order(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.same_tag_keeps_order, numel)


@pytest.mark.parametrize("numel", SIZES)
def test_receives_before_sends(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.receives_first, numel)


@pytest.mark.parametrize("numel", SIZES)
def test_any_source(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.any_source, numel)


def test_any_source_with_tags(ranks: harness.Workers) -> None:
    ranks.run(p2p.any_source_tags)


@pytest.mark.parametrize("numel", SIZES)
def test_batch(ranks: harness.Workers, numel: int) -> None:
    ranks.run(p2p.batch, numel)


def test_in_a_subgroup(ranks: harness.Workers) -> None:
    ranks.run(p2p.subgroup)


def test_between_collectives(ranks: harness.Workers) -> None:
    ranks.run(p2p.interleaved, 30)
