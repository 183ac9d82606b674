"""``python -m fusedpg [info | check | bench]``: what is installed, whether it works, how fast."""

from __future__ import annotations

import argparse
import platform
import sys
from types import ModuleType

import torch

import fusedpg
from fusedpg._registration import built_for, load_extension


def kernels(module: ModuleType, why_not: str) -> str:
    """Whether the engine finds the kernels for CUDA, and can load them."""
    try:
        module._load_cuda_kernels()
    except RuntimeError as error:
        return f"kernels not built: {why_not}" if why_not else str(error)
    return "kernels built"


def cuda(module: ModuleType, why_not: str) -> str:
    """What CUDA tensors need, and which of it is here."""
    gpus = torch.cuda.device_count() if torch.version.cuda else 0
    parts = (
        kernels(module, why_not),
        f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch has no CUDA",
        f"{gpus} GPU{'s' if gpus > 1 else ''} found" if gpus else "no GPU found",
    )
    return "; ".join(parts)


def info() -> int:
    module = load_extension()
    from fusedpg import _build_info, _serve_gloo

    rows = {
        "fusedpg": fusedpg.__version__,
        "torch": f"{torch.__version__} (built for {', '.join(built_for())})",
        "python": platform.python_version(),
        "compiler": _build_info.cxx_compiler,
        "kernels": module.isa(),
        "cpu": "shared memory",
        "hosts": "tcp",
        "cuda": cuda(module, getattr(_build_info, "cuda_why_not", "")),
        "gloo": _serve_gloo.describe(),
    }
    for name, value in rows.items():
        print(f"{name:10} {value}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedpg", description="fusedpg's doctor")
    words = {
        "info": "what this installation is made of (the default)",
        "check": "two ranks run what can run here, against torch's numbers; the exit status says "
        "whether all was right",
        "bench": "a short table of times, beside Gloo's and a copy's",
    }
    commands = parser.add_subparsers(dest="command")
    for name, text in words.items():
        commands.add_parser(name, help=text, description=text)
    command = parser.parse_args().command
    try:
        load_extension()
    except ImportError as error:
        sys.exit(str(error))
    if command in (None, "info"):
        return info()
    from fusedpg import _doctor

    return _doctor.run_check() if command == "check" else _doctor.run_bench()


if __name__ == "__main__":
    sys.exit(main())
