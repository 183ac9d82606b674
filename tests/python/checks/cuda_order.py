"""The order of a group's calls on a GPU: ordinary collectives, fused operations, graphs.

One rank, on streams of the fake GPU; fake_nccl.cpp stands for ProcessGroupNCCL. A stream is held,
and what must come behind its work must not run before it is released. Several ranks: cuda_ranks.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks.refused import refused
from harness import ROOT, Context

COUNT = 1000
EARLY = 0.2  # what must not run gets so many seconds to do it
GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # of captures

_module: Any = None


def fake() -> Any:
    """The module, and this process's ProcessGroupNCCL replaced by the one in it."""
    global _module
    if _module is None:
        library = Path(os.environ["FUSEDPG_CUDA_LIB"])
        # Sanitizers build the library without torch.
        sys.path[:0] = [str(library.parent), str(ROOT / "build/cmake")]
        _module = importlib.import_module("fusedpg_fake_nccl")
        _module.load(str(library))
        fusedpg._registration.load_extension()._set_delegate_factory(make_delegate)
    return _module


def make_delegate(device: str, *arguments: Any) -> Any:
    assert device == "cuda", device
    store, rank, size, *_ = arguments
    made.append(fake().FakeNccl(store, rank, size))
    return made[-1]


made: list[Any] = []


class Scene:
    """A fresh group, two streams and the tensors of a fused step that adds 1 to `param`."""

    def __init__(self, *, warm: bool = True, device: int = 0) -> None:
        self.fake = fake()
        self.fake.set_device(device)
        made.clear()
        self.device = device
        self.group: Any = dist.new_group(backend="fused")
        self.a, self.b = (self.fake.new_stream(device) for _ in range(2))
        self.param, self.grad = self.tensor(0.0), self.tensor(-1.0)
        self.out, self.seen = self.tensor(-7.0), self.tensor(-7.0)
        self.steps = 0
        if warm:
            self.gather()
            self.step()
            self.sync(0)
            self.fake.host(self.out).fill_(-7)

    def tensor(self, value: float) -> torch.Tensor:
        made: torch.Tensor = self.fake.tensor(torch.full((COUNT,), value), self.device)
        return made

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before = self.fake.set_stream(self.device, stream)
        try:
            yield
        finally:
            self.fake.set_stream(self.device, before)

    @contextlib.contextmanager
    def held(self, stream: int) -> Iterator[None]:
        hold = self.fake.Hold(stream)
        try:
            yield
        finally:
            hold.release()
            self.sync(self.a)
            self.sync(self.b)

    def sync(self, stream: int) -> None:
        self.fake.synchronize(stream)

    def step(self, async_op: bool = False, reduce: str = "mean") -> Any:
        self.steps += 1
        flags = {"nesterov": False, "is_first_step": True, "dampening": 0.0}
        numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1.0}
        how = {"group": self.group, "async_op": async_op, "reduce": reduce}
        return fusedpg.fused_sgd_([self.param], [self.grad], [], **numbers, **flags, **how)

    def gather(self, async_op: bool = False) -> Any:
        """An ordinary collective: `out` becomes `param`."""
        return dist.all_gather_into_tensor(
            self.out, self.param, group=self.group, async_op=async_op
        )

    def coalesced(self, async_ops: bool = False) -> Any:
        with dist._coalescing_manager(self.group, self.out.device, async_ops) as manager:
            # By the group's method: torch's function would make it one call.
            options = dist.distributed_c10d.AllgatherOptions()
            options.asyncOp = async_ops
            self.group._allgather_base(self.out, self.param, options)
        return manager

    def value(self, tensor: torch.Tensor) -> float:
        values = self.fake.host(tensor).unique()
        assert len(values) == 1, values
        return float(values[0])

    def stays(self, tensor: torch.Tensor, value: float) -> None:
        end = time.monotonic() + EARLY
        while time.monotonic() < end:
            assert self.value(tensor) == value, "ran too early"
            time.sleep(0.01)

    def close(self) -> None:
        assert self.fake.bad_handles() == 0
        dist.destroy_process_group(self.group)


def ordinary(scene: Scene, kind: str) -> Any:
    if kind.startswith("coalesced"):
        return scene.coalesced(async_ops=kind.endswith("async"))
    return scene.gather(async_op=kind == "async")


