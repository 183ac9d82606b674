"""Groups that span machines: Gloo's collectives, and our sums and steps over messages."""

from __future__ import annotations

import contextlib
import dataclasses
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
    harness.slow("two"),
    "three",
    "two and one",
    "two of two",
    harness.slow("crossed"),
]


@pytest.fixture(params=LAYOUTS)
def spread(request: pytest.FixtureRequest) -> Spread:
    return harness.pool_of_hosts(request.param), harness.HOSTS[request.param]


def test_engine(spread: Spread) -> None:
    workers, names = spread
    workers.run(hosts.engine, [names.count(name) for name in names])


def test_memory(spread: Spread) -> None:
    workers, names = spread
    workers.run(hosts.memory, [names.count(name) for name in names])


ARENAS = ["two of two", "two and one", harness.slow("three and one")]


@pytest.mark.parametrize("op", collectives.OPS)
@pytest.mark.parametrize("names", ARENAS)
def test_in_arenas(names: str, op: str) -> None:
    """Some ranks' tensors lie in their arenas: also views, at odd offsets, with gaps."""
    size = len(harness.HOSTS[names])

    @hypothesis.settings(max_examples=12)
    @hypothesis.given(calls(op, (size,)), st.text("ao", min_size=size, max_size=size))
    def examples(call: tuple[int, Case], memory: str) -> None:
        case = dataclasses.replace(call[1], memory=memory)
        harness.pool_of_hosts(names).run(hosts.in_arenas, case)

    examples()


def test_freed_in_flight() -> None:
    harness.pool_of_hosts("two of two").run(hosts.freed_in_flight, 300_007, 20)


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
    ("option", "variable", "refused"),
    [
        (None, "", False),
        (None, "tcp", False),
        ("tcp", "ucx", False),  # the option comes first
        ("ucx", "", True),
        (None, "ucx", True),
    ],
)
def test_choice_of_transport(option: str | None, variable: str, refused: bool) -> None:
    env = [{"FUSEDPG_HOST_ID": str(i), "FUSEDPG_TRANSPORT": variable} for i in range(2)]
    with harness.Workers(2, env=env, init=False, oracle=False, one_host=False) as workers:
        workers.run(hosts.choice, option, refused)


def test_store_is_busy() -> None:
    harness.pool_of_hosts("two").run(hosts.store_is_busy)


def test_timeout_of_messages() -> None:
    harness.pool_of_hosts("two").run(hosts.timeout_of_messages)


def _serve(connection: Connection) -> None:
    store = harness.serve()
    connection.send(store.port)
    connection.recv()


@pytest.mark.parametrize("what", ["all_reduce", "messages"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["ended", "stopped"])
def test_without_its_store_from_the_first_operation(how: signal.Signals, what: str) -> None:
    """Ranks have met: rank 0's process may end with the store."""
    ours, theirs = harness.FORKED.Pipe()
    server = harness.FORKED.Process(target=_serve, args=(theirs,))
    server.start()
    env = [{"FUSEDPG_HOST_ID": str(i)} for i in range(2)]
    try:
        with harness.Workers(2, env=env, init=False, oracle=False, one_host=False) as workers:
            workers.run(hosts.meet_at, ours.recv(), 2.0)
            os.kill(cast("int", server.pid), how)
            try:
                took = workers.run(hosts.without_store, what)
            finally:
                with contextlib.suppress(ProcessLookupError):  # it may have ended
                    os.kill(cast("int", server.pid), signal.SIGCONT)
            assert max(took) < 1, took
    finally:
        if how == signal.SIGSTOP:
            ours.send(None)
        server.join()


def test_info_while_waiting() -> None:
    harness.pool_of_hosts("two").run(hosts.info_while_waiting)


@pytest.mark.parametrize(
    ("name", "value", "here"),
    [
        ("FUSEDPG_SOCKET_IFNAME", "none0", r"no interface none0 .*machine has .*lo"),
        ("FUSEDPG_PORT_RANGE", "40000-", r'must be two ports.*got "40000-"'),
    ],
)
def test_cannot_listen(name: str, value: str, here: str) -> None:
    text = f"because of rank 0: .*{here}"
    harness.pool_of_hosts("two").run(hosts.cannot_listen, name, value, here, text)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        ("three", (1, 1003, 1024, 1025, 16_001, 70_001, 1_000_003)),
        ("two", (1024, 1025, 32_768)),
    ],
)
def test_sums_have_the_bits_of_one_host(names: str, sizes: tuple[int, ...]) -> None:
    ranks = harness.pool_of_hosts(names)
    for kind in ("float32", "float16", "int32"):
        for numel in sizes:
            parts = ranks.run(hosts.sums, kind, numel)
            one_host = harness.pool(ranks.world_size).run(hosts.sums, kind, numel)
            assert set(parts) == set(one_host), (kind, numel)


SHARED = ["two and one", "two of two", "crossed", harness.slow("three and one")]


@pytest.mark.parametrize("names", SHARED)
def test_order_of_sums(names: str) -> None:
    ranks = harness.pool_of_hosts(names)
    for numel in (1, 1003, 300_007):
        ranks.run(hosts.order, harness.HOSTS[names], numel)
    ranks.run(hosts.skipping, harness.HOSTS[names])


def test_flat_order_has_the_bits_of_one_host() -> None:
    ranks = harness.pool_of_hosts("two of two", FUSEDPG_ORDER="flat")
    for numel in (1003, 300_007):
        ranks.run(hosts.order, ["a"] * 4, numel)
    ranks.run(hosts.skipping, ["a"] * 4)


@pytest.mark.parametrize(("names", "order"), [("three", "hosts"), ("two of two", "flat")])
def test_fused_steps_have_the_bits_of_one_host(names: str, order: str) -> None:
    ranks = harness.pool_of_hosts(names, FUSEDPG_ORDER=order)
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
