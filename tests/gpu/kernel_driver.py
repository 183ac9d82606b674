"""Runs every kernel once, or those of the direct path, for compute-sanitizer.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes each tensor an allocation of its own, so that a step beyond
one is seen.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/kernel_driver.py
    compute-sanitizer --tool racecheck python tests/gpu/kernel_driver.py direct-in-turn
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from gpu_checks import direct, kernels  # noqa: E402

CHECKS = {
    "kernels": lambda: kernels.run_all(None),
    "direct": lambda: direct.run_all(None),
    "direct-in-turn": lambda: direct.run_all(None, in_turn=True),
}


def main(name: str = "kernels") -> int:
    print(f"{CHECKS[name]()} checks of kernels passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
