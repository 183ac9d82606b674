"""All parameters of a unit in one call, against one parameter after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedpg._by_parameter import ByParameter, Kept
from fusedpg._registration import load_extension
from fusedpg.compress import _each, compressors, memories
from fusedpg.compress._each import EachParameter, EachParametersMemory
from fusedpg.compress._piece import Parts, Piece, Run, Runs

SIZES = (1, 7, 64, 129, 1000, 40_007, 3)
RANKS = 3
COMPRESSORS: dict[str, Callable[[], Any]] = {
    "topk": lambda: compressors.TopK(0.1),
    "dgc": lambda: compressors.DGC(0.01),
    "randomk": lambda: compressors.RandomK(0.1),
    "guarded_threshold": lambda: compressors.GuardedThreshold(0.5, 0.4),
    "qsgd": compressors.QSGD,
    "qsgd wide": lambda: compressors.QSGD(300, 0),
    "terngrad": compressors.TernGrad,
    "natural": compressors.Natural,
    "efsignsgd": compressors.EFSignSGD,
    "onebit": compressors.OneBit,
}
MEMORIES: dict[str, Callable[[], Any]] = {
    "none": memories.NoneMemory,
    "residual": lambda: memories.ResidualMemory(0.9, 0.5),
    "efsignsgd": lambda: memories.EFSignSGDMemory(0.5),
    "dgc": memories.DGCMemory,
    "dgc, clipped": lambda: memories.DGCMemory(0.5, 2.0, False),
}
SPARSE = ("topk", "dgc", "randomk", "guarded_threshold")
PAIRS = [(c, m) for c in COMPRESSORS for m in MEMORIES if not m.startswith("dgc") or c in SPARSE]


class Store:
    """What a rank keeps of parameters of these sizes."""

    def __init__(self) -> None:
        self._by_parameter = ByParameter()
        self._parameters = [torch.zeros(size) for size in SIZES]

    def unsettled(self, name: str) -> Kept:
        orders = [None] * len(SIZES)
        cpu = torch.device("cpu")
        return self._by_parameter.unsettled(name, self._parameters, orders, torch.float32, cpu)

    def state(self, name: str, begin: int, end: int, shared: Any) -> torch.Tensor:
        kept = self.unsettled(name)
        kept.settle()
        return kept.tensor[begin:end]

    def saved(self) -> list[torch.Tensor]:
        """As in a checkpoint."""
        found = []
        for name in self._by_parameter.names():
            found += [self._by_parameter.get(name, p) for p in self._parameters]
        return [tensor.clone() for tensor in found if tensor is not None]


def steps(
    compressor: str, memory: str, bad: bool, in_parts: bool, pending: bool, looks: bool
) -> list[torch.Tensor]:
    """Results and what is kept, of as many ranks as there are. ``pending``: what can be left of a
    step is left to the next one, unless somebody ``looks``."""
    total = sum(SIZES)
    runs = Runs(Run(f"p{n}", 3 * n, 0, size, torch.Size([size])) for n, size in enumerate(SIZES))
    method = EachParameter(COMPRESSORS[compressor]())
    keepers = [EachParametersMemory(MEMORIES[memory]()) for _ in range(RANKS)]
    stores = [Store() for _ in range(RANKS)]
    found = []
    for step in range(4):
        payloads = []
        for rank, (keeper, store) in enumerate(zip(keepers, stores)):
            piece = Piece(
                "0", total, runs, rank, RANKS, 17 + step, torch.float32, torch.device("cpu"),
                store.state, kept=store.unsettled if pending else None,
            )  # fmt: skip
            generator = torch.Generator().manual_seed(10 * step + rank)
            grad = torch.randn(total, generator=generator)
            if bad and (step, rank) == (1, 1):
                grad[900], grad[20_000] = math.inf, math.nan
            parts: Any = list(grad.split(SIZES))
            payload, at = keeper.encode(method, Parts(parts, parts) if in_parts else grad, piece)
            payloads.append(payload)
            if looks:
                found += store.saved()
        out = torch.full((total,), 7.0)
        parts = list(out.split(SIZES))
        method.combine(Parts(parts, parts) if in_parts else out, payloads, keepers[0].scale, at)
        found.append(out)
    signs = compressor in ("efsignsgd", "onebit") and memory != "none"
    for store in stores:
        if signs:
            left = store.unsettled("residual").pending is not None
            assert left == (pending and not looks)
        found += store.saved()
    return found


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize(("compressor", "memory"), PAIRS)
def test_same_bits_as_one_after_the_other(
    compressor: str, memory: str, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(COMPRESSORS[compressor]())
    calls = []
    original = kind.encode_unit
    monkeypatch.setattr(
        kind, "encode_unit", lambda *arguments: calls.append(1) or original(*arguments)
    )
    units = {
        looks: [
            steps(compressor, memory, bad, in_parts, pending, looks)
            for in_parts in (False, True)
            for pending in (False, True)
        ]
        for looks in (False, True)
    }
    assert len(calls) == 8 * 4 * RANKS
    monkeypatch.setattr(_each, "WHOLE_UNITS", frozenset())
    for looks, every in units.items():
        wanted = steps(compressor, memory, bad, True, False, looks)
        for got in every:
            for mine, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert len(calls) == 8 * 4 * RANKS


def test_pending_of_another_compressor() -> None:
    """What is kept goes from compressor to compressor, whatever is pending."""

    def run(pending: bool) -> list[torch.Tensor]:
        store, keeper = Store(), EachParametersMemory(memories.ResidualMemory())
        total, found = sum(SIZES), []
        runs = Runs(Run(f"p{n}", n, 0, size, torch.Size([size])) for n, size in enumerate(SIZES))
        for step, name in enumerate(("efsignsgd", "onebit", "topk", "onebit", "efsignsgd", "qsgd")):
            piece = Piece(
                "0", total, runs, 0, 1, step, torch.float32, torch.device("cpu"), store.state,
                kept=store.unsettled if pending else None,
            )  # fmt: skip
            grad = torch.randn(total, generator=torch.Generator().manual_seed(step))
            found += keeper.encode(EachParameter(COMPRESSORS[name]()), grad, piece)[0]
        return [*found, *store.saved()]

    for mine, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_own_subclass_is_called_for_each_parameter() -> None:
    class Mine(compressors.TopK):
        pass

    keeper, method = EachParametersMemory(memories.NoneMemory()), EachParameter(Mine(0.5))
    runs = Runs(Run(f"p{n}", n, 0, 4, torch.Size([4])) for n in range(2))
    piece = Piece(
        "0", 8, runs, 0, 1, 1, torch.float32, torch.device("cpu"), lambda *_: torch.empty(0)
    )
    payload, at = keeper.encode(method, torch.arange(8.0), piece)
    assert [tensor.tolist() for tensor in payload] == [[2, 3], [2, 3], [6, 7], [2, 3]]
    assert len(at.own) == 2


C = load_extension().compress
V = torch.zeros(8)
ONE = torch.zeros(1)
INDEX = torch.zeros(1, dtype=torch.int32)
BYTE = torch.zeros(1, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: C.topk([V], None, [1], numels=[4, 4]),
        lambda: C.topk([V], None, [1, 5], numels=[4, 4]),
        lambda: C.topk([V], None, [1, 1], numels=[4, 5]),
        lambda: C.topk([V[:3], V[3:]], None, [1, 1], numels=[4, 4]),
        lambda: C.topk([V], V[1:], [1, 1], numels=[4, 4]),
        lambda: C.topk(None, None, [1, 1], numels=[4, 4]),
        lambda: C.topk([V], None, [0, 0], numels=[-4, 12]),
        lambda: C.topk([V, V], None, 1),
        lambda: C.signs([V.double()], None, True, numels=[8]),
        lambda: C.signs([V], V, True, numels=[8], owes=True),
        lambda: C.onebit([V], V, numels=[4, 4], owed=ONE),
        lambda: C.subtract_signs_(V, [4, 4], torch.zeros(2)),
        lambda: C.threshold([V], None, math.nan, [0], numels=[8]),
        lambda: C.qsgd([V], None, 127, [], bucket_size=128, numels=[8]),
        lambda: C.pick([V], None, INDEX + 4, numels=[4, 4], counts=[1, 0]),
        lambda: C.drawn([4], [5], [1]),
        lambda: C.zero_at_(V, INDEX - 1, [4, 4], [0, 1]),
        lambda: C.dgc_accumulate_(V, V, [V], 0.9, [1.0], [4, 4]),
        lambda: C.scatter_([V], [INDEX + 4], [ONE], 1.0, [4, 4], [[1, 0]]),
        lambda: C.scatter_([V], [INDEX - 1], [ONE], 1.0, [4, 4], [[0, 1]]),
        lambda: C.scatter_([V], [INDEX], [ONE], 1.0, [4, 4], [[1, 1]]),
        lambda: C.unpack_signs_([V], [BYTE], [ONE], False, 1.0, [4, 4]),
        lambda: C.unqsgd_([V], [torch.zeros(8)], [ONE], 127, numels=[8]),
        lambda: C.unnatural_([V], [], numels=[8]),
    ],
)
def test_arguments_are_checked(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"fused: compress\."):
        call()
