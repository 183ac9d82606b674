"""Sums of integers that share an exponent a block, against exact arithmetic."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks.compress import Given, given
from checks.refused import refused
from fusedpg import compress
from fusedpg._registration import load_extension
from fusedpg.compress import _reference
from harness import Context

C = load_extension().compress
Array = np.ndarray[Any, Any]


def bits(ranks: int) -> int:
    """Of docs/reference/numerics.md."""
    carry = math.ceil(math.log2(ranks))
    return 31 - carry if ranks <= 128 else 30 - carry


def added(values: Array, block: int, order: Any = None, kernels: Any = C) -> Array:
    """What the kernels make of the ranks' rows, which are added in this order."""
    rows = [torch.from_numpy(row.copy()) for row in values]
    order = range(len(rows)) if order is None else order
    exponents = kernels.block_exponents(rows[0], block)
    for row in rows[1:]:
        exponents = torch.maximum(exponents, kernels.block_exponents(row, block))
    total = torch.zeros(values.shape[1], dtype=torch.int32)
    for rank in order:
        total += kernels.block_quantise(rows[rank], exponents, block, len(rows))
    out = torch.full((values.shape[1],), 7.0)
    kernels.block_dequantise_(out, total, exponents, block, len(rows))
    return out.numpy()


def test_error_of_a_million_blocks() -> None:
    """Values of a block lie within 26 binades, so that fp64 adds them exactly."""
    ranks, block, blocks = 4, 4, 1_000_000
    r = np.random.default_rng(5)
    for begin in range(0, blocks, 100_000):
        count = min(100_000, blocks - begin)
        whole = r.integers(-(2**24) + 1, 2**24, (ranks, count, block))
        shift = r.integers(-26, 1, (ranks, count, block))
        scale = r.integers(-149 + 26, 104 - 2, (1, count, 1))
        exact = np.ldexp(whole.astype(np.float64), shift + scale)
        values = exact.astype(np.float32)  # rounded only where it is denormal
        exact = values.astype(np.float64)
        got = added(values.reshape(ranks, -1), block).reshape(count, block)
        _, exponent = np.frexp(np.abs(exact).max((0, 2)))
        unit = np.ldexp(1.0, exponent - bits(ranks))[:, None]
        error = np.abs(got.astype(np.float64) - exact.sum(0))
        rounding = np.maximum(np.abs(got).astype(np.float64) * 2.0**-24, 2.0**-150)
        assert (error <= ranks * unit / 2 + rounding).all()


@pytest.mark.parametrize("ranks", [5, 1, 2, 3, 4, 7, 128, 129, 200])
def test_rule_by_hand(ranks: int) -> None:
    """Each formula of docs/reference/numerics.md, in numbers that fp64 and int64 hold exactly: any
    scale, denormal, huge and no numbers; the same bits in 20 orders."""
    r = np.random.default_rng(ranks)
    block, count = 5, 20_000 if ranks < 100 else 2_000
    raw = r.integers(0, 2**32, (ranks, count, block), dtype=np.uint32)
    kind = r.integers(0, 6, (1, count, 1))
    binade = r.integers(0, 255, (1, count, 1)) - r.integers(0, 30, raw.shape)
    sign, fraction = raw & np.uint32(0x80000000), raw & np.uint32(0x807FFFFF)
    values = np.where(kind == 1, fraction, fraction | np.maximum(binade, 0).astype("u4") << 23)
    values = np.where(kind == 2, sign, values)  # zeros
    values = np.where(kind == 3, sign | np.uint32(0x7F7FFFFF), values)  # the largest
    values = np.where(kind == 4, raw, values)  # also infinities and NaN
    x = np.ascontiguousarray(values.astype("u4")).view("f4")
    finite = np.isfinite(x).all((0, 2))
    exact = np.where(finite[:, None], x, 0).astype(np.float64)
    _, exponent = np.frexp(np.abs(exact).max((0, 2)))
    shift = np.where(exact.any((0, 2)), exponent - bits(ranks), 0)[:, None]
    codes = np.rint(np.ldexp(exact, -shift)).astype(np.int64).sum(0)
    assert np.abs(codes).max() < 2**31
    with np.errstate(over="ignore"):
        unit = np.ldexp(1.0, shift)
        wanted = [(codes * one).astype("f4") for one in (unit, unit / ranks)]
    for want in wanted:
        want[codes == 0] = 0  # never -0
        want[~finite] = math.nan
    rows = [torch.from_numpy(row.reshape(-1).copy()) for row in x]
    exponents = functools.reduce(torch.maximum, [C.block_exponents(row, block) for row in rows])
    each = [C.block_quantise(row, exponents, block, ranks) for row in rows]
    for _ in range(20 if ranks < 100 else 2):
        total = torch.zeros_like(each[0])
        for rank in r.permutation(ranks):
            total += each[rank]
        for want, factor in zip(wanted, (1.0, 1 / ranks)):
            got = torch.full((want.size,), 7.0)
            C.block_dequantise_(got, total, exponents, block, ranks, factor)
            found, flat = got.numpy(), want.reshape(-1)
            number = ~np.isnan(flat)
            assert np.isnan(found[~number]).all()
            assert found[number].tobytes() == flat[number].tobytes()


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-2, 2, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4028234663852886e38]),
)


