"""Serving "gloo" under its own name: what torch and programs see, and who agrees on it."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import fusedpg
import harness
from fusedpg._registration import minor_release
from harness import Context, on_ranks

Group = Any


class Row(NamedTuple):
    ranks: int
    run: Callable[[Context, Group], Any]
    gloo: Any  # what Gloo gives, by rank; None: it is not always the same
    served: Any


def _reduce(context: Context, group: Group) -> Any:
    t = torch.tensor([context.rank + 1.0])
    dist.reduce(t, 0, group=group)
    return t.item()


def _transposed_sum(context: Context, group: Group) -> Any:
    t = torch.arange(4.0).view(2, 2)
    t = t.clone() if context.rank == 0 else t.t().contiguous().t()
    dist.all_reduce(t, group=group)
    return t.tolist()


def _transposed_broadcast(context: Context, group: Group) -> Any:
    t = torch.arange(4.0).view(2, 2)
    t = t.t() if context.rank == 0 else torch.zeros(2, 2)
    dist.broadcast(t, 0, group=group)
    return t.tolist()


def _extremes(context: Context, group: Group) -> Any:
    found = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        t = torch.tensor([float("nan"), 1.0] if context.rank == 0 else [1.0, float("nan")])
        dist.all_reduce(t, op, group=group)
        found += t.isnan().tolist()
    return found


def _half_mean(context: Context, group: Group) -> Any:
    t = torch.tensor([65504.0], dtype=torch.float16)
    dist.all_reduce(t, dist.ReduceOp.AVG, group=group)
    return t.item()


def _order(context: Context, group: Group) -> Any:
    t = torch.tensor([(2.0**26, 1.0, -(2.0**26), 1.0)[context.rank]])
    dist.all_reduce(t, group=group)
    return t.item()


def _positions(context: Context, group: Group) -> Any:
    t = torch.full((3000,), (2.0**24, 1.0, 1.0)[context.rank])
    dist.all_reduce(t, group=group)
    return len(t.unique())


def _bools(context: Context, group: Group) -> Any:
    t = torch.tensor([True])
    dist.all_reduce(t, group=group)
    return t.view(torch.uint8).item()


def _works(call: Callable[[], Any]) -> bool:
    with contextlib.suppress(RuntimeError, ValueError):
        call()
        return True
    return False


def _short_integers(context: Context, group: Group) -> Any:
    tensors = [torch.ones(3, dtype=dtype) for dtype in (torch.int16, torch.uint16)]
    return [_works(lambda t=t: dist.all_reduce(t, group=group)) and t.tolist() for t in tensors]


def _complex32(context: Context, group: Group) -> Any:
    t, out = torch.ones(2, dtype=torch.complex32), torch.ones(1, dtype=torch.complex32)
    return [
        _works(lambda: dist.reduce(t, 0, group=group)),
        _works(lambda: dist.reduce_scatter_tensor(out, t, group=group)),
        _works(lambda: dist.all_reduce(t, group=group)),
    ]


def _strided_message(context: Context, group: Group) -> Any:
    t = torch.full((3, 2), float(context.rank))[:, 0]
    call = dist.send if context.rank else dist.recv
    return _works(lambda: call(t, 1 - context.rank, group=group)) and t.tolist()


def _float8(context: Context, group: Group) -> Any:
    t = torch.full((3,), context.rank + 1.0).to(torch.float8_e4m3fn)
    return _works(lambda: dist.broadcast(t, 1, group=group)) and t.float().tolist()


def _uneven(context: Context, group: Group) -> Any:
    parts = [torch.zeros(r + 1) for r in range(context.world_size)]
    mine = torch.full((context.rank + 1,), context.rank + 1.0)
    return _works(lambda: dist.all_gather(parts, mine, group=group)) and torch.cat(parts).tolist()


def _sparse_mean(context: Context, group: Group) -> Any:
    t = torch.eye(3).mul(context.rank).to_sparse()
    works = _works(lambda: dist.all_reduce(t, dist.ReduceOp.AVG, group=group))
    return works and t.to_dense().diagonal().tolist()


def _gradient_of_scatter(context: Context, group: Group) -> Any:
    x = torch.ones(2 * context.world_size, requires_grad=True)
    out = torch.zeros(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.reduce_scatter_tensor(out, x, group=group)
        if not out.requires_grad:
            return None
        out.sum().backward()
    return None if x.grad is None else x.grad.tolist()


def _gathered_leaf(context: Context, group: Group) -> Any:
    if group is context.oracle:
        return None  # its ranks raise in different calls, and wait for each other then
    out, x = torch.zeros(2 * context.world_size), torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):
            dist.all_gather_into_tensor(out.zero_(), x, group=group)
    return out.tolist()


def _polled(context: Context, group: Group) -> Any:
    part = torch.zeros(1)
    work = dist.reduce_scatter_tensor(
        part, torch.ones(context.world_size), group=group, async_op=True
    )
    # Gloo's has ended long before: its Work says nothing for ever.
    end = time.monotonic() + (2 if group is context.oracle else 20)
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    done = work.is_completed()
    work.wait()
    return done, part.item()


ROWS = {
    "`reduce(t, dst)` overwrites": Row(4, _reduce, None, [10.0, 2.0, 3.0, 4.0]),
    "`all_reduce` of a tensor that is transposed on some ranks": Row(
        2, _transposed_sum, None, [[[0.0, 2.0], [4.0, 6.0]]] * 2
    ),
    "`broadcast` of a transposed tensor": Row(
        2,
        _transposed_broadcast,
        [[[0.0, 2.0], [1.0, 3.0]], [[0.0, 1.0], [2.0, 3.0]]],
        [[[0.0, 2.0], [1.0, 3.0]]] * 2,
    ),
    "MAX and MIN lose a NaN": Row(2, _extremes, None, [[True] * 4] * 2),
    "the mean of float16": Row(2, _half_mean, [float("inf")] * 2, [65504.0] * 2),
    "sums of float32 depend on the algorithm": Row(4, _order, [0.0] * 4, [1.0] * 4),
    "the same sum has other bits": Row(3, _positions, [2] * 3, [1] * 3),
    "the sum of bools": Row(2, _bools, [2] * 2, [1] * 2),
    "int16 and uint16": Row(2, _short_integers, [[False] * 2] * 2, [[[2, 2, 2]] * 2] * 2),
    "`reduce` and `reduce_scatter` add complex32": Row(
        2, _complex32, [[True] * 3] * 2, [[False, False, True]] * 2
    ),
    "`send` and `recv` of a tensor that is not contiguous": Row(
        2, _strided_message, [False] * 2, [[1.0] * 3] * 2
    ),
    "float8": Row(2, _float8, [False] * 2, [[2.0, 2.0, 2.0]] * 2),
    "`all_gather` into a list of tensors of different sizes": Row(
        2, _uneven, [False] * 2, [[1.0, 2.0, 2.0]] * 2
    ),
    "the mean of sparse tensors": Row(2, _sparse_mean, [False] * 2, [[0.5] * 3] * 2),
    "`reduce_scatter_tensor` of a tensor that requires grad": Row(
        2, _gradient_of_scatter, None, [None] * 2
    ),
    "`is_completed()` of an asynchronous `reduce_scatter`": Row(
        2, _polled, [(False, 2.0)] * 2, [(True, 2.0)] * 2
    ),
    "`all_gather_into_tensor` of a tensor that requires grad": Row(
        2, _gathered_leaf, None, [[1.0] * 4] * 2
    ),
}

pytestmark = pytest.mark.fused_only


def serve() -> Any:
    """The module, in workers, too."""
    from fusedpg import _serve_gloo

    return _serve_gloo


@contextlib.contextmanager
def serving(on: bool = True) -> Iterator[None]:
    serve().serve_gloo(on)
    try:
        yield
    finally:
        serve().serve_gloo(False)


@contextlib.contextmanager
def served(**arguments: Any) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks that asks for "gloo"."""
    with serving():
        group = dist.new_group(backend="gloo", **arguments)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


def backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def is_ours(group: dist.ProcessGroup) -> bool:
    return isinstance(backend_of(group), fusedpg.ProcessGroupFused)


def check_sum(context: Context, group: dist.ProcessGroup) -> None:
    t = torch.arange(5000.0) + context.rank
    dist.all_reduce(t, group=group)
    n = context.world_size
    assert torch.equal(t, torch.arange(5000.0) * n + n * (n - 1) / 2)


def adds_up(context: Context, backend: Any) -> None:
    """A backend or a group, without torch.distributed."""
    t = torch.ones(3)
    backend.allreduce([t]).wait()
    assert t.sum() == 3 * context.world_size


def compare(context: Context, name: str) -> tuple[Any, Any]:
    """What came out on Gloo, and on a served group."""
    row = ROWS[name]
    gloo = row.run(context, context.oracle)
    with served() as group:
        return gloo, row.run(context, group)


# --- what it does otherwise -----------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_what_differs(name: str) -> None:
    """A row of docs/guides/serve_gloo.md."""
    row = ROWS[name]
    text = (harness.ROOT / "docs/guides/serve_gloo.md").read_text()
    assert text.count(f"| {name}") == 1
    gloo, served = zip(*harness.pool(row.ranks).run(compare, name), strict=True)
    assert list(served) == row.served, (served, gloo)
    assert list(gloo) != list(served)
    assert row.gloo is None or list(gloo) == row.gloo, gloo


