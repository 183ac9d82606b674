"""Generated kernels as modules of the GPU's driver: misuse, their ends, masks; on the fake GPU.

That the tests see a wrong kernel is seen with faults put into the generated text.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import cuda_programs
from checks import fusion as checks
from checks.compiled import compiles, done
from checks.cuda_order import EARLY, Scene, captured
from checks.cuda_programs import FUSED, Partial, Replicate, text_of
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import codegen_cuda, nvrtc
from harness import Context
from test_fusion_coconet import close, draws, generated, orders

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]


def _step(g: Partial, w: Replicate, lr: float) -> Any:
    return w - lr * fusion.all_reduce(g, "sum")


_TEXTS = itertools.count()


class Raw:
    """A kernel's source, and calls of the group's own method: right ones but for what is said."""

    def __init__(self, context: Context, backend: Any, like: torch.Tensor) -> None:
        shape = torch.empty(like.shape)
        run = fusedpg.fuse(_step).scheduled(*FUSED)
        program = run.schedule(shape, shape, lr=0.5, world_size=context.world_size).program
        self.source, self.backend = text_of(program), backend
        self.parameters = codegen_cuda.parameters(self.source)
        with compiles(context):
            architecture = backend.program_architecture(like)
            # Code of its own: a module of an earlier test, with the same, may not have ended yet,
            # and would be shared.
            text = f"{self.source.text}\n__device__ int fusedpg_own_{next(_TEXTS)};\n"
            self.image = nvrtc.ptx(text, "step", architecture).decode()

    def load(self, tensor: torch.Tensor, **other: Any) -> Any:
        given = {"image": self.image, "entry": codegen_cuda.ENTRY, "parameters": self.parameters}
        return self.backend.load_program(**(given | other), tensor=tensor)

    def call(self, function: Any, source: torch.Tensor, w: torch.Tensor, **other: Any) -> Any:
        given = {
            "operands": [w],
            "kinds": [kind for _, kind in self.source.operands],
            "reads": self.source.reads,
            "outputs": [w],
            "gathered": [True],
            "numbers": [0.5],
            "seeds": list(self.source.periods),
            "done": source.new_empty(0),
        }
        return self.backend.fused_program_(
            function, self.source.key, "sum", source, **(given | other)
        )


def misused(context: Context) -> None:
    """What does not fit raises in the caller and says what would; the group goes on."""
    scene = Scene(device=1)
    fake, param, grad = scene.fake, scene.param, scene.grad
    check = Modules()
    raw = Raw(context, fusedpg.functional._backend(scene.group), param)
    there = fake.tensor(torch.zeros(param.shape), 0)
    short = fake.tensor(torch.zeros(param.numel() - 1), 1)
    good, other = raw.load(param), raw.load(there)
    loaded = check.now()
    # Whichever device is the thread's.
    for current in (0, 1, 2):
        fake.set_device(current)
        for word, function, given in (
            ("loaded for GPU 0, but rank 0 of this group works on GPU 1; load it", other, {}),
            ("an operand must be contiguous on cuda:1", good, {"operands": [there]}),
            ("a result must be contiguous on cuda:1", good, {"outputs": [there]}),
            ("with 1000 elements; found 999", good, {"operands": [short]}),
            ("with 1000 elements; found 999", good, {"outputs": [short]}),
            ("with 999 elements; found 1000", good, {"source": short}),
            ("arguments do not fit", good, {"kinds": []}),
            ("arguments do not fit", good, {"gathered": []}),
            (
                "7 parameters, but the call gives 6: 0 operands",
                good,
                {"operands": [], "kinds": [], "reads": []},
            ),
            ("has 1000 elements, expected 7", good, {"kinds": [2], "reads": [7]}),
            ("pass what the kernel's own source lists", good, {"numbers": [0.5, 0.5]}),
            ("1 numbers, 1 seeds and periods", good, {"seeds": [3]}),
            ("pass what load_program() gave", 12345, {}),
            ("`done` must be", None, {}),
        ):
            with refused(word, ValueError):
                raw.call(function, **({"source": grad, "w": param} | given))
        elsewhere = (
            "the group works on GPU 1 on rank 0, but got a tensor on GPU 0; use one GPU a rank"
        )
        with refused(elsewhere, ValueError):
            raw.call(other, there, there)
        assert check.now() == loaded
    host, byte = torch.zeros(param.shape), torch.zeros(1, dtype=torch.uint8)
    with refused("cannot run on a CPU; pass the address", ValueError):
        raw.call(good, host, host, done=byte)
    for word, wrong in (
        ("does not have the 8 parameters of 8 bytes", {"parameters": raw.parameters + 1}),
        ("does not have the 6 parameters of 8 bytes", {"parameters": raw.parameters - 1}),
        ("named symbol not found", {"entry": "fusedpg_program_0"}),
        ("PTX", {"image": raw.image[:-10]}),
    ):
        with refused(word):
            raw.load(param, **wrong)
        assert check.now() == loaded, "one that failed stays"
    # From a thread that has called nothing of CUDA: it has no context, and device 0.
    start = scene.value(param)
    thread = threading.Thread(target=partial(raw.call, raw.load(param), grad, param))
    thread.start()
    thread.join()
    fake.set_device(0)
    raw.call(good, grad, param)
    scene.sync(0)
    fake.set_device(1)
    scene.sync(0)
    assert scene.value(param) == start + 2 * 0.5, "kernels that ran"
    scene.close()
    scene.group = None
    del good, other, raw, thread
    check(0)  # each on its own device
    assert fake.bad_handles() == 0


def _fake(function: str, *given: Any) -> int:
    called = getattr(ctypes.CDLL(os.environ["FUSEDPG_CUDA_LIB"]), f"fusedpg_fake_{function}")
    called.restype = ctypes.c_uint64
    return int(called(*given))


class Modules:
    """A check of how many modules there are that were loaded from now on.

    Those of earlier tests do not count: they go when Python collects them, and when a thread of a
    group that has ended comes to it.
    """

    def __init__(self) -> None:
        self._before = ctypes.c_uint64(_fake("loaded"))

    def now(self) -> int:
        return _fake("modules_since", self._before)

    def __call__(self, wanted: int) -> None:
        """Soon, as threads may unload."""
        gc.collect()
        end = time.monotonic() + 30
        while self.now() != wanted and time.monotonic() < end:
            time.sleep(0.01)
        assert self.now() == wanted, (self.now(), wanted)


def kept_while_it_runs(context: Context, kind: str) -> None:
    """No module goes under its kernel, whoever has dropped it; it goes with the group."""
    scene = Scene()
    fake, check = scene.fake, Modules()
    raw = Raw(context, fusedpg.functional._backend(scene.group), scene.param)
    function = raw.load(scene.param)
    start = scene.value(scene.param)
    hold = fake.Hold(scene.a)
    with scene.on(scene.a):
        work = raw.call(function, scene.grad, scene.param, async_op=True)
        work.wait()  # this stream waits, and the operation lets go of its tensors
    del function, work, raw
    gc.collect()
    time.sleep(EARLY)
    check(1)
    threading.Timer(EARLY, hold.release).start()
    if kind == "program":
        scene.sync(scene.a)
        check(1)
    elif kind == "aborted":
        scene.group.abort()
    dist.destroy_process_group(scene.group)
    scene.group = None
    check(0)
    scene.sync(scene.a)
    assert scene.value(scene.param) == start + 0.5 or kind == "aborted"
    assert fake.bad_handles() == 0


def kept_for_a_graph(context: Context) -> None:
    """A graph holds a kernel for as long as it lives, which of one rank nobody says."""
    scene = Scene(warm=False)
    scene.step()
    scene.sync(0)
    fake, check = scene.fake, Modules()
    raw = Raw(context, fusedpg.functional._backend(scene.group), scene.param)
    start = scene.value(scene.param)
    with captured(scene, scene.a) as graph:
        raw.call(raw.load(scene.param), scene.grad, scene.param)
    del raw
    check(1)
    fake.launch(graph.handle, scene.a)
    scene.sync(scene.a)
    assert scene.value(scene.param) == start + 0.5 * context.world_size
    scene.close()
    scene.group = None
    check(1)
    fake.destroy_graph(graph.handle)
    check(0 if context.world_size > 1 else 1)
    assert fake.bad_handles() == 0


def _count(function: str) -> int:
    """Calls of the driver in this process."""
    return _fake("calls", function.encode())


def unloaded(context: Context) -> None:
    """Programs of equal text share a module, which ends with the last of them and of the groups."""
    x = torch.arange(40.0)
    gc.collect()  # modules of earlier tests
    loads, unloads = _count("cuModuleLoadDataEx"), _count("cuModuleUnload")

    def counts(loaded: int, ended: int) -> None:
        gc.collect()
        now = _count("cuModuleLoadDataEx") - loads, _count("cuModuleUnload") - unloads
        assert now == (loaded, ended), now

    def program() -> Any:
        def step(g: Partial, w: Replicate) -> Any:
            return w - 0.4375 * fusion.all_reduce(g)

        return fusedpg.fuse(step).scheduled(*FUSED)

    def group() -> Any:
        return dist.new_group(backend="fused", pg_options=fusedpg.Options(_cpu_as_cuda=True))

    with compiles(context):
        first, second = group(), group()
        one, other = program(), program()
        one(x, x, group=first)
        one(x, x, group=second)
        other(x, x, group=first)
        counts(1, 0)
        del one, other
        counts(1, 0)  # the groups have it
        again = program()
        again(x, x, group=second)
        counts(1, 0)
        for ending in (first, second):
            dist.barrier()
            dist.destroy_process_group(ending)
        del first, second, ending
        counts(1, 0)  # the program has it
        del again
        counts(1, 1)
        # The other way round, and loaded again.
        last, run = group(), program()
        run(x, x, group=last)
        del run
        counts(2, 1)
        dist.barrier()
        dist.destroy_process_group(last)
        del last
        counts(2, 2)


# --- faults in the text ---------------------------------------------------------------------------


def one_has_none(context: Context) -> None:
    """Where a rank has no kernel the others' write nothing: neither slices nor what is gathered."""
    w, g = torch.full((3000,), 2.0), torch.ones(3000)
    part = checks.shard(w, context.world_size, context.rank)
    raw = Raw(context, fusedpg.functional._backend(None), w)
    function = None if context.rank else raw.load(w)
    for result, gathered in ((w, True), (part, False)):
        missing = torch.tensor([0.0 if function else 1.0])
        raw.call(function, g, w, done=missing, outputs=[result], gathered=[gathered])
        assert float(missing) == 1
    assert bool((w == 2).all()) and bool((part == 2).all())


