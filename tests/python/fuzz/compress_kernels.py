"""Random calls of compression's kernels against numpy, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusedpg._registration import load_extension
from fuzz.core import Choices

C = load_extension().compress
Array = np.ndarray[Any, Any]
F = np.float32
# Around vectors, tiles, samples, parts, and results that go around the cache.
EDGES = [0, 1, 3, 8, 16, 32, 64, 128, 1024, 16384, 32768, 65536, 131072, 1 << 20]
SIZES = [max(0, edge + d) for edge in EDGES for d in (-1, 0, 1)]
KINDS = ("normal", "ties", "equal", "zeros", "sparse", "denormal", "ascending", "descending",
         "blocks", "periodic", "wide", "neighbours", "bits", "huge", "few above")  # fmt: skip


def values(r: np.random.Generator, n: int) -> Array:
    kind = str(r.choice(KINDS))
    normal = r.standard_normal(n)
    at = np.arange(n)
    if kind == "bits":
        v = r.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(F)
    elif kind == "blocks":
        v = 0.01 * normal
        for begin in r.integers(0, max(n, 1), 3):
            v[begin : begin + int(2 ** r.uniform(0, 16))] = r.choice([1e3, -1e3, 5.0])
    else:
        v = {
            "normal": normal,
            "ties": normal.round(),
            "equal": np.full(n, r.choice([-2.5, 1e-42, 3e38])),
            "zeros": np.where(r.random(n) < 0.5, 0.0, -0.0),
            "sparse": np.where(r.random(n) < r.choice([1e-5, 1e-3, 0.01]), normal, 0.0),
            "denormal": r.integers(-50, 50, n) * 1.4e-45,
            "ascending": at * r.choice([1.0, -1.0, 1e-3]),
            "descending": at[::-1] * 1.0,
            "periodic": np.where(at % r.choice([31, 32, 1024, 4096]) == 0, 50 + normal, normal),
            "wide": normal * np.exp(20 * r.standard_normal(n)),
            "neighbours": 1 + r.integers(0, 5, n) * 2.0**-23,
            "huge": r.choice([3e38, -3e38, 1.0], n),
            "few above": np.where(r.random(n) < r.choice([0.3, 0.01]), 1 + 2.0**-23, 1.0),
        }[kind]
    v = v.astype(F)
    if r.random() < 0.15:
        bad = r.random(n) < r.choice([1 / max(n, 1), 0.01, 0.6])
        v[bad] = r.choice([np.nan, np.inf, -np.inf, -0.0])
    return v


def placed(r: np.random.Generator, v: Array) -> torch.Tensor:
    """A copy that begins anywhere in a vector."""
    begin = int(r.integers(0, 17))
    t = torch.empty(len(v) + begin)[begin:]
    t.copy_(torch.from_numpy(v))
    return t


def philox(seed: int, offset: int, n: int) -> Array:
    """Philox4x32-10 (Salmon et al. 2011), the upper 24 of each word's bits."""
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = np.arange(offset // 4, (offset + n + 3) // 4, dtype=np.uint64)
    c = [counter & word, counter >> shift, np.zeros_like(counter), np.zeros_like(counter)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (q >> shift) ^ c[1] ^ np.uint64(keys[0]), q & word,
            (p >> shift) ^ c[3] ^ np.uint64(keys[1]), p & word,
        ]  # fmt: skip
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (np.stack(c, 1).ravel()[offset % 4 :][:n] >> np.uint64(8)).astype(np.int64)


def same(got: Any, want: Array, what: str) -> None:
    """The same bits; of NaNs that they are some."""
    got = np.asarray(got)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    nan = np.isnan(got) & np.isnan(want) if got.dtype.kind == "f" else np.zeros(got.shape, bool)
    words = f"u{got.itemsize}"
    differ = (got.view(words) != want.astype(got.dtype).view(words)) & ~nan
    where = np.flatnonzero(differ)
    assert not len(where), (what, where[:5], got[where[:5]], want[where[:5]])


def largest(v: Array, k: int) -> Array:
    """Of equal ones the first; as integers NaNs are the largest."""
    order = np.argsort(-(v.view(np.uint32) & 0x7FFFFFFF).astype(np.int64), kind="stable")
    return np.sort(order[:k])


class Call:
    """One call with compensation: v = beta * residual + gamma * grad."""

    def __init__(self, r: np.random.Generator, n: int) -> None:
        self.r, self.n = r, n
        grad, kept = values(r, n), values(r, n)
        beta, gamma = ((1.0, 1.0), (1.0, 0.1), (0.9, 0.5))[r.integers(3)]
        which = r.choice(["both", "both", "grad", "residual"])
        self.given = None if which == "residual" else grad
        self.grad = None if which == "residual" else placed(r, grad)
        self.residual = None if which == "grad" else placed(r, kept)
        if which == "both":
            self.v = F(beta) * kept + F(gamma) * grad
        else:
            self.v = F(gamma) * grad if which == "grad" else kept
        self.factors = (beta, gamma)
        self.results: list[Any] = []

    def left(self, want: Array) -> None:
        if self.residual is not None:
            same(self.residual.numpy(), want, "residual")
            self.results.append(self.residual)
        if self.grad is not None:
            assert self.given is not None
            same(self.grad.numpy(), self.given, "the gradient, which is only read")


def topk(c: Call) -> None:
    part = c.r.choice([0, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 1.0])
    k = min(max(int(c.n * part) + int(c.r.integers(-1, 2)), 0), c.n)
    sent, indices = C.topk(c.grad, c.residual, k, *c.factors)
    _sparse(c, sent, indices, largest(c.v, k))


def threshold(c: Call) -> None:
    bound = float(c.r.choice([0, 0.5, 1e-42, 1e9, 50, np.nan_to_num(np.abs(c.v)).max(initial=0)]))
    least = int(c.n * c.r.choice([0, 0, 0.01, 1.0]))
    sent, indices = C.threshold(c.grad, c.residual, bound, least, *c.factors)
    want = np.flatnonzero(~(np.abs(c.v) <= F(bound)))
    _sparse(c, sent, indices, want if len(want) >= least else largest(c.v, least))


def _sparse(c: Call, sent: torch.Tensor, indices: torch.Tensor, want: Array) -> None:
    same(indices.numpy(), want, "indices")
    same(sent.numpy(), c.v[want], "values")
    rest = c.v.copy()
    rest[want] = 0
    c.results += [sent, indices]
    c.left(rest)


def signs(c: Call) -> None:
    """With the mean of magnitudes, or those of either side."""
    high, wide = c.v >= 0, c.v.astype(np.float64)
    if c.r.integers(2):
        packed, scale = C.signs(c.grad, c.residual, True, *c.factors)
        low, up = -float(scale), float(scale)
        means = [np.abs(wide).mean() if c.n else 0.0] * 2
        means[0] = -means[0]
    else:
        packed, scale = C.onebit(c.grad, c.residual, *c.factors)
        low, up = scale.tolist()
        means = [wide[side].mean() if side.any() else 0.0 for side in (~high, high)]
    np.testing.assert_allclose([low, up], means, rtol=1e-6, atol=1e-44)
    same(packed.numpy(), np.packbits(high, bitorder="little"), "signs")
    c.results += [packed, scale]
    c.left(c.v - np.where(high, F(up), F(low)))


def qsgd(c: Call) -> None:
    levels = int(c.r.choice([1, 4, 127, 128, 32767]))
    bucket = int(c.r.choice([0, 128, 1000, 1500] + [5] * (c.n < 10_000)))
    seed, offset = int(c.r.integers(0, 1 << 63)), int(c.r.choice([0, 1, 3, (1 << 34) + 1]))
    codes, norms = C.qsgd(c.grad, c.residual, levels, seed, offset, *c.factors, bucket)
    size = bucket or max(c.n, 1)
    wide = np.add.reduceat(c.v.astype(np.float64) ** 2, np.arange(0, c.n, size)) if c.n else []
    np.testing.assert_allclose(norms, np.sqrt(wide).astype(F), rtol=1e-6)
    norm = np.repeat(norms.numpy(), size)[: c.n]
    factor = F(levels) / norm
    usable = (factor > 0) & np.isfinite(factor)
    scaled = np.minimum(np.abs(c.v) * np.where(usable, factor, F(0)), F(levels))
    low = np.floor(np.where(usable, scaled, 0))
    code = low + (philox(seed, offset, c.n).astype(F) * F(2.0**-24) < scaled - low)
    code = np.where(usable, np.where(c.v < 0, -code, code), 0)
    assert codes.dtype == (torch.int8 if levels <= 127 else torch.int16)
    same(codes.numpy(), code.astype(np.int64), "codes")
    c.results += [codes, norms]
    c.left(np.where(usable, c.v - code.astype(F) * (norm / F(levels)), c.v))


def terngrad(c: Call) -> None:
    sigmas, seed = float(c.r.choice([0, 1, 2.5])), int(c.r.integers(0, 1 << 63))
    packed, found = C.terngrad(c.grad, c.residual, sigmas, seed, 0, *c.factors)
    wide = np.abs(c.v.astype(np.float64))
    want = wide.max(initial=0.0)
    if sigmas and c.n:
        v = c.v.astype(np.float64)
        want = min(want, sigmas * max(v.std(), abs(v.mean())))
    scale = F(float(found))
    if not np.isfinite(wide).all():
        assert np.isnan(scale)
        return
    np.testing.assert_allclose(scale, want, rtol=2e-6, atol=1e-38)
    chance = np.minimum(np.abs(c.v), scale)
    sent = philox(seed, 0, c.n).astype(F) * F(2.0**-24) * scale < chance
    code = np.where(sent, np.where(c.v < 0, 2, 1), 0)
    four = np.zeros(-(-c.n // 4) * 4, np.uint8)
    four[: c.n] = code
    same(packed.numpy(), (four.reshape(-1, 4) << np.arange(0, 8, 2)).sum(1), "codes")
    c.results += [packed, found]
    c.left(c.v - np.choose(code, [F(0), scale, -scale]))


def natural(c: Call) -> None:
    seed = int(c.r.integers(0, 1 << 63))
    codes = C.natural(c.grad, c.residual, seed, 0, *c.factors)
    bits = (c.v.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    code = (bits >> 23) - 63 + (philox(seed, 0, c.n) < (bits & 0x7FFFFF) << 1)
    code = np.where(bits >> 23 == 255, 127, np.minimum(np.where(code < 1, 0, code), 126))
    code |= np.where(c.v < 0, 128, 0)
    same(codes.numpy(), code, "codes")
    c.results.append(codes)
    c.left(c.v - powers(code))


def powers(code: Array) -> Array:
    size = np.ldexp(1.0, (code & 127) - 64)
    size = np.where(code & 127, np.where(code & 127 == 127, np.nan, size), 0.0)
    return np.where(code > 127, -size, size).astype(F)


def decode(c: Call) -> None:
    """What others have sent is any bytes."""
    n, r = c.n, c.r
    ranks, alpha = int(r.choice([1, 2, 5])), F(r.choice([1, 1 / 3, 0, -2]))
    out = placed(r, values(r, n))
    which = int(r.integers(4))
    found: list[Array] = []  # of each rank
    ones = [F(x) for x in r.standard_normal(ranks)]
    others = [F(x) for x in r.choice([0.3, np.inf, 3e38], ranks)]
    size = (-(-n // 8), -(-n // 4), n, n)[which]
    sent = [r.integers(0, 256, size, dtype=np.uint8) for _ in range(ranks)]
    packed = [*map(torch.from_numpy, sent)]
    if which == 0:
        pairs = [torch.tensor([float(x) for x in pair]) for pair in zip(ones, others)]
        C.unpack_signs_(out, packed, pairs, True, float(alpha))
        for bits, one, other in zip(sent, ones, others):
            high = np.unpackbits(bits, bitorder="little")[:n].astype(bool)
            found.append(np.where(high, alpha * other, alpha * one))
    elif which == 1:
        C.unterngrad_(out, packed, [torch.tensor([float(x)]) for x in others], float(alpha))
        for bits, other in zip(sent, others):
            code = ((bits[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3).ravel()[:n]
            found.append(np.choose(code, [F(0), alpha * other, -(alpha * other), F(0)]))
    elif which == 2:
        C.unnatural_(out, packed, float(alpha))
        found += [alpha * powers(code.astype(np.int64)) for code in sent]
    else:
        levels, bucket = int(r.choice([127, 32767])), int(r.choice([0, 128, 1000]))
        kind = np.int8 if levels == 127 else np.int16
        codes = [r.integers(-levels, levels + 1, n).astype(kind) for _ in range(ranks)]
        size = bucket or max(n, 1)
        norms = [np.abs(r.standard_normal(-(-n // size))).astype(F) for _ in range(ranks)]
        tensors = ([*map(torch.from_numpy, each)] for each in (codes, norms))
        C.unqsgd_(out, *tensors, levels, float(alpha), bucket)
        for code, norm in zip(codes, norms):
            found.append(alpha * (code.astype(F) * (np.repeat(norm, size)[:n] / F(levels))))
    total = found[0].astype(F)
    for one in found[1:]:
        total = total + one.astype(F)
    same(out.numpy(), total, f"decoded {which} of {ranks} ranks")
    c.results.append(out)


def votes(c: Call) -> None:
    ranks = int(c.r.choice([1, 2, 3, 5] + [254, 255, 256, 511] * (c.n < 20_000)))
    packed = c.r.integers(0, 256, (ranks, -(-c.n // 8)), dtype=np.uint8)
    out = placed(c.r, np.zeros(c.n, F))
    C.vote_signs_(out, torch.from_numpy(packed), 0.5)
    high = np.unpackbits(packed, axis=1, bitorder="little")[:, : c.n].sum(0)
    same(out.numpy(), np.where(2 * high >= ranks, F(0.5), F(-0.5)), "votes")
    c.results.append(out)


CALLS: tuple[Callable[[Call], None], ...] = (
    topk, threshold, signs, qsgd, terngrad, natural, decode, votes,
)  # fmt: skip


WHERE = ("131073", "1048577")  # elements at most
EXAMPLES = 150


@dataclasses.dataclass(frozen=True)
class Program:
    call: Callable[[Call], None]
    numel: int
    seed: int


def draw(choose: Choices, where: str) -> Program:
    sizes = [size for size in SIZES if size <= int(where)]
    odd = choose.randrange(1 << choose.randint(0, 17))
    numel = choose.choice(sizes) if choose.random() < 0.8 else min(odd, int(where))
    return Program(choose.choice(CALLS), numel, choose.getrandbits(32))


def results(program: Program) -> list[Any]:
    """The same bits under every FUSEDPG_ISA, but for those of NaNs."""
    with np.errstate(all="ignore"):
        call = Call(np.random.default_rng(program.seed), program.numel)
        program.call(call)
    return call.results


def check(program: Program) -> int:
    return len(results(program))
