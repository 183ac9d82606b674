"""Streams, the order among collectives, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

from checks.fused_ops import BF16, FP32, Run
from gpu_checks import streams
from ranks import Ranks

pytestmark = [pytest.mark.timeout(900), pytest.mark.real_gpu]


@pytest.mark.parametrize("op", ["sgd", "adamw", "lamb"])
def test_host_does_not_wait(pair: Ranks, op: str) -> None:
    for called, whole in pair.run(streams.host_does_not_wait, op):
        # The call enqueues; behind it lies a kernel of about half a second.
        assert whole > 0.2, whole
        assert called < whole / 3, (called, whole)


@pytest.mark.parametrize("op", ["sgd", "adamw", "lamb"])
def test_wait_on_another_stream(pair: Ranks, op: str) -> None:
    pair.run(streams.another_stream, op)


@pytest.mark.parametrize("async_op", [False, True], ids=["", "async"])
def test_arguments_freed_at_once(pair: Ranks, async_op: bool) -> None:
    pair.run(streams.freed_at_once, async_op)


def test_work(pair: Ranks) -> None:
    pair.run(streams.work_of_a_step)


def test_random_order_among_collectives(pair: Ranks) -> None:
    pair.run(streams.many_interleavings, 100)


def test_random_order_of_three_ranks(trio: Ranks) -> None:
    trio.run(streams.many_interleavings, 10)


GRAPHS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 with masters": {"dtypes": (BF16,), "master": True},
    "weighted": {"weighted": True},
    "several calls": {"dtypes": (FP32, BF16)},
    "large": {"shapes": ((1 << 20,), (1_000_003,), (5,))},
}


@pytest.mark.parametrize("variant", GRAPHS)
@pytest.mark.parametrize("op", ["adamw", "lamb"])
def test_graph(pair: Ranks, op: str, variant: str) -> None:
    pair.run(streams.graph, Run(op, **GRAPHS[variant]))


def test_graph_of_one_rank(ranks: Ranks) -> None:
    ranks.run(streams.graph, Run("adamw"))


def test_capture_that_fails(pair: Ranks) -> None:
    pair.run(streams.graph_after_failure_to_capture)
