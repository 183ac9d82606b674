"""Checks that files which are compiled together keep different names to themselves.

A unity build (FUSEDPG_UNITY in CMakeLists.txt) puts the files of a folder into one unit. What one
has in an anonymous namespace is then seen by the others: a compiler refuses most of what clashes,
but it would choose silently between overloads. Run: python tools/check_names.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Compiled by themselves, as CMakeLists.txt says.
ALONE = {"base/error.cpp", "c10d/bindings.cpp"}
ALONE_FOLDERS = {"kernels"}

# Of code that clang-format has laid out: a definition begins at the first column.
TYPE = re.compile(r"(?:struct|class|union|enum class|enum) (\w+)(?! *;)")
FUNCTION = re.compile(r"[A-Za-z_][^=;]*?([A-Za-z_]\w*)\(")
VARIABLE = re.compile(r"[A-Za-z_][\w:<>,*& ]*[ *&](\w+)(?:\[.*?\])?(?: =|\{|;|$)")
NO_DEFINITION = ("using ", "template", "static_assert", "namespace", "extern ", "}")


def private_names(text: str) -> Iterator[tuple[int, str]]:
    """Names in a file's anonymous namespaces, behind what they lie in, and their lines.

    Aliases are none: they may be repeated.
    """
    spaces: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"(?:inline )?namespace\b *(.*)\{$", line):
            spaces.append(match[1].strip())
        elif re.match(r"\} +// namespace", line):
            spaces.pop()
        elif "" in spaces and re.match(r"[A-Za-z_]", line) and not line.startswith(NO_DEFINITION):
            match = TYPE.match(line) or FUNCTION.match(line) or VARIABLE.match(line)
            if match:
                yield number, "::".join([*filter(None, spaces), match[1]])


def name_errors(csrc: Path) -> list[str]:
    errors = []
    first: dict[tuple[str, str], Path] = {}
    for path in sorted(csrc.rglob("*.cpp")):
        inside = path.relative_to(csrc)
        folder = inside.parts[0]
        if str(inside) in ALONE or folder in ALONE_FOLDERS:
            continue
        for number, name in private_names(path.read_text()):
            other = first.setdefault((folder, name), path)
            if other != path:
                errors.append(f"{path}:{number}: {other.name} has a {name} of its own, too")
    return errors


def main() -> int:
    errors = name_errors(ROOT / "csrc")
    for error in errors:
        print(error.replace(f"{ROOT}/", ""), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
