"""Hooks of mkdocs (mkdocs.yml): what pages link to outside of docs/ becomes part of the site.

On a host of Git repositories a page in docs/ links to ../../examples/quickstart.py. The site is
made of docs/ alone, so those files are added to it under project/, as they are, and the links
follow. README.md is the home page.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?:```.*?^```|<!--.*?-->)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]+)?(?=\))")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")


def in_site(path: str) -> str:
    """Where a file of the project lies in the site's sources."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"


def in_project(uri: str) -> str:
    """The other way round."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}"


def links(path: str) -> list[str]:
    """The files of the project that a page links to."""
    text = FENCE.sub("", (ROOT / path).read_text())
    folder = posixpath.dirname(path)
    found = [posixpath.normpath(posixpath.join(folder, match[1])) for match in LINK.finditer(text)]
    return [name for name in found if (ROOT / name).is_file()]


def on_pre_build(**_: Any) -> None:
    """Draws the pictures of measured results, which are not kept, into build/figures."""
    subprocess.run([sys.executable, ROOT / "benchmarks/report.py", "--shown"], check=True)


def on_files(files: Files, config: Any) -> Files:
    """Adds what is linked, and what that links to."""
    known = {in_project(file.src_uri) for file in files}
    new = [name for name in PAGES if name not in known]
    todo = [*new, *(name for name in known if name.endswith(".md"))]
    while todo:
        for name in links(todo.pop()):
            if name not in known and name not in new:
                new.append(name)
                todo += [name] if name.endswith(".md") else []
    for name in new:
        files.append(File.generated(config, in_site(name), abs_src_path=os.fspath(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the project to links of the site."""
    source, place = in_project(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if (ROOT / target).is_dir():
            raise ValueError(f"{source} links to the folder {target}; the site has files alone")
        return posixpath.relpath(in_site(target), place or ".") + (match[2] or "")

    parts = FENCE.split(markdown)
    fences = FENCE.findall(markdown)
    text = [LINK.sub(moved, part) for part in parts]
    return "".join(a + b for a, b in zip(text, [*fences, ""], strict=True))
