"""Compressed training in random ways, and what an adversary has thought of.

No postponed annotations here: DDP inspects those of its hooks.
"""

import gc
import itertools
import math
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import fusedpg.compress as compress
import harness
from checks.compress import Given, hooked
from fuzz import compressed, core
from harness import Context

pytestmark = pytest.mark.fused_only
SEEDS = [0, *map(harness.slow, range(1, 8))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", [one for one in compressed.WHERE if "search" not in one])
def test_nothing_is_lost(where: str, seed: int) -> None:
    core.search("compressed", where, core.seed(seed))


@pytest.mark.parametrize("compressor", compressed.COMPRESSORS)
@pytest.mark.parametrize("place", ["3", *harness.HOSTS])
def test_nothing_is_lost_by_any_communicator(place: str, compressor: str) -> None:
    schedules = ("bucket", "layer", "one", 2) if place == "3" else ("bucket", "one")
    for carrier, (n, schedule) in itertools.product(
        compressed.carriers(compressor), enumerate(schedules)
    ):
        memory, scale = ("residual", 1.0) if n % 2 == 0 else ("efsignsgd", 10.0)
        if compressor == "powersgd":
            memory, scale = "powersgd", 1.0
        params: dict[str, Any] = {
            "compressor": compressed.OF_THE_USER.get(compressor, compressor), "memory": memory,
            "communicator": carrier, "compress_ratio": 0.1, "threshold": 0.5, "quantum_num": 63,
        }  # fmt: skip
        params |= {"lr": 0.1} if memory == "efsignsgd" else {}
        ranks = compressed.per_host(place, carrier)
        case = compressed.Case(params, schedule, steps=8, scale=scale, per_host=ranks)
        core.check("compressed", f"{place}, {compressor}", case)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "where", ["3", "two of two", *map(harness.slow, ("2", "gloo", "crossed", "two and one"))]
)
def test_search_by_drawn_times(where: str, seed: int) -> None:
    """Whatever the ranks' clocks say, and while DDP's buckets change: nothing is lost, ranks go the
    same way, and a step without compression leaves nothing behind."""
    core.search("compressed", f"{where}, search", core.seed(seed))


class Chain(nn.Module):
    """A function of one's own between two parameters: in backward between their buckets."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(600_000) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return (self.between.apply(x * self.all[0]) * self.all[1]).sum()


def wrapped(
    numel: int, params: dict[str, Any], hook: Any = compress.hook, **more: Any
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Given([numel]))
    ddp.register_comm_hook(compress.from_params(params, **more), hook)
    return ddp


def step(ddp: DistributedDataParallel, gradient: Tensor) -> Tensor:
    ddp.zero_grad()
    ddp([gradient]).backward()
    found = ddp.module.parts[0].grad
    assert found is not None
    return found.clone()


def mean_of_many(context: Context, params: dict[str, Any], steps: int) -> tuple[Any, Any]:
    """The mean result of the same gradients, again and again, and its standard error."""
    generator = torch.Generator().manual_seed(context.rank)
    gradient = torch.randn(301, generator=generator)
    ddp = wrapped(301, params)
    found = torch.stack([step(ddp, gradient).double() for _ in range(steps)])
    error = found.std(0) / steps**0.5
    return (found.mean(0).numpy(), error.numpy(), gradient.double().numpy())


def calls() -> int:
    """How many sums the module's own group has done."""
    return int(fusedpg.stats().get("all_reduce", {}).get("calls", 0))


class Sized(compress.Compressor):
    """As GRACE's own: the context knows the size, and nothing may be empty."""

    def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], Any]:
        return [tensor.view(1, -1).clone(), tensor.abs().max().view(1)], tensor.numel()

    def decompress(self, tensors: Sequence[Tensor], ctx: Any) -> Tensor:
        assert tensors[0].numel() == ctx
        return tensors[0].view(ctx).clone()


