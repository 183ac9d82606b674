"""What each rank does in the tests of generated CUDA code, on the fake GPU.

A source is compiled for the CPU by the fake's NVRTC, and launched through its driver functions.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
from checks import fusion as checks
from checks.cases import digest
from checks.compiled import compiles, done, environment, forget_answers
from checks.cuda_order import Scene
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import codegen_cuda, nvrtc
from fusedpg.fusion.compiled import kernel
from fusedpg.fusion.ir import Program
from harness import Context

Partial, Replicate, Shard = fusion.Partial, fusion.Replicate, fusion.Shard
FUSED = (fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Op:
    """A function of a sum `x`, a whole tensor `w`, and numbers."""

    function: Callable[..., torch.Tensor]
    ulps: int = 0  # in the last place, from the function in fp64 that is rounded once
    positive: bool = False


# What is rounded exactly: the bits of torch's functions on the CPU. Kept by name, for messages.
EXACT = {
    "add": Op(lambda x, w: x + w),
    "sub": Op(lambda x, w: 1.5 - (x - w)),
    "mul": Op(lambda x, w: x * w * 0.3),
    "not contracted": Op(lambda x, w: x * w + x),
    "div": Op(lambda x, w: x / (w * w + 1)),
    "div by a number": Op(lambda x, w: x / 3.0),
    "number by": Op(lambda x, w: 0.7 / (x * x + 1)),
    "neg and abs": Op(lambda x, w: -torch.abs(x)),
    "sign": Op(lambda x, w: torch.sign(x) * w),
    "square": Op(lambda x, w: torch.square(x) + w**2),
    "reciprocal": Op(lambda x, w: (x * x + 1).reciprocal()),
    "relu": Op(lambda x, w: F.relu(x)),
    "maximum": Op(lambda x, w: torch.maximum(x, w) - torch.minimum(x, w)),
    "clamp": Op(lambda x, w: x.clamp(-0.5, 1.0) + w.clamp(min=0.1)),
    "where": Op(lambda x, w: torch.where(x > w, x, 0.5)),
    "masks": Op(lambda x, w: torch.where((x > 0) & ((w <= 0.5) | ~(x < w)), x, w)),
    "equality": Op(lambda x, w: torch.where(x.sign() == w.sign(), x, w)),
    "casts": Op(lambda x, w: x.double().to(x.dtype) + x.float().to(x.dtype)),
    "half casts": Op(lambda x, w: x.bfloat16().to(x.dtype) + w.half().to(x.dtype)),
    "infinity": Op(lambda x, w: torch.where(x > float("inf"), w, x * float("-inf"))),
}
# Functions of CUDA's, here of the C library's; and sqrt, where torch's own is MKL's.
CLOSE = {
    "sqrt": Op(torch.sqrt, 0, True),
    "power": Op(lambda x: x**0.5, 0, True),
    "rsqrt": Op(torch.rsqrt, 2, True),
    "exp": Op(torch.exp, 1),
    "log": Op(torch.log, 1, True),
    "tanh": Op(torch.tanh, 2),
    "sigmoid": Op(torch.sigmoid, 3),
    "erf": Op(torch.erf, 2),
    "gelu": Op(F.gelu, 4),
    "gelu of tanh": Op(lambda x: F.gelu(x, approximate="tanh"), 6),
    "silu": Op(F.silu, 4),
}


def text_of(program: Program) -> codegen_cuda.Source:
    (unit,) = [(group, nodes) for group, nodes in program.units if group is not None]
    source = kernel(*unit, program).cuda_source
    assert source is not None
    return source


def fused(op: Op) -> Any:
    function = op.function
    if op.positive or op in CLOSE.values():

        def one(g: Partial) -> Any:
            return function(fusion.all_reduce(g, "sum"))

        return fusedpg.fuse(one).scheduled(*FUSED)

    def two(g: Partial, w: Replicate) -> Any:
        return function(fusion.all_reduce(g, "mean"), w)

    return fusedpg.fuse(two).scheduled(*FUSED)


def drawn(shape: tuple[int, ...], size: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of every rank. Sums of few of these are exact, so that their order does not matter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(-64, 65, shape, generator=generator) / 32).to(dtype) for _ in range(size)
    ]


def kernels(group: dist.ProcessGroup | None) -> int:
    """How many kernels the group has run."""
    return int(fusedpg.stats(group).get("fused_program", {}).get("calls", 0))


def exact(
    context: Context,
    dtype: torch.dtype,
    name: str,
    device: torch.device = CPU,
    group: dist.ProcessGroup | None = None,
) -> None:
    """The bits of torch's functions on the CPU, of a mean that has no rounding but its last."""
    size, rank, shape = context.world_size, context.rank, (5, 1021)
    op, parts = EXACT[name], drawn(shape, size, 1, dtype)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mean = (torch.stack([part.to(wide) for part in parts]).sum(0) / size).to(dtype)
    wanted = op.function(mean, w)
    before = kernels(group)
    with compiles(context):
        got = fused(op)(parts[rank].to(device), w.to(device), group=group).cpu()
    assert kernels(group) == before + 1, f"{name} did not run as a kernel"
    equal = (got == wanted) | (got.isnan() & wanted.isnan())
    assert bool(equal.all()), f"{name}: {got[~equal][:4]} for {wanted[~equal][:4]}"