def fused_behind(context: Context, kind: str) -> None:
    """A fused operation waits for an ordinary one of another stream, and its caller does not."""
    scene = Scene()
    with scene.held(scene.a):
        with scene.on(scene.a):
            work = ordinary(scene, kind)
        with scene.on(scene.b):
            step = scene.step(async_op=True)
        scene.stays(scene.param, 1.0)
        scene.sync(scene.b)
    with scene.on(scene.b):
        step.wait()
        if work is not None:
            work.wait()
    scene.sync(scene.b)
    assert scene.value(scene.param) == 2.0
    assert scene.value(scene.out) == 1.0
    scene.close()


def before_the_engine(context: Context) -> None:
    """The first fused operation, too, comes behind what was called before it."""
    scene = Scene(warm=False)
    hold = scene.fake.Hold(scene.a)
    with scene.on(scene.a):
        scene.gather()
    timer = threading.Timer(EARLY, hold.release)
    timer.start()
    with scene.on(scene.b):
        scene.step()
    scene.sync(scene.b)
    assert scene.value(scene.param) == 1.0
    assert scene.value(scene.out) == 0.0
    timer.join()
    scene.close()


def ordinary_behind(context: Context, kind: str) -> None:
    """An ordinary operation waits for a fused one, and whoever waits for it does."""
    scene = Scene()
    with scene.held(scene.a):
        with scene.on(scene.a):
            scene.step()
        with scene.on(scene.b):
            work = ordinary(scene, kind)
            if work is not None:
                work.wait()
            scene.fake.copy(scene.seen, scene.out)
        scene.stays(scene.out, -7.0)
        assert scene.value(scene.seen) == -7.0
    assert scene.value(scene.out) == 2.0
    assert scene.value(scene.seen) == 2.0
    scene.close()


def keeps_coalesced_tensors(context: Context) -> None:
    """A fused operation may wait for them before the caller does: then their stream waits, too."""
    scene = Scene()
    with scene.held(scene.a):
        with scene.on(scene.a):
            scene.coalesced(async_ops=True)
        with scene.on(scene.b):
            scene.step()
        with scene.on(scene.a):
            # As who gets memory that nobody holds any more.
            scene.fake.copy(scene.out, scene.grad)
    assert scene.value(scene.out) == -1.0
    scene.close()


def keeps_tensors_of_all_callers(context: Context) -> None:
    """A region's calls may come from several streams: each waits."""
    scene = Scene()
    with scene.held(scene.a):
        with dist._coalescing_manager(scene.group, scene.out.device, True):
            options = dist.distributed_c10d.AllgatherOptions()
            options.asyncOp = True
            for stream, to in ((scene.a, scene.out), (scene.b, scene.seen)):
                with scene.on(stream):
                    scene.group._allgather_base(to, scene.param, options)
        with scene.on(scene.fake.new_stream(0)):
            scene.step()
        for stream, to in ((scene.a, scene.out), (scene.b, scene.seen)):
            with scene.on(stream):
                scene.fake.copy(to, scene.grad)
    assert scene.value(scene.out) == -1.0
    assert scene.value(scene.seen) == -1.0
    scene.close()


def refused_in_between(context: Context, kind: str) -> None:
    """A fused operation that is refused is none: the next one waits for what it would have."""
    scene = Scene()
    with captured(scene, scene.b, RELAXED) as graph:
        scene.step()
        with scene.on(scene.a):
            hold = scene.fake.Hold(scene.a)
            ordinary(scene, kind)
        with scene.on(0):
            with refused("captured", ValueError):
                scene.step()
    scene.fake.destroy_graph(graph.handle)
    stream = scene.fake.new_stream(0)
    with scene.on(stream):
        step = scene.step(async_op=True)
        scene.stays(scene.param, 1.0)
        hold.release()
        step.wait()
    scene.sync(stream)
    scene.sync(scene.a)
    assert scene.value(scene.out) == 1.0
    assert scene.value(scene.param) == 2.0
    scene.close()


def fresh_group(context: Context) -> None:
    """The first calls of a group are coalesced ones."""
    scene = Scene(warm=False)
    with dist._coalescing_manager(scene.group, scene.out.device):
        pass
    with dist._coalescing_manager(scene.group, torch.device("cpu")):
        dist.broadcast(torch.zeros(3), src=context.rank, group=scene.group)
    assert not made, "no delegate without a call that needs one"
    scene.coalesced()
    scene.sync(0)
    assert scene.value(scene.out) == 0.0
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, scene.grad, context.rank, scene.group),
            dist.P2POp(dist.irecv, scene.seen, context.rank, scene.group),
        ]
    ):
        work.wait()
    scene.sync(0)
    assert scene.value(scene.seen) == -1.0
    scene.close()


