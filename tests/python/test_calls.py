"""What a call may be given: views of one memory, several tensors, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import harness
from checks import collectives, several
from checks.faults import fused_step, works
from fuzz import mistakes
from fuzz.calls import Env
from fuzz.programs import GroupSpec, Step
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only
Tensors = list[torch.Tensor]


# --- views: strided, overlapping, in place, expanded -------------------------------


@dataclasses.dataclass(frozen=True)
class Window:
    """`count` views of one memory, each `step` elements after the last."""

    start: int
    step: int
    stride: int = 1

    def of(self, memory: torch.Tensor, count: int, numel: int) -> Tensors:
        def view(i: int) -> torch.Tensor:
            begin = self.start + i * self.step
            return memory[begin : begin + (numel - 1) * self.stride + 1 : self.stride]

        return [view(i) for i in range(count)]


def layouts(size: int, n: int) -> dict[str, tuple[Window, Window]]:
    """Outputs and inputs; n is a multiple of 6."""
    behind = 2 * size * n
    return {
        "strided": (Window(1, 2 * n, 2), Window(behind, 2 * n, 2)),
        "interleaved": (Window(0, 1, size), Window(behind, 1, size)),
        "outputs overlap": (Window(3, n // 2), Window(behind, n)),
        "inputs overlap": (Window(0, n), Window(behind, n // 2)),
        "input in outputs": (Window(0, n), Window(n // 2, n)),
        "backwards": (Window(n // 2, n), Window(0, n)),
        "in place": (Window(0, n), Window(0, n)),
        "in place, strided": (Window(0, 2 * n, 2), Window(0, 2 * n, 2)),
    }


def memory_of(rank: int, size: int, n: int) -> torch.Tensor:
    return torch.arange(6.0 * size * n, dtype=torch.float64) + 1000.0 * n * rank


Model = Callable[[list[Tensors], int, int], Tensors]
"""What a rank's outputs hold: of every rank's inputs, its rank, the root."""


@dataclasses.dataclass(frozen=True)
class Op:
    """Of a call in `collectives.OPS`."""

    model: Model
    outputs: int = 1  # 0: one a rank
    inputs: int = 1
    whole: str = ""  # outputs or inputs are one tensor for all ranks


OPS: dict[str, Op] = {
    "broadcast": Op(lambda i, p, r: [] if p == r else [i[r][0]]),
    "all_gather": Op(lambda i, p, r: [x[0] for x in i], outputs=0),
    "all_gather_into_tensor": Op(lambda i, p, r: [torch.cat([x[0] for x in i])], whole="outputs"),
    "gather": Op(lambda i, p, r: [x[0] for x in i] if p == r else [], outputs=0),
    "scatter": Op(lambda i, p, r: [i[r][p]], inputs=0),
    "reduce_scatter": Op(lambda i, p, r: [sum(x[p] for x in i)], inputs=0),  # type: ignore[list-item]
    "reduce_scatter_tensor": Op(
        lambda i, p, r: [sum(x[0].chunk(len(i))[p] for x in i)],  # type: ignore[list-item]
        whole="inputs",
    ),
    "all_to_all": Op(lambda i, p, r: [x[p] for x in i], outputs=0, inputs=0),
    "all_to_all_single": Op(
        lambda i, p, r: [torch.cat([x[0].chunk(len(i))[p] for x in i])], whole="both"
    ),
    # In place: the outputs' layout alone counts.
    "all_reduce": Op(lambda i, p, r: [sum(x[0] for x in i)]),  # type: ignore[list-item]
    "reduce": Op(lambda i, p, r: [sum(x[0] for x in i)] if p == r else []),  # type: ignore[list-item]
    "all_reduce_coalesced": Op(
        lambda i, p, r: [sum(x[k] for x in i) for k in range(len(i))],  # type: ignore[misc]
        outputs=0,
        inputs=0,
    ),
}
IN_PLACE = ("all_reduce", "reduce", "all_reduce_coalesced")


def views(context: Context, name: str, layout: str, n: int, memory: torch.Tensor, rank: int):
    """Outputs and inputs of a rank."""
    op, size = OPS[name], context.world_size
    out, into = layouts(size, n)[layout]

    def of(window: Window, many: int, whole: bool) -> Tensors:
        if whole:
            return window.of(memory, 1, size * n)
        if many == 1 and layout == "in place" and name != "broadcast":
            # The part of a list that is this rank's.
            return window.of(memory, size, n)[rank : rank + 1]
        return window.of(memory, size if many == 0 else 1, n)

    outputs = of(out, op.outputs, op.whole in ("outputs", "both"))
    inputs = of(into, op.inputs, op.whole in ("inputs", "both"))
    return outputs, outputs if name in IN_PLACE else inputs


def check_views(context: Context, name: str, layout: str, n: int) -> None:
    """All memory is afterwards as if inputs were read first, outputs written in order."""
    op, size, root = OPS[name], context.world_size, context.world_size - 1
    inputs = []
    for rank in range(size):
        memory = memory_of(rank, size, n)
        found = views(context, name, layout, n, memory, rank)[1]
        inputs.append([t.clone() for t in found])
    want = memory_of(context.rank, size, n)
    targets, _ = views(context, name, layout, n, want, context.rank)
    for target, result in zip(targets, op.model(inputs, context.rank, root), strict=False):
        target.copy_(result)
    for arena in (False, True) if context.fused else (False,):
        got = context.empty(want.numel(), dtype=want.dtype, arena=arena)
        got.copy_(memory_of(context.rank, size, n))
        out, into = views(context, name, layout, n, got, context.rank)
        if context.rank == root:  # what the others have is for one who sends or gets nothing
            out = into if name == "broadcast" else out
        else:
            out, into = [] if name == "gather" else out, [] if name == "scatter" else into
        collectives.OPS[name].call(out, into, root, {})
        differ = int((got != want).sum())
        assert differ == 0, (
            f"{name}, {layout}, n={n}, arena={arena}: {differ} of {got.numel()} elements differ"
        )


@pytest.mark.parametrize("name", OPS)
@on_ranks(2, 3, "two", harness.slow("three"))
def test_views(context: Context, name: str) -> None:
    for layout in layouts(2, 2):
        for n in (6, 30_000):
            check_views(context, name, layout, n)


@on_ranks(2, 3, "two", harness.slow("three"))
def test_elements_that_share_memory(context: Context) -> None:
    """Elements that share memory have one value, and get one."""
    total = sum(range(1, context.world_size + 1))
    memory = torch.full((3,), float(context.rank + 1))
    tensor = memory[1:2].expand(4)
    dist.all_reduce(tensor)
    assert memory.tolist() == [context.rank + 1, total, context.rank + 1]
    # A broadcast row, and windows that overlap.
    memory = torch.arange(6.0) * (context.rank + 1)
    dist.all_reduce(memory.as_strided((3, 2), (1, 1)))
    assert torch.equal(memory[:4], torch.arange(4.0) * total)
    assert torch.equal(memory[4:], torch.arange(4.0, 6.0) * (context.rank + 1))
    row = torch.full((1, 3), float(context.rank + 1))
    dist.all_reduce_coalesced([row.expand(20000, 3), torch.zeros(2)])
    assert row.tolist() == [[total] * 3]
    memory = torch.full((1,), float(context.rank + 1))
    dist.reduce(memory.expand(4), 0)
    assert memory.item() == (total if context.rank == 0 else context.rank + 1)
    gathered = [torch.zeros(4) for _ in range(context.world_size)]
    dist.all_gather(gathered, torch.full((1,), float(context.rank)).expand(4))
    assert [t.tolist() for t in gathered] == [[float(p)] * 4 for p in range(context.world_size)]
    # Conjugates and negatives are views, too. torch's dispatcher makes copies of them, but a
    # backend may be called without it.
    for view in (torch.tensor([1 + 2j, 3j]).conj(), torch._neg_view(torch.ones(2))):
        numbers = [torch.zeros_like(view) for _ in range(context.world_size)]
        several.backend(None).allgather([numbers], [view]).wait()
        assert all(torch.equal(t, view) for t in numbers)
    # Strides that interleave share nothing.
    memory = torch.zeros(8)
    dist.all_gather(
        [memory.as_strided((3, 2), (2, 3)) for _ in range(context.world_size)],
        torch.arange(6.0).view(3, 2),
    )
    assert torch.equal(memory.as_strided((3, 2), (2, 3)), torch.arange(6.0).view(3, 2))


@on_ranks(2, "two")
def test_different_values_for_one_element(context: Context) -> None:
    """Different values for one element: an error on all ranks, and the group lives."""
    size = context.world_size

    def gather(out: torch.Tensor) -> None:
        dist.all_gather([out] * size, torch.arange(4.0))

    for bad in (torch.zeros(1).expand(4), torch.zeros(3).as_strided((2, 2), (1, 1)).view(2, 2)):
        with pytest.raises(ValueError, match="share memory"):
            gather(bad)
        works()


@on_ranks(2, 3, "two")
def test_a_scalar_is_not_split(context: Context) -> None:
    """A scalar cannot be split; nothing happens."""
    for out, into in (
        (torch.tensor(-1.0), torch.tensor(3.0)),
        (torch.tensor(-1.0), torch.ones(context.world_size)),
        (torch.full((context.world_size,), -1.0), torch.tensor(3.0)),
    ):
        with pytest.raises(ValueError, match="scalar"):
            dist.all_to_all_single(out, into)
        assert bool((out == -1).all())
    works()


# --- several tensors ---------------------------------------------------------------


@pytest.mark.parametrize("op", several.OPS)
@on_ranks(1, 2, 3, "two")
def test_several_tensors(context: Context, op: str) -> None:
    several.check(context, op)


@on_ranks(1, 2, "two")
def test_one_tensor_several_times(context: Context) -> None:
    """One tensor twice is two contributions; half types round once a rank."""
    tensor = torch.ones(3) * (context.rank + 1)
    several.backend(None).allreduce([tensor, tensor]).wait()
    assert tensor.tolist() == [2.0 * sum(range(1, context.world_size + 1))] * 3
    mean = [torch.full((4,), float(context.rank)), torch.full((4,), 2.0)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    several.backend(None).allreduce(mean, options).wait()
    want = (sum(range(context.world_size)) + 2.0 * context.world_size) / context.world_size
    assert all(torch.allclose(t, torch.full((4,), want)) for t in mean)


@on_ranks(2, "two")
def test_several_tensors_refused(context: Context) -> None:
    """What Gloo refuses is refused, before anything is counted or sent."""
    pg = several.backend(None)
    one, two = torch.ones(2), torch.ones(3)
    wide = dist.BroadcastOptions()
    wide.rootTensor = 2
    size = context.world_size
    for call in (
        lambda: pg.allreduce([one, two]),
        lambda: pg.allreduce([one, one.double()]),
        lambda: pg.allreduce([]),
        lambda: pg.broadcast([one, one], wide),
        lambda: pg.broadcast([one, two], dist.BroadcastOptions()),
        lambda: pg.allgather([[one] * size], [one, one]),
        lambda: pg.allgather([[one] * size] * 2, [one, one]),
        lambda: pg.allgather([[two] * (2 * size)] * 2, [one, one]),
        lambda: pg.reduce([one, one], dist.ReduceOptions()),
    ):
        with pytest.raises(ValueError, match=r"^fused: "):
            call().wait()
    works()


# --- errors of one rank that leave the group usable ---------------------------------


@on_ranks(2, 3)
def test_one_rank_refuses(context: Context) -> None:
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
        works()


def mismatch_then_adapt(context: Context) -> None:
    """Ranks choose alike after a mismatch and after a refusal."""
    shapes = (20_000, 30_000)
    bad = torch.zeros(shapes[context.rank % 2])
    for _ in range(3):
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(bad)
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


def test_ranks_adapt_alike_after_errors() -> None:
    harness.pool(2, options={"block_skip": "auto"}).run(mismatch_then_adapt)


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


@on_ranks(1, 2)
def test_abort_and_shutdown(context: Context) -> None:
    """Both, from several threads and in any order, are quiet."""
    for turn in range(30):
        group = dist.new_group()
        dist.barrier()
        end_group(group, turn)
        dist.barrier()
        dist.destroy_process_group(group)


def _raises_soon(call: Callable[[], object], what: str) -> None:
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"^fused:(?s:.*)aborted"):
        call()
    assert time.monotonic() - start < 5, what


@on_ranks(2, "two")
def test_abort_without_peers(context: Context) -> None:
    """What waits for ranks that do not come ends with abort(), and what comes later raises."""
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(4)]
    peer = (context.rank + 1) % context.world_size

    def later(group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()

    calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda group: dist.all_reduce(torch.ones(5), group=group),
        "later": later,
        "recv": lambda group: dist.recv(torch.ones(5), peer, group),
        "step": lambda group: fused_step(100, group=group),
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


@on_ranks(2, 3, "two", timeout=120)
def test_wrong_on_one_rank(context: Context) -> None:
    """Each of the mistakes that the fuzzer draws: all ranks raise soon, and the group works on."""
    spec = GroupSpec(tuple(range(context.world_size)))
    for what in mistakes.REFUSALS:
        for odd in (0, context.world_size - 1):
            # The seed says which rule's step, and whether it is asynchronous.
            for seed in range(8) if what.startswith("step") else (0,):
                args = {"what": what, "odd": odd, "numel": 100}
                step = Step(0, 0, "refusal_of_one", "sync", 0, seed, args)
                env = Env(step, spec, dist.group.WORLD, context.rank, not context.one_host)
                mistakes.refusal_of_one(env).start(False)