def _distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """In units of the last place that the exact value has in the type."""
    wanted = exact.to(got.dtype)
    info = torch.finfo(got.dtype)
    _, exponent = torch.frexp(wanted.double())
    lowest = torch.full_like(exact, info.tiny * info.eps)
    unit = torch.maximum(torch.ldexp(torch.full_like(exact, info.eps / 2), exponent), lowest)
    return float(((got.double() - wanted.double()).abs() / unit).max())


def close(
    context: Context,
    dtype: torch.dtype,
    name: str,
    device: torch.device = CPU,
    group: dist.ProcessGroup | None = None,
) -> float:
    """The largest distance from torch's function in fp64, rounded once."""
    op, size, rank, shape = CLOSE[name], context.world_size, context.rank, (4, 513)
    parts = drawn(shape, size, 3, dtype)
    if op.positive:
        parts = [part.abs() + 0.25 for part in parts]
    total = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
    before = kernels(group)
    with compiles(context):
        got = fused(op)(parts[rank].to(device), group=group).cpu()
    assert kernels(group) == before + 1, f"{name} did not run as a kernel"
    wanted = op.function(total.double())
    found = _distance(got, wanted)
    # In fp64 torch's functions are no more exact than ours.
    allowed = max(op.ulps, 1) * 4 if dtype == torch.float64 else op.ulps
    # The factor 1 + erf(x) of gelu cancels where x is far below 0, in torch as well.
    tiny = 4 * torch.finfo(dtype).eps if "gelu" in name else 0.0
    worst = float((got.double() - wanted).abs().max())
    assert found <= allowed or worst <= tiny, f"{name}: {found} units off, {worst}"
    return found


def reductions(context: Context) -> None:
    """Every reduction and layout; several results; rows, columns, one number; sizes and types."""
    size, rank = context.world_size, context.rank

    def step(g: Partial, w: Replicate, row: Replicate, column: Replicate, one: Replicate,
             m: Shard, lr: float, seed: int) -> Any:  # fmt: skip
        x = fusion.all_reduce(g, OP)
        m = 0.5 * m + x
        y = fusion.dropout(w - lr * m, 0.25, seed)
        return y, y * row + column, x * one, m

    shapes = [(3, 4), (1, 7), (33, 65), (257, 19)]
    for dtype in TYPES:
        for op in ("sum", "mean", "max", "min"):
            step.__globals__["OP"] = op
            run = fusedpg.fuse(step).scheduled(*FUSED)
            for shape in shapes:
                g, (w,) = drawn(shape, size, 5, dtype), drawn(shape, 1, 6, dtype)
                (row,), (column,) = drawn(shape[1:], 1, 7, dtype), drawn((shape[0], 1), 1, 8, dtype)
                (whole,) = drawn((w.numel(),), 1, 9, dtype)
                m, one = checks.shard(whole, size, rank), torch.tensor(0.75, dtype=dtype)
                given = (g[rank], w, row, column, one, m, 0.25, 2**64 - 5)
                wanted = run(*given)
                before = done()
                with compiles(context):
                    results = run(*given)
                assert done() == before + 1, run.generated(*given, device="cuda")
                for got, want in zip(results, wanted, strict=True):
                    assert torch.equal(got, want), (dtype, op, shape, got, want)


OP = "sum"