@harness.on_ranks(2)
def test_neighbours_in_memory(context: Context) -> None:
    """Buckets that lie side by side are two all the same, and those that no schedule knows a unit
    each."""
    units = compress.from_params({}, schedule="one")._units
    whole = torch.zeros(32)

    def backward(*sizes: int) -> list[list[int]]:
        units.begin(1, False)
        closed, offset = [], 0
        for size in sizes:
            part = torch.frombuffer(whole.numpy(), dtype=torch.float32, count=size, offset=offset)
            offset += 4 * size
            parameters = [nn.Parameter(torch.zeros(size))]
            closed += units.follow(parameters, part)
            closed += units.add(parameters, part, [None], torch.futures.Future())
        closed += units.end()
        return [[s.numel() for s in unit.slices] for unit in closed]

    assert backward(16, 16) == [[16], [16]]
    assert backward(16, 16) == [[16, 16]]
    assert backward(16, 8, 8) == [[16], [8], [8]]
    assert backward(16, 8, 8) == [[16, 8, 8]]


def disagree(context: Context, what: str) -> None:
    """Rank 1 has something else than the others, of which there may be some on both sides."""
    params: dict[str, Any] = {"compressor": "randomk", "memory": "residual"}
    more: dict[str, Any] = {}
    odd = context.rank == 1
    if what == "seed":
        more["seed"] = int(odd)
    elif what == "compressor":
        params["compress_ratio"] = 0.1 + 0.1 * odd
    elif what == "schedule":
        more["schedule"] = odd + 1
    step(wrapped(100, params, **more), torch.ones(100))


def disagree_later(context: Context, what: str) -> None:
    """A checkpoint of another step, or of another seed, is loaded into a state that is at work."""
    state = compress.from_params({"compressor": "randomk"})
    ddp = hooked(Given([100]), state)
    for _ in range(2):
        step(ddp, torch.ones(100))
    saved = state.state_dict()
    ((values,),) = saved.values()
    values[what] += context.rank == 1
    state.load_state_dict(saved)
    step(ddp, torch.ones(100))


def differ_later(context: Context, params: dict[str, Any], part: str, what: str) -> None:
    """One rank changes what it compresses with, in the middle of training."""
    state = compress.from_params(params)
    ddp = hooked(Given([40, 70]), state)
    for now in range(3):
        if now == 2 and context.rank == context.world_size - 1:
            object_ = getattr(state, part)
            number = getattr(object_, what)
            setattr(object_, what, type(number)(number / 2))
        ddp.zero_grad()
        ddp([torch.ones(40), torch.ones(70)]).backward()


def other_model(context: Context, how: str, ranks: Sequence[int]) -> str:
    """Some ranks load a checkpoint of another model than all have."""
    shapes = {
        "fewer": [(6, 4)] * 2, "more": [(6, 4)] * 4, "transposed": [(4, 6)] * 3,
        "flat": [(24,)] * 3, "renamed": [(6, 4)] * 3, "type": [(6, 4)] * 3, "same": [(6, 4)] * 3,
        "reordered": [(3,), (6, 4), (6, 4)],
    }  # fmt: skip
    first = [(6, 4), (6, 4), (3,)] if how == "reordered" else [(6, 4)] * 3
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.1}

    def made(shapes: Any, doubles: Sequence[int], prefix: str) -> Any:
        model = Given(shapes)
        for n in doubles if how == "type" else ():
            model.parts[n].data = model.parts[n].data.double()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        names = [(prefix + name, p) for name, p in model.named_parameters()]
        state = compress.from_params(params, named_parameters=names if how == "renamed" else None)
        ddp.register_comm_hook(state, compress.hook)
        return ddp, state

    def backward(ddp: DistributedDataParallel) -> None:
        ddp([torch.full(p.shape, 1.0 + n) for n, p in enumerate(ddp.module.parts)]).backward()

    saved = []
    for model in ((first, [1], "a."), (shapes[how], [0, 1], "b.")):
        ddp, state = made(*model)
        backward(ddp)
        saved.append(state.state_dict())
    ddp, state = made(*model)
    state.load_state_dict(saved[0 if context.rank in ranks else 1])
    try:
        backward(ddp)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@harness.on_ranks(2)