# --- what a group says it is --------------------------------------------------


@on_ranks(2, 3)
def test_group_is_ours_by_the_name_of_gloo(context: Context) -> None:
    with served() as group:
        assert is_ours(group)
        check_sum(context, group)
        backend = backend_of(group)
        assert dist.get_backend(group) == dist.Backend.GLOO
        assert group.name() == backend.name() == backend.options.backend == "gloo"
        info = fusedpg.group_info(group)
        assert (info["backend"], info["engine"]) == ("gloo", "shm")
        assert fusedpg.stats(group)["all_reduce"]["calls"] == 1
        assert backend.options.group_name == group.group_name
        assert list(backend.options.global_ranks_in_group) == list(range(context.world_size))
    assert fusedpg.group_info()["backend"] == "fused"


@on_ranks(2)
def test_undo_gives_torch_its_class_back(context: Context) -> None:
    import torch._C._distributed_c10d as bindings

    before = [c10d._create_process_group_wrapper]
    before += [module.ProcessGroupGloo for module in (c10d, dist, bindings)]
    with serving():
        proxy = dist.ProcessGroupGloo
        assert proxy is c10d.ProcessGroupGloo is bindings.ProcessGroupGloo is not before[1]
    after = [c10d._create_process_group_wrapper]
    after += [module.ProcessGroupGloo for module in (c10d, dist, bindings)]
    assert all(one is other for one, other in zip(before, after))
    group = dist.new_group(backend="gloo")
    assert type(backend_of(group)) is serve().Gloo
    check_sum(context, group)
    # A program may have kept the name.
    store = dist.PrefixStore("kept", context.store)
    kept = proxy(store, context.rank, context.world_size)
    assert type(kept) is serve().Gloo
    # Gloo's constructor fails where a peer that has returned from its own has gone already.
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_instances_by_every_name(context: Context) -> None:
    import torch._C._distributed_c10d as bindings

    with served() as group:
        real = serve().Gloo(dist.HashStore(), 0, 1)
        for module in (dist, c10d, bindings):
            assert isinstance(backend_of(group), module.ProcessGroupGloo)
            assert isinstance(real, module.ProcessGroupGloo)
            assert not isinstance(backend_of(dist.group.WORLD), module.ProcessGroupGloo)
            assert issubclass(serve().Gloo, module.ProcessGroupGloo)
            assert not issubclass(type(backend_of(group)), module.ProcessGroupGloo)
        assert dist.ProcessGroupGloo.__name__ == "ProcessGroupGloo"
        assert dist.ProcessGroupGloo._Options is serve().Gloo._Options
        assert dist.ProcessGroupGloo == serve().Gloo
        assert hash(dist.ProcessGroupGloo) == hash(serve().Gloo)


@on_ranks(2)
def test_subclass_stays_real(context: Context) -> None:
    with serving():

        class Mine(dist.ProcessGroupGloo):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.made = True

        assert Mine.__mro__[1] is serve().Gloo
        mine = Mine(dist.PrefixStore("mine", context.store), context.rank, context.world_size)
        assert mine.made and isinstance(mine, dist.ProcessGroupGloo)
        adds_up(context, mine)


@on_ranks(2)
def test_group_made_by_hand(context: Context) -> None:
    """As torchft and rpc make them: the class itself, and a ProcessGroup around it."""
    with serving():
        store = dist.PrefixStore("hand", context.store)
        timeout = datetime.timedelta(seconds=30)
        backend = dist.ProcessGroupGloo(store, context.rank, context.world_size, timeout=timeout)
        assert not isinstance(backend, serve().Gloo)
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, context.rank, context.world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        assert backend.options._timeout == timeout
        group.barrier().wait()
        adds_up(context, group)


