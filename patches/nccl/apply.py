"""Puts fusedpg's ring into a source tree of NCCL, or takes it out again.

    python apply.py NCCL_DIR            apply
    python apply.py NCCL_DIR --check    change nothing, say what is the case
    python apply.py NCCL_DIR --revert   every file as it was

It inserts some lines at the anchors of hooks.toml and adds files. It builds
nothing: that is NCCL's own makefile's work (see README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
# Where the backend's headers go, and what they include each other by.
HEADERS = Path("src/include/fusedpg")
ROOT_HEADER = "cuda/kernels/ranges.hpp"

TOKEN = re.compile(r"[A-Za-z_]\w*|\"(?:[^\"\\\n]|\\.)*\"|\d[\w.]*|->|==|\S")
INCLUDE = re.compile(r'^#include "((?:base|cuda|kernels)/[^"]+)"$', re.MULTILINE)


class PatchError(Exception):
    """The tree is not one that the patch fits."""


@dataclasses.dataclass(frozen=True)
class Hook:
    what: str
    file: str
    anchor: str
    insert: str

    def place(self, text: str) -> int:
        """Where the insertion goes; the anchor must occur exactly once."""
        wanted = [token.group() for token in TOKEN.finditer(self.anchor)]
        caret = wanted.index("^")
        wanted.remove("^")
        tokens = list(TOKEN.finditer(text))
        names = [token.group() for token in tokens]
        found = [
            i
            for i in range(len(names) - len(wanted) + 1)
            if names[i] == wanted[0] and names[i : i + len(wanted)] == wanted
        ]
        if len(found) != 1:
            raise PatchError(
                f"{self.file}: the anchor `{self.anchor}` ({self.what}) occurs "
                f"{len(found)} times, once is expected"
            )
        first = found[0]
        if caret == len(wanted):
            return tokens[first + caret - 1].end()
        return tokens[first + caret].start()


@dataclasses.dataclass
class Plan:
    """What files would be: None is no file."""

    version: str
    applied: list[Hook]
    missing: list[Hook]
    contents: dict[Path, str | None]


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror}: is this a source tree of NCCL?") from error


def hooks() -> tuple[list[str], list[Hook]]:
    table: dict[str, Any] = tomllib.loads((HERE / "hooks.toml").read_text())
    return table["verified"], [Hook(**hook) for hook in table["hook"]]


def version(tree: Path) -> str:
    text = read(tree / "makefiles/version.mk")
    parts = [
        re.search(rf"^NCCL_{part}\s*:=\s*(\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    if None in parts:
        raise PatchError(f"{tree}/makefiles/version.mk names no version")
    return ".".join(part.group(1) for part in parts if part)


def added_files() -> dict[Path, str]:
    """Path in NCCL's tree -> contents of the files that are ours."""
    files = {
        path.relative_to(HERE / "files"): path.read_text()
        for path in sorted((HERE / "files").rglob("*"))
        if path.is_file()
    }
    todo = [ROOT_HEADER]
    while todo:
        name = todo.pop()
        if HEADERS / name not in files:
            text = (CSRC / name).read_text()
            todo += INCLUDE.findall(text)
            files[HEADERS / name] = INCLUDE.sub(r'#include "fusedpg/\1"', text)
    return files


def refuse_other_patch(name: str, text: str, all_hooks: list[Hook]) -> None:
    for hook in all_hooks:
        text = text.replace(hook.insert, "")
    if "fusedpg" in text.lower():
        raise PatchError(
            f"{name} holds lines of another version of this patch: revert them with its own "
            "apply.py, or take a fresh tree"
        )


def plan(tree: Path, *, revert: bool, allow_unverified: bool) -> Plan:
    verified, all_hooks = hooks()
    found = version(tree)
    if found not in verified and not (revert or allow_unverified):
        raise PatchError(
            f"{tree} is NCCL {found}; the patch was verified with {', '.join(verified)}. "
            "--allow-unverified tries it all the same"
        )
    result = Plan(found, [], [], {})
    for hook in all_hooks:
        path = tree / hook.file
        text = result.contents.get(path) or read(path)
        refuse_other_patch(hook.file, text, all_hooks)
        count = text.count(hook.insert)
        if count > 1:
            raise PatchError(f"{hook.file}: `{hook.insert.strip()}` occurs {count} times")
        if count == 1:
            result.applied.append(hook)
            text = text.replace(hook.insert, "") if revert else text
        else:
            result.missing.append(hook)
            if not revert:
                place = hook.place(text)
                text = text[:place] + hook.insert + text[place:]
        result.contents[path] = text
    if result.applied and result.missing and not revert:
        names = ", ".join(sorted({hook.file for hook in result.missing}))
        raise PatchError(f"the patch is applied in part (not in {names}): --revert it first")
    for name, text in added_files().items():
        path = tree / name
        if path.exists() and not result.applied and not revert:
            raise PatchError(f"{name} exists already and is not this patch's")
        result.contents[path] = None if revert else text
    return result


def write(tree: Path, contents: dict[Path, str | None]) -> int:
    changed = 0
    for path, text in contents.items():
        if text is None:
            if path.exists():
                path.unlink()
                changed += 1
            # Folders that held nothing else.
            for folder in path.parents:
                if folder == tree or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()
            continue
        data = text.encode()
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            changed += 1
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="NCCL_DIR")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="change nothing")
    group.add_argument("--revert", action="store_true", help="take everything out again")
    parser.add_argument("--allow-unverified", action="store_true", help="also other versions")
    options = parser.parse_args(arguments)
    try:
        made = plan(options.tree, revert=options.revert, allow_unverified=options.allow_unverified)
    except PatchError as error:
        print(f"apply.py: {error}", file=sys.stderr)
        return 1
    if options.check:
        state = "applied" if made.applied else "not applied, and fits"
        print(f"NCCL {made.version}: {state}")
        return 0
    changed = write(options.tree, made.contents)
    done = "reverted" if options.revert else "applied"
    print(f"NCCL {made.version}: {done}, {changed} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
