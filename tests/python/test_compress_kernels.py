"""The kernels of compression: `fuzz.compress_kernels` has what they are to give, in numpy."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import harness
from fusedpg._registration import load_extension
from fusedpg.compress import _kernels, _reference, compressors
from fusedpg.compress._piece import Piece, Runs
from fuzz import core
from fuzz.compress_kernels import philox

C = load_extension().compress

FLOATS = st.one_of(
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from(
        [0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-42, 3e38, math.inf, -math.inf, math.nan]
    ),
)
# After their own arguments these have one more before beta and gamma.
DRAWS = ("natural", "qsgd", "terngrad", "threshold")
KINDS = ("normal", "ties", "sparse", "equal", "periodic", "wide", "ascending")


def values(kind: str, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(numel, generator=generator)
    if kind == "ties":
        return v.round()
    if kind == "sparse":
        return torch.where(torch.rand(numel, generator=generator) < 0.003, v, 0)
    if kind == "equal":
        return torch.full((numel,), -2.5)
    if kind == "periodic":
        return torch.where(torch.arange(numel) % 4096 == 0, 50 + v, 0.01 * v)
    if kind == "wide":
        return v * torch.exp(8 * torch.randn(numel, generator=generator))
    return torch.arange(numel).float() if kind == "ascending" else v


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_nan_is_not_hidden() -> None:
    for bad in (math.nan, math.inf):
        grad = torch.randn(5000)
        grad[4321] = bad
        residual = torch.zeros(5000)
        values_, indices = C.topk(grad, residual, 3)
        assert 4321 in indices.tolist()
        assert not values_.isfinite().all()
        assert residual.isfinite().all()
        out = torch.empty(5000)
        for codes, norms in (
            C.qsgd(grad, None, 127, 1),
            C.qsgd(grad, None, 127, 1, bucket_size=64),
        ):
            C.unqsgd_(out, [codes], [norms], 127, bucket_size=5000 if norms.numel() == 1 else 64)
            assert not out[4321].isfinite()
        packed, scale = C.terngrad(grad, None, 2.5, 1)
        C.unterngrad_(out, [packed], [scale])
        assert not out[4321].isfinite()
        C.unnatural_(out, [C.natural(grad, None, 1)])
        assert not out[4321].isfinite()
        assert out[:4321].isfinite().all()
        assert not C.signs(grad, None, True)[1].isfinite()
        assert not C.onebit(grad, None)[1].isfinite().all()
    grad[4321] = math.nan
    assert not C.signs(grad, None, False)[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 255, 256, 300])
def test_votes(ranks: int, dtype: torch.dtype) -> None:
    bits = np.random.default_rng(ranks).random((ranks, 1003)) < 0.5
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
    out = torch.empty(1003, dtype=dtype)
    _kernels.vote_signs_(out, packed, 0.5)
    same(out, np.where(2 * bits.sum(0) >= ranks, np.float32(0.5), np.float32(-0.5)))


def test_random_words_are_those_of_the_paper() -> None:
    """Known answer of Random123 for a counter and a key of zeros, and the mapping of elements."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    same(philox(0, 0, 4), [word >> 8 for word in words])
    numel, seed, offset = 4099, 0xFEDCBA9876543210, 2**34 + 3
    grad = torch.full((numel,), 1.5)  # halfway between 1 and 2
    codes = C.natural(grad, None, seed, offset)
    up = philox(seed, offset, numel) < 2**23
    same(codes, np.where(up, 65, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [[-3.0], [2.0] * 5, [1.0, 1.25]], ids=str)
def test_terngrad_sends_what_is_about_constant(grad: list[float], dtype: torch.dtype) -> None:
    """Its deviation from the mean is nothing, of which a bias of one element would never get on."""
    given = torch.tensor(grad, dtype=dtype)
    residual = torch.zeros_like(given)
    sent = torch.zeros_like(given)
    out = torch.empty_like(given)
    for seed in range(50):
        packed, scale = _kernels.terngrad(given, residual, 2.5, seed)
        _kernels.unterngrad_(out, [packed], [scale])
        sent += out
    torch.testing.assert_close(sent + residual, 50 * given, rtol=1e-4, atol=1e-4)
    assert (residual.abs() < 6 * given.abs()).all()


@pytest.mark.parametrize(("numel", "ratio"), [(10, 0.7), (10, 0.3), (7, 1.0), (1, 0.1), (41, 0.6)])
def test_random_k_draws_all_alike(numel: int, ratio: float) -> None:
    drawn, times = np.zeros(numel), 4000
    randomk = compressors.RandomK(ratio)
    cpu = torch.device("cpu")
    for seed in range(times):
        piece = Piece("0", numel, Runs(), 0, 1, seed, torch.float32, cpu, lambda *_: torch.empty(0))
        indices = randomk._drawn(piece, [piece.numel])[1].numpy()
        assert len(indices) == max(1, int(numel * ratio))
        assert (np.diff(indices) > 0).all()
        drawn[indices] += 1
    chance = max(1, int(numel * ratio)) / numel
    assert np.abs(drawn - times * chance).max() <= 5 * np.sqrt(times * chance * (1 - chance))


def test_natural_rounds_to_neighbouring_powers() -> None:
    grad = values("wide", 3000, 5)
    residual = torch.zeros(3000)
    out = torch.zeros(3000)
    C.unnatural_(out, [C.natural(grad, residual, 2)])
    wide = grad.numpy().astype(np.float64)
    low = 2.0 ** np.floor(np.log2(np.abs(wide)))
    got = out.numpy().astype(np.float64)
    inside = (np.abs(wide) > 2.0**-62) & (np.abs(wide) < 2.0**61)
    assert inside.mean() > 0.9
    assert set(np.unique((np.abs(got) / low)[inside])) == {1.0, 2.0}
    assert (np.sign(got) == np.sign(wide))[inside].all()
    torch.testing.assert_close(out + residual, grad, rtol=1e-6, atol=1e-18)
    ends = torch.tensor([1e-30, -1e-30, 0.0, 1e30, -1e30])
    out = torch.empty(5)
    C.unnatural_(out, [C.natural(ends, None, 0)])
    assert out.tolist() == [0.0, 0.0, 0.0, 2.0**62, -(2.0**62)]


@pytest.mark.parametrize("name", ["qsgd", "qsgd whole", "terngrad", "natural"])
def test_mean_is_right(name: str) -> None:
    """Within 5 sigma of the gradient, each element, over 4000 draws."""
    grad = values("normal", 257, 6)
    total, squares, draws = torch.zeros(257).double(), torch.zeros(257).double(), 4000
    out = torch.empty(257)
    for seed in range(draws):
        if name == "terngrad":
            packed, scale = C.terngrad(grad, None, 0.0, seed)
            C.unterngrad_(out, [packed], [scale])
        elif name == "natural":
            C.unnatural_(out, [C.natural(grad, None, seed)])
        else:
            bucket = 64 if name == "qsgd" else 0
            codes, norms = C.qsgd(grad, None, 3, seed, bucket_size=bucket)
            C.unqsgd_(out, [codes], [norms], 3, bucket_size=bucket)
        total += out
        squares += out.double().square()
    mean = total / draws
    sigma = ((squares / draws - mean.square()) / draws).clamp(min=0).sqrt()
    off = (mean - grad.double()).abs()
    assert (off <= 5 * sigma + 1e-6).all(), (off / sigma.clamp(min=1e-12)).max()
    assert (sigma > 0).float().mean() > 0.9


def test_indices_of_others_are_checked() -> None:
    out = torch.zeros(5)
    for index in (-1, 5):
        indices = torch.tensor([index], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"index {index} of 5 elements"):
            C.scatter_(out, [indices], [torch.ones(1)])
        with pytest.raises(ValueError, match="index"):
            C.zero_at_(out, indices)
        with pytest.raises(ValueError, match="index"):
            C.pick(out, None, indices)


def test_values_of_all_ranks_are_added_in_their_order() -> None:
    """Parts of the result, ranks without values, and indices that are in no order."""
    draw = np.random.default_rng(7)
    for numel in (1, 5, 32768, 100_000):
        for ranks in (1, 2, 5):
            sent = []
            for rank in range(ranks):
                count = int(draw.integers(0, numel + 1)) if rank != 1 else 0
                index = draw.choice(numel, count, replace=False).astype(np.int32)
                sent.append((np.sort(index), draw.standard_normal(count).astype(np.float32)))
            want = np.zeros(numel, np.float32)
            for index, given in sent:
                want[index] += np.float32(0.3) * given
            out = torch.full((numel,), math.nan)
            C.scatter_(out, *([torch.from_numpy(x) for x in each] for each in zip(*sent)), 0.3)
            same(out, want)
            turned = [(i[::-1].copy(), g[::-1].copy()) for i, g in sent]
            C.scatter_(out, *([torch.from_numpy(x) for x in each] for each in zip(*turned)), 0.3)
            np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-5)