def test_wrong_checkpoint_changes_nothing(context: Context) -> None:
    """Loaded into a state that is at work, it is refused at once, and training goes on."""
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.1}
    other = compress.from_params(params)
    ddp = hooked(Given([30]), other)
    step(ddp, torch.ones(30))

    def results(load: bool) -> list[Tensor]:
        state = compress.from_params(params)
        ddp = hooked(Given([40]), state)
        found = [step(ddp, torch.arange(40.0))]
        if load:
            shapes = r"shape \(40,\) in the model, .* shape \(30,\) in the checkpoint"
            with pytest.raises(ValueError, match=shapes):
                state.load_state_dict(other.state_dict())
        return [*found, step(ddp, torch.arange(40.0))]

    for one, other_ in zip(results(True), results(False), strict=True):
        assert torch.equal(one, other_)


@harness.on_ranks(2)
def test_named_checkpoint(context: Context) -> None:
    """By names, whatever the order of the parameters."""
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.05}
    came_out = torch.zeros(3, 40)
    gradients = [torch.linspace(-1, 3, 40) * (n + 1) + context.rank for n in range(3)]
    saved = None
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        model = Given([(40,)] * 3)
        state = compress.from_params(
            params,
            named_parameters=[(f"of {n}", p) for n, p in zip(order, model.parts)],
        )
        if saved is not None:
            state.load_state_dict(saved)
        ddp = hooked(model, state, bucket_cap_mb=1e-5)
        for now in range(2):
            if order == [1, 2, 0] and now == 1:
                state.compressor.compress_ratio = 1.0
            ddp.zero_grad()
            ddp([gradients[n] for n in order]).backward()
            for n, p in zip(order, model.parts):
                came_out[n] += p.grad
        saved = state.state_dict()
    mean = torch.stack(gradients)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(came_out, 6 * mean, rtol=1e-4, atol=1e-4)


def counts() -> dict[str, int]:
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


@harness.on_ranks(2)
def test_two_modules(context: Context) -> None:
    """Each with a state of its own, in one graph."""
    first, second = wrapped(50, {"compressor": "topk", "memory": "residual"}), wrapped(70, {})
    for _ in range(3):
        a, b = torch.full((50,), context.rank + 1.0), torch.full((70,), 5.0 * context.rank)
        (first(a) + second(b)).backward()
    size = context.world_size
    grad = second.module.parts[0].grad
    assert grad is not None
    torch.testing.assert_close(grad, torch.full((70,), 3 * 5.0 * (size - 1) / 2))


@harness.on_ranks(2)
def test_replaced_parts(context: Context) -> None:
    """Another compressor and memory, on all ranks, from the next step on."""
    state = compress.from_params({"compressor": "topk", "compress_ratio": 0.1})
    ddp = hooked(Given([40]), state)
    gradient = torch.arange(40.0)
    assert step(ddp, gradient).count_nonzero() == 4
    state.compressor = compress.compressors.TopK(0.5)
    assert step(ddp, gradient).count_nonzero() == 20
    state.memory = compress.memories.EFSignSGDMemory(0.5)
    step(ddp, gradient)  # sends the last 20
    v = torch.cat([gradient[:20], 0.5 * gradient[20:]])
    torch.testing.assert_close(step(ddp, gradient).sum(), v.topk(20).values.sum() / 0.5)


@harness.on_ranks(2)
def test_empty_parameters(context: Context) -> None:
    """Which may be alone in what is compressed, and share a place with the next one."""
    for name in compress.compressors.BY_NAME:
        for communicator in ("allgather", "ps", None):
            params = {"compressor": name, "compress_ratio": 1.0}
            if communicator is not None:
                params["communicator"] = communicator
            if name == "powersgd" and communicator is not None:
                continue
            for schedule in ("layer", "one"):
                ddp = hooked(
                    Given([(0,), (4, 6), (5, 0), ()]),
                    compress.from_params(params, schedule=schedule),
                )
                for _ in range(2):
                    ddp([torch.ones(p.shape) for p in ddp.module.parts]).backward()
                for p in ddp.module.parts:
                    assert p.grad is not None
                    assert p.grad.shape == p.shape
                    assert bool(p.grad.isfinite().all()), (params, schedule)