def mutated(context: Context, old: str, new: str, check: Callable[..., Any], *given: Any) -> bool:
    """Whether a check sees that each kernel has another text."""
    cuda_programs.exact(context, torch.float32, "sub")  # other values lie in the buffers then
    write, found = codegen_cuda._CudaWriter._file, []

    def wrong(self: Any, *arguments: Any) -> str:
        text = write(self, *arguments)
        found.append(old in text)
        return text.replace(old, new)

    codegen_cuda._CudaWriter._file = wrong  # type: ignore[method-assign]
    try:
        check(context, *given)
    except AssertionError as error:
        assert "did not run as a kernel" not in str(error), error
        return True
    finally:
        codegen_cuda._CudaWriter._file = write  # type: ignore[method-assign]
        assert found and all(found), f"the kernel has changed: mend the mutant of {old!r}"
    return False


def gpus(size: int, **options: Any) -> harness.Workers:
    library = harness.fake_gpu()["env"]["FUSEDPG_CUDA_LIB"]
    return harness.pool(size, **harness.fake_gpu(FUSEDPG_NVRTC_LIB=library) | options)


def streams(size: int) -> harness.Workers:
    """Their tensors are on GPUs as torch sees them."""
    return gpus(size, options={"cuda_chunk_bytes": 1 << 10})


