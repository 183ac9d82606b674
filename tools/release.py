"""What a release needs beside its packages: the notes, and a page that pip can install from.

    python tools/release.py v0.2.0 dist

Checks that the tag, the package and every file in the folder name one version, and writes notes.md,
the version's section of CHANGELOG.md, and index.html, for `pip install --find-links`, there.
"""

from __future__ import annotations

import hashlib
import html
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def section(changelog: str, version: str) -> str:
    """What the changelog says of one version."""
    found = re.search(
        rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section {version}")
    return found[1].strip() + "\n"


def index(packages: list[Path]) -> str:
    """A page of links with hashes, which pip checks."""
    links = []
    for package in packages:
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        name = html.escape(package.name)
        links.append(f'<a href="{name}#sha256={digest}">{name}</a><br>')
    lines = ["<!DOCTYPE html>", "<title>fusedpg</title>", *links]
    return "\n".join(lines) + "\n"


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    tag, folder = sys.argv[1], Path(sys.argv[2])
    version = tag.removeprefix("v")
    declared = re.search(r'__version__ = "(.+)"', (ROOT / "fusedpg/__init__.py").read_text())
    if declared is None or declared[1] != version:
        raise SystemExit(f"the tag is {tag}, and fusedpg.__version__ {declared and declared[1]}")
    packages = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    others = [
        p.name
        for p in packages
        if not p.name.startswith((f"fusedpg-{version}-", f"fusedpg-{version}.tar"))
    ]
    if others or not packages:
        raise SystemExit(f"not of version {version}: {', '.join(others) or 'there is nothing'}")
    (folder / "notes.md").write_text(section((ROOT / "CHANGELOG.md").read_text(), version))
    (folder / "index.html").write_text(index(packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