@harness.on_ranks(2)
def test_half_wrapper(context: Context) -> None:
    hook = default_hooks.fp16_compress_wrapper(compress.hook)
    ddp = wrapped(40, {"compressor": "topk", "memory": "residual", "compress_ratio": 1.0}, hook)
    for now in range(3):
        found = step(ddp, torch.arange(40.0) + context.rank + now)
        wanted = torch.arange(40.0) + (context.world_size - 1) / 2 + now
        torch.testing.assert_close(found, wanted)


@harness.on_ranks(2)
def test_new_memory_after_old_parameters(context: Context) -> None:
    """A state that outlives its module knows the parameters of the next one, wherever they lie."""
    state = compress.from_params({"compressor": "topk", "memory": "residual"})
    for trial in range(20):
        ddp = hooked(Given([30]), state)
        step(ddp, torch.arange(30.0))
        last = state.state_dict()["memory"]["residual"][-1]
        assert last is not None
        assert last.abs().sum() > 0
        if trial == 19:
            # Who loads it has never seen the others.
            loaded = compress.from_params({"compressor": "topk", "memory": "residual"})
            loaded.load_state_dict(state.state_dict())
            ddp = hooked(ddp.module, loaded)
            step(ddp, torch.zeros(30))
            assert (
                loaded.state_dict()["memory"]["residual"][0].count_nonzero()
                == last.count_nonzero() - 9
            )
        del ddp
        gc.collect()


def raises_in_backward(context: Context, rank: int) -> str:
    """One rank's backward fails in the second step."""
    fail = False

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if fail and context.rank == rank:
                raise RuntimeError("of one's own")
            return g

    ddp = hooked(Chain(Fails), compress.from_params({"compressor": "topk"}), bucket_cap_mb=1)
    ddp(torch.ones(600_000)).backward()
    fail = True
    with pytest.raises(RuntimeError) as raised:
        ddp(torch.ones(600_000)).backward()
    return str(raised.value)


def dies(context: Context, rank: int, schedule: str = "bucket") -> str:
    state = compress.from_params({"compressor": "topk", "memory": "residual"}, schedule=schedule)
    ddp = hooked(Given([100_000]), state)
    # With "auto" the second and the third step send gradients as they are.
    for _ in range(1 if schedule == "bucket" else 3):
        step(ddp, torch.ones(100_000))
    assert state._direct == (schedule == "auto")
    dist.barrier()
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        for _ in range(3):
            step(ddp, torch.ones(100_000))
    # Gloo may not hear of it before the time limit.
    assert time.monotonic() - begin < 10 or context.backend == "gloo"
    with pytest.raises(RuntimeError):
        step(ddp, torch.ones(100_000))
    return str(raised.value)


def own_fails(context: Context, rank: int) -> str:
    """A compressor that raises on one rank."""

    class Fails(Sized):
        calls = 0

        def compress(self, tensor: Tensor, name: str) -> tuple[Sequence[Tensor], Any]:
            self.calls += 1
            if self.calls == 2 and context.rank == rank:
                raise ValueError("of one's own")
            return super().compress(tensor, name)

    ddp = wrapped(100, {"compressor": Fails()})
    step(ddp, torch.ones(100))
    with pytest.raises(RuntimeError) as raised:
        step(ddp, torch.ones(100))
    return str(raised.value)


def state_of_an_ended_group(context: Context) -> str:
    """The default group goes and comes back; the state knows that its own has gone."""
    ddp = wrapped(10, {"compressor": "topk", "memory": "residual"})
    step(ddp, torch.ones(10))
    state = compress.from_params({"compressor": "topk", "memory": "residual"})
    other = hooked(Given([10]), state)
    step(other, torch.ones(10))
    dist.destroy_process_group(state._group)
    with pytest.raises(RuntimeError) as raised:
        step(other, torch.ones(10))
    return f"{type(raised.value).__name__}: {raised.value}"