@on_ranks(2)
def test_fused_optimizer(context: Context) -> None:
    """fusedpg's own functions take the group as one of theirs."""
    torch.manual_seed(0)
    model, data = torch.nn.Linear(4, 3), torch.randn(8, 4)
    reference = torch.nn.Linear(4, 3)
    reference.load_state_dict(model.state_dict())
    with served() as group:
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        ours = fusedpg.optim.AdamW(model.parameters(), lr=0.1, ddp=ddp)
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
        for _ in range(3):
            ddp(data[context.rank :: context.world_size]).pow(2).mean().backward()
            reference(data).pow(2).mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert any("adamw" in name for name in fusedpg.stats(group)), fusedpg.stats(group)
        for mine, other in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(mine, other)


def compressed(group: dist.ProcessGroup, rank: int, uncompressed: int) -> list[torch.Tensor]:
    from fusedpg import compress
    from fusedpg.compress import _lane

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    params = {"compressor": "topk", "memory": "residual", "communicator": "allgather"}
    state = compress.from_params(
        params | {"compress_ratio": 0.05}, group=group, uncompressed_steps=uncompressed
    )
    ddp.register_comm_hook(state, compress.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(6, 50, generator=torch.Generator().manual_seed(rank))
    for _ in range(5):
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_backend(_lane.of(group).group) == "fused"
    return [p.detach() for p in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("uncompressed", [0, 3])
def test_compressed_gradients(context: Context, uncompressed: int) -> None:
    """fusedpg.compress takes the group for ours, not for Gloo's, also after serving has ended."""
    from fusedpg import functional

    with serving():
        group = dist.new_group(backend="gloo")
    gloo = dist.new_group(backend="gloo")
    assert functional._is_ours(group) and functional._is_ours(dist.group.WORLD)
    assert not functional._is_ours(gloo)
    # Ranks need not know as many groups as each other, but to torch since 2.15.
    if context.rank == 0 and minor_release(torch.__version__) < (2, 15):
        dist.new_group([0], use_local_synchronization=True)
    found = compressed(group, context.rank, uncompressed)
    want = compressed(dist.group.WORLD, context.rank, uncompressed)
    for mine, other in zip(found, want):
        assert torch.equal(mine, other)
    dist.destroy_process_group(group)
    dist.destroy_process_group(gloo)


@on_ranks("two")
def test_between_hosts(context: Context) -> None:
    with served() as group:
        check_sum(context, group)
        t = torch.full((3,), float(context.rank))
        peer = context.rank ^ 1
        other = torch.empty(3)
        calls = [
            lambda: dist.isend(t, peer, group=group),
            lambda: dist.irecv(other, peer, group=group),
        ]
        for work in [call() for call in calls[:: 1 if context.rank < peer else -1]]:
            work.wait()
        assert torch.equal(other, torch.full((3,), float(peer)))
        dist.monitored_barrier(group)
        info = fusedpg.group_info(group)
        assert (info["backend"], info["engine"]) == ("gloo", "tcp")


# --- timeouts, options, exceptions --------------------------------------------


@on_ranks(2)
def test_timeouts(context: Context) -> None:
    with served(timeout=datetime.timedelta(seconds=41)) as group:
        assert backend_of(group).options._timeout == datetime.timedelta(seconds=41)
        short = datetime.timedelta(milliseconds=300)
        c10d._set_pg_timeout(short, group)
        assert backend_of(group).options._timeout == short
        if context.rank == 0:
            with pytest.raises(RuntimeError, match=r"timeout after 300 ms.*timed out after"):
                dist.all_reduce(torch.ones(3), group=group)
        time.sleep(0.5)
        dist.barrier()


@on_ranks(2)
def test_options_have_gloos_fields(context: Context) -> None:
    with served() as group:
        options = backend_of(group).options
        assert options._threads == 2 and options._devices == []
        options._threads = 4
        assert backend_of(group).options._threads == 4


def with_options(context: Context, prefix: str, ranks: list[int]) -> Any:
    store = dist.PrefixStore(prefix, context.store)
    if context.rank in ranks:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = datetime.timedelta(seconds=20)
        return dist.ProcessGroupGloo(store, context.rank, context.world_size, options)
    timeout = datetime.timedelta(seconds=20)
    return dist.ProcessGroupGloo(store, context.rank, context.world_size, timeout)


@on_ranks(2)
@pytest.mark.parametrize("ranks", [[0, 1], [0], [1]])
def test_options_with_devices_are_gloos(context: Context, ranks: list[int]) -> None:
    with serving():
        backend = with_options(context, f"devices{ranks}", ranks)
        assert type(backend) is serve().Gloo
        adds_up(context, backend)


@on_ranks(2)
def test_exceptions_are_gloos(context: Context) -> None:
    gloo = dist.new_group(backend="gloo")
    with served() as ours:
        assert is_ours(ours) and not is_ours(gloo)
        mean, words = dist.ReduceOp.AVG, "result type Float can't be cast to the desired"
        output = torch.ones(2, dtype=torch.int64)
        for one in (gloo, ours):
            with pytest.raises(RuntimeError, match=words):
                dist.all_reduce(torch.ones(2, dtype=torch.int64), mean, group=one)
            for call in (
                lambda one=one: one.broadcast([torch.ones(2)], broadcast_to(7)).wait(),
                lambda one=one: one.allreduce([]).wait(),
                lambda one=one: one.allgather([[output]], [output]).wait(),
                lambda one=one: one.send([torch.ones(2).to_sparse()], 1 - context.rank, 0),
            ):
                with pytest.raises(RuntimeError):
                    call()
        check_sum(context, ours)


def broadcast_to(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


@on_ranks(2)
def test_mean_of_floats(context: Context) -> None:
    with served() as group:
        t = torch.full((9,), float(context.rank))
        dist.all_reduce(t, dist.ReduceOp.AVG, group=group)
        assert torch.equal(t, torch.full((9,), (context.world_size - 1) / 2))


@on_ranks(2)
def test_disagreement_raises_at_once(context: Context) -> None:
    """Gloo hangs, or adds what does not belong together."""
    with served() as group:
        with pytest.raises(RuntimeError, match="disagree"):
            dist.all_reduce(torch.ones(3 + context.rank), group=group)


def in_a_dead_group(context: Context) -> str:
    with serving():
        group = dist.new_group(backend="gloo")
        dist.barrier(group)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(3), group=group)
        except RuntimeError as error:
            return str(error)
        return "nothing"


def test_death_of_a_peer_in_gloos_words() -> None:
    with harness.Workers(2, oracle=False) as workers:
        workers.start(in_a_dead_group)
        text, died = workers.collect(30)
        assert isinstance(died, harness.Died)
        assert re.search("the process of rank 1 .* ended.*Connection closed by peer", text), text


@on_ranks(2)
def test_creation_gives_up_in_gloos_words(context: Context) -> None:
    if context.rank == 0:
        with (
            serving(),
            pytest.raises(RuntimeError, match=r"timeout after 10ms.*have not come: rank 1"),
        ):
            dist.ProcessGroupGloo(
                dist.PrefixStore("alone", context.store),
                0,
                context.world_size,
                timeout=datetime.timedelta(milliseconds=10),
            )


# --- what torch reads in C++, and debugging -----------------------------------


@on_ranks(2)
@pytest.mark.parametrize("threads", [2, 5])
def test_ddp_logs_it_as_gloo(context: Context, threads: int) -> None:
    """Its logger casts the backend to torch's class; a memory fault where the layout differs."""
    with served() as group:
        backend_of(group).options._threads = threads
        module = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(3, 2), process_group=group
        )
        module(torch.ones(1, 3)).sum().backward()
        data = module._get_ddp_logging_data()
        assert (data["backend_name"], data["gloo_num_threads"]) == ("gloo", threads)


@on_ranks(2)
def test_layout_check_tells_other_numbers(context: Context) -> None:
    options = serve().Gloo._Options()
    options._devices = [serve().Gloo.create_device(hostname="127.0.0.1")]
    options._threads = 3
    gloo = serve().Gloo(dist.HashStore(), 0, 1, options)

    assert fusedpg.ProcessGroupFused._layout_is_gloos(gloo, 3)
    assert not fusedpg.ProcessGroupFused._layout_is_gloos(gloo, 4)


@on_ranks(2)
def test_titles_of_the_profiler(context: Context) -> None:
    with served() as group:
        with torch.autograd.profiler.profile() as profile:
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
            if context.rank == 0:
                dist.send(torch.ones(3), 1, group=group)
            elif context.rank == 1:
                dist.recv(torch.ones(3), 0, group=group)
        names = [event.name for event in profile.function_events]
        assert names.count("gloo:all_reduce") == 2
        assert ("gloo:send" if context.rank == 0 else "gloo:recv") in names
        assert not [name for name in names if name.startswith("fused:")]


@on_ranks(2)
def test_debugging(context: Context) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: DDP, a memory fault on Gloo, works; calls are compared."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with served() as group:
            assert is_ours(group)
            ddp = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Linear(3, 2), process_group=group
            )
            ddp(torch.ones(1, 3)).sum().backward()
            with pytest.raises(RuntimeError, match="disagree"):
                if context.rank == 0:
                    dist.all_reduce(torch.ones(3), group=group)
                else:
                    dist.broadcast(torch.ones(3), 0, group=group)
    finally:
        dist.set_debug_level(before)


