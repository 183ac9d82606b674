"""Fused functions as kernels that NVRTC compiles."""

from __future__ import annotations

import pytest
import torch

from checks.cuda_programs import TYPES
from gpu_checks import programs
from ranks import Ranks

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_exact_operations(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(programs.exact, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_transcendental_operations(pair: Ranks, dtype: torch.dtype) -> None:
    print(pair.run(programs.close, dtype)[0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_masks(pair: Ranks, dtype: torch.dtype) -> None:
    assert len(set(pair.run(programs.masks, dtype))) == 1, "ranks have other bits"
