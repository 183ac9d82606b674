"""Launches of the kernels of libfusedpg_cuda.so on tensors: gpu_table.cpp, which is built beside
those kernels, or beside their fake.

Nothing here needs torch.distributed: a launch sees one rank of a group that need not exist.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

BUILD = Path(os.environ.get("FUSEDPG_BUILD_DIR") or Path(__file__).parents[1] / "build/cmake")


@functools.cache
def _module() -> ModuleType:
    path = BUILD / "fusedpg_gpu_table.so"
    if not path.exists():
        raise ImportError(
            f"{path} is missing. In a checkout run `pip install --no-build-isolation -e .` where "
            "nvcc is on PATH, or `make fake-gpu` for the fake."
        )
    spec = importlib.util.spec_from_file_location("fusedpg_gpu_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name: str) -> Any:
    """What the module has. It is loaded late: tests that are skipped are imported without it."""
    return getattr(_module(), name)


def library() -> Path:
    """Where the engine looks for the kernels."""
    named = os.environ.get("FUSEDPG_CUDA_LIB")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("fusedpg")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("fusedpg is not installed")
    return Path(spec.submodule_search_locations[0]) / "libfusedpg_cuda.so"


def load() -> Any:
    """The kernels' table; raises where there is none, or it is of another version."""
    return _module().load_api(str(library()))
