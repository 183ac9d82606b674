"""What a fused operation is to CUDA's streams, and its place among NCCL's collectives."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from checks.cases import same
from checks.fused_ops import Oracle, Run, compare
from gpu_checks.device import DEVICE, group_of, synchronize
from gpu_checks.fused import GpuModel
from harness import Context

# Clock cycles of about half a second: long against a call, short against a test.
LONG = 1_000_000_000


def busy(cycles: int = LONG) -> None:
    """A kernel that keeps the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[attr-defined]


def warm(model: GpuModel) -> Oracle:
    """One step: communicators, buffers and kernels are there afterwards."""
    oracle = Oracle(model)
    model.set_gradients(0)
    model.step()
    oracle.step(0)
    synchronize()
    dist.barrier(group=model.group)
    synchronize()
    return oracle


def host_does_not_wait(context: Context, op: str) -> tuple[float, float]:
    """Seconds that a call and its wait() take behind a long kernel, and that the kernel takes."""
    model = GpuModel(context, Run(op, steps=2, async_op=True))
    oracle = warm(model)
    model.set_gradients(1)
    synchronize()
    options, lists = model.options(), model.lists()
    import fusedpg

    call = getattr(fusedpg, f"fused_{op}_")
    begin = time.perf_counter()
    busy()
    work = call(*lists, **options)
    work.wait()
    seen = model.params[0].clone()
    called = time.perf_counter() - begin
    assert not torch.cuda.current_stream().query(), "the kernel ended too soon to tell"
    synchronize()
    whole = time.perf_counter() - begin
    oracle.step(1)
    compare(model.on_host(), oracle)
    assert same(seen, model.params[0]), "work behind wait() ran before the operation"
    return called, whole


def another_stream(context: Context, op: str) -> None:
    """wait() orders the stream that is current then, whatever stream the call was made on."""
    model = GpuModel(context, Run(op, steps=2, async_op=True))
    oracle = warm(model)
    import fusedpg

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        busy()
        model.set_gradients(1)
        work = getattr(fusedpg, f"fused_{op}_")(*model.lists(), **model.options())
    with torch.cuda.stream(second):
        work.wait()
        seen = [param.clone() for param in model.params]
    second.synchronize()
    oracle.step(1)
    for mine, now in zip(seen, model.params, strict=True):
        assert same(mine, now)
    compare(model.on_host(), oracle)


def freed_at_once(context: Context, async_op: bool) -> None:
    """Gradients and scalars may be dropped as soon as the call has returned."""
    import fusedpg

    run = Run("adamw", steps=2)
    model = GpuModel(context, run)
    oracle = warm(model)
    grads = [model.gradient(1, context.rank, i).to(DEVICE) for i in range(len(model.params))]
    options = model.options() | {
        "async_op": async_op,
        "lr": torch.tensor(run.hypers()["lr"], dtype=torch.float64, device=DEVICE),
        "grad_scale": torch.tensor(1.0, device=DEVICE),
        "found_inf": torch.tensor(0.0, device=DEVICE),
    }
    lists = model.lists()
    lists[1] = grads
    sizes = [grad.shape for grad in grads]
    synchronize()
    busy()
    work: Any = fusedpg.fused_adamw_(*lists, **options)
    del lists, grads, options
    # The allocator hands the same blocks out again, to be written behind the long kernel.
    garbage = [torch.full(size, torch.nan, device=DEVICE) for size in sizes for _ in range(2)]
    scalars = [torch.full((), torch.nan, dtype=torch.float64, device=DEVICE) for _ in range(8)]
    if work is not None:
        work.wait()
    synchronize()
    del garbage, scalars
    oracle.step(1)
    compare(model.on_host(), oracle)


def work_of_a_step(context: Context) -> None:
    """What torch's code asks of a Work."""
    import fusedpg

    model = GpuModel(context, Run("sgd", async_op=True))
    model.set_gradients(0)
    work = fusedpg.fused_sgd_(*model.lists(), **model.options())
    assert work is not None
    future = work.get_future()
    chained = future.then(lambda done: done.value()[0] + 1)
    work.wait()
    synchronize()
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline, "a finished operation is never noticed"
        time.sleep(0.001)
    assert work.is_success()
    result = work.result()
    assert all(same(a, b) for a, b in zip(result, model.params, strict=True))
    assert same(chained.wait(), model.params[0] + 1)


