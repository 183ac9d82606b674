"""A group fails: what its tensors hold on the ranks that live on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import harness
from checks import detach

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

# All notice the failure, or one does not : then the arena is copied.
WAYS = ["kill", "stop"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [detach.write_through_failure, detach.broadcast_through_failure])
def test_no_write_is_lost(check: Callable[..., Any], how: str) -> None:
    with harness.Workers(3, timeout=20, oracle=False) as workers:
        workers.start(check, how, 3_000_000)
        for text in workers.collect(40, ranks=[0, 1]):
            assert isinstance(text, str), text
            assert "rank 2" in text, text


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["kill", "abort", "stop"])
def test_shared_parameters_survive(how: str, victim: int) -> None:
    with harness.Workers(3, timeout=20, oracle=False) as workers:
        workers.start(detach.share_and_fail, how, victim)
        survivors = [rank for rank in range(3) if how == "abort" or rank != victim]
        answers = workers.collect(40, ranks=survivors)
        assert not any(isinstance(a, harness.RemoteError | harness.Died) for a in answers), answers
        assert len({digest for pair in answers for digest in pair}) == 1, answers
        workers.start(detach.write_parameters, ranks=survivors)
        assert workers.collect(20, ranks=survivors) == [None] * len(survivors)
        workers.start(detach.read_parameters, survivors, ranks=survivors)
        assert workers.collect(30, ranks=survivors) == [None] * len(survivors)


def test_impossible_sizes(pair: harness.Workers) -> None:
    pair.run(detach.impossible_sizes)