def after_states(context: Context) -> list[dict[str, int]]:
    """Threads, files and groups after states have come and gone."""
    found = []
    for _ in range(8):
        ddp = wrapped(100, {"compressor": "topk", "memory": "residual", "communicator": "ps"})
        for _ in range(3):
            step(ddp, torch.ones(100))
        del ddp
        found.append(counts())
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("how", "views"),
    [
        ("new module", False),
        ("new module", True),
        ("checkpoint", True),
        # Without views of buckets DDP itself gives elements to others then.
        ("same module", True),
    ],
)
@harness.on_ranks(2)
def test_memory_order_changes(context: Context, how: str, views: bool) -> None:
    """A module becomes channels_last, or not any more: what is kept stays with its element."""
    shape = (4, 3, 2, 2)
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.05}
    state = compress.from_params(params)

    def module(order: torch.memory_format) -> DistributedDataParallel:
        ddp = hooked(Given([shape]).to(memory_format=order), state, gradient_as_bucket_view=views)
        return ddp

    ddp = module(torch.contiguous_format)
    went_in, came_out = torch.zeros(shape), torch.zeros(shape)
    for now in range(6):
        weight = ddp.module.parts[0]
        if now == 3 and how == "checkpoint":
            saved = state.state_dict()
            state = compress.from_params(params)
            state.load_state_dict(saved)
            ddp = module(torch.channels_last)
        elif now == 3:
            # With DDP's buckets as they were, or with new ones.
            weight.data = weight.data.to(memory_format=torch.channels_last)
            weight.grad = None
            if how == "new module":
                kept = ddp.module
                ddp = hooked(kept, state, gradient_as_bucket_view=views)
        if now == 5:
            state.compressor.compress_ratio = 1.0
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(now))
        came_out += step(ddp, gradient)
        went_in += gradient
    torch.testing.assert_close(came_out, went_in)


@harness.on_ranks(2)
def test_low_rank_of_a_transpose(context: Context) -> None:
    """A weight that is another's transpose: its gradient has the rank that it has."""
    model = Given([(9, 31)])
    model.parts[0].data = torch.zeros(31, 9).t()
    ddp = DistributedDataParallel(model)
    params = {"compressor": "powersgd", "communicator": "allreduce"}
    ddp.register_comm_hook(compress.from_params(params), compress.hook)
    gradient = torch.outer(torch.arange(9.0) - 2, torch.linspace(-1, 1, 31))
    for _ in range(3):
        found = step(ddp, gradient)
    torch.testing.assert_close(found, gradient)


def newcomer(context: Context, communicator: str) -> Any:
    """A rank that has no checkpoint of its own begins with nothing kept, the others with theirs."""
    params = {"compressor": "topk", "memory": "residual", "communicator": communicator}
    state = compress.from_params(params)
    ddp = hooked(Given([41, 7]), state, bucket_cap_mb=1e-5)
    gradient = [torch.linspace(-1, 2, 41) * (context.rank + 1), torch.ones(7)]
    for _ in range(3):
        ddp(gradient).backward()
    state.load_state_dict(state.state_dict(), memory=context.rank != 1)
    for _ in range(3):
        ddp.zero_grad()
        ddp(gradient).backward()
    return [p.grad.numpy() for p in ddp.module.parts]


@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "two types"])
@harness.on_ranks(2)
def test_checkpoint_under_other_buckets(context: Context, mixed: bool) -> None:
    """A checkpoint is loaded where DDP's buckets are of another size: parameters, which are all of
    one shape, get what was their own."""
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.05}

    def made(cap: float, saved: Any) -> tuple[DistributedDataParallel, compress.State]:
        model = Given([(40,)] * 7)
        for n in (1, 2, 5) if mixed else ():
            model.parts[n].data = model.parts[n].data.double()
        state = compress.from_params(params)
        if saved is not None:
            state.load_state_dict(saved)
        ddp = hooked(model, state, bucket_cap_mb=cap, find_unused_parameters=cap < 1)
        return ddp, state

    gradients = [torch.randn(40) * (n + 1) for n in range(7)]
    came_out = [torch.zeros(40) for _ in range(7)]
    saved = None
    for cap in (1e-5, 400 / 2**20, 25.0, 1e-5):
        ddp, state = made(cap, saved)
        for now in range(2):
            if cap == 1e-5 and saved is not None and now == 1:
                state.compressor.compress_ratio = 1.0
            ddp.zero_grad()
            ddp(gradients).backward()
            for out, p in zip(came_out, ddp.module.parts):
                out += p.grad
        saved = state.state_dict()
    mean = torch.stack(gradients)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(torch.stack(came_out), 8 * mean, rtol=1e-4, atol=1e-4)


