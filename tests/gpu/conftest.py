"""Tests that need a GPU; they share one. Elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import harness
from gpu_checks.device import DEVICE, FAKE
from ranks import Ranks, pool

HERE = Path(__file__).parent


def _reason() -> str | None:
    if not harness.IS_FUSED:
        return "about the fused backend's own guarantees"
    if not FAKE and not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds no CUDA device"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_gpu: not with a fake one (FUSEDPG_TEST_DEVICE=cpu)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason()
    for item in items:
        if HERE not in item.path.parents:
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif FAKE and item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a real GPU, not {DEVICE}"))


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"world{size}")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """1, 2, 3 and 4 ranks in turn."""
    return pool(request.param)


@pytest.fixture
def pair() -> Ranks:
    return pool(2)


@pytest.fixture
def trio() -> Ranks:
    return pool(3)
