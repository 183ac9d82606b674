"""A folder for ``PYTHONPATH``: in it ``import horovod`` finds this package's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def python_path(environ: Mapping[str, str]) -> str:
    """``PYTHONPATH`` with this folder before what is there."""
    before = environ.get("PYTHONPATH", "")
    here = str(Path(__file__).parent)
    return os.pathsep.join([here, *[part for part in before.split(os.pathsep) if part]])