def chunks(context: Context, numel: int, dtype: torch.dtype, chunk: int) -> None:
    """In place and into new tensors, synchronous or not; in many chunks or whole."""
    options = fusedpg.Options(_cpu_as_cuda=True, cuda_chunk_bytes=chunk)
    group = dist.new_group(backend="fused", pg_options=options)
    size, rank = context.world_size, context.rank

    def momentum(g: Partial, w: Replicate, m: Shard, lr: float) -> Any:
        m = 0.5 * m + fusion.all_reduce(g, "sum")
        return w - lr * m, m

    g = drawn((numel,), size, 1, dtype)[rank]
    (w,), (whole,) = drawn((numel,), 1, 2, dtype), drawn((numel,), 1, 3, dtype)
    m = checks.shard(whole, size, rank)
    run = fusedpg.fuse(momentum).scheduled(*FUSED)
    wanted = run(g, w, m, lr=0.25, group=group)
    with compiles(context):
        for into in (False, True):
            for async_op in (False, True):
                mine = (g.clone(), w.clone(), m.clone())
                how = {"lr": 0.25, "async_op": async_op, "group": group}
                got = run.into(mine[1:], *mine, **how) if into else run(*mine, **how)
                got = got.wait() if async_op else got
                assert all(torch.equal(x, y) for x, y in zip(got, wanted))
                assert torch.equal(mine[0], g)
                if into:
                    assert all(x is y for x, y in zip(got, mine[1:]))
        grown = g.clone()  # the contribution's own memory takes the result
        run.into((grown, m.clone()), grown, w, m, lr=0.25, group=group)
        assert torch.equal(grown, wanted[0])
    assert fusedpg.group_info(group)["cuda_path"] == "stock"
    dist.destroy_process_group(group)


def without_nvrtc(context: Context) -> list[str]:
    """Where one rank has no kernel all run the eager path, and results stay as they were."""

    def step(g: Partial, w: Replicate) -> Any:
        return w - 0.25 * fusion.all_reduce(g, "mean")

    run = fusedpg.fuse(step).scheduled(*FUSED)
    x = torch.arange(5000.0)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fusedpg")
    logger.addHandler(handler)
    missing = context.rank == context.world_size - 1
    library = {"FUSEDPG_NVRTC_LIB": "/nowhere/libnvrtc.so"} if missing else {}
    nvrtc._failed.clear()
    try:
        with tempfile.TemporaryDirectory() as empty, compiles(context):
            with environment(FUSEDPG_CACHE_DIR=empty, **library):
                before = done()
                for turn in range(3):
                    w = x.clone()
                    got = run.into(w, x, w)
                    assert got is w and torch.equal(w, x - 0.25 * x)
                    assert done() == before + 1, turn  # the one that found it out
    finally:
        logger.removeHandler(handler)
        nvrtc._failed.clear()
    return said


def disagree(context: Context, kind: str) -> None:
    """What ranks say differently; raises on all of them."""
    x, rank = torch.arange(3000.0), context.rank
    runs = [fused(EXACT[name]) for name in ("add", "mul")]

    def step(g: Partial, w: Replicate, lr: float) -> Any:
        return w - lr * fusion.all_reduce(g)

    numbers = fusedpg.fuse(step).scheduled(*FUSED)
    with compiles(context):
        for _ in range(1 if kind == "first" and rank else 2):
            numbers(x, x, lr=0.5)
        if kind == "numbers":
            numbers(x, x, lr=0.5 + rank)
        elif kind == "programs":
            runs[rank](x, x)
        elif rank:  # has forgotten what it knew
            forget_answers()
            numbers(x, x, lr=0.5)
        dist.barrier()


