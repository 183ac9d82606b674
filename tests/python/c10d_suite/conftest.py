"""Keeps the tests whose names stand in the file C10D_SUITE_SELECT names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection = os.environ.get("C10D_SUITE_SELECT")
    if selection is None:
        return  # the project's own tests; run.py has not been asked
    wanted = set(Path(selection).read_text().split())
    kept = [item for item in items if item.name in wanted]
    missing = wanted - {item.name for item in kept}
    if missing:
        raise pytest.UsageError(f"torch has no such tests: {sorted(missing)}")
    config.hook.pytest_deselected(items=[item for item in items if item.name not in wanted])
    items[:] = kept
