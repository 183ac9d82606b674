"""fusedpg.hvd: good and bad calls in random order, in torch's modes, against Gloo; a subject of
`fuzz`.

A bad call raises in its caller, or on all ranks, and the next call works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusedpg.hvd as hvd
import harness
from fuzz import core
from fuzz.core import Choices, Pair, Tape, done, draw_tape
from harness import Context
from test_hvd import session

pytestmark = pytest.mark.timeout(300)

ROWS = 12  # a multiple of all numbers of ranks


@contextlib.contextmanager
def bfloat16_by_default() -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    bfloat16_by_default,
    lambda: torch.device("meta"),
]


def expanded(values: Tensor) -> Tensor:
    return values[:1].expand_as(values)


def as_view(values: Tensor) -> Tensor:
    wide = values.new_zeros((values.shape[0], 2 * values.shape[1]))
    wide[:, ::2] = values
    return wide[:, ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda values: values,
    "transposed": lambda values: values.t().contiguous().t(),
    "view": as_view,
    "parameter": lambda v: torch.nn.Parameter(v, requires_grad=v.dtype.is_floating_point),
    "inference": lambda values: values,  # made in inference mode
    "negated": lambda values: torch.complex(values.double(), -values.double()).conj().imag,
    "conjugated": lambda values: torch.complex(values.double(), values.double()).conj(),
    "expanded": expanded,
}
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16]

REDUCTIONS = ["allreduce", "allreduce_", "grouped_allreduce", "reducescatter"]
KINDS = [*REDUCTIONS, "allgather", "broadcast", "broadcast_", "alltoall"]
OPS = {hvd.Sum: dist.ReduceOp.SUM, hvd.Max: dist.ReduceOp.MAX, hvd.Average: dist.ReduceOp.SUM}


def call(kind: str, tensor: Any, op: int, name: str | None) -> Tensor:
    if kind.startswith("broadcast"):
        return getattr(hvd, kind)(tensor, 0, name=name)
    more = {"op": op} if kind in REDUCTIONS else {}
    if kind.startswith("grouped"):
        return hvd.grouped_allreduce([tensor], name=name, **more)[0]
    return getattr(hvd, kind)(tensor, name=name, **more)


def by_gloo(context: Context, kind: str, own: Tensor, op: int) -> Tensor:
    """What plain torch.distributed gives, in a type that has all the numbers exactly."""
    exact = own.is_floating_point() or own.is_complex()
    kept = torch.complex128 if own.is_complex() else torch.double if exact else torch.int64
    wide = own.detach().resolve_conj().resolve_neg().to(kept).contiguous().clone()
    size, rank = context.world_size, context.rank
    if kind in REDUCTIONS:
        dist.all_reduce(wide, OPS[op], group=context.oracle)
        if op == hvd.Average:
            wide = wide / size if exact else wide.div(size, rounding_mode="trunc")
        wide = wide.chunk(size)[rank] if kind == "reducescatter" else wide
    elif kind.startswith("broadcast"):
        dist.broadcast(wide, 0, group=context.oracle)
    else:
        parts = [torch.empty_like(wide) for _ in range(size)]
        dist.all_gather(parts, wide, group=context.oracle)
        if kind == "alltoall":
            parts = [part.chunk(size)[rank] for part in parts]
        wide = torch.cat(parts)
    return wide.to(own.dtype)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(ROWS, 2)


def given_back() -> Tensor:
    tensor = torch.ones(ROWS, 2)
    tensor.untyped_storage().resize_(0)
    return tensor


# Whatever is done with them.
BAD_TENSORS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.ones(ROWS, 2, device="meta"),
    "sparse": lambda: torch.eye(ROWS).to_sparse(),
    "csr": lambda: torch.eye(ROWS).to_sparse_csr(),
    "fake": fake,
    "list": lambda: [1.0, 2.0],
    "None": lambda: None,
    "less than bytes": lambda: torch.empty(ROWS, dtype=torch.int4),
    "quantised": lambda: torch._empty_affine_quantized([ROWS], scale=1.0, dtype=torch.qint8),
    "memory given back": given_back,
}
ones = torch.ones(ROWS, 2)
BAD_CALLS: dict[str, Callable[[str | None], Any]] = {
    "expanded in place": lambda name: hvd.allreduce_(torch.ones(1).expand(4), name=name),
    "expanded broadcast": lambda name: hvd.broadcast_(torch.ones(1).expand(4), 0, name=name),
    "operation": lambda name: hvd.allreduce(ones, op=17, name=name),
    "both": lambda name: hvd.allreduce(ones, average=True, op=hvd.Sum, name=name),
    "scale": lambda name: hvd.allreduce(ones, prescale_factor="much", name=name),
    "root": lambda name: hvd.broadcast(ones, 99, name=name),
    "scalar": lambda name: hvd.allgather(torch.tensor(1.0), name=name),
    "scalar parts": lambda name: hvd.reducescatter(torch.tensor(1.0), name=name),
    "splits": lambda name: hvd.alltoall(ones, [99] * hvd.size(), name=name),
    "splits' type": lambda name: hvd.alltoall(ones, torch.ones(hvd.size()), name=name),
    "rows": lambda name: hvd.alltoall(torch.ones(hvd.size() + 1), name=name),
    "no tensors": lambda name: hvd.grouped_allreduce_([], name=name),
    "integers": lambda name: hvd.allreduce(ones.int(), op=hvd.Adasum, name=name),
    "compression": lambda name: hvd.allreduce(ones, compression=object(), name=name),
}
# What the engines of all ranks refuse alike.
REFUSED: dict[str, Callable[[str | None], Any]] = {
    "scaled bytes": lambda name: hvd.allreduce(
        torch.ones(4).to(torch.float8_e5m2), prescale_factor=2.0, name=name
    ),
    "bits": lambda name: hvd.allreduce(ones[0].to(torch.uint8).view(torch.bits8), name=name),
    "order": lambda name: hvd.allreduce(torch.ones(4) * 1j, op=hvd.Max, name=name),
    "mean of truths": lambda name: hvd.allreduce(
        torch.ones(4, dtype=torch.bool), postscale_factor=0.5, op=hvd.Average, name=name
    ),
}


def bad_call(what: str, kind: str, name: str | None) -> None:
    if what in BAD_TENSORS:
        call(kind, BAD_TENSORS[what](), hvd.Sum, name)
    else:
        BAD_CALLS[what](name)


def bad_kind(what: str, kind: str) -> str:
    """The kind of operation that a bad call was to be."""
    kinds = {"root": "broadcast", "scalar": "allgather", "scalar parts": "reducescatter"}
    kinds |= {"splits": "alltoall", "splits' type": "alltoall", "rows": "alltoall"}
    kinds |= {"expanded broadcast": "broadcast"}
    return kind if what in BAD_TENSORS else kinds.get(what, "allreduce")


def good_call(context: Context, draw: Choices, name: str | None, kind: str = "") -> None:
    kind = kind or draw.choice(KINDS)
    mode = draw.choice(MODES)
    names = [n for n in LAYOUTS if not (n == "expanded" and kind.endswith("_"))]
    layout = draw.choice(names)
    dtype = draw.choice(DTYPES[:1] if layout == "negated" else DTYPES)
    op = draw.choice([op for op in OPS if op != hvd.Max or layout != "conjugated"])
    seed = draw.randrange(1 << 30) + context.rank
    numbers = torch.randint(0, 5, (ROWS, 3), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode(layout == "inference"):
        own = LAYOUTS[layout](numbers.to(dtype))
    want = by_gloo(context, kind, own, op)
    with mode():
        got = call(kind, own, op, name)
    assert (got is own) == kind.endswith("_"), (kind, layout, got)
    torch.testing.assert_close(got.detach(), want, msg=lambda m: f"{kind} {layout} {dtype}: {m}")
    if mode is not torch.inference_mode and layout != "inference":
        assert not got.is_inference()


def one_call(context: Context, draw: Choices) -> str:
    """A call that is right, or wrong on one or all ranks; in words."""
    name = draw.choice([None, "a", "b"])
    what = draw.choice(["good", "good", "all", "one", "refused"])
    if what == "good":
        good_call(context, draw, name)
        return what
    if what == "refused":
        case = draw.choice(sorted(REFUSED))
        with contextlib.suppress(hvd.HorovodInternalError):
            REFUSED[case](name)
        return f"{what}: {case}"
    bad = draw.choice(sorted([*BAD_TENSORS, *BAD_CALLS]))
    kind = draw.choice(KINDS)
    rank = draw.randrange(context.world_size)
    mode = draw.choice([contextlib.nullcontext, torch.no_grad, torch.inference_mode])
    if what == "all" or rank == context.rank:
        with mode(), pytest.raises(Exception) as told:
            bad_call(bad, kind, name)
        assert not isinstance(told.value, hvd.HorovodInternalError), (bad, told.value)
    else:
        with pytest.raises(hvd.HorovodInternalError, match=f"rank {rank}'s call raised"):
            call(bad_kind(bad, kind), torch.ones(ROWS, 2), hvd.Sum, name)
    return f"{what}: {bad}"


WHERE = ("2", "3")
EXAMPLES = 2


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 500, 1500)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    choices = program.choices()
    with session():
        while choices.left > 0:
            yield done(one_call(context, choices))


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 20))])
@pytest.mark.parametrize("where", WHERE)
def test_calls_are_right_or_raise_and_end_nothing(where: str, seed: int) -> None:
    core.search("horovod", where, core.seed(seed))


def _bits(context: Context) -> None:
    numbers = torch.arange(float(ROWS * 3)).view(ROWS, 3) + context.rank
    with session():
        for layout in ("negated", "conjugated"):
            own = LAYOUTS[layout](numbers)
            for kind in KINDS:
                if not kind.endswith("_"):
                    want = by_gloo(context, kind, own, hvd.Sum)
                    torch.testing.assert_close(call(kind, own, hvd.Sum, None), want)


@pytest.mark.parametrize("backend", [harness.BACKEND, "gloo"])
def test_bits_of_views_on_any_backend(backend: str) -> None:
    """Gloo moves memory, in which the bit of a conjugated or negated view is not."""
    harness.pool(2, backend=backend).run(_bits)
