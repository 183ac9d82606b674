"""Groups that span machines: Gloo's collectives, and our sums and steps over messages."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fusedpg
import harness
from checks import collectives, ddp, faults, fused_ops, groups, p2p
from checks.cases import Case, same
from checks.fused_ops import BF16, FP16, FP32, Run
from harness import Context, on_ranks
from test_collectives import calls

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def by_hosts(xs: list[torch.Tensor], hosts: list[str], op: str) -> torch.Tensor:
    """The reduction in the documented order: a host's ranks, then the hosts by their first rank."""
    half = xs[0].dtype in (torch.float16, torch.bfloat16) and op not in ("MIN", "MAX")
    wide = [x.float() if half else x for x in xs]
    join = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}.get(op, torch.add)
    groups = [
        [x for x, host in zip(wide, hosts, strict=True) if host == name]
        for name in dict.fromkeys(hosts)
    ]
    total = functools.reduce(join, [functools.reduce(join, group) for group in groups])
    if op == "AVG":
        total = (
            total / len(xs)
            if total.is_floating_point()
            else total.div(len(xs), rounding_mode="trunc")
        )
    return total.to(xs[0].dtype)


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


def engine(context: Context, local: list[int]) -> None:
    """The group knows that it spans machines."""
    info = fusedpg.group_info()
    assert info["engine"] == "tcp"
    assert info["world_size"] == context.world_size
    assert info["local_world_size"] == local[context.rank]


def test_engine(spread: Spread) -> None:
    workers, names = spread
    workers.run(engine, [names.count(name) for name in names])


def memory(context: Context, local: list[int]) -> None:
    """empty gives memory that the ranks of a host share, or what there is."""
    tensor = fusedpg.empty(1000)
    shares = local[context.rank] > 1
    assert fusedpg.in_arena(tensor) == shares
    assert (fusedpg.group_info()["arena_used"] >= 4000) == shares
    assert not fusedpg.in_arena(torch.empty(1000))
    tensor.fill_(2)
    assert bool((tensor == 2).all())
    torch.distributed.all_reduce(tensor)
    assert bool((tensor == 2 * context.world_size).all())


def test_memory(spread: Spread) -> None:
    workers, names = spread
    workers.run(memory, [names.count(name) for name in names])


ARENAS = ["two of two", "two and one", harness.slow("three and one")]


def in_arenas(context: Context, case: Case) -> None:
    """What ranks have in their arenas gives the bits of ordinary memory, whoever else has."""
    op = collectives.OPS[case.op]
    got = op.run(context, case, None)
    plain = op.run(context, dataclasses.replace(case, memory="ordinary"), None)
    collectives.compare(context, case, got, op.expect(context, case))
    for mine, other in zip(got, plain, strict=True):
        assert same(mine, other), f"rank {context.rank}: {case}"


@pytest.mark.parametrize("op", collectives.OPS)
@pytest.mark.parametrize("names", ARENAS)
def test_in_arenas(names: str, op: str) -> None:
    """Some ranks' tensors lie in their arenas: also views, at odd offsets, with gaps."""
    size = len(harness.HOSTS[names])

    @hypothesis.settings(max_examples=12)
    @hypothesis.given(calls(op, (size,)), st.text("ao", min_size=size, max_size=size))
    def examples(call: tuple[int, Case], memory: str) -> None:
        case = dataclasses.replace(call[1], memory=memory)
        harness.pool_of_hosts(names).run(in_arenas, case)

    examples()


@on_ranks("two of two")
def test_freed_in_flight(context: Context) -> None:
    """Peers write to a tensor that its owner has let go; not to what comes after it."""
    dist = torch.distributed
    numel = 300_007
    for i in range(20):
        x = fusedpg.empty(numel).fill_(context.rank + i)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        result = work.get_future()
        del x
        after = fusedpg.empty(numel).fill_(-1)
        work.wait()
        assert bool((after == -1).all())
        total = sum(rank + i for rank in range(context.world_size))
        (value,) = result.value()
        assert bool((value == total).all())


