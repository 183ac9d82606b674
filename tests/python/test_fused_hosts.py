"""Groups that span machines: Gloo's collectives, and our sums and steps over messages."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import cast

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import harness
from checks import collectives, ddp, fused_ops, groups, hosts, p2p
from checks.cases import Case
from checks.fused_ops import BF16, FP16, FP32, Run
from test_collectives import calls

pytestmark = pytest.mark.fused_only


Spread = tuple[harness.Workers, list[str]]


LAYOUTS = [
    harness.slow(("two", "ucx")),
    harness.slow(("two", "tcp")),
    harness.slow(("three", "ucx")),
    ("three", "tcp"),
    harness.slow(("two and one", "ucx")),
    ("two and one", "tcp"),
    ("two of two", "ucx"),
    ("two of two", "tcp"),
    harness.slow(("crossed", "ucx")),
]


@pytest.fixture(params=LAYOUTS, ids=" by ".join)
def spread(request: pytest.FixtureRequest) -> Spread:
    names, transport = request.param
    return harness.pool_of_hosts(names, transport), harness.HOSTS[names]


def test_engine(spread: Spread) -> None:
    workers, names = spread
    workers.run(hosts.engine, [names.count(name) for name in names])


def test_memory(spread: Spread) -> None:
    workers, names = spread
    workers.run(hosts.memory, [names.count(name) for name in names])


ARENAS = [("two of two", "tcp"), ("two and one", "tcp"), harness.slow("three and one", "tcp")]


@pytest.mark.parametrize("op", collectives.OPS)
@pytest.mark.parametrize(("names", "transport"), ARENAS)
def test_in_arenas(names: str, transport: str, op: str) -> None:
    """Some ranks' tensors lie in their arenas: also views, at odd offsets, with gaps."""
    size = len(harness.HOSTS[names])

    @hypothesis.settings(max_examples=12)
    @hypothesis.given(calls(op, (size,)), st.text("ao", min_size=size, max_size=size))
    def examples(call: tuple[int, Case], memory: str) -> None:
        case = dataclasses.replace(call[1], memory=memory)
        harness.pool_of_hosts(names, transport).run(hosts.in_arenas, case)

    examples()


def test_freed_in_flight() -> None:
    harness.pool_of_hosts("two of two", "tcp").run(hosts.freed_in_flight, 300_007, 20)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_neighbour_is_lost(how: str) -> None:
    """What it would still write to this rank's tensors, when it goes on, it does not."""
    env = [{"FUSEDPG_HOST_ID": name} for name in harness.HOSTS["two of two"]]
    timeout = 6 if how == "stop" else 30  # only who waits for a stopped rank needs it
    with harness.Workers(4, timeout=timeout, env=env, one_host=False, oracle=False) as workers:
        workers.start(hosts.lost_in_arenas, how, 3_000_000)
        if how == "stop":
            while not (workers.scratch / "failed").exists():
                time.sleep(0.01)
            os.kill(workers.processes[1].pid, signal.SIGCONT)
        for answer in workers.collect(80, ranks=[0, 2, 3]):
            assert isinstance(answer, str), answer


@pytest.mark.parametrize("op", collectives.OPS)
def test_collectives(spread: Spread, op: str) -> None:
    for numel in (0, 1003, 70_001):
        spread[0].run(collectives.check, Case(op, numel=numel, seed=1))


def test_average(spread: Spread) -> None:
    for op in ("all_reduce", "reduce_scatter_tensor"):
        spread[0].run(collectives.check, Case(op, numel=1003, redop="AVG"))
    # Gloo's sum, which is truncated here.
    spread[0].run(collectives.check, Case("all_reduce", torch.int64, 70_001, redop="AVG"))


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
        Run(steps=20, memory="arena", dtypes=(BF16, FP32), grad_dtypes=(FP16, BF16)),
    ],
)
def test_fused_adamw(spread: Spread, run: Run) -> None:
    assert len(set(spread[0].run(fused_ops.parity, run))) == 1


def test_transport(spread: Spread) -> None:
    spread[0].run(hosts.transport)


@pytest.mark.parametrize(
    ("choices", "library", "expected"),
    [
        (("ucx", "ucx"), "", "ucx"),
        (("", ""), "", "tcp"),  # never UCX unasked, though all have it
        (("ucx", "ucx"), "/no/libucp.so", "cannot load UCX"),
    ],
)
def test_choice_of_transport(choices: tuple[str, str], library: str, expected: str) -> None:
    env = [
        {"FUSEDPG_HOST_ID": str(i), "FUSEDPG_TRANSPORT": choice, "FUSEDPG_UCX_LIB": library}
        for i, choice in enumerate(choices)
    ]
    if library:
        env[0]["FUSEDPG_UCX_LIB"] = ""  # one rank without it is enough
    with harness.Workers(2, env=env, one_host=False) as workers:
        workers.run(hosts.choice, expected)