@on_ranks(2)
def test_debugging_of_another_backend(context: Context) -> None:
    """The helper of its wrapper is Gloo's."""
    module = serve()
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    before, module._arguments = module._arguments, None  # nobody may ask
    try:
        with serving():
            wrapper = c10d._create_process_group_wrapper(
                wrapped_pg=group,
                store_prefix="helper",
                store=context.store,
                rank=context.rank,
                world_size=context.world_size,
            )
    finally:
        module._arguments = before
    assert isinstance(wrapper, c10d._ProcessGroupWrapper)
    adds_up(context, wrapper)


@on_ranks(3)
def test_monitored_barrier(context: Context) -> None:
    with served() as group:
        dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=20))
        if context.rank == 0:
            with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier"):
                dist.monitored_barrier(
                    group, timeout=datetime.timedelta(milliseconds=200), wait_all_ranks=True
                )
        dist.barrier()


# --- the agreement ------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_that_does_not_serve(context: Context, alone: int) -> None:
    """All have Gloo's group, soon, and the others say why."""
    begin = time.monotonic()
    with serving(context.rank != alone):
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=50))
    assert time.monotonic() - begin < 25  # half of the time limit
    assert type(backend_of(group)) is serve().Gloo
    check_sum(context, group)
    said = [text for text in serve()._said if f"rank {alone} does not serve it" in text]
    assert bool(said) == (context.rank != alone)
    dist.destroy_process_group(group)