def lost_in_arenas(context: Context, how: str, numel: int) -> str:
    """A neighbour goes while tensors of the arena are under way: afterwards they change no more."""
    dist = torch.distributed
    x, other = fusedpg.empty(numel).fill_(1), fusedpg.empty(numel).fill_(3)
    dist.all_reduce(x)
    dist.barrier()
    try:
        for step in range(1000):
            if context.rank == 1 and step == 20:
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            x.fill_(1)
            dist.all_reduce(x)
    except dist.DistBackendError as error:
        x.fill_(5)
        other.fill_(6)
        if how == "stop" and context.rank == 0:
            Path(context.scratch, "failed").touch()
        time.sleep(1)
        assert bool((x == 5).all())
        assert bool((other == 6).all())
        return str(error)
    raise AssertionError("the group did not fail")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_neighbour_is_lost(how: str) -> None:
    """What it would still write to this rank's tensors, when it goes on, it does not."""
    env = [{"FUSEDPG_HOST_ID": name} for name in harness.HOSTS["two of two"]]
    timeout = 6 if how == "stop" else 30  # only who waits for a stopped rank needs it
    with harness.Workers(4, timeout=timeout, env=env, one_host=False, oracle=False) as workers:
        workers.start(lost_in_arenas, how, 3_000_000)
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


@on_ranks(*LAYOUTS)
def test_average(context: Context) -> None:
    for op in ("all_reduce", "reduce_scatter_tensor"):
        collectives.check(context, Case(op, numel=1003, redop="AVG"))
    # Gloo's sum, which is truncated here.
    collectives.check(context, Case("all_reduce", torch.int64, 70_001, redop="AVG"))


@on_ranks(*LAYOUTS)
def test_point_to_point(context: Context) -> None:
    p2p.tags_out_of_order(context, 100)
    p2p.batch(context, 10_000)
    p2p.any_source(context, 100)


@on_ranks(*LAYOUTS)
def test_objects_and_groups(context: Context) -> None:
    groups.objects(context)
    groups.subgroups(context)


@on_ranks(*LAYOUTS)
def test_transport(context: Context) -> None:
    """A new group adds up, and says what carries its messages."""
    group = torch.distributed.new_group()
    x = torch.ones(1000)
    fusedpg.sparse_all_reduce(x, group=group)
    assert bool((x == context.world_size).all())
    assert fusedpg.group_info(group)["transport"] == "tcp"
    torch.distributed.destroy_process_group(group)


def choice(context: Context, option: Any, refused: bool) -> None:
    """A group whose messages go by TCP; or an error that says what to do instead."""
    create = functools.partial(faults.rejoin, context, "choice", transport=option)
    if refused:
        with pytest.raises(ValueError, match=r'"ucx" has been removed.* set it to tcp'):
            create()
        return
    create()
    x = torch.ones(1000)
    torch.distributed.all_reduce(x)
    assert bool((x == context.world_size).all())
    assert fusedpg.group_info()["transport"] == "tcp"


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
        workers.run(choice, option, refused)


@on_ranks("two")
def test_store_is_busy(context: Context) -> None:
    """A thread that waits for a key keeps its client of the store, and nothing of the group's."""
    dist = torch.distributed
    group = dist.new_group()
    assert context.store is not None
    waits = threading.Thread(target=context.store.wait, args=(["store_is_busy"],))
    if context.rank == 0:
        waits.start()
    x = torch.ones(10)
    dist.all_reduce(x, group=group)
    assert bool((x == context.world_size).all())
    for rank in range(1, context.world_size):
        if context.rank == 0:
            dist.send(x, rank, group=group)
        elif context.rank == rank:
            dist.recv(x.zero_(), 0, group=group)
    assert bool((x == context.world_size).all())
    assert waits.is_alive() == (context.rank == 0)
    dist.barrier(group=group)
    if context.rank != 0:
        context.store.set("store_is_busy", "")
    else:
        waits.join()
        context.store.delete_key("store_is_busy")
    dist.barrier(group=group)
    dist.destroy_process_group(group)


