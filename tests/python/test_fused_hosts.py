"""Groups that span machines: Gloo's collectives, and our steps over its sends and receives."""

from __future__ import annotations

import pytest

import harness
from checks import collectives, ddp, fused_ops, groups, hosts, p2p
from checks.cases import Case
from checks.fused_ops import BF16, FP16, FP32, Run

pytestmark = pytest.mark.fused_only


Spread = tuple[harness.Workers, list[str]]


@pytest.fixture(params=[harness.slow("two"), "three", "two of two"])
def spread(request: pytest.FixtureRequest) -> Spread:
    return harness.pool_of_hosts(request.param), harness.HOSTS[request.param]


def test_engine(spread: Spread) -> None:
    workers, names = spread
    workers.run(hosts.engine, names.count("a"))


def test_memory(spread: Spread) -> None:
    spread[0].run(hosts.memory)


@pytest.mark.parametrize("op", collectives.OPS)
def test_collectives(spread: Spread, op: str) -> None:
    for numel in (0, 1003, 70_001):
        spread[0].run(collectives.check, Case(op, numel=numel, seed=1))


def test_average(spread: Spread) -> None:
    for op in ("all_reduce", "reduce_scatter_tensor"):
        spread[0].run(collectives.check, Case(op, numel=1003, redop="AVG"))


def test_point_to_point(spread: Spread) -> None:
    spread[0].run(p2p.tags_out_of_order, 100)
    spread[0].run(p2p.batch, 10_000)
    spread[0].run(p2p.any_source, 100)


def test_objects_and_groups(spread: Spread) -> None:
    spread[0].run(groups.objects)
    spread[0].run(groups.subgroups)


@pytest.mark.parametrize(
    "run",
    [
        Run(steps=20),
        Run(steps=20, hyper=(("amsgrad", True),), reduce="sum"),
        Run(steps=20, scale=8.0, layout="channels_last"),
        Run(steps=5, async_op=True, memory="mixed", hyper=(("maximize", True),)),
    ],
)
def test_fused_adamw(spread: Spread, run: Run) -> None:
    assert len(set(spread[0].run(fused_ops.parity, run))) == 1


@pytest.mark.parametrize("names", ["three", "two of two"])
def test_fused_steps_have_the_bits_of_one_host(names: str) -> None:
    ranks = harness.pool_of_hosts(names)
    for op in fused_ops.OPS:
        for more in (
            {},
            {"dtypes": (BF16, FP32), "grad_dtypes": (FP16, BF16), "weighted": True},
            {"dtypes": (BF16,), "master": True, "layout": "transposed"},
            {"shapes": ((100_003,), (5,)), "weighted": True, "present": 0.3},
        ):
            if op == "lamb" and "present" in more:
                continue
            run = Run(op, steps=3, **more)
            one_host = harness.pool(len(harness.HOSTS[names])).run(fused_ops.parity, run)
            assert set(ranks.run(fused_ops.parity, run)) == set(one_host), run


def test_fused_adamw_overflow(spread: Spread) -> None:
    spread[0].run(fused_ops.overflow, Run())


def test_ddp(spread: Spread) -> None:
    assert len(set(spread[0].run(ddp.variant, "view"))) == 1
