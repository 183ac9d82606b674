"""The kernels of compression in torch's operations: for GPUs, and for types other than float32.

Each has the face of its namesake in the extension (``fusedpg._C.compress``), which is for float32
on a CPU and also works on units of gradients. Gradients are flat. ``residual`` is what earlier
steps have not sent, or None; compressing functions compress v = beta * residual + gamma * grad and
leave v minus what they send in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fusedpg.fusion import philox


def _compensated(grad: Tensor | None, residual: Tensor | None, beta: float, gamma: float) -> Tensor:
    """v, in the residual's memory where there is one."""
    if residual is None:
        assert grad is not None
        return grad if gamma == 1 else grad * gamma
    if grad is not None:
        if beta != 1:
            residual.mul_(beta)
        residual.add_(_times(grad, gamma))
    return residual


def _times(x: Tensor, factor: float) -> Tensor:
    """For sums: torch's ``alpha=`` rounds once or twice, as the processor has it, and ranks would
    drift apart."""
    return x if factor == 1 else x * factor


def _uniform(seed: int, offset: int, count: int, like: Tensor) -> Tensor:
    """Numbers in [0, 1), multiples of 2^-24: those of the extension."""
    words = philox.words(seed, offset, count, like.device)
    return (words >> 8).to(like.dtype) * 2.0**-24


def accumulate_(residual: Tensor, grad: Tensor, beta: float = 1.0, gamma: float = 1.0) -> None:
    _compensated(grad, residual, beta, gamma)


def dgc_accumulate_(
    momentum_buffer: Tensor, velocity: Tensor, grad: Tensor, momentum: float, gamma: float = 1.0
) -> None:
    momentum_buffer.mul_(momentum).add_(_times(grad, gamma))
    velocity.add_(momentum_buffer)


def square_sums(v: Tensor) -> list[float]:
    """The sum of squares of the one gradient."""
    return [float(v.double().square().sum())]