@on_ranks("two")
def test_timeout_of_messages(context: Context) -> None:
    """A group's new timeout is also that of messages, whoever carries them."""
    dist = torch.distributed
    group = dist.new_group(timeout=datetime.timedelta(seconds=90))
    group.set_timeout(datetime.timedelta(seconds=1))
    store = dist.PrefixStore("timeout_of_messages", context.store)
    if context.rank == 0:
        begin = time.monotonic()
        with pytest.raises((dist.DistBackendError, RuntimeError), match=r"(?i)timed out|timeout"):
            dist.recv(torch.empty(10), 1, group=group)
        took = time.monotonic() - begin
        store.set("raised", "")
        assert took < 60, took
    store.wait(["raised"])
    dist.destroy_process_group(group)


def _serve(connection: Connection) -> None:
    store = harness.serve()
    connection.send(store.port)
    connection.recv()


def meet_at(context: Context, port: int, seconds: float) -> None:
    """A default group under another store than the test's."""
    dist = torch.distributed
    dist.init_process_group(
        context.backend,
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=context.rank,
        world_size=context.world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )


def without_store(context: Context, what: str) -> float:
    """Seconds that the first operation takes."""
    dist = torch.distributed
    begin = time.monotonic()
    x = torch.ones(10)
    if what == "all_reduce":
        dist.all_reduce(x)
    elif context.rank == 0:
        dist.send(x + 1, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)
    assert bool((x == 2).all())
    return time.monotonic() - begin


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
            workers.run(meet_at, ours.recv(), 2.0)
            os.kill(cast("int", server.pid), how)
            try:
                took = workers.run(without_store, what)
            finally:
                with contextlib.suppress(ProcessLookupError):  # it may have ended
                    os.kill(cast("int", server.pid), signal.SIGCONT)
            assert max(took) < 1, took
    finally:
        if how == signal.SIGSTOP:
            ours.send(None)
        server.join()


@on_ranks("two")
def test_info_while_waiting(context: Context) -> None:
    """Who asks what a group is does not wait for ranks that have not come yet."""
    group = torch.distributed.new_group()
    store = torch.distributed.PrefixStore("info", context.store)
    if context.rank != 0:
        store.wait(["asked"])
        fusedpg.sparse_all_reduce(torch.ones(10), group=group)
        torch.distributed.destroy_process_group(group)
        return
    thread = threading.Thread(target=lambda: fusedpg.sparse_all_reduce(torch.ones(10), group=group))
    thread.start()
    time.sleep(0.3)
    # Would wait for ever: the others come when this has answered.
    info = fusedpg.group_info(group)
    store.set("asked", "")
    thread.join()
    assert "transport" in info
    torch.distributed.destroy_process_group(group)


def cannot_listen(context: Context, name: str, value: str, here: str, text: str) -> None:
    """What keeps one rank from listening is raised by all, and the next group works."""
    os.environ.update({name: value} if context.rank == 0 else {})
    begin = time.monotonic()
    with pytest.raises((RuntimeError, ValueError), match=here if context.rank == 0 else text):
        torch.distributed.new_group()
    assert time.monotonic() - begin < 5
    os.environ.pop(name, None)
    group = torch.distributed.new_group()
    torch.distributed.all_reduce(torch.ones(10), group=group)
    torch.distributed.destroy_process_group(group)


@pytest.mark.parametrize(
    ("name", "value", "here"),
    [
        ("FUSEDPG_SOCKET_IFNAME", "none0", r"no interface none0 .*machine has .*lo"),
        ("FUSEDPG_PORT_RANGE", "40000-", r'must be two ports.*got "40000-"'),
    ],
)
def test_cannot_listen(name: str, value: str, here: str) -> None:
    text = f"because of rank 0: .*{here}"
    harness.pool_of_hosts("two").run(cannot_listen, name, value, here, text)


