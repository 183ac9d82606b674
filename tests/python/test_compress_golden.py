"""The bytes that compressors send and what comes of them, as they were when they were recorded.

``python tests/python/test_compress_golden.py --record`` writes the hashes anew, which is right only
where messages are meant to change: ranks of two versions would not understand each other.

The hashes depend on neither the instruction set nor the number of threads. The extension keeps
float32 the same by itself. The other types are torch's operations, whose sums depend on both; their
gradients are therefore multiples of 1/16 of which every sum is exact in float64. That leaves out
what no input makes exact: the standard deviation of TernGrad's clipping, QSGD's float64 norms, a
second step, and PowerSGD, which multiplies matrices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusedpg._by_parameter import ByParameter, Kept
from fusedpg.compress import Compensated, Compressor, Piece, compressors, memories
from fusedpg.compress._each import EachParameter, EachParametersMemory
from fusedpg.compress._piece import Parts, Run, Runs

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "compress.json"
SIZES = (1, 7, 1000, 40_001)
RANKS = 3
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "none": compressors.NoneCompressor,
    "fp16": compressors.FP16,
    "topk": lambda: compressors.TopK(0.1),
    "dgc": lambda: compressors.DGC(0.01),
    "randomk": lambda: compressors.RandomK(0.1),
    "threshold": lambda: compressors.Threshold(0.5),
    "guarded_threshold": lambda: compressors.GuardedThreshold(1.5, 0.4),
    "qsgd": compressors.QSGD,
    "qsgd wide": lambda: compressors.QSGD(300, 0),
    "terngrad": compressors.TernGrad,
    "terngrad unclipped": lambda: compressors.TernGrad(0.0),
    "natural": compressors.Natural,
    "signsgd": compressors.SignSGD,
    "signum": lambda: compressors.Signum(0.5),
    "efsignsgd": compressors.EFSignSGD,
    "onebit": compressors.OneBit,
}
MEMORIES: dict[str, Callable[[], memories.Memory]] = {
    "none": memories.NoneMemory,
    "residual": lambda: memories.ResidualMemory(0.5, 2.0),
    "efsignsgd": lambda: memories.EFSignSGDMemory(0.5),
    "dgc": lambda: memories.DGCMemory(0.5),
    "dgc clipped": lambda: memories.DGCMemory(0.5, 2.0, False),
}
SPARSE = ("topk", "dgc", "randomk", "threshold", "guarded_threshold")


def gradient(numel: int, dtype: torch.dtype, seed: int, bad: bool = False) -> torch.Tensor:
    random = np.random.RandomState(seed)
    if dtype == torch.float32:
        x = 3 * random.random_sample(numel) - 1.5
        values = torch.from_numpy((x * x * x).astype(np.float32))
    else:
        values = torch.from_numpy(random.randint(-40, 41, numel) / 16).to(dtype)
    if bad and numel > 1:
        values[numel // 2], values[numel - 1] = math.inf, math.nan
    return values


def digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tensor.numel()}".encode())
        if tensor.is_floating_point():  # which NaN it is depends on the processor
            tensor = torch.where(tensor.isnan(), 0, tensor)
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class Rank:
    """What a rank keeps of parameters."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._kept = ByParameter()
        self._parameters = [torch.zeros(size, dtype=dtype) for size in sizes]
        self._dtype = dtype

    def unsettled(self, name: str) -> Kept:
        orders = [None] * len(self._parameters)
        cpu = torch.device("cpu")
        return self._kept.unsettled(name, self._parameters, orders, self._dtype, cpu)

    def state(self, name: str, begin: int, end: int, shared: Any) -> torch.Tensor:
        kept = self.unsettled(name)
        kept.settle()
        return kept.tensor[begin:end]

    def saved(self) -> list[torch.Tensor]:
        kept = self._kept
        found = [kept.get(name, p) for name in kept.names() for p in self._parameters]
        return [tensor.clone() for tensor in found if tensor is not None]

    def owes(self) -> bool:
        """Whether anything of a step is left to the next one."""
        every = itertools.chain.from_iterable(self._kept._flats.values())
        return any(kept.pending is not None for kept in every)


def runs_of(sizes: Sequence[int]) -> Runs:
    """Those of whole parameters of these sizes."""
    return Runs(Run(f"p{n}", 3 * n, 0, size, torch.Size([size])) for n, size in enumerate(sizes))