def topk(
    grad: Tensor | None, residual: Tensor | None, k: int, beta: float = 1.0, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    v = _compensated(grad, residual, beta, gamma)
    # A stable descending sort puts NaN first and, of equal magnitudes, the lowest index.
    order = v.abs().sort(descending=True, stable=True).indices[:k]
    return _taken(v, residual, order.sort().values)


def threshold(
    grad: Tensor | None,
    residual: Tensor | None,
    threshold: float,
    at_least: int = 0,
    beta: float = 1.0,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    v = _compensated(grad, residual, beta, gamma)
    indices = (~(v.abs() <= threshold)).nonzero().view(-1)
    if indices.numel() < at_least:
        order = v.abs().sort(descending=True, stable=True).indices[:at_least]
        indices = order.sort().values
    return _taken(v, residual, indices)


def _taken(v: Tensor, residual: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor]:
    values = v[indices]
    if residual is not None:
        residual[indices] = 0
    return values, indices.to(torch.int32)


def pick(
    grad: Tensor | None,
    residual: Tensor | None,
    indices: Tensor,
    beta: float = 1.0,
    gamma: float = 1.0,
) -> Tensor:
    v = _compensated(grad, residual, beta, gamma)
    values = v[indices.long()]
    if residual is not None:
        # Otherwise a NaN would stay until it is drawn, in whatever step that is.
        if not math.isfinite(square_sums(v)[0]):
            values.fill_(math.nan)
        zero_at_(residual, indices)
    return values


def zero_at_(v: Tensor, indices: Tensor) -> None:
    v[indices.long()] = 0


def scatter_(
    out: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor], alpha: float = 1.0
) -> None:
    """out = alpha * the values of all ranks at their indices, 0 where there are none."""
    out.zero_()
    for places, given in zip(indices, values, strict=True):
        out.index_add_(0, places.long(), _times(given, alpha))


def _pack(bits: Tensor, each: int) -> Tensor:
    """Numbers of `each` bits in bytes, the first in the lowest bits."""
    per_byte = 8 // each
    padded = bits.new_zeros(-(-bits.numel() // per_byte) * per_byte, dtype=torch.uint8)
    padded[: bits.numel()] = bits
    shifts = torch.arange(0, 8, each, device=bits.device, dtype=torch.uint8)
    return (padded.view(-1, per_byte) << shifts).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, each: int, count: int) -> Tensor:
    shifts = torch.arange(0, 8, each, device=packed.device, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & ((1 << each) - 1)).flatten(-2)[..., :count]


def signs(
    grad: Tensor | None,
    residual: Tensor | None,
    scaled: bool,
    beta: float = 1.0,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    v = _compensated(grad, residual, beta, gamma)
    mean = v.abs().double().mean() if v.numel() else v.new_zeros((), dtype=torch.float64)
    one = torch.where(mean.isfinite(), torch.ones_like(mean), math.nan)
    scale = (mean if scaled else one).to(v.dtype).view(1)
    bits = v >= 0
    packed = _pack(bits, 1)
    if residual is not None:
        residual.sub_(torch.where(bits, scale, -scale))
    return packed, scale


def onebit(
    grad: Tensor | None, residual: Tensor | None, beta: float = 1.0, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    v = _compensated(grad, residual, beta, gamma)
    bits = v >= 0
    wide = v.double()
    means = torch.stack(
        [
            torch.where(which, wide, 0).sum() / which.sum().clamp(min=1)
            for which in (~bits, bits)
        ]
    ).to(v.dtype)  # fmt: skip
    packed = _pack(bits, 1)
    if residual is not None:
        residual.sub_(torch.where(bits, means[1], means[0]))
    return packed, means


def _put(out: Tensor, values: Iterable[Tensor], alpha: float) -> None:
    """out = alpha * the values of all ranks, added in the order of ranks."""
    for rank, one in enumerate(values):
        if rank:
            out.add_(_times(one, alpha))
        else:
            out.copy_(one * alpha)


def unpack_signs_(
    out: Tensor,
    packed: Sequence[Tensor],
    values: Sequence[Tensor],
    two: bool,
    alpha: float = 1.0,
) -> None:
    """values: of each rank, a scale, or with ``two`` what bits stand for that are clear and set."""

    def one(bits: Tensor, value: Tensor) -> Tensor:
        set_ = _unpack(bits, 1, out.numel()).bool()
        low = value[:1] if two else -value
        return torch.where(set_, value[-1:], low).to(out.dtype)

    _put(out, map(one, packed, values), alpha)


def vote_signs_(out: Tensor, packed: Tensor, alpha: float = 1.0) -> None:
    votes = _unpack(packed, 1, out.numel()).sum(0, dtype=torch.int32)
    out.copy_(torch.where(2 * votes >= packed.shape[0], alpha, -alpha))


def qsgd(
    grad: Tensor | None,
    residual: Tensor | None,
    levels: int,
    seed: int,
    offset: int = 0,
    beta: float = 1.0,
    gamma: float = 1.0,
    bucket_size: int = 0,
) -> tuple[Tensor, Tensor]:
    v = _compensated(grad, residual, beta, gamma)
    norms = _bucket_norms(v, bucket_size)
    norm = _spread(norms, v.numel(), bucket_size)
    scaled = torch.where(norm == 0, 0, v.abs() * (levels / norm))
    low = scaled.floor()
    up = _uniform(seed, offset, v.numel(), v) < scaled - low
    code = ((low + up).clamp(max=levels) * v.sign()).nan_to_num(nan=0.0)
    codes = code.to(torch.int8 if levels <= 127 else torch.int16)
    if residual is not None:
        residual.sub_(codes.to(v.dtype) * (norm / levels))
    return codes, norms


def _bucket_norms(v: Tensor, bucket_size: int) -> Tensor:
    size = bucket_size or max(v.numel(), 1)
    count = math.ceil(v.numel() / size)
    padded = v.new_zeros(count * size, dtype=torch.float64)
    padded[: v.numel()] = v
    return padded.view(count, size).square().sum(1).sqrt().to(v.dtype)


def _spread(norms: Tensor, count: int, bucket_size: int) -> Tensor:
    return norms.repeat_interleave(bucket_size or max(count, 1))[:count]


def unqsgd_(
    out: Tensor,
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    levels: int,
    alpha: float = 1.0,
    bucket_size: int = 0,
) -> None:
    def values(code: Tensor, norm: Tensor) -> Tensor:
        return code.to(out.dtype) * (_spread(norm, out.numel(), bucket_size) / levels)

    _put(out, map(values, codes, norms), alpha)


def terngrad(
    grad: Tensor | None,
    residual: Tensor | None,
    clip_sigma: float,
    seed: int,
    offset: int = 0,
    beta: float = 1.0,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    v = _compensated(grad, residual, beta, gamma)
    clipped = v
    if clip_sigma > 0 and v.numel():
        wide = v.double()
        sigma = torch.maximum(wide.std(unbiased=False), wide.mean().abs())
        bound = clip_sigma * sigma.to(v.dtype)
        clipped = v.clamp(-bound, bound)
    scale = clipped.abs().max().view(1) if v.numel() else v.new_zeros(1)
    scale = torch.where(v.isfinite().all(), scale, torch.nan)
    sent = _uniform(seed, offset, v.numel(), v) * scale < clipped.abs()
    codes = torch.where(sent, torch.where(v < 0, 2, 1), 0)
    packed = _pack(codes, 2)
    if residual is not None:
        residual.sub_(torch.where(sent, clipped.sign() * scale, 0))
    return packed, scale


def unterngrad_(
    out: Tensor, packed: Sequence[Tensor], scale: Sequence[Tensor], alpha: float = 1.0
) -> None:
    def values(bits: Tensor, factor: Tensor) -> Tensor:
        codes = _unpack(bits, 2, out.numel())
        return ((codes == 1).to(out.dtype) - (codes == 2).to(out.dtype)) * factor

    _put(out, map(values, packed, scale), alpha)


# Exponents of natural compression: code c stands for 2^(c - _BIAS).
_BIAS = 64


def natural(
    grad: Tensor | None,
    residual: Tensor | None,
    seed: int,
    offset: int = 0,
    beta: float = 1.0,
    gamma: float = 1.0,
) -> Tensor:
    v = _compensated(grad, residual, beta, gamma)
    fraction, exponent = torch.frexp(v.abs())
    # v = 2^low * (1 + rest), 0 <= rest < 1: up with probability rest.
    low = exponent - 1
    rest = 2 * fraction - 1
    code = low + (_uniform(seed, offset, v.numel(), v) < rest).to(low.dtype) + _BIAS
    code = torch.where((v == 0) | (code < 1), 0, code.clamp(max=126))
    code = torch.where(v.isfinite(), code, 127)
    sent = (code | (v < 0).to(code.dtype) << 7).to(torch.uint8)
    if residual is not None:
        residual.sub_(_powers(sent, v.dtype))
    return sent


def _powers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    code = (codes & 127).to(torch.int32)
    values = torch.ldexp(torch.ones_like(code, dtype=dtype), code - _BIAS)
    values = torch.where(code == 0, 0, torch.where(code == 127, torch.nan, values))
    return torch.where(codes > 127, -values, values)


def unnatural_(out: Tensor, codes: Sequence[Tensor], alpha: float = 1.0) -> None:
    _put(out, (_powers(one, out.dtype) for one in codes), alpha)


# Exponents that stand for blocks of zeros, and for blocks with an infinity or NaN.
_ZERO_BLOCK, _NOT_FINITE_BLOCK = -1024, 1024


def _block_float_bits(ranks: int) -> int:
    carry = (ranks - 1).bit_length()
    return 31 - carry if carry <= 7 else 30 - carry


def block_exponents(v: Tensor, block: int) -> Tensor:
    block = min(block, max(v.numel(), 1))
    sizes = torch.nn.functional.pad(v.abs(), (0, -v.numel() % block)).view(-1, block)
    most = sizes.double().amax(1) if v.numel() else v.new_empty(0).double()
    found = torch.where(most == 0, _ZERO_BLOCK, torch.frexp(most).exponent)
    return torch.where(most.isfinite(), found, _NOT_FINITE_BLOCK).to(torch.int32)


def _each_element(exponents: Tensor, block: int, numel: int) -> Tensor:
    return exponents.repeat_interleave(min(block, max(numel, 1)))[:numel]


def block_quantise(v: Tensor, exponents: Tensor, block: int, ranks: int) -> Tensor:
    bits = _block_float_bits(ranks)
    exponent = _each_element(exponents, block, v.numel())
    codes = torch.ldexp(v.double(), (bits - exponent).double()).round()
    has_exponent = (exponent > _ZERO_BLOCK) & (exponent < _NOT_FINITE_BLOCK)
    return torch.where(has_exponent, codes, 0).to(torch.int32)


def block_dequantise_(
    out: Tensor, codes: Tensor, exponents: Tensor, block: int, ranks: int, alpha: float = 1.0
) -> None:
    exponent = _each_element(exponents, block, out.numel())
    power = torch.ldexp(torch.ones_like(codes).double(), exponent - _block_float_bits(ranks))
    values = torch.where(exponent == _ZERO_BLOCK, 0, codes.double() * (power * alpha))
    out.copy_(torch.where(exponent == _NOT_FINITE_BLOCK, torch.nan, values))