class InQuarters(compress.Memory):
    """Compresses in another unit."""

    scale = 4.0

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        return tensor / 4


@pytest.mark.parametrize("communicator", ["allgather", "ps"])
@harness.on_ranks(2)
def test_rates_that_change(context: Context, communicator: str) -> None:
    """Error feedback of updates: what was not sent is sent with the rate of its time, by whom
    ever it was kept."""
    params = {"compressor": "topk", "compress_ratio": 0.1, "communicator": communicator}
    memory = compress.memories.EFSignSGDMemory(0.1)
    state = compress.from_params({**params, "memory": memory})
    ddp = hooked(Given([60]), state)
    went_in, came_out = torch.zeros(60), torch.zeros(60)
    for now, rate in enumerate([0.1, 0.1, 2.0, 0.01, 0.5]):
        memory.lr = rate
        if now == 4:
            state.compressor.compress_ratio = 1.0
        gradient = torch.randn(60, generator=torch.Generator().manual_seed(10 * now + context.rank))
        came_out += rate * step(ddp, gradient)
        went_in += rate * gradient
    dist.all_reduce(went_in, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(came_out, went_in, rtol=1e-4, atol=1e-5)

    own = wrapped(60, {**params, "compressor": "none", "memory": InQuarters()})
    mean = gradient.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(step(own, gradient), mean)


@pytest.mark.parametrize("communicator", ["allgather", "alltoall", "ps"])
@pytest.mark.parametrize(
    "params",
    [
        {"compressor": "qsgd", "quantum_num": 2},
        {"compressor": "terngrad", "clip_sigma": 0.0},
        {"compressor": "natural"},
    ],
    ids=lambda params: params["compressor"],
)
def test_mean_is_right(params: dict[str, Any], communicator: str) -> None:
    """Also where a sum is rounded again for the way back."""
    steps = 1000
    answers = harness.pool(2).run(mean_of_many, {**params, "communicator": communicator}, steps)
    mean, error, _ = answers[0]
    true = (answers[0][2] + answers[1][2]) / 2
    z = (mean - true) / np.maximum(error, 1e-9)
    # Of 301 numbers, each drawn 1000 times; some hardly ever are what they can be.
    assert 0.6 < (z**2).mean() < 1.6
    assert np.median(np.abs(z)) < 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("compressor", "memory", "communicator"),
    [
        *((c, "residual", "allgather") for c in compressed.COMPRESSORS[:-2] if c != "powersgd"),
        *((c, "residual", "ps") for c in ("topk", "randomk", "qsgd", "efsignsgd")),
        ("powersgd", "powersgd", "allreduce"),
        ("powersgd", "none", "allreduce"),
        ("topk", "dgc", "allgather"),
        ("randomk", "dgc", "allgather"),
        ("dgc", "dgc", "ps"),
        ("signsgd", "none", "allgather"),
        ("signum", "none", "allgather"),
        ("signum", "none", "ps"),
    ],
)
@harness.on_ranks(3)
def test_not_finite_is_seen_at_once_and_gone(
    context: Context, compressor: str, memory: str, communicator: str, bad: float
) -> None:
    """What is not finite on one rank is seen by all ranks in that step, and in no later one; and in
    no other parameter, where it is compressed by itself."""
    params = {"compressor": compressor, "memory": memory, "communicator": communicator}
    for schedule in ("bucket", "layer"):
        ddp = hooked(Given([64, 5]), compress.from_params(params, schedule=schedule))
        good = [torch.linspace(-1, 1, 64) + context.rank, torch.ones(5)]
        for now in range(6):
            wanted = [g.clone() for g in good]
            if now == 2 and context.rank == 0:
                wanted[0][17] = bad
            ddp.zero_grad()
            ddp(wanted).backward()
            finite = [bool(p.grad.isfinite().all()) for p in ddp.module.parts]
            assert all(finite) == (now != 2), (params, now)
            assert finite[1] or schedule == "bucket", (params, now)