def test_misuse() -> None:
    streams(1).run(misused)


@pytest.mark.parametrize("kind", ["program", "destroyed", "aborted"])
def test_kept_while_it_runs(kind: str) -> None:
    streams(1).run(kept_while_it_runs, kind)


@pytest.mark.parametrize("size", [1, 2])
def test_kept_for_a_graph(size: int) -> None:
    streams(size).run(kept_for_a_graph)


def test_unloaded() -> None:
    gpus(2).run(unloaded)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, torch.float32),
        (3, torch.bfloat16),
        harness.slow(1, torch.float16),
        harness.slow(2, torch.float64),
    ],
    ids=str,
)
def test_masks(size: int, dtype: torch.dtype) -> None:
    assert len(set(gpus(size).run(cuda_programs.masks, dtype))) == 1, "ranks have other bits"


def in_chunks(context: Context) -> None:
    """The product at once, and what follows as one operation."""
    size, rank = context.world_size, context.rank
    draw = draws(10)
    x, w = draw(2, 7, 8 * size), draw(8 * size, 24)
    b, r = draw(24), draw(2, 7, 24)
    mine = x.chunk(size, 2)[rank].contiguous(), w.chunk(size, 0)[rank].contiguous()
    for run in orders(3):
        before = done()
        y = run(*mine, b, r, 0.5, 7)
        assert done() == before + 1
        close(y, torch.where(y != r, 2 * (x @ w + b), 0.0) + r, run)
        assert "__global__" in run.generated(*mine, b, r, 0.5, 7, device="cuda")


def test_a_product_in_chunks() -> None:
    gpus(2).run(generated, in_chunks)


def test_one_has_none() -> None:
    gpus(2).run(one_has_none)


class Mutant(NamedTuple):
    what: str
    old: str
    new: str
    check: Any
    given: tuple[Any, ...] = ()


EXACT = (cuda_programs.exact, (torch.float32, "add"))
MASKS = (cuda_programs.masks, (torch.float32,))
MUTANTS = [
    Mutant("tail is one short", "if (i < count) {", "if (i + 1 < count) {", *EXACT),
    Mutant("all blocks at one tile", "u64(blockIdx.x) * kTile", "u64(0)", *EXACT),
    Mutant(
        "ties away from zero",
        "0x7fff + (bits >> 16 & 1)",
        "0x8000",
        cuda_programs.exact,
        (torch.bfloat16, "mul"),
    ),
    Mutant("dropout by the slice's index", "(seed0, begin + i)", "(seed0, i)", *MASKS),
    Mutant("rows from the slice's beginning", "rows(begin + i,", "rows(i,", *MASKS),
    Mutant("a round less", "round < 10", "round < 9", *MASKS),
    Mutant("NaN that is not handed on", "a != a || a > b", "a > b", *MASKS),
    Mutant("a flag that nobody reads", "if (*skip)", "if (false)", one_has_none),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_caught(mutant: Mutant) -> None:
    given = mutant.old, mutant.new, mutant.check, *mutant.given
    assert any(gpus(2).run(mutated, *given)), mutant.what