@st.composite
def contributions(draw: Any) -> Array:
    ranks, numel = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    drawn = draw(st.lists(FLOATS, min_size=ranks * numel, max_size=ranks * numel))
    return np.array(drawn, dtype=np.float32).reshape(ranks, numel)


@hypothesis.given(contributions(), st.integers(1, 50))
@hypothesis.settings(max_examples=200, deadline=None)
def test_error_of_any_values(values: Array, block: int) -> None:
    ranks, numel = values.shape
    got = added(values, block)
    np.testing.assert_array_equal(got, added(values, block, kernels=_reference))
    for begin in range(0, numel, block):
        part = values[:, begin : begin + block]
        largest = Fraction(float(np.abs(part).max()))
        unit = Fraction(2) ** (math.frexp(float(largest))[1] - bits(ranks)) if largest else 0
        for column, found in zip(part.T, got[begin : begin + block], strict=True):
            exact = sum(Fraction(float(x)) for x in column)
            if math.isinf(found):  # the sum itself is no float32
                assert abs(exact) + ranks * unit / 2 >= Fraction(2) ** 128 * (
                    1 - Fraction(2) ** -25
                )
                continue
            error = abs(Fraction(float(found)) - exact)
            rounding = max(abs(Fraction(float(found))) / 2**24, Fraction(2) ** -150)
            assert error <= ranks * unit / 2 + rounding


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_block_with_what_is_not_finite_is_nan(bad: float) -> None:
    values = np.ones((3, 20), dtype=np.float32)
    values[1, 9] = bad
    for kernels in (C, _reference):
        got = added(values, 8, kernels=kernels)
        assert np.isnan(got[8:16]).all()
        assert (got[:8] == 3).all() and (got[16:] == 3).all()


def test_arguments_of_kernels_are_checked() -> None:
    v = torch.ones(10)
    exponents = C.block_exponents(v, 4)
    for call in (
        lambda: C.block_exponents(v, 0),
        lambda: C.block_exponents(v.double(), 4),
        lambda: C.block_quantise(v, exponents[:2], 4, 2),
        lambda: C.block_quantise(v, exponents, 4, 0),
        lambda: C.block_dequantise_(v, torch.zeros(9, dtype=torch.int32), exponents, 4, 2),
    ):
        with pytest.raises(ValueError, match="fused: compress"):
            call()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def contribution(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * seed + rank)
    v = torch.randn(numel, generator=generator)
    v *= torch.exp(3 * torch.randn(numel, generator=generator))
    v.clamp_(-1e4, 1e4)  # within float16, sums too
    v[torch.rand(numel, generator=generator) < 0.3] = 0
    return v.to(dtype)


def sum_of(values: Array, block: int) -> Array:
    """By numpy in fp64, where codes and their sums are exact."""
    ranks, numel = values.shape
    out = np.zeros(numel)
    for begin in range(0, numel, block):
        part = values[:, begin : begin + block].astype(np.float64)
        unit = np.ldexp(1.0, np.frexp(np.abs(part).max())[1] - bits(ranks))
        out[begin : begin + block] = np.rint(part / unit).sum(0) * unit
    return out


@hypothesis.given(
    ranks=st.sampled_from([3, 2, 1]), numel=st.integers(0, 5000) | st.just(70_001),
    block=st.integers(1, 6000) | st.sampled_from([1, 256, 4096]), seed=st.integers(0, 99),
    dtype=st.sampled_from(list(DTYPES)), average=st.booleans(),
)  # fmt: skip
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_call(ranks: int, **case: Any) -> None:
    harness.pool(ranks).run(any_call, case)