def test_arguments_are_checked() -> None:
    v = torch.zeros(8)
    for call in (
        lambda: C.topk(v.double(), None, 1),
        lambda: C.topk(v[::2], None, 1),
        lambda: C.topk(v, torch.zeros(7), 1),
        lambda: C.topk(v, None, 9),
        lambda: C.topk(None, None, 1),
        lambda: C.threshold(v, None, -1.0),
        lambda: C.qsgd(v, None, 0, 1),
        lambda: C.qsgd(v, None, 1, 1, bucket_size=-1),
        lambda: C.unpack_signs_(v, [torch.zeros(2, dtype=torch.uint8)], [v[:2]], True),
        lambda: C.unqsgd_(v, [torch.zeros(8, dtype=torch.int8)], [torch.zeros(2)], 1),
        lambda: C.unpack_signs_(v, [torch.zeros(1, dtype=torch.uint8)], [v[:2]] * 2, True),
        lambda: C.unpack_signs_(v, [torch.zeros(1, dtype=torch.uint8)], [v[:2]], False),
        lambda: C.unterngrad_(v, [], []),
        lambda: C.vote_signs_(v, torch.zeros(1, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueError, match=r"fused: compress\."):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_operations_do_the_same(kind: str) -> None:
    """What GPUs use, and float64: the same numbers but for the order of sums."""
    grad = values(kind, 40_007, 8)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("topk", (400,)), ("threshold", (1.5,)), ("signs", (True,)), ("onebit", ()),
        ("natural", (5,)), ("qsgd", (127, 5)), ("terngrad", (2.5, 5)),
    ]  # fmt: skip
    for name, arguments in calls:
        kept = values("normal", 40_007, 9)
        ours, theirs = kept.clone(), kept.clone()
        rest = (0, 0.5, 2.0) if name in DRAWS else (0.5, 2.0)
        got = getattr(C, name)(grad, ours, *arguments, *rest)
        want = getattr(_reference, name)(grad, theirs, *arguments, *rest)
        pairs = [(got, want)] if isinstance(got, torch.Tensor) else list(zip(got, want))
        for mine, other in [*pairs, (ours, theirs)]:
            if mine.dtype.is_floating_point:
                near = torch.isclose(mine, other, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))
            else:
                near = mine == other
            # A number that rounding moves over a bound is another code.
            assert near.double().mean() > 0.9995, name


@pytest.mark.parametrize(
    "where, seed", [("131073", 7), *(harness.slow("1048577", seed) for seed in range(25))]
)
def test_random_calls(where: str, seed: int) -> None:
    """Those of seed 7 have every kernel, and infinite norms; test_instruction_sets has them too."""
    core.search("kernels", where, core.seed(seed))