def exception_in_a_region(context: Context, kind: str) -> None:
    """Whatever raises, what comes later is launched."""
    scene = Scene()
    wrong = scene.fake.tensor(torch.zeros(COUNT - 1), 0)
    try:
        with dist._coalescing_manager(scene.group, scene.out.device):
            options = dist.distributed_c10d.AllgatherOptions()
            scene.group._allgather_base(scene.out, scene.param, options)
            if kind == "delegate":
                scene.group._allgather_base(wrong, scene.param, options)
            elif kind == "ours":
                scene.step()
            elif kind == "launch":
                scene.fake.fail("ncclAllGather", 2)
            else:
                raise ValueError("the caller's own")
    except (ValueError, RuntimeError):
        pass
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    if kind in ("caller", "launch"):
        # It went past us; the next region ends the one before. NCCL failed: torch's group stays in
        # its region until the next one ends.
        scene.coalesced()
    scene.fake.host(scene.out).fill_(-7)
    scene.gather()
    scene.step()
    scene.sync(0)
    assert scene.value(scene.out) == 1.0
    assert scene.value(scene.param) == 2.0
    scene.close()


def calls_beside_a_region(context: Context) -> None:
    """A region is one thread's: another thread's calls neither join it nor end it."""
    scene = Scene()
    device = scene.out.device

    def elsewhere(call: Callable[[], Any]) -> str:
        errors: list[str] = []

        def body() -> None:
            try:
                call()
            except (ValueError, RuntimeError) as error:
                errors.append(str(error))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return "".join(errors)

    scene.group._start_coalescing(device)
    # There is nothing in it yet.
    assert elsewhere(scene.gather) == ""
    scene.sync(0)
    assert scene.value(scene.out) == 1.0
    scene.fake.host(scene.out).fill_(-7)
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    scene.group._allgather_base(scene.out, scene.param, options)
    for call in (scene.gather, scene.step):
        assert "another thread coalesces" in elsewhere(call)
    ended = elsewhere(lambda: scene.group._end_coalescing(device))
    assert "endCoalescing without startCoalescing on this group and thread" in ended, ended
    scene.stays(scene.out, -7.0)
    scene.group._end_coalescing(device)
    scene.sync(0)
    assert scene.value(scene.out) == 1.0
    assert elsewhere(scene.step) == ""
    scene.sync(0)
    assert scene.value(scene.param) == 2.0
    scene.close()


