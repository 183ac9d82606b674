"""Time the kernels of compression beside a plain read and write of as many bytes.

    python benchmarks/compress_kernels.py --check-bars

One process and thread; 100 MB of float32 by default. Each kernel runs in turn with `y = c * x` over
as many bytes as the kernel has to read and write: gradient, residual (read and written), payload,
and a pass more over what has to be seen before anything can be sent (a norm, a maximum) or before
the residual is known (a mean).
Top-k of 1 % also beside torch.topk. Results are compared with torch's operations first, of a
shorter tensor.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import _harness as harness
from _harness import Bar, Context, Row
from fusedpg._registration import load_extension
from fusedpg.compress import _reference

SIZE = 100 << 20
KERNEL, TOPK = "kernel", "torch.topk"
RATIO = 0.01
DRAWN = ("qsgd", "qsgd, one norm", "terngrad", "natural")


def kernels(numel: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Calls on a gradient of so many elements, and the bytes that each reads and writes."""
    c: Any = load_extension().compress
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator)
    residual = torch.randn(numel, generator=generator) * 0.1
    out, k = torch.zeros(numel), int(numel * RATIO)
    keep = residual.clone()

    def fresh(name: str, *arguments: Any) -> Callable[[], object]:
        """Elements pile up in a residual: beta keeps it where it is."""
        return partial(getattr(c, name), grad, keep, *arguments, beta=0.5)

    values, indices = c.topk(grad, None, k)
    packed, scale = c.signs(grad, None, True)
    codes, norms = c.qsgd(grad, None, 127, 5, bucket_size=128)
    ternary, _ = c.terngrad(grad, None, 2.5, 5)
    powers = c.natural(grad, None, 5)
    rows = torch.stack([packed] * 4)
    full, once = 4.0 * numel, 12.0 * numel  # a tensor; gradient and residual in, residual out
    twice = once + 2 * full  # the residual is read and written again
    return {
        "topk": (fresh("topk", k), once),
        "topk, no residual": (partial(c.topk, grad, None, k), full),
        "threshold": (fresh("threshold", 2.5), once),
        "signs": (fresh("signs", True), twice + numel / 8),
        "signs, no residual": (partial(c.signs, grad, None, False), full + numel / 8),
        "onebit": (fresh("onebit"), twice + numel / 8),
        "unpack_signs_": (
            partial(c.unpack_signs_, out, [packed], [scale], False), full + numel / 8
        ),
        "unpack_signs_ of 8": (
            partial(c.unpack_signs_, out, [packed] * 8, [scale] * 8, False), full + numel
        ),
        "vote_signs_ of 4": (partial(c.vote_signs_, out, rows), full + numel / 2),
        "qsgd": (
            partial(c.qsgd, grad, keep, 127, 5, 0, 0.5, 1.0, 128), once + numel
        ),
        "qsgd, one norm": (partial(c.qsgd, grad, keep, 127, 5, 0, 0.5, 1.0, 0), twice + numel),
        "unqsgd_": (
            partial(c.unqsgd_, out, [codes], [norms], 127, 1.0, 128), full + numel
        ),
        "unqsgd_ of 8": (
            partial(c.unqsgd_, out, [codes] * 8, [norms] * 8, 127, 1.0, 128), full + 8 * numel
        ),
        "terngrad": (partial(c.terngrad, grad, keep, 2.5, 5, 0, 0.5), twice + numel / 4),
        "unterngrad_": (partial(c.unterngrad_, out, [ternary], [scale]), full + numel / 4),
        "natural": (partial(c.natural, grad, keep, 5, 0, 0.5), once + numel),
        "unnatural_": (partial(c.unnatural_, out, [powers]), full + numel),
        "dgc_accumulate_": (
            partial(c.dgc_accumulate_, out, torch.zeros(numel), grad, 0.9), 5 * full
        ),
        "scatter_": (partial(c.scatter_, out, [indices], [values]), full + 8.0 * k),
        "scatter_ of 8": (partial(c.scatter_, out, [indices] * 8, [values] * 8), full + 64.0 * k),
    }  # fmt: skip


def check() -> None:
    c: Any = load_extension().compress
    grad = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    for name, arguments in (
        ("topk", (2000,)), ("threshold", (2.5,)), ("signs", (True,)), ("onebit", ()),
        ("qsgd", (127, 5)), ("terngrad", (2.5, 5)), ("natural", (5,)),
    ):  # fmt: skip
        mine = getattr(c, name)(grad, None, *arguments)
        theirs = getattr(_reference, name)(grad, None, *arguments)
        if isinstance(mine, torch.Tensor):
            mine, theirs = (mine,), (theirs,)
        for one, other in zip(mine, theirs):
            same = torch.isclose(one.double(), other.double(), rtol=1e-5).double().mean()
            harness.require(float(same) > 0.999, f"{name} differs from torch's operations")


def plain(numbers: torch.Tensor, to: torch.Tensor, moved: float) -> Callable[[], object]:
    """Reads and writes so many bytes, over and over the same tensors."""
    half = int(moved / 8)
    whole, rest = divmod(half, numbers.numel())

    def run() -> None:
        for _ in range(whole):
            torch.mul(numbers, 1.5, out=to)
        if rest:
            torch.mul(numbers[:rest], 1.5, out=to[:rest])

    return run


@functools.cache
def checked_kernels(numel: int) -> tuple[dict[str, tuple[Callable[[], object], float]], Any, Any]:
    """All, which share their tensors, and two tensors to copy between."""
    torch.set_num_threads(1)
    check()
    return kernels(numel), torch.ones(numel), torch.ones(numel)


def measure(context: Context, args: argparse.Namespace, name: str) -> list[Row]:
    size = args.sizes[0]
    numel = size // 4
    found, x, y = checked_kernels(numel)
    call, moved = found[name]
    arms = {KERNEL: call, harness.COPY: plain(x, y, moved)}
    if name == "topk":
        arms[TOPK] = partial(torch.topk, x.copy_(torch.randn(numel)).abs(), int(numel * RATIO))
    return harness.measure(context, arms, case=name, size=size, rounds=args.rounds)


def bars(size: int = SIZE) -> list[Bar]:
    found = [Bar(1, "topk", KERNEL, size, TOPK, at_least=5)]
    for name in kernels(1000):
        share = 0.4 if name in DRAWN else 0.7
        found.append(Bar(1, name, KERNEL, size, harness.COPY, at_least=share))
    return found


def main() -> int:
    parser = harness.Parser(__doc__, backends="fused", sizes=str(SIZE), rounds=7)
    parser.set_defaults(world_size=1)
    args = parser.parse_args()
    rows = harness.run(measure, args, list(kernels(1000)))
    return harness.finish("compress_kernels", rows, args, bars=bars(args.sizes[0]))


if __name__ == "__main__":
    sys.exit(main())