def interleaved(context: Context, seed: int) -> None:
    """Fused steps and NCCL's collectives in a random order, on random streams, ranks out of step.

    Kernels of two communicators that met in different orders on two ranks would wait for ever.
    """
    import fusedpg

    group, size, rank = group_of(context), context.world_size, context.rank
    plan = random.Random(seed)  # the same on all ranks
    own = random.Random(1000 * seed + rank)
    numel = plan.choice([33, 5000, 300_001])
    param = torch.zeros(numel, device=DEVICE)
    moved = 0.0
    expected: list[tuple[torch.Tensor, float]] = []
    pending: list[Any] = []
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(12):
        kind = plan.choice(["step", "step", "all_reduce", "all_gather", "broadcast"])
        async_op = plan.random() < 0.5
        if own.random() < 0.2:
            time.sleep(own.random() * 0.005)
        if own.random() < 0.2:
            busy(own.randrange(1, 20) * 1_000_000)
        # Collectives on one tensor follow each other; on others they need not.
        stream = streams[0] if kind == "step" else own.choice(streams)
        stream.wait_stream(streams[0])
        with torch.cuda.stream(stream):
            value = torch.full((numel,), float(rank + number), device=DEVICE)
            mean = number + (size - 1) / 2
            if kind == "step":
                work: Any = fusedpg.fused_sgd_(
                    [param],
                    [value],
                    [],
                    weight_decay=0.0,
                    momentum=0.0,
                    lr=0.5,
                    dampening=0.0,
                    nesterov=False,
                    is_first_step=False,
                    group=group,
                    async_op=async_op,
                )
                moved -= 0.5 * mean
            elif kind == "all_reduce":
                work = dist.all_reduce(value, group=group, async_op=async_op)
                expected.append((value, mean * size))
            elif kind == "broadcast":
                work = dist.broadcast(value, size - 1, group=group, async_op=async_op)
                expected.append((value, float(size - 1 + number)))
            else:
                out = torch.empty(numel * size, device=DEVICE)
                work = dist.all_gather_into_tensor(out, value, group=group, async_op=async_op)
                expected.append((out.view(size, numel)[size // 2], float(size // 2 + number)))
        if work is not None:
            pending.append(work)
        if plan.random() < 0.3:
            while pending:
                pending.pop(0).wait()
        streams[0].wait_stream(stream)
    for work in pending:
        work.wait()
    synchronize()
    torch.testing.assert_close(param, torch.full_like(param, moved))
    for found, want in expected:
        assert bool((found == want).all()), (found, want)


def many_interleavings(context: Context, count: int) -> None:
    for seed in range(count):
        interleaved(context, seed)


# --- CUDA graphs ----------------------------------------------------------------


def graph(context: Context, run: Run, replays: int = 5) -> None:
    """Replays of a captured step are eager steps: gradients and learning rate are read anew."""
    eager, captured = GpuModel(context, run), GpuModel(context, run)
    lr = torch.tensor(run.hypers()["lr"], device=DEVICE)
    # Warm-up on a side stream, as torch's documentation has it.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for model in (eager, captured):
            model.set_gradients(0)
            model.step(lr=lr)
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    recorded = torch.cuda.CUDAGraph()
    options, lists = captured.options() | {"lr": lr}, captured.lists()
    import fusedpg

    call = getattr(fusedpg, f"fused_{run.op}_")
    with torch.cuda.graph(recorded):
        call(*lists, **options)
    for step in range(1, replays + 1):
        lr.fill_(1e-2 / step)
        captured.set_gradients(step)
        recorded.replay()
    synchronize()
    for step in range(1, replays + 1):
        lr.fill_(1e-2 / step)
        eager.set_gradients(step)
        eager.step(lr=lr)
    agree(captured, eager)
    # Eager steps go on, also those that need larger buffers than the graph has.
    other = GpuModel(context, Run("adamw", shapes=((2_000_003,),)))
    other.set_gradients(0)
    other.step()
    for model in (eager, captured):
        model.set_gradients(replays + 1)
    eager.step(lr=lr)
    recorded.replay()
    agree(captured, eager)
    dist.barrier(group=captured.group)
    synchronize()


def agree(a: GpuModel, b: GpuModel) -> None:
    synchronize()
    for mine, want in zip(a.state(), b.state(), strict=True):
        assert same(mine.cpu(), want.cpu())


def graph_after_failure_to_capture(context: Context) -> None:
    """A capture that the caller breaks off leaves the group usable."""
    model = GpuModel(context, Run("adamw"))
    oracle = warm(model)
    recorded = torch.cuda.CUDAGraph()
    options, lists = model.options(), model.lists()
    import fusedpg

    try:
        with torch.cuda.graph(recorded):
            fusedpg.fused_adamw_(*lists, **options)
            raise KeyError("the caller's own")
    except KeyError:
        pass
    del recorded
    synchronize()
    model.set_gradients(1)
    model.step()
    oracle.step(1)
    # Two steps of a run of eight.
    for mine, want in zip(model.on_host().params, oracle.params, strict=True):
        torch.testing.assert_close(mine, want.detach(), rtol=1e-5, atol=1e-5)