@on_ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_serve(context: Context, rank: int) -> None:
    """Such as one whose extension does not load."""
    module = serve()
    before = module._refusals[:]
    if context.rank == rank:
        module._refusals[:] = ["ImportError: no extension"]
    try:
        with served() as group:
            assert type(backend_of(group)) is module.Gloo
            check_sum(context, group)
            assert any(f"rank {rank}: ImportError: no extension" in text for text in module._said)
    finally:
        module._refusals[:] = before


@on_ranks(2, 3)
def test_groups_of_both_kinds_under_one_prefix(context: Context) -> None:
    """What an earlier group has left in the store decides nothing."""
    store = dist.PrefixStore("again", context.store)
    for turn, ours in enumerate((False, True, True, False, True)):
        with serving(ours):
            if context.rank == turn % 2:
                time.sleep(0.2)
            backend = dist.ProcessGroupGloo(
                store, context.rank, context.world_size, datetime.timedelta(seconds=20)
            )
            assert (type(backend) is not serve().Gloo) == ours, turn
            adds_up(context, backend)
            dist.barrier()
            del backend
            dist.barrier()


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_other_stores(kind: str, tmp_path: Path) -> None:
    """One rank: the agreement's calls are there in every store."""
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    with serving():
        backend = dist.ProcessGroupGloo(dist.PrefixStore("x", store), 0, 1)
        assert not isinstance(backend, serve().Gloo) and isinstance(backend, dist.ProcessGroupGloo)


class Small(dist.Store):
    """What Gloo asks of a store, and no more."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: Any, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: Any) -> Any:
        return self._inner.get(key)

    def add(self, key: Any, value: Any) -> int:
        return self._inner.add(key, value)

    def wait(self, keys: Any, *timeout: Any) -> None:
        self._inner.wait(keys, *timeout)


@on_ranks(2)
def test_store_that_cannot_agree(context: Context) -> None:
    """One written in Python: all ranks have Gloo's group, at once."""
    store = Small(dist.PrefixStore("small", context.store))
    with serving():
        backend = dist.ProcessGroupGloo(
            store, context.rank, context.world_size, datetime.timedelta(seconds=20)
        )
        assert type(backend) is serve().Gloo
        assert any("its store has only" in text for text in serve()._said)
        adds_up(context, backend)