# --- ends -----------------------------------------------------------------------


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started: there is no memory for its stack."""
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)
    assert libc.pthread_getattr_default_np(attributes) == 0
    before = ctypes.c_size_t()
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(before)) == 0

    def set_size(size: int) -> None:
        assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size)) == 0
        assert libc.pthread_setattr_default_np(attributes) == 0

    set_size(1 << 50)
    try:
        yield
    finally:
        set_size(before.value)


@contextlib.contextmanager
def logged(texts: list[str]) -> Iterator[None]:
    """What the process writes to its standard error."""
    with tempfile.TemporaryFile("w+") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            texts.append(file.read())


def end_that_raises(context: Context, what: str) -> None:
    """The destructor of a group that nobody has destroyed tells of it, and comes to an end."""
    module = fake()
    module.set_device(0)
    made.clear()
    options = fusedpg.Options(cuda_chunk_bytes=1 << 10)
    group: Any = fusedpg.ProcessGroupFused(dist.HashStore(), 0, 1, options)
    param, out = (module.tensor(torch.zeros(COUNT), 0) for _ in range(2))
    group._allgather_base(out, param).wait()
    group.reduce_shards_([param])
    module.synchronize(0)
    injected: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if what == "thread":
        injected = no_threads()
    elif what == "delegate":
        module.fail("ncclCommDestroy", 3)
    else:
        library = ctypes.CDLL(os.environ["FUSEDPG_CUDA_LIB"])
        assert library.fusedpg_fake_fault(None) == 0
    texts: list[str] = []
    begin = time.monotonic()
    with injected, logged(texts):
        del group
        gc.collect()
    assert time.monotonic() - begin < 15
    wanted = {
        "thread": "the end of a group raised: ",
        "delegate": "the end of a group's ordinary collectives of CUDA tensors raised: ",
        "gpu": "",
    }
    assert wanted[what] in texts[0], texts


# --- graphs ---------------------------------------------------------------------


@contextlib.contextmanager
def captured(scene: Scene, stream: int, mode: int = GLOBAL) -> Iterator[types.SimpleNamespace]:
    graph = types.SimpleNamespace()
    with scene.on(stream):
        scene.fake.begin_capture(stream, mode)
        yield graph
        graph.handle = scene.fake.end_capture(stream)


def replay(scene: Scene, graph: types.SimpleNamespace, times: int = 1) -> None:
    for _ in range(times):
        scene.fake.launch(graph.handle, scene.a)
        scene.sync(scene.a)


def eager_then_captured(context: Context, kind: str) -> None:
    """What ran before a capture is none of it, and the other way round."""
    scene = Scene()
    with scene.held(scene.a), scene.on(scene.a):
        eager = ordinary(scene, kind)
    with captured(scene, scene.a) as graph:
        scene.step()
        work = ordinary(scene, kind)
        if work is not None:
            work.wait()
    assert scene.value(scene.param) == 1.0
    replay(scene, graph, 2)
    assert scene.value(scene.param) == 3.0
    assert scene.value(scene.out) == 3.0
    with scene.on(scene.a):
        if eager is not None:
            eager.wait()
        scene.step()
        ordinary(scene, "sync")
    scene.sync(scene.a)
    assert scene.value(scene.out) == 4.0
    with captured(scene, scene.b) as again:  # another one
        ordinary(scene, "sync")
        scene.step()
    replay(scene, again)
    assert scene.value(scene.out) == 4.0
    assert scene.value(scene.param) == 5.0
    for one in (graph, again):
        scene.fake.destroy_graph(one.handle)
    scene.close()


def ordered_in_a_graph(context: Context, kind: str) -> None:
    """The lanes of a graph run at once: only the order of calls keeps these apart."""
    scene = Scene()
    scene.fake.set_delay(200)
    with captured(scene, scene.a) as graph:
        first = ordinary(scene, kind)
        step = scene.step(async_op=True)
        for work in (first, step):
            if work is not None:
                work.wait()
    with captured(scene, scene.a) as other:
        step = scene.step(async_op=True)
        second = ordinary(scene, kind)
        for work in (second, step):
            if work is not None:
                work.wait()
    for _ in range(10):
        before = scene.value(scene.param)
        replay(scene, graph)
        assert scene.value(scene.out) == before
        assert scene.value(scene.param) == before + 1
        replay(scene, other)
        assert scene.value(scene.out) == before + 2
    scene.fake.set_delay(0)
    with captured(scene, scene.a) as third:  # which has nothing to do with `other`
        scene.step()
    for one in (graph, other, third):
        scene.fake.destroy_graph(one.handle)
    scene.close()


def out_of_memory_in_a_capture(context: Context) -> None:
    """The capture goes on without the step, and so does the group."""
    scene = Scene()
    with scene.on(scene.a), captured(scene, scene.a) as graph:
        scene.fake.fail("allocate", 2)
        with refused("the group works on", torch.OutOfMemoryError):
            scene.step()
        scene.step()
    replay(scene, graph, 3)
    assert scene.value(scene.param) == 4.0
    scene.step()
    scene.sync(0)
    assert scene.value(scene.param) == 5.0
    scene.close()


def eager_beside_a_capture(context: Context) -> None:
    """The engine's streams belong to the capture until it ends; both go on."""
    scene = Scene()
    with captured(scene, scene.a, RELAXED) as graph:
        scene.step()
        with scene.on(scene.b):
            with refused("captured", ValueError):
                scene.step()
            ordinary(scene, "sync")
            ordinary(scene, "async").wait()
            ordinary(scene, "coalesced")
        ordinary(scene, "sync")
    scene.sync(scene.b)
    assert scene.value(scene.out) == 1.0
    replay(scene, graph)
    assert scene.value(scene.param) == 2.0
    scene.fake.host(scene.out).fill_(-7)
    scene.step()
    scene.sync(0)
    assert scene.value(scene.param) == 3.0
    scene.fake.destroy_graph(graph.handle)
    scene.close()


def first_step_captured(context: Context) -> None:
    scene = Scene(warm=False)
    with refused("before the capture", ValueError), captured(scene, scene.a):
        scene.step()
    graph = scene.fake.end_capture(scene.a)
    scene.fake.destroy_graph(graph)
    scene.step()
    scene.sync(0)
    assert scene.value(scene.param) == 1.0
    scene.close()


def other_device_is_current(context: Context) -> None:
    """Tensors say on which GPU a call works, not the thread."""
    scene = Scene(device=1)
    scene.fake.set_device(0)
    with scene.held(scene.a):
        with scene.on(scene.a):
            scene.step()
        with scene.on(scene.b):
            scene.gather()
            scene.gather(async_op=True).wait()
            scene.coalesced()
            scene.step()
    assert scene.value(scene.out) == 2.0
    assert scene.value(scene.param) == 3.0
    scene.close()
