"""Keeps the tests whose names stand in the file C10D_SUITE_SELECT names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(Path(os.environ["C10D_SUITE_SELECT"]).read_text().split())
    kept = [item for item in items if item.name in wanted]
    missing = wanted - {item.name for item in kept}
    if missing:
        raise pytest.UsageError(f"torch has no such tests: {sorted(missing)}")
    config.hook.pytest_deselected(items=[item for item in items if item.name not in wanted])
    items[:] = kept
