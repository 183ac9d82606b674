"""What ranks run on one GPU: functions of a Context, with no test framework in them."""

import sys
from pathlib import Path

# The description of the kernel library is the benchmarks'; neither is part of the package.
_BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.append(_BENCHMARKS)

import _gpu_table as table  # noqa: E402

__all__ = ["table"]