@pytest.mark.parametrize("transport", ["ucx", "tcp"])
def test_store_is_busy(transport: str) -> None:
    harness.pool_of_hosts("two", transport).run(hosts.store_is_busy)


@pytest.mark.parametrize("transport", ["ucx", "tcp"])
def test_timeout_of_messages(transport: str) -> None:
    harness.pool_of_hosts("two", transport).run(hosts.timeout_of_messages)


def _serve(connection: Connection) -> None:
    store = harness.serve()
    connection.send(store.port)
    connection.recv()


@pytest.mark.parametrize(
    ("transport", "what"), [*itertools.product(("tcp", "ucx"), ("all_reduce", "messages"))]
)
def test_store_stopped_before_the_first_operation(transport: str, what: str) -> None:
    """Its client would wait for an answer without a limit."""
    timeout = 2.0
    ours, theirs = harness.FORKED.Pipe()
    server = harness.FORKED.Process(target=_serve, args=(theirs,))
    server.start()
    env = [{"FUSEDPG_HOST_ID": str(i), "FUSEDPG_TRANSPORT": transport} for i in range(2)]
    try:
        with harness.Workers(2, env=env, init=False, oracle=False, one_host=False) as workers:
            workers.run(hosts.meet_at, ours.recv(), timeout)
            os.kill(cast("int", server.pid), signal.SIGSTOP)
            try:
                took = workers.run(hosts.store_stopped, what)
            finally:
                os.kill(cast("int", server.pid), signal.SIGCONT)
            assert max(took) < timeout + 4, took
    finally:
        ours.send(None)
        server.join()


def test_info_while_connecting() -> None:
    harness.pool_of_hosts("two").run(hosts.info_while_connecting)


def test_connects_once() -> None:
    harness.pool_of_hosts("two", "tcp").run(hosts.connects_once)


@pytest.mark.parametrize(
    ("names", "transport", "sizes"),
    [
        ("three", "ucx", (1, 1003, 70_001)),
        ("three", "tcp", (1, 1003, 1024, 1025, 16_001, 70_001, 1_000_003)),
        ("two", "tcp", (1024, 1025, 32_768)),
    ],
)
def test_sums_have_the_bits_of_one_host(names: str, transport: str, sizes: tuple[int, ...]) -> None:
    ranks = harness.pool_of_hosts(names, transport)
    for kind in ("float32", "float16", "int32"):
        for numel in sizes:
            parts = ranks.run(hosts.sums, kind, numel)
            one_host = harness.pool(ranks.world_size).run(hosts.sums, kind, numel)
            assert set(parts) == set(one_host), (kind, numel)


SHARED = [
    ("two and one", "tcp"),
    ("two of two", "tcp"),
    ("crossed", "ucx"),
    harness.slow("two and one", "ucx"),
    harness.slow("two of two", "ucx"),
    harness.slow("three and one", "ucx"),
]


@pytest.mark.parametrize(("names", "transport"), SHARED)
def test_order_of_sums(names: str, transport: str) -> None:
    ranks = harness.pool_of_hosts(names, transport)
    for numel in (1, 1003, 300_007):
        ranks.run(hosts.order, harness.HOSTS[names], numel)
    ranks.run(hosts.skipping, harness.HOSTS[names])


@pytest.mark.parametrize("transport", ["ucx", "tcp"])
def test_flat_order_has_the_bits_of_one_host(transport: str) -> None:
    ranks = harness.pool_of_hosts("two of two", transport, FUSEDPG_ORDER="flat")
    for numel in (1003, 300_007):
        ranks.run(hosts.order, ["a"] * 4, numel)
    ranks.run(hosts.skipping, ["a"] * 4)


@pytest.mark.parametrize(
    ("names", "transport", "order"),
    [
        ("three", "tcp", "hosts"),
        ("two of two", "ucx", "flat"),
        harness.slow("two of two", "tcp", "flat"),
    ],
)
def test_fused_steps_have_the_bits_of_one_host(names: str, transport: str, order: str) -> None:
    ranks = harness.pool_of_hosts(names, transport, FUSEDPG_ORDER=order)
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