# --- the variable -------------------------------------------------------------

PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group(*sys.argv[1:])
t = torch.ones(3)
dist.all_reduce(t)
assert t.sum() == 3 * dist.get_world_size()
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
print(type(backend).__name__, dist.get_backend(), backend.name())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("arguments", [(), ("gloo",), ("cpu:gloo",)])
@pytest.mark.parametrize("value", ["1", "0"])
def test_variable(arguments: tuple[str, ...], value: str) -> None:
    """Alone: the program imports torch and asks for gloo, or for nothing."""
    for done in harness.run_ranks(PROGRAM, *arguments, FUSEDPG_SERVE_GLOO=value):
        # Beside other work torch's own Gloo aborts now and then when its process exits, also where
        # fusedpg is not even imported.
        gloos = value == "0" and "terminate called without an active exception\n" in done.stderr
        assert done.returncode == 0 or gloos, (done.returncode, done.stderr)
        kind, *_, name = done.stdout.split()
        assert kind == ("ProcessGroupFused" if value == "1" else "ProcessGroupGloo"), done.stdout
        assert name == "gloo"


def test_variable_with_other_values() -> None:
    done = harness.run_ranks(PROGRAM, "gloo", size=1, FUSEDPG_SERVE_GLOO="yes")[0]
    assert "FUSEDPG_SERVE_GLOO must be 0 or 1, got yes" in done.stderr
    assert done.stdout.split()[0] == "ProcessGroupGloo"


LATE = """
import torch.distributed as dist
dist.init_process_group("gloo")
import fusedpg
print(type(dist.new_group(backend="gloo")._get_backend(__import__("torch").device("cpu"))).__name__)
"""


def test_import_without_autoload() -> None:
    """Then fusedpg is asked when it is imported, and says that there are groups already."""
    environment = {"FUSEDPG_SERVE_GLOO": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = harness.run_ranks(PROGRAM, "gloo", size=1, **environment)[0]
    assert done.stdout.split()[0] == "ProcessGroupGloo"
    done = harness.run_ranks(LATE, size=1, **environment)[0]
    assert done.returncode == 0, done.stderr
    assert "the groups of this process that exist stay Gloo's" in done.stderr
    assert done.stdout.split() == ["ProcessGroupFused"]


TORCHCOMMS = """
def is_backend_built(name):
    return name == "gloo"
def new_comm(backend, device, **more):
    raise RuntimeError("torchcomms was asked for " + backend)
"""


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("fused", 'torchcomms, which has no backend "fused": unset it'),
        ("gloo", "torchcomms was asked for gloo"),
    ],
)
def test_torchcomms_gets_names(backend: str, words: str, tmp_path: Path) -> None:
    """A stand-in for it, which torch finds by its name. torch 2.14 asks which names it has."""
    package = tmp_path / "torchcomms"
    package.mkdir()
    (package / "__init__.py").write_text(TORCHCOMMS)
    (package / "_comms.py").write_text("class _BackendWrapper: pass")
    (package / "hooks.py").write_text("class FlightRecorderHook: pass")
    environment = {
        "PYTHONPATH": str(tmp_path),
        "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1",
        "FUSEDPG_SERVE_GLOO": "1",
    }
    done = harness.run_ranks(PROGRAM, backend, size=1, **environment)[0]
    if backend == "fused" and hasattr(c10d, "_torchcomms_handles_backend"):
        assert done.stdout.split()[:2] == ["ProcessGroupFused", "fused"], done.stderr
    else:
        assert words in done.stderr, done.stderr


def by_rpc(context: Context, environment: dict[str, str]) -> list[float] | None:
    from torch.distributed import rpc

    os.environ.update(environment)
    with serving():
        rpc.init_rpc(f"w{context.rank}", rank=context.rank, world_size=2)
        found = rpc.rpc_sync("w1", torch.add, (torch.ones(2), 1)) if context.rank == 0 else None
        rpc.shutdown()
    return None if found is None else found.tolist()


def test_rpc() -> None:
    with harness.Workers(2, init=False, oracle=False) as workers:
        found = workers.run(by_rpc, harness.environment_of(workers.store))
    assert found == [[2.0, 2.0], None]
