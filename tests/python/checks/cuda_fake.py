"""What ranks do in tests of the CUDA engine; their CPU tensors stand for device memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checks.cases import digest, same
from checks.faults import fused_step
from checks.fused_ops import BF16, FP32, Model, Run
from harness import Context


def info(context: Context) -> dict[str, Any]:
    import fusedpg

    return fusedpg.group_info()


_made: list[Any] = []  # delegates: their Python halves live as long as they


def with_communicator(context: Context) -> None:
    """Later delegates have a communicator as ProcessGroupNCCL has: the fake's."""
    from fusedpg import _registration
    from fusedpg._serve_gloo import Gloo

    class Id(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 16),)

    library = ctypes.CDLL(os.environ["FUSEDPG_NCCL_LIB"])

    class Delegate(Gloo):
        @functools.cache  # noqa: B019 (_made keeps it anyway)
        def _comm_ptr(self) -> int:
            key, own, comm = "communicator", Id(), ctypes.c_void_p()
            if self.rank() == 0:
                assert library.fusedpg_fake_make_id(ctypes.byref(own)) == 0
                self.store.set(key, bytes(own).hex())
            found = Id.from_buffer_copy(bytes.fromhex(self.store.get(key).decode()))
            made = library.fusedpg_fake_connect(
                ctypes.byref(comm), ctypes.byref(found), self.rank(), self.size()
            )
            assert made == 0, made
            return comm.value or 0

    def make(device: str, store: Any, rank: int, size: int, options: Any) -> Any:
        delegate: Any = Delegate(store, rank, size, timeout=options._timeout)
        delegate.store = store
        _made.append(delegate)
        return delegate

    _registration.load_extension()._set_delegate_factory(make)


def with_symmetric_memory(context: Context) -> None:
    """Memory of this process that the others reach: tests/fake_gpu/c10d/cpu_symm_mem.cpp."""
    library = Path(os.environ["FUSEDPG_CUDA_LIB"]).with_name("libfusedpg_cpu_symm_mem.so")
    torch.ops.load_library(str(library))


def unknown_nccl(context: Context) -> None:
    import fusedpg

    dist.new_group(backend="fused", pg_options=fusedpg.Options(nccl="other"))  # type: ignore[arg-type]


def info_after_a_step(context: Context) -> dict[str, Any]:
    model = Model(context, Run())
    model.set_gradients(0)
    model.step()
    return info(context)


def interleaved(context: Context) -> None:
    """Ordinary collectives between fused steps see their results, and the other way round."""
    model, rank, size = Model(context, Run("sgd")), context.rank, context.world_size
    for step in range(10):
        model.set_gradients(step)
        work = model.start(async_op=step % 2 == 0)
        total = model.params[0].clone() if work is None else None
        seen = torch.empty(size * model.params[0].numel())
        dist.all_gather_into_tensor(seen, model.params[0].view(-1))
        seen = seen.view(size, -1)
        assert same(seen[0], seen[size - 1]), "replicas differ"
        if total is not None:
            assert same(seen[rank], total.view(-1))
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert same(ones, torch.full((3,), float(size)))
        dist.broadcast(model.grads[0], src=0)
        if work is not None:
            work.wait()


def premul_sums(context: Context) -> None:
    """The backend multiplies where NCCL would be wrong; the stand-in, Gloo, has no PREMUL_SUM."""
    size, rank = context.world_size, context.rank
    op = dist._make_nccl_premul_sum(0.375)

    def given(dtype: torch.dtype, r: int) -> torch.Tensor:
        # Sums of these are exact.
        return (torch.arange(48, dtype=torch.float64) % 8 + r + 1).to(dtype)

    def mine(dtype: torch.dtype) -> torch.Tensor:
        return given(dtype, rank)

    for dtype in (BF16, FP32) if size == 1 else (BF16,):
        source = mine(dtype)
        want = 0.375 * torch.stack([given(dtype, r) for r in range(size)]).sum(0)
        share = want.chunk(size)[rank]
        reduced = mine(dtype)
        dist.all_reduce(reduced, op)
        assert same(reduced, want)
        one, other = mine(dtype), mine(dtype)
        with dist._coalescing_manager():
            dist.all_reduce(one, op)
            dist.all_reduce(other, op)
        assert same(one, want) and same(other, want)
        rooted = mine(dtype)
        dist.reduce(rooted, 0, op)
        assert same(rooted, want if rank == 0 else source)
        output = torch.empty_like(share)
        dist.reduce_scatter_tensor(output, source, op)
        assert same(output, share)
        output.zero_()
        dist.reduce_scatter(output, list(source.chunk(size)), op)
        assert same(output, share)
        assert same(source, mine(dtype)), "an input was written"
    whole = torch.full((4,), 3)
    with pytest.raises(RuntimeError):
        dist.all_reduce(whole, op)
    assert same(whole, torch.full((4,), 3)), "integers were multiplied"


