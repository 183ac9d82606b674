"""What `fusedpg.all_reduce_` does is what `dist.all_reduce` does."""

from __future__ import annotations

import contextlib
import time
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedpg
from checks.cases import REDUCIBLE, supported, values
from checks.faults import mark
from harness import Context

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _agree(given: torch.Tensor, redop: str) -> None:
    expected, got = given.clone(), given.clone()
    dist.all_reduce(expected, getattr(dist.ReduceOp, redop))
    before = got._version
    fusedpg.all_reduce_(got, redop.lower())
    assert got._version == before + 1
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (given.dtype, redop)


def types(context: Context) -> None:
    for dtype in REDUCIBLE:
        for redop in OPS:
            if supported(redop, dtype):
                _agree(values(context.rank, 1000, dtype), redop)


def bits_of_views(context: Context) -> None:
    """Conjugate and negative views are written through their bit."""
    for dtype in (torch.complex64, torch.complex128):
        for _ in range(20):  # where torch copies, it copies from freed memory
            plain = values(context.rank, 1000, dtype)
            view = plain.conj()
            expected = view.resolve_conj().clone()
            dist.all_reduce(expected)
            before = view._version
            fusedpg.all_reduce_(view)
            assert view.is_conj() and view._version > before
            assert torch.equal(view.resolve_conj(), expected)
            assert torch.equal(plain, expected.conj().resolve_conj())
    plain = values(context.rank, 1000, torch.float32)
    view = torch._neg_view(plain)
    expected = view.resolve_neg().clone()
    dist.all_reduce(expected, dist.ReduceOp.MAX)
    fusedpg.all_reduce_(view, "max")
    assert torch.equal(view.resolve_neg(), expected)
    assert torch.equal(plain, -expected)


class Seen(torch.Tensor):
    """A subclass that notes the functions of torch that it passes through."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Seen.functions.append(func)
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Seen.functions.append(func)
        return func(*args, **(kwargs or {}))


def seen(context: Context) -> None:
    """Modes, subclasses and the profiler see the operator, which other calls reach directly."""
    operator = torch.ops.fusedpg.all_reduce_.default
    given = torch.ones(8)
    for around, tensor in (
        (Functions(), given),
        (Dispatches(), given),
        (contextlib.nullcontext(), given.as_subclass(Seen)),
    ):
        Seen.functions.clear()
        tensor.fill_(1)
        with around:
            fusedpg.all_reduce_(tensor)
        assert Seen.functions.count(operator) == 1, (around, Seen.functions)
        assert torch.equal(given, torch.full((8,), float(context.world_size)))
    with torch.profiler.profile() as profile:
        fusedpg.all_reduce_(given)
    names = {event.key for event in profile.key_averages()}
    assert {"fusedpg::all_reduce_", "fused:all_reduce"} <= names, names


def outsiders(context: Context) -> None:
    """A rank that is no member is warned, as by dist.all_reduce."""
    alone = dist.new_group([0])
    tensor = torch.ones(10)
    if context.rank == 0:
        fusedpg.all_reduce_(tensor, "sum", alone)
    else:
        with pytest.warns(UserWarning, match="all_reduce_"):
            fusedpg.all_reduce_(tensor, "sum", alone)
    assert torch.equal(tensor, torch.ones(10))


def order(context: Context) -> None:
    """It shares the order and the sequence numbers of the group's other operations."""
    group = dist.group.WORLD
    tensors = [torch.full((100,), float(i + context.rank)) for i in range(6)]
    before = fusedpg.group_info()["sequence_number"]
    works = [dist.all_reduce(tensors[i], group=group, async_op=True) for i in range(3)]
    fusedpg.all_reduce_(tensors[3], dist.ReduceOp.MAX, group)
    dist.all_reduce(tensors[4])
    fusedpg.all_reduce_(tensors[5])
    for work in works:
        work.wait()
    world = context.world_size
    for i in (0, 1, 2, 4, 5):
        assert torch.equal(tensors[i], torch.full((100,), float(world * i + sum(range(world)))))
    assert torch.equal(tensors[3], torch.full((100,), 3.0 + world - 1))
    assert fusedpg.group_info()["sequence_number"] == before + 6


def refused(context: Context) -> None:
    """Arguments that are wrong on one rank raise on all, and the group stays usable."""
    wrong = context.rank == 0
    tensor = torch.ones(10)
    with pytest.raises((ValueError, dist.DistBackendError), match="op must be"):
        fusedpg.all_reduce_(tensor, "mean" if wrong else "sum")
    with pytest.raises(dist.DistBackendError):
        fusedpg.all_reduce_(torch.ones(10 + context.rank))
    leaf = torch.ones(10, requires_grad=True)
    with pytest.raises((RuntimeError, ValueError), match="has no derivative"):
        fusedpg.all_reduce_(leaf if wrong else tensor)
    with torch.no_grad():
        fusedpg.all_reduce_(leaf)
    assert torch.equal(leaf, torch.full((10,), float(context.world_size)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(10), torch.ones(10))
        with pytest.raises((RuntimeError, ValueError), match="has no derivative"):
            fusedpg.all_reduce_(dual if wrong else tensor)
        with forward_ad._set_fwd_grad_enabled(False):
            fusedpg.all_reduce_(dual)
    with pytest.raises((RuntimeError, ValueError), match=r"no rule for torch\.vmap"):
        if wrong:
            torch.vmap(fusedpg.all_reduce_)(torch.ones(2, 10))
        else:
            fusedpg.all_reduce_(tensor)
    # No UTF-8: torch.ops says what it says of other types, and nobody has begun.
    with pytest.raises(RuntimeError, match="argument 'op'"):
        fusedpg.all_reduce_(tensor, "\ud800")


def compiled(context: Context) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        fusedpg.all_reduce_(y, "sum", dist.group.WORLD)
        fusedpg.all_reduce_(y, "max")
        return y + 1

    expected = torch.full((64,), 2.0 * context.world_size + 1)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        fast = torch.compile(function, fullgraph=True, backend=backend)
        assert torch.equal(fast(torch.ones(64)), expected)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(64)
        torch.ops.fusedpg.all_reduce_(fake, "sum", dist.group.WORLD.group_name)
        assert fake.shape == (64,)
    meta = torch.ones(64, device="meta")
    torch.ops.fusedpg.all_reduce_(meta, "sum", dist.group.WORLD.group_name)
    with pytest.raises(ValueError, match="op must be"):
        torch.ops.fusedpg.all_reduce_(meta, "mean", dist.group.WORLD.group_name)


def until_it_fails(context: Context) -> tuple[str, float]:
    tensor = torch.ones(1024)
    calls = 0
    try:
        while True:
            fusedpg.all_reduce_(tensor, "max")
            calls += 1
            if calls == 3:
                mark(context, "running")
    except dist.DistBackendError as error:
        return str(error), time.monotonic()


def alone(context: Context) -> str:
    """One rank does not come."""
    if context.rank == 0:
        return ""
    with pytest.raises(dist.DistBackendError) as error:
        fusedpg.all_reduce_(torch.ones(1024))
    return str(error.value)
