"""Generated kernels as modules of the GPU's driver: misuse, their ends, masks; on the fake GPU.

That the tests see a wrong kernel is seen with faults put into the generated text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import harness
from checks import coconet, cuda_modules, cuda_programs

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]


def gpus(size: int, **options: Any) -> harness.Workers:
    library = harness.fake_gpu()["env"]["FUSEDPG_CUDA_LIB"]
    return harness.pool(size, **harness.fake_gpu(FUSEDPG_NVRTC_LIB=library) | options)


def streams(size: int) -> harness.Workers:
    """Their tensors are on GPUs as torch sees them."""
    return gpus(size, options={"cuda_chunk_bytes": 1 << 10})


def test_misuse() -> None:
    streams(1).run(cuda_modules.misused)


@pytest.mark.parametrize("kind", ["program", "destroyed", "aborted"])
def test_kept_while_it_runs(kind: str) -> None:
    streams(1).run(cuda_modules.kept_while_it_runs, kind)


@pytest.mark.parametrize("size", [1, 2])
def test_kept_for_a_graph(size: int) -> None:
    streams(size).run(cuda_modules.kept_for_a_graph)


def test_unloaded() -> None:
    gpus(2).run(cuda_modules.unloaded)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, torch.float32),
        (3, torch.bfloat16),
        harness.slow(1, torch.float16),
        harness.slow(2, torch.float64),
    ],
    ids=str,
)
def test_masks(size: int, dtype: torch.dtype) -> None:
    assert len(set(gpus(size).run(cuda_modules.masks, dtype))) == 1, "ranks have other bits"


def test_a_product_in_chunks() -> None:
    gpus(2).run(coconet.generated, "overlapped_on_gpu")


def test_one_has_none() -> None:
    gpus(2).run(cuda_modules.one_has_none)


class Mutant(NamedTuple):
    what: str
    old: str
    new: str
    check: Any
    given: tuple[Any, ...] = ()


EXACT = (cuda_programs.exact, (torch.float32, "add"))
MASKS = (cuda_modules.masks, (torch.float32,))
MUTANTS = [
    Mutant("tail is one short", "if (i < count) {", "if (i + 1 < count) {", *EXACT),
    Mutant("all blocks at one tile", "u64(blockIdx.x) * kTile", "u64(0)", *EXACT),
    Mutant(
        "ties away from zero",
        "0x7fff + (bits >> 16 & 1)",
        "0x8000",
        cuda_programs.exact,
        (torch.bfloat16, "mul"),
    ),
    Mutant("dropout by the slice's index", "(seed0, begin + i)", "(seed0, i)", *MASKS),
    Mutant("rows from the slice's beginning", "rows(begin + i,", "rows(i,", *MASKS),
    Mutant("a round less", "round < 10", "round < 9", *MASKS),
    Mutant("NaN that is not handed on", "a != a || a > b", "a > b", *MASKS),
    Mutant("a flag that nobody reads", "if (*skip)", "if (false)", cuda_modules.one_has_none),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_caught(mutant: Mutant) -> None:
    given = mutant.old, mutant.new, mutant.check, *mutant.given
    assert any(gpus(2).run(cuda_modules.mutated, *given)), mutant.what