@harness.on_ranks(2)
def test_steps_without_compression_are_of_the_same_training(context: Context) -> None:
    """schedule="auto" begins without compression."""
    memory = compress.memories.ResidualMemory(beta=0.5, gamma=2.0)
    params = {"compressor": "topk", "memory": memory, "compress_ratio": 0.25}
    state = compress.from_params(params, schedule="auto")
    ddp = hooked(Given([8]), state)
    residual = torch.zeros(8)
    was_plain, own = [], []
    for now in range(6):
        before = calls()
        result = step(ddp, torch.arange(8.0) + context.rank + now)
        plain = state._units.plain
        # Both ranks have the same residual but for the mean of their gradients.
        v = 0.5 * residual + 2 * (torch.arange(8.0) + 0.5 + now)
        wanted = v if plain else torch.where(torch.arange(8) >= 6, v, 0)
        torch.testing.assert_close(result, wanted)
        residual = v - wanted
        was_plain.append(plain)
        if plain:
            own.append(calls() - before)
        else:
            assert calls() == before
    assert True in was_plain and False in was_plain
    # What was kept goes by the hook's group; then DDP's own has nothing else to do.
    assert own == [0, *[1] * (len(own) - 1)]


@pytest.mark.parametrize("numel", [1, 5, 6])
@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("communicator", ["allgather", "alltoall", "ps"])
@harness.on_ranks(3)
def test_ones_own_with_uneven_shards(
    context: Context, communicator: str, memory: str, numel: int
) -> None:
    ddp = wrapped(numel, {"compressor": Sized(), "memory": memory, "communicator": communicator})
    gradient = torch.arange(float(numel)) + 1 + context.rank
    for _ in range(3):
        found = step(ddp, gradient)
    assert torch.equal(found, torch.arange(float(numel)) + 2)


