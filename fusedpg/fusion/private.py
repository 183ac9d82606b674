"""Directories of the cache, which belong to the user alone."""

from __future__ import annotations

import os
from pathlib import Path

from fusedpg.fusion.errors import FusionError


def directory(configured: str, name: str) -> Path:
    """A directory of the cache.

    Raises:
        FusionError: where there is none, or others could write to it.
    """
    if not configured:
        raise FusionError("there is no cache directory: set HOME or FUSEDPG_CACHE_DIR")
    result = Path(configured) / name
    result.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = result.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise FusionError(f"{result} belongs to, or is written by, other users")
    return result