def sums(context: Context, kind: str, numel: int) -> str:
    """A digest of an all-reduce's result."""
    generator = torch.Generator().manual_seed(100 + context.rank)
    x = (1000 * torch.randn(numel, generator=generator)).to(getattr(torch, kind))
    torch.distributed.all_reduce(x)
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


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
            parts = ranks.run(sums, kind, numel)
            one_host = harness.pool(ranks.world_size).run(sums, kind, numel)
            assert set(parts) == set(one_host), (kind, numel)


SHARED = ["two and one", "two of two", "crossed", harness.slow("three and one")]


def order(context: Context, hosts: list[str], numel: int) -> None:
    """Bits of all_reduce, reduce and reduce_scatter, for all types and reductions."""
    dist = torch.distributed
    for kind in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ):
        whole = []
        for rank in range(context.world_size):
            generator = torch.Generator().manual_seed(100 + rank)
            whole.append((100 * torch.randn(numel, generator=generator)).to(kind))
        for op in REDUCTIONS:
            wanted = by_hosts(whole, hosts, op)
            x = whole[context.rank].clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            assert same(x, wanted), (kind, op)
            x = whole[context.rank].clone()
            root = context.world_size - 1
            dist.reduce(x, root, getattr(dist.ReduceOp, op))
            assert same(x, wanted if context.rank == root else whole[context.rank]), (kind, op)
            parts = list(whole[context.rank].tensor_split(context.world_size))
            mine = wanted.tensor_split(context.world_size)[context.rank]
            out = torch.empty_like(mine)
            dist.reduce_scatter(out, parts, getattr(dist.ReduceOp, op))
            assert same(out, mine), (kind, op)


def skipping(context: Context, hosts: list[str]) -> None:
    """Blocks of zeros stay at home, and the bits are those of the dense sum."""
    for kind in (torch.float32, torch.bfloat16):
        whole = []
        for rank in range(context.world_size):
            generator = torch.Generator().manual_seed(7 + rank)
            x = torch.randn(100_003, generator=generator)
            x.view(-1)[: 256 * 390].view(390, 256)[
                torch.randperm(390, generator=generator)[60:]
            ] = 0
            whole.append(x.to(kind))
        x = whole[context.rank].clone()
        fusedpg.sparse_all_reduce(x)
        assert same(x, by_hosts(whole, hosts, "SUM")), kind


# Of one segment, which the quick part has, and of several.
NUMELS = [(1003, 40_007), (1, 300_007)]


@pytest.mark.parametrize("numels", NUMELS)
@pytest.mark.parametrize("names", SHARED)
def test_order_of_sums(names: str, numels: tuple[int, ...]) -> None:
    ranks = harness.pool_of_hosts(names)
    for numel in numels:
        ranks.run(order, harness.HOSTS[names], numel)
    ranks.run(skipping, harness.HOSTS[names])


@pytest.mark.parametrize("numels", NUMELS)
def test_flat_order_has_the_bits_of_one_host(numels: tuple[int, ...]) -> None:
    ranks = harness.pool_of_hosts("two of two", FUSEDPG_ORDER="flat")
    for numel in numels:
        ranks.run(order, ["a"] * 4, numel)
    ranks.run(skipping, ["a"] * 4)


@pytest.mark.parametrize("op", ["adamw", "sgd", "adam", "lamb"])
@pytest.mark.parametrize(("names", "order"), [("three", "hosts"), ("two of two", "flat")])
def test_fused_steps_have_the_bits_of_one_host(names: str, order: str, op: str) -> None:
    ranks = harness.pool_of_hosts(names, FUSEDPG_ORDER=order)
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


def test_ddp(spread: Spread) -> None:
    assert len(set(spread[0].run(ddp.variant, "view"))) == 1
