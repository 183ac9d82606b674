"""All parameters of a unit in one call, against one parameter after the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fusedpg._registration import load_extension
from fusedpg.compress import _each, compressors, memories
from fusedpg.compress._base import WHOLE_UNITS
from fusedpg.compress._each import EachParameter, EachParametersMemory
from fusedpg.compress._piece import Piece
from test_compress_golden import COMPRESSORS, MEMORIES, RANKS, SPARSE, Rank, Steps, runs_of

SIZES = (1, 7, 64, 129, 1000, 40_007, 3)
IN_UNITS = [name for name, make in COMPRESSORS.items() if type(make()) in WHOLE_UNITS]
PAIRS = [(c, m) for c in IN_UNITS for m in MEMORIES if not m.startswith("dgc") or c in SPARSE]


def steps(
    compressor: str, memory: str, bad: bool, in_parts: bool, pending: bool, looks: bool
) -> list[torch.Tensor]:
    """Results and what is kept. ``pending``: what can be left of a step is left to the next one,
    unless somebody ``looks``."""
    training = Steps(SIZES, torch.float32, 4, bad, pending, in_parts, looks)
    _, results, owes = training.run(
        EachParameter(COMPRESSORS[compressor]()), lambda: EachParametersMemory(MEMORIES[memory]())
    )
    signs = compressor in ("efsignsgd", "onebit") and memory != "none"
    assert owes == (signs and pending and not looks)
    return results


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
        store = Rank(SIZES, torch.float32)
        keeper = EachParametersMemory(memories.ResidualMemory())
        total, found = sum(SIZES), []
        runs = runs_of(SIZES)
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
    cpu = torch.device("cpu")
    piece = Piece("0", 8, runs_of([4, 4]), 0, 1, 1, torch.float32, cpu, lambda *_: torch.empty(0))
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
