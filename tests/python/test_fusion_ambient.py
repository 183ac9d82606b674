"""Fused functions under torch's modes: autocast, no_grad, default types and devices."""

from __future__ import annotations

import pytest
import torch

import harness
from checks import ambient

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.bfloat16),
        *(
            harness.slow(*case)
            for case in [(1, torch.bfloat16), (1, torch.float32), (2, torch.float32)]
        ),
        *(harness.slow(size, torch.float64) for size in (1, 2)),
    ],
)
def test_autocast(world_size: int, dtype: torch.dtype) -> None:
    harness.pool(world_size).run(ambient.functions, dtype, timeout=240)  # dozens are compiled


@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
def test_autocast_of_blocks(world_size: int) -> None:
    harness.pool(world_size).run(ambient.blocks)


@pytest.mark.parametrize(
    "check",
    ["threads_and_devices", "under_compile", "managers", "in_place", "mistakes", "magnitudes"],
)
def test_on_ranks(check: str) -> None:
    harness.pool(2).run(getattr(ambient, check))