def captured(context: Context) -> None:
    """In a graph a program reads its operands anew; its first call is refused there."""
    scene = Scene()
    fake, group = scene.fake, scene.group

    def step(g: Partial, w: Replicate, lr: float) -> Any:
        return w - lr * fusion.all_reduce(g, "sum")

    run = fusedpg.fuse(step).scheduled(*FUSED)
    like = torch.empty(scene.param.shape)
    program = run.schedule(like, like, lr=0.5, world_size=context.world_size).program
    source = text_of(program)
    backend = fusedpg.functional._backend(group)
    with compiles(context):
        function = nvrtc.kernel(source, "step", backend, scene.param)
    assert function
    flag, none = fake.tensor(torch.zeros(1), 0), fake.tensor(torch.zeros(0), 0)

    def call(known: torch.Tensor) -> None:
        key, kinds = source.key, [kind for _, kind in source.operands]
        given = (
            [scene.param],
            kinds,
            source.reads,
            [scene.param],
            [True],
            [0.5],
            list(source.periods),
            known,
        )
        backend.fused_program_(function, key, "sum", scene.grad, *given)

    with scene.on(scene.a):
        call(flag)
    scene.sync(scene.a)
    assert scene.value(flag) == 0
    start = scene.value(scene.param)
    fake.begin_capture(scene.a, 1)
    with scene.on(scene.a):
        with refused("before the capture", ValueError):
            call(flag)
        call(none)
    graph = fake.end_capture(scene.a)
    assert scene.value(scene.param) == start
    wanted = start
    for turn in range(3):
        fake.host(scene.grad).fill_(float(turn))
        fake.launch(graph, scene.a)
        scene.sync(scene.a)
        wanted -= 0.5 * turn * context.world_size
        assert scene.value(scene.param) == wanted
    fake.destroy_graph(graph)
    scene.close()


# --- masks ----------------------------------------------------------------------------------------


def _masked(g: Partial, w: Replicate, m: Shard, row: Replicate, first: int, second: int) -> Any:
    x = fusion.all_reduce(g, "mean")
    kept = fusion.dropout(x + w * row, 0.3, first)
    mask = ((x > w) | (kept == 0)) & ~(x != x)
    y = torch.where(mask, kept, torch.maximum(x, w))
    z = fusion.dropout(torch.where(y <= row, w, 0.5), 0.6, second)
    less = m < x
    return y, z, torch.where(less, y, m), less


_SEEDS = (2**40 + 3, 17)


def _flags(g: Partial, w: Replicate) -> Any:
    x = fusion.all_reduce(g, "sum")
    return x > w, torch.where(x > w, x, w)


def _same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    equal = (got == wanted) | ((got != got) & (wanted != wanted))
    assert bool(equal.all()), f"{what}: {got[~equal][:4]} for {wanted[~equal][:4]}"


def masks(
    context: Context,
    dtype: torch.dtype,
    device: torch.device = CPU,
    group: dist.ProcessGroup | None = None,
) -> str:
    """What follows from masks and is gathered: the CPU engine's values; a digest of their bits."""
    size, rank, shape = context.world_size, context.rank, (33, 259)
    g, (w,) = drawn(shape, size, 11, dtype), drawn(shape, 1, 12, dtype)
    (whole,), (row,) = drawn((w.numel(),), 1, 13, dtype), drawn(shape[1:], 1, 14, dtype)
    for at, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        g[0].view(-1)[at + 5 :: 97] = value
    m = checks.shard(whole, size, rank)
    given = (g[rank], w, m, row)
    there = [tensor.to(device) for tensor in given]
    run = fusedpg.fuse(_masked).scheduled(*FUSED)
    flags = fusedpg.fuse(_flags).scheduled(*FUSED)
    cpu = dist.new_group(backend="fused", pg_options=fusedpg.Options())
    with compiles(context):
        wanted, before = run(*given, *_SEEDS, group=cpu), kernels(group)
        got = [result.cpu() for result in run(*there, *_SEEDS, group=group)]
        assert kernels(group) == before + 1, "it did not run as a kernel"
        # Masks themselves that all get: not as a kernel, and no less right.
        known = flags(g[rank], w, group=cpu)
        seen = [result.cpu() for result in flags(*there[:2], group=group)]
        assert kernels(group) == before + 1
        shown = flags.generated(g[rank], w, world_size=size, device="cuda")
    assert kernels(cpu) == 2, "the CPU's engine did not compute it"
    dist.destroy_process_group(cpu)
    assert "a mask that all ranks get is not generated for GPUs" in shown, shown
    names = ("y", "z", "slice", "mask", "flag", "where")
    for name, one, other in zip(names, (*got, *seen), (*wanted, *known), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        _same(one, other, name)
    assert all(0 < int(x.sum()) < x.numel() for x in (got[3], seen[0])), "a mask of one kind"
    assert 0.5 < float((got[1] == 0).double().mean()) < 0.7
    return digest([got[0], got[1], *seen])