def any_call(context: Context, case: dict[str, Any]) -> None:
    """What numpy gives."""
    numel, block, of = case["numel"], case["block"], DTYPES[case["dtype"]]
    parts = [contribution(rank, numel, of, case["seed"]) for rank in range(context.world_size)]
    t = parts[context.rank].clone()
    fusedpg.quantized_all_reduce(
        t, block, dist.ReduceOp.AVG if case["average"] else dist.ReduceOp.SUM
    )
    want = sum_of(np.stack([part.float().numpy() for part in parts]), block)
    want = want * (1 / context.world_size) if case["average"] else want
    assert torch.equal(t, torch.from_numpy(want.astype(np.float32)).to(of))


@harness.on_ranks(2)
def test_strides(context: Context) -> None:
    """Blocks are of the tensor row by row, however it lies in memory."""
    whole = contribution(context.rank, 4 * 6 * 5 * 5, torch.float32, 1).view(4, 6, 5, 5)
    want = whole.clone()
    fusedpg.quantized_all_reduce(want, 64)
    for strided in (
        whole.to(memory_format=torch.channels_last),
        whole.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([whole, whole], -1)[..., 0],
    ):
        assert not strided.is_contiguous()
        fusedpg.quantized_all_reduce(strided, 64)
        assert torch.equal(strided, want)
    leaf = torch.nn.Parameter(whole.clone())
    fusedpg.quantized_all_reduce(leaf, 64)
    assert torch.equal(leaf.detach(), want)


@pytest.mark.parametrize("names", harness.HOSTS)
def test_between_hosts(names: str) -> None:
    ranks = harness.pool_of_hosts(names)
    case = {"numel": 50_003, "block": 256, "seed": 4, "dtype": "fp32", "average": False}
    ranks.run(any_call, case)


@harness.on_ranks(2)
def test_refused(context: Context) -> None:
    call = fusedpg.quantized_all_reduce
    other = context.rank == 1
    half = torch.full((300,), 2.0, dtype=torch.bfloat16 if other else torch.float32)
    for text, kind, arguments in (
        ("block is an integer", ValueError, (torch.ones(3), 0)),
        ("found torch.float64", ValueError, (torch.ones(3).double(),)),
        ("op is SUM or AVG", ValueError, (torch.ones(3), 256, dist.ReduceOp.MAX)),
        ("dense", ValueError, (torch.ones(3).to_sparse(),)),
        # As many blocks of other sizes, elements or types.
        ("other blocks", TypeError, (torch.ones(300), 256 if other else 299)),
        ("other blocks", TypeError, (torch.ones(301 if other else 300),)),
        ("other blocks", TypeError, (half,)),
    ):
        with refused(text, kind):
            call(*arguments)
    assert bool((half == 2).all())
    t = torch.ones(300)
    call(t)
    assert bool((t == 2).all())


@pytest.mark.parametrize("compressor", ["none", "fp16", "powersgd", "randomk"])
@pytest.mark.parametrize("block", [64, 256])
@harness.on_ranks(3)
def test_hook(context: Context, compressor: str, block: int) -> None:
    """DDP's gradients by integers are near those by floats, and the same on all ranks."""
    found = {}
    for communicator in ("allreduce", "quantized"):
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.001)
        params = {
            "compressor": compressor, "communicator": communicator, "block": block,
            "compress_ratio": 0.5,
        }  # fmt: skip
        ddp.register_comm_hook(compress.from_params(params, seed=7), compress.hook)
        ddp(given(1, context.rank)).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])
        found[communicator] = flat
        others = [torch.empty_like(flat) for _ in range(context.world_size)]
        dist.all_gather(others, flat)
        assert all(torch.equal(flat, other) for other in others)
    rtol = {"fp16": 2e-3, "powersgd": 1e-4}.get(compressor, 1e-6)
    torch.testing.assert_close(found["quantized"], found["allreduce"], rtol=rtol, atol=rtol)
    if compressor == "none":
        assert not torch.equal(found["quantized"], found["allreduce"])
        grads = [torch.cat([g.reshape(-1) for g in given(1, r)]) for r in range(3)]
        exact = torch.stack(grads).double().mean(0)
        assert float((found["quantized"] - exact).abs().max()) < 3 * 2.0 ** (3 - bits(3)) + 3e-7