def other_parameters(context: Context, numel: int) -> None:
    """Ranks step different models of equal shapes, with different learning rates."""
    fused_step(numel, 0.1)  # the first of a shape also finds out in another way
    param = torch.full((numel,), float(context.rank + 1))
    with pytest.raises(RuntimeError, match="disagree"):
        for _ in range(10):
            fused_step(numel, 0.1 * (context.rank + 1), param)
            time.sleep(0.1)
    time.sleep(0.5)  # what is under way has arrived
    assert same(param, torch.full((numel,), float(context.rank + 1)))


def used_flags(context: Context) -> None:
    """Of a list of several types they move on the device alone: graphs take nothing of the host."""
    from fusedpg.functional import _backend, load_extension

    params = [torch.zeros(n, dtype=t) for n, t in ((64, FP32), (9, BF16), (5, FP32), (5, FP32))]
    used = torch.tensor([context.rank == 0, context.rank == 1, False, True], dtype=torch.uint8)
    hyper = load_extension().Hyper(lr=1.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _backend(None).fused_step_(
            "fused_sgd_", params, [torch.ones_like(p) for p in params], [], [], [hyper], used=used
        )
    names = {event.name for event in profile.events()}
    assert not names & {"aten::to", "aten::index_select", "aten::index_copy_"}, names
    assert used.tolist() == [1, 1, 0, 1]
    assert [bool(p.any()) for p in params] == [True, True, False, True]


def work(context: Context) -> None:
    """An asynchronous step: its Work, its future, and what it keeps alive."""
    model = Model(context, Run("adamw", steps=1))
    model.set_gradients(0)
    gone = weakref.ref(model.grads[0])
    work = model.start(async_op=True)
    model.grads.clear()
    gc.collect()
    future = work.get_future()
    future.wait()
    work.wait()
    assert work.is_completed() and work.is_success()
    assert future.done() and len(future.value()) == len(model.params)
    first = digest(model.params)
    gc.collect()
    assert gone() is None, "gradients outlive their operation"
    again = Model(context, Run("adamw", steps=1))
    again.set_gradients(0)
    again.step()
    assert digest(again.params) == first


def found_inf(context: Context) -> None:
    """A flag on one rank stops all of them."""
    run = Run("adamw")
    model = Model(context, run)
    for step in range(3):
        model.set_gradients(step)
        flag = torch.tensor(float(step == 1 and context.rank == context.world_size - 1))
        kept = [one.clone() for one in model.state()]
        model.step(found_inf=flag)
        moved = [not same(now, old) for now, old in zip(model.state(), kept, strict=True)]
        assert float(flag) == (step == 1)
        assert any(moved) == (step != 1)


def absent(context: Context, seconds: float) -> str:
    """Rank 1 does not come; what rank 0 is told."""
    model = Model(context, Run("sgd"))
    model.set_gradients(0)
    model.step()
    if context.rank == 1:
        time.sleep(seconds)
        return ""
    begin = time.monotonic()
    try:
        model.step()
    except RuntimeError as error:
        assert time.monotonic() - begin < seconds
        return str(error)
    raise AssertionError("an absent rank was not missed")


def aborted(context: Context) -> str:
    """Rank 0 waits for a rank that does not come, and another thread of it aborts."""
    model = Model(context, Run("sgd"))
    model.set_gradients(0)
    model.step()
    if context.rank == 1:
        time.sleep(3)
        return ""
    group: Any = dist.distributed_c10d._get_default_group()
    timer = threading.Timer(0.5, group.abort)
    timer.start()
    begin = time.monotonic()
    try:
        model.step()
    except RuntimeError as error:
        assert time.monotonic() - begin < 3
        return str(error)
    finally:
        timer.join()
    raise AssertionError("nothing was aborted")
