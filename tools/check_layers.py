"""Checks the house rule that a compiler does not: who includes whom.

The rooms of csrc/ are described in docs/develop/architecture.md. Run: python tools/check_layers.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What each room may include besides itself; a room below never knows one above.
MAY_INCLUDE: dict[str, set[str]] = {
    "c10d": {
        "aggregate",
        "collectives",
        "compress",
        "messages",
        "host",
        "net",
        "cuda",
        "base",
        "kernels",
    },
    "aggregator": {"aggregate", "collectives", "base", "kernels"},
    "collectives": {"aggregate", "messages", "host", "net", "cuda", "base", "kernels"},
    "messages": {"host", "net", "base", "kernels"},
    "aggregate": {"net", "base", "kernels"},
    "compress": {"kernels"},
    "host": {"base"},
    "net": {"base"},
    "cuda": {"base", "kernels"},
    "base": set(),
    "kernels": set(),
}
# Single headers open to a room that may not include the rest of their room.
ALSO_ALLOWED: dict[str, set[str]] = {
    "kernels": {"base/dtype.hpp"},
    "base": {"kernels/formulas/hyper.hpp"},
}

TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
PYTHON = re.compile(r"^pybind11/|^(Python|structmember)\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
CXX_SUFFIXES = {".cpp", ".hpp", ".h", ".cu", ".cuh"}


def check_include(room: str, delimiter: str, name: str, csrc: Path) -> str | None:
    """What is wrong with one include directive of a file in a room, or None."""
    if TORCH.match(name):
        return None if room == "c10d" else f"only csrc/c10d may see torch: {name}"
    if PYTHON.match(name):
        seen = room in ("c10d", "aggregator")
        return None if seen else f"only csrc/c10d and csrc/aggregator may see Python: {name}"
    if delimiter == "<":
        return None
    if not (csrc / name).is_file():
        return f'"{name}" does not exist under csrc/: our headers are included by that path'
    target = name.split("/")[0]
    if target == room or target in MAY_INCLUDE[room] or name in ALSO_ALLOWED.get(room, set()):
        return None
    return f"{room} may not include {name}"


def layer_errors(csrc: Path) -> list[str]:
    errors = []
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in CXX_SUFFIXES or not path.is_file():
            continue
        room = path.relative_to(csrc).parts[0]
        if room not in MAY_INCLUDE:
            errors.append(f"{path}: not in a room of csrc/ ({', '.join(MAY_INCLUDE)})")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match and (error := check_include(room, match[1], match[2], csrc)):
                errors.append(f"{path}:{number}: {error}")
    return errors


def main() -> int:
    errors = layer_errors(ROOT / "csrc")
    for error in errors:
        print(error.replace(f"{ROOT}/", ""), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
