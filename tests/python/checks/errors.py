"""Errors of one rank that leave the group usable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from fuzz import mistakes
from fuzz.calls import Env
from fuzz.programs import GroupSpec, Step
from harness import Context


def usable(context: Context) -> None:
    tensor = torch.full((100,), float(context.rank + 1))
    dist.all_reduce(tensor)
    assert bool((tensor == sum(range(1, context.world_size + 1))).all())


def one_rank_refuses(context: Context) -> None:
    """What one rank cannot do raises on all, in one line on its peers, and ends nothing."""
    size, last = context.world_size, context.world_size - 1

    def output(numel: int) -> torch.Tensor:
        good = torch.zeros(numel)
        return torch.zeros(1).expand(numel) if context.rank == last else good

    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather([output(4) for _ in range(size)], torch.ones(4)),
        lambda: dist.all_gather_into_tensor(output(4 * size), torch.ones(4)),
        lambda: dist.reduce_scatter_tensor(output(4), torch.ones(4 * size)),
        lambda: dist.all_to_all_single(output(4 * size), torch.ones(4 * size)),
        lambda: dist.broadcast(output(4), 0),
        lambda: dist.scatter(output(4), [torch.ones(4)] * size if context.rank == 0 else None),
    ]

    def coalesced() -> None:
        """The second of a list of operations."""
        backend = dist.distributed_c10d._get_default_group()
        outputs = [torch.zeros(4 * size), output(4 * size), torch.zeros(4 * size)]
        backend.allgather_into_tensor_coalesced(outputs, [torch.ones(4)] * 3).wait()

    for call in [*calls, coalesced]:
        try:
            call()
        except ValueError as error:
            assert context.rank == last and "share memory" in str(error)
        except dist.DistBackendError as error:
            text = str(error)
            assert context.rank != last
            assert f"rank {last} refused to take part: fused: cannot write" in text
            # Their error in one line, without torch's trace of this one.
            assert "Exception raised from check_writable" not in text
        else:
            raise AssertionError("nobody raised")
        usable(context)


def mismatch_then_adapt(context: Context) -> None:
    """Ranks choose alike after a mismatch and after a refusal."""
    shapes = (20_000, 30_000)
    bad = torch.zeros(shapes[context.rank % 2])
    for _ in range(3):
        try:
            dist.all_reduce(bad)
        except dist.DistBackendError:
            pass
        else:
            raise AssertionError("nobody raised")
    with contextlib.suppress(dist.DistBackendError, ValueError):
        # A shape that all know, but one rank's reduction has no meaning.
        odd = context.rank == 0
        op = dist.ReduceOp.BAND if odd else dist.ReduceOp.SUM
        dist.all_reduce(torch.zeros(shapes[0]), op)
        raise AssertionError("nobody raised")
    for call in range(80):
        numel = shapes[call % 2]
        tensor = torch.zeros(numel)
        begin = 0 if call < 40 else context.rank * 100
        tensor[begin : numel if call < 40 else begin + 100] = context.rank + 1.0
        want = torch.zeros(numel)
        for rank in range(context.world_size):
            begin = 0 if call < 40 else rank * 100
            want[begin : numel if call < 40 else begin + 100] += rank + 1.0
        dist.all_reduce(tensor)
        assert torch.equal(tensor, want), call


def end_group(group: dist.ProcessGroup, turn: int) -> None:
    """Aborts, shuts down and uses a group from five threads at once."""
    backend = group._get_backend(torch.device("cpu"))
    works = [dist.all_reduce(torch.ones(50_000), group=group, async_op=True) for _ in range(4)]
    start = threading.Barrier(5)
    errors: list[BaseException] = []

    def end(call: Callable[[], object]) -> None:
        start.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    def collective() -> None:
        with contextlib.suppress(dist.DistBackendError, RuntimeError):
            dist.all_reduce(torch.ones(10), group=group)

    calls = [backend.abort, backend.shutdown, backend.abort, backend.shutdown, collective]
    if turn % 2:
        calls.reverse()
    threads = [threading.Thread(target=end, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend.abort()
    backend.shutdown()
    assert not errors, errors
    for work in works:
        with contextlib.suppress(dist.DistBackendError, RuntimeError):
            work.wait()


def abort_and_shutdown(context: Context, rounds: int) -> None:
    """Both, from several threads and in any order, are quiet."""
    for turn in range(rounds):
        group = dist.new_group()
        dist.barrier()
        end_group(group, turn)
        dist.barrier()
        dist.destroy_process_group(group)


def _raises_soon(call: Callable[[], object], what: str) -> None:
    start = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        assert str(error).startswith("fused:") and "aborted" in str(error), (what, str(error))
    else:
        raise AssertionError(f"{what} raised nothing")
    assert time.monotonic() - start < 5, what


def abort_without_peers(context: Context) -> None:
    """What waits for ranks that do not come ends with abort(), and what comes later raises."""
    import fusedpg

    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(4)]
    peer = (context.rank + 1) % context.world_size

    def step(group: dist.ProcessGroup) -> None:
        n = fusedpg.shard_range(100, context.world_size, context.rank)[1]
        state = [[torch.zeros(n)], [torch.zeros(n)], [], [torch.tensor(0.0)]]
        hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        tensors = [torch.ones(100)], [torch.ones(100)]
        fusedpg.fused_adamw_(*tensors, *state, **hyper, group=group)

    def later(group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()

    calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda group: dist.all_reduce(torch.ones(5), group=group),
        "later": later,
        "recv": lambda group: dist.recv(torch.ones(5), peer, group),
        "step": step,
    }
    dist.barrier()
    if context.rank == 0:
        for name, call in calls.items():
            group = groups.pop()
            backend = group._get_backend(torch.device("cpu"))
            timer = threading.Timer(0.2, backend.abort)
            timer.start()
            _raises_soon(lambda: call(group), f"{name} in flight")  # noqa: B023
            timer.join()
            for after, other in calls.items():
                _raises_soon(lambda: other(group), f"{after} after {name}")  # noqa: B023
            start = time.monotonic()
            dist.destroy_process_group(group)
            del group, backend, timer
            assert time.monotonic() - start < 5, name
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


def wrong_on_one_rank(context: Context) -> None:
    spec = GroupSpec(tuple(range(context.world_size)))
    for what in mistakes.REFUSALS:
        for odd in (0, context.world_size - 1):
            # The seed says which rule's step, and whether it is asynchronous.
            for seed in range(8) if what.startswith("step") else (0,):
                args = {"what": what, "odd": odd, "numel": 100}
                step = Step(0, 0, "refusal_of_one", "sync", 0, seed, args)
                env = Env(step, spec, dist.group.WORLD, context.rank, not context.one_host)
                mistakes.refusal_of_one(env).start(False)
