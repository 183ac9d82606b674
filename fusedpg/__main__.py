"""``python -m fusedpg`` prints what this installation is made of."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

import fusedpg
from fusedpg._registration import load_extension


def main() -> int:
    module = load_extension()
    from fusedpg import _build_info

    kernels = Path(__file__).with_name("libfusedpg_cuda.so")
    cuda = "kernels on torch's NCCL" if kernels.exists() else "not built (no nvcc was found)"
    rows = {
        "fusedpg": fusedpg.__version__,
        "torch": f"{torch.__version__} (built for {_build_info.torch_full_version})",
        "python": platform.python_version(),
        "compiler": _build_info.cxx_compiler,
        "kernels": module.isa(),
        "engines": f"cpu: shared memory, gloo between hosts; cuda: {cuda}",
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