@dataclasses.dataclass
class Steps:
    """Some steps of training with these parameters.

    Attributes:
        bad: rank 1 has an infinity and a NaN in the first step.
        pending: what can be left of a step is left to the next one.
        in_parts: gradients and results are not in one tensor.
        looks: what is kept is read after each step.
    """

    sizes: Sequence[int]
    dtype: torch.dtype = torch.float32
    count: int = 3
    bad: bool = False
    pending: bool = False
    in_parts: bool = False
    looks: bool = False

    def run(
        self, compressor: Compressor, make_memory: Callable[[], memories.Memory]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
        """All that is sent, all results and what is kept, and whether the last step owes any."""
        sizes, dtype, total = self.sizes, self.dtype, sum(self.sizes)
        runs = Runs(
            Run(f"p{n}", 3 * n, 0, size, torch.Size([size])) for n, size in enumerate(sizes)
        )
        keepers = [make_memory() for _ in range(RANKS)]
        ranks = [Rank(sizes, dtype) for _ in range(RANKS)]
        sent, results = [], []
        for step in range(self.count):
            payloads = []
            for number, (keeper, rank) in enumerate(zip(keepers, ranks)):
                piece = Piece(
                    "0", total, runs, number, RANKS, 17 + step, dtype, torch.device("cpu"),
                    rank.state, kept=rank.unsettled if self.pending else None,
                )  # fmt: skip
                bad = self.bad and (step, number) == (0, 1)
                grad = gradient(total, dtype, 10 * step + number, bad)
                payload, at = keeper.encode(compressor, self._given(grad), piece)
                sent += [tensor.clone() for tensor in payload]
                payloads.append([tensor.clone() for tensor in payload])
                if self.looks:
                    results += rank.saved()
            out = torch.full((total,), 7.0, dtype=dtype)
            compressor.combine(self._given(out), payloads, keepers[0].scale, at)
            results.append(out)
        owes = any(rank.owes() for rank in ranks)
        for rank in ranks:
            results += rank.saved()
        return sent, results, owes

    def _given(self, whole: torch.Tensor) -> Any:
        each = list(whole.split(list(self.sizes)))
        return Parts(each, each) if self.in_parts else whole


def single(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """One gradient, as GRACE's functions have it and as communicators do."""
    dtype = DTYPES[kind]
    for numel in (0, *SIZES):
        compressor = COMPRESSORS[name]()
        grad = gradient(numel, dtype, 3)
        if name != "signum":
            tensors, context = compressor.compress(grad, "p")
            yield f"compress {numel}", digest(tensors)
            if name != "none":
                yield f"decompress {numel}", digest([compressor.decompress(tensors, context)])
        cpu, runs = torch.device("cpu"), Runs((Run("p", 1, 0, numel, torch.Size([numel])),))
        rank = Rank([numel], dtype)
        piece = Piece("p", numel, runs, 1, RANKS, (5 << 40) + numel, dtype, cpu, rank.state)
        residual = gradient(numel, dtype, 4)
        for given in (
            Compensated(grad),
            Compensated(grad, None, 1.0, 0.5),
            Compensated(grad, residual.clone(), 0.5, 2.0),
            Compensated(None, residual.clone()),
        ):
            payload, at = compressor.encode(given, piece)
            yield f"encode {numel}", digest(payload)
            if given.residual is not None:
                yield f"residual {numel}", digest([given.residual])
            out = torch.full((numel,), 7.0, dtype=dtype)
            compressor.combine(out, [[t.clone() for t in payload]] * RANKS, 0.5, at)
            yield f"combine {numel}", digest([out])


def trained(name: str, kind: str) -> Iterator[tuple[str, str]]:
    """Each size by itself, and all of them as one unit."""
    dtype = DTYPES[kind]
    exact = kind == "fp32"
    for memory, make in MEMORIES.items():
        if memory.startswith("dgc") and (name not in SPARSE or not exact):
            continue
        for bad in (False, True)[: 1 + exact]:
            count = 3 if exact else 1
            for numel in SIZES:
                found = Steps([numel], dtype, count, bad).run(COMPRESSORS[name](), make)
                for what, tensors in zip(("sent", "results"), found):
                    yield f"{memory} {numel} {what}", digest(tensors)
            for pending in (False, True):
                unit = Steps(SIZES, dtype, count, bad, pending, in_parts=pending)
                found = unit.run(
                    EachParameter(COMPRESSORS[name]()),
                    lambda: EachParametersMemory(make()),  # noqa: B023
                )
                for what, tensors in zip(("sent", "results"), found):
                    yield f"{memory} unit {what}", digest(tensors)


def hashes(name: str, kind: str) -> dict[str, str]:
    """One for all results of a sort."""
    found: dict[str, list[str]] = {}
    for form in (single, trained):
        for what, value in form(name, kind):
            found.setdefault(what, []).append(value)
    return {
        what: hashlib.sha256(" ".join(values).encode()).hexdigest()[:16]
        for what, values in found.items()
    }


# Sums that processors round differently: torch's deviations, and its `alpha=` of short types.
LEFT_OUT = [("terngrad", kind) for kind in ("fp16", "bf16", "fp64")]
LEFT_OUT += [("fp16", kind) for kind in ("fp16", "bf16")]
# MKL takes the roots of torch's float64 norms, which are not exact on every processor.
LEFT_OUT += [(name, "fp64") for name in ("qsgd", "qsgd wide")]
CASES = [(name, kind) for name in COMPRESSORS for kind in DTYPES if (name, kind) not in LEFT_OUT]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_messages_are_the_recorded_ones(name: str, kind: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert hashes(name, kind) == golden[f"{name} {kind}"]


def main() -> None:
    if sys.argv[1:] != ["--record"]:
        raise SystemExit(__doc__)
    found = {f"{name} {kind}": hashes(name, kind) for name, kind in CASES}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
