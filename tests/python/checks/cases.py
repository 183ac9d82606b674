"""Inputs, memory layouts and the reference every result is compared with."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness import Context

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCIBLE = (*FLOATS, *INTS, *COMPLEX, torch.bool)
MOVABLE = (*REDUCIBLE, *UNSIGNED, torch.float8_e4m3fn)
# Gloo refuses the others.
GLOO = (
    *FLOATS,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    *COMPLEX,
    torch.bool,
)
LAYOUTS = ("contiguous", "offset", "transposed", "channels_last", "strided")
MEMORY = ("ordinary", "arena", "mixed")
BITWISE = ("BAND", "BOR", "BXOR")
ORDERED = ("MIN", "MAX")
FACTOR = 0.75


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one collective."""

    op: str
    dtype: torch.dtype = torch.float32
    numel: int = 1000
    layout: str = "contiguous"
    memory: str = "ordinary"  # of MEMORY, or a letter a rank: "a" for the arena
    async_op: bool = False
    redop: str = "SUM"
    root: int = 0
    seed: int = 0

    def in_arena(self, rank: int) -> bool:
        if self.memory in MEMORY:
            return self.memory == "arena" or (self.memory == "mixed" and rank == 0)
        return self.memory[rank] == "a"

    def plain(self) -> Case:
        """The same call on ordinary contiguous tensors."""
        return dataclasses.replace(self, layout="contiguous", memory="ordinary")


def supported(redop: str, dtype: torch.dtype) -> bool:
    """Whether a reduction has a meaning for a type."""
    if redop in BITWISE:
        return dtype in INTS or dtype == torch.bool
    if redop in ORDERED:
        return dtype not in COMPLEX
    if redop == "PRODUCT":
        return dtype not in COMPLEX  # torch's front end refuses it
    if redop == "AVG":
        return dtype in FLOATS or dtype in COMPLEX
    if redop == "PREMUL_SUM":
        return dtype in FLOATS
    return True


def reduce_op(redop: str) -> Any:
    if redop == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, redop)


def values(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Reproducible contents; every rank can compute those of the others."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype in COMPLEX or dtype in FLOATS:
        wide = torch.complex128 if dtype in COMPLEX else torch.float64
        return torch.randn(numel, generator=generator, dtype=wide).to(dtype)
    low = -8 if dtype.is_signed else 0
    return torch.randint(low, 16, (numel,), generator=generator).to(dtype)


def shape_of(case: Case) -> tuple[int, ...]:
    """The shape of a case's tensors: about case.numel elements."""
    n = case.numel
    if case.layout == "transposed" and n >= 3:
        return (3, n // 3)
    if case.layout == "channels_last" and n >= 12:
        return (2, 3, 2, n // 12)
    return (n,)


def count(case: Case) -> int:
    return int(torch.Size(shape_of(case)).numel())


def logical(case: Case, rank: int, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A rank's input as a contiguous tensor."""
    shape = shape_of(case) if shape is None else shape
    numel = int(torch.Size(shape).numel())
    return values(case.seed * 1009 + rank, numel, case.dtype).reshape(tuple(shape))


class Placed:
    """A tensor in the layout and memory a case asks for, with a guard around."""

    def __init__(
        self, context: Context, case: Case, contents: torch.Tensor, layout: str | None = None
    ) -> None:
        layout = case.layout if layout is None else layout
        arena = case.in_arena(context.rank)
        shape = tuple(contents.shape)
        n = contents.numel()

        def empty(*size: int) -> torch.Tensor:
            return context.empty(*size, dtype=case.dtype, arena=arena)

        self._gaps: torch.Tensor | None = None
        if layout == "transposed" and len(shape) == 2:
            self.tensor = empty(shape[1], shape[0]).t()
        elif layout == "channels_last" and len(shape) == 4:
            a, b, c, d = shape
            self.tensor = empty(a, c, d, b).permute(0, 3, 1, 2)
        elif layout == "strided":
            whole = empty(2 * n)
            self._gaps = whole[1::2]
            self.tensor = whole[::2].view(shape)
        elif layout == "offset":
            whole = empty(n + 2)
            self._gaps = torch.as_strided(whole, (2,), (n + 1,), 0)
            self.tensor = whole[1 : n + 1].view(shape)
        else:
            self.tensor = empty(*shape)
        if self._gaps is not None:
            self._gaps.fill_(1)
        self.tensor.copy_(contents)
        self._before = contents

    def untouched(self) -> None:
        """Asserts that an input still holds what it held."""
        assert same(self.tensor, self._before), "an input was written"
        self.guarded()

    def guarded(self) -> None:
        """Asserts that nothing beside the tensor was written."""
        if self._gaps is not None:
            ones = torch.ones(self._gaps.shape, dtype=torch.float32).to(self._gaps.dtype)
            assert same(self._gaps, ones), "memory beside the tensor was written"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in logical order."""
    # A tensor of one element is contiguous with any stride.
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, any NaN equal to any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    if not (a.dtype.is_floating_point or a.dtype.is_complex) or a.dtype.itemsize == 1:
        return torch.equal(raw(a), raw(b))
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.contiguous()), torch.view_as_real(b.contiguous())
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return False
    return torch.equal(raw(a.masked_fill(nan, 0)), raw(b.masked_fill(nan, 0)))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equality up to rounding."""
    if a.dtype.itemsize == 1 or a.dtype in UNSIGNED:
        assert torch.equal(raw(a), raw(b))
        return
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(a.dtype)
    if tolerance is None:
        torch.testing.assert_close(a.contiguous(), b.contiguous(), equal_nan=True)
    else:
        torch.testing.assert_close(
            a.contiguous(), b.contiguous(), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def randn(*key: int, numel: int) -> torch.Tensor:
    seed = 0
    for part in key:
        seed = seed * 1_000_003 + part + 1
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    return torch.randn(numel, generator=generator)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(order).contiguous().flatten()


def distance(mine: torch.Tensor, want: torch.Tensor) -> float:
    return float((mine - want).norm() / want.norm().clamp(min=1e-30))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA256 of the bytes of some tensors."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(raw(tensor).numpy().tobytes())
    return state.hexdigest()


def _fold(step: Callable[[Any, Any], Any], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    result = inputs[0].clone()
    for contribution in inputs[1:]:
        result = step(result, contribution)
    return result


def reference(redop: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A left fold in rank order; half types accumulate in fp32, rounded once."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        steps: dict[str, Callable[[Any, Any], Any]] = {
            "SUM": torch.logical_or,
            "MAX": torch.logical_or,
            "BOR": torch.logical_or,
            "PRODUCT": torch.logical_and,
            "MIN": torch.logical_and,
            "BAND": torch.logical_and,
            "BXOR": torch.logical_xor,
        }
        return _fold(steps[redop], inputs)
    wide = torch.float32 if dtype in HALF else dtype
    steps = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PREMUL_SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    factor = FACTOR if redop == "PREMUL_SUM" else 1
    total = _fold(steps[redop], [contribution.to(wide) * factor for contribution in inputs])
    if redop == "AVG" and dtype.is_complex:
        # torch divides by a complex number, which rounds otherwise.
        total = torch.view_as_complex(torch.view_as_real(total) / len(inputs))
    elif redop == "AVG":
        total = total / len(inputs)
    return total.to(dtype)