@harness.on_ranks(2)
def test_state_of_two_modules_in_one_backward(context: Context) -> None:
    """One module's between another one's buckets, all of which one state is to take at once: what
    is first cut off would wait forever for the rest of its buckets."""
    state = compress.from_params({"compressor": "topk"}, schedule="one")
    inner = DistributedDataParallel(Given([10]))
    begun = False

    class Begins(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if begun:
                with torch.enable_grad():
                    inner([torch.ones(10)]).backward()
            return g

    outer = DistributedDataParallel(Chain(Begins), bucket_cap_mb=1)
    for ddp in (inner, outer):
        ddp.register_comm_hook(state, compress.hook)
    for _ in range(3):
        outer(torch.ones(600_000)).backward()
    begun = True
    with pytest.raises(RuntimeError, match="a state is for one DDP module"):
        outer(torch.ones(600_000)).backward()


@pytest.mark.parametrize("communicator", ["allgather", "ps"])
@pytest.mark.parametrize("where", ["2", "two of two"])
def test_rank_without_a_checkpoint(where: str, communicator: str) -> None:
    """What ranks share out is moved by all of them, whoever has anything."""
    first, *others = core.workers(where).run(newcomer, communicator)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@harness.on_ranks(2)
def test_sparse_gradients_are_refused(context: Context) -> None:
    ddp = hooked(nn.Embedding(10, 4, sparse=True), compress.from_params({"compressor": "topk"}))
    with pytest.raises(ValueError, match=r"^fusedpg\.compress: compresses dense gradients"):
        ddp(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_states_share_a_group_and_a_thread(backend: str) -> None:
    """However many states a group has had, they share one group and one thread."""
    with harness.Workers(2, backend=backend, oracle=False) as workers:
        for found in workers.run(after_states):
            groups = [counts["groups"] for counts in found]
            assert groups == [groups[0]] * len(groups)
            if backend == "fused":
                assert found[-1]["threads"] <= found[2]["threads"] + 1, found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", ["seed", "compressor", "schedule"])
def test_ranks_that_differ(what: str, world_size: int) -> None:
    """Their payloads may have the same sizes, and mean something else."""
    for error in harness.pool(world_size).errors(disagree, what):
        assert all(f"rank {r} has {what} " in error.text for r in (0, 1)), error.text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", ["seed", "step"])
def test_ranks_that_load_what_differs(what: str, world_size: int) -> None:
    """They would draw other elements, and take each other's for their own."""
    for error in harness.pool(world_size).errors(disagree_later, what):
        assert all(f"rank {r} has {what} " in error.text for r in (0, 1)), error.text


@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize(
    ("params", "part", "what"),
    [
        ({"compressor": "efsignsgd", "memory": "efsignsgd"}, "memory", "lr"),
        ({"compressor": "topk", "memory": "residual"}, "compressor", "compress_ratio"),
        ({"compressor": "randomk"}, "compressor", "compress_ratio"),
        ({"compressor": "qsgd"}, "compressor", "quantum_num"),
        ({"compressor": "threshold", "communicator": "ps"}, "compressor", "threshold"),
        ({"compressor": "topk", "memory": InQuarters()}, "memory", "scale"),
    ],
)
def test_ranks_that_differ_later(params: Any, part: str, what: str, backend: str) -> None:
    """One rank's learning rate or share changes, or is forgotten to be changed."""
    workers = harness.pool(3, backend=backend)
    for error in workers.errors(differ_later, params, part, what):
        assert all(f"rank {r} has {part} " in error.text for r in (0, 2)), error.text
        assert f"{what}=" in error.text, error.text


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one rank"])
@pytest.mark.parametrize(
    "how", ["fewer", "more", "transposed", "flat", "renamed", "type", "reordered"]
)
def test_checkpoint_of_another_model(how: str, ranks: tuple[int, ...]) -> None:
    """Residuals would go to parameters that they are not of."""
    answers = harness.pool(2).run(other_model, how, ranks)
    for rank, text in enumerate(answers):
        if rank in ranks:
            assert text.startswith("ValueError: the checkpoint is of another model"), answers
        else:
            assert "a step has failed" in text, answers


def test_checkpoint_of_the_same_model() -> None:
    assert harness.pool(2).run(other_model, "same", (0, 1)) == ["nothing"] * 2


@pytest.mark.parametrize(
    ("backend", "schedule"), [("fused", "bucket"), ("fused", "auto"), ("gloo", "bucket")]
)
def test_rank_that_dies(backend: str, schedule: str) -> None:
    with harness.Workers(3, timeout=15, backend=backend) as workers:
        workers.start(dies, 1, schedule)
        answers = workers.collect(40)
        assert isinstance(answers[1], harness.Died)
        assert all(isinstance(answers[rank], str) for rank in (0, 2)), answers


@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_compressor_that_raises_on_one_rank(backend: str) -> None:
    # On ours the others hear of it at once.
    timeout = 60 if backend == "fused" else 6
    with harness.Workers(3, timeout=timeout, backend=backend) as workers:
        workers.start(own_fails, 1)
        answers = workers.collect(30)
        assert "ValueError: of one's own" in answers[1], answers
        assert all("a step has failed" in answers[rank] for rank in (0, 2)), answers


@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_backward_that_raises_on_one_rank(backend: str) -> None:
    with harness.Workers(2, timeout=6, backend=backend) as workers:
        workers.start(raises_in_backward, 1)
        answers = workers.collect(40)
        assert answers[1] == "of one's own", answers
        assert "a step has failed" in answers[0], answers


def test_group_that_has_ended() -> None:
    with harness.Workers(2, timeout=6) as workers:
        for text in workers.run(state_of_an_ended_group):
            assert "a step has failed" in text, text
