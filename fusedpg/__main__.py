"""``python -m fusedpg`` prints what this installation is made of."""

from __future__ import annotations

import platform
import sys

import torch

import fusedpg
from fusedpg._registration import load_extension


def main() -> int:
    module = load_extension()
    from fusedpg import _build_info

    rows = {
        "fusedpg": fusedpg.__version__,
        "torch": f"{torch.__version__} (built for {_build_info.torch_full_version})",
        "python": platform.python_version(),
        "compiler": _build_info.cxx_compiler,
        "kernels": module.isa(),
        "engines": "cpu: shared memory, gloo between hosts; cuda: not built",
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
