"""The documents: their links, tables, plots and programs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import harness

pytestmark = pytest.mark.fused_only

ROOT = harness.ROOT
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "patches/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)


def text_of(path: Path) -> str:
    """Without code, in which brackets mean something else."""
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """The names that hosts of Markdown give to headings."""
    names: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(text_of(path)):
        plain = LINK.sub(lambda match: match[0][1:].partition("]")[0], heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{name}-{names[name]}" if name in names else name)
        names[name] = names.get(name, 0) + 1
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links(document: str) -> None:
    """Every relative link leads to a file that is there, and to a heading of it."""
    path = ROOT / document
    for target in LINK.findall(text_of(path)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{document} links to {target}"
        assert file.is_relative_to(ROOT), f"{document} links to {target}, outside of the project"
        if anchor:
            assert anchor in anchors(file), f"{document} links to {target}"


def test_every_document_is_linked() -> None:
    """From the README one gets to all of docs/."""
    linked = {target.partition("#")[0] for target in LINK.findall(text_of(ROOT / "README.md"))}
    assert {name for name in DOCUMENTS if name.startswith("docs/")} - linked == set()


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/report.py; what importing it puts into the environment goes with the test."""
    for name in ("OMP_NUM_THREADS", "FUSEDPG_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("report")


def test_tables_are_of_the_saved_results(report: Any) -> None:
    """Nobody edits a figure by hand: `make figures` writes them."""
    for name in report.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert "<!-- table:" in text
        assert report.rewritten(text) == text, f"{name}: make figures"


def test_arms_have_words_and_plots(report: Any, tmp_path: Path) -> None:
    """No plot names an arm by a letter, and each result has a plot."""
    words = report.words
    arms = importlib.import_module("_optimizer_arms")
    for name in arms.ARMS:
        assert len(words.arm(name)) > 3, name
    for path in report.RESULTS.glob("*.json"):
        saved = report.load(path)
        for row in saved["rows"]:
            assert len(words.arm(row.arm)) > 3, f"{path.name}: {row.arm}"
        assert saved["unit"] != "seconds" or path.with_suffix(".png").exists(), path
    small = report.load(report.RESULTS / "ddp_p2.json")
    report.plots.save_plot(tmp_path / "plot.png", small["rows"], 2)
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_programs_of_the_readme(tmp_path: Path) -> None:
    """DDP, the changed line and the fused call, as they stand there."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    ddp, line, call = blocks
    assert "fusedpg" not in ddp
    # The second block shows one line before and after, of a script like the first.
    after = "import fusedpg\nddp = model\n" + line
    after += "model(torch.randn(4, 10)).sum().backward()\noptimizer.step()\n"
    begin = "import torch, torch.distributed as dist, fusedpg\n\n"
    again = call.replace('dist.init_process_group("fused")\n', "")
    assert call.startswith(begin) and again != call
    run_program("\n".join([ddp, after, again, "dist.destroy_process_group()"]), tmp_path, 2)


@pytest.mark.parametrize(("document", "ranks"), [("docs/guides/coconet.md", 4)])
def test_programs_of_a_page(document: str, ranks: int, tmp_path: Path) -> None:
    """All that stands there, one after the other, with its own comparisons."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    run_program("\n".join(blocks), tmp_path, ranks)


def run_program(text: str, folder: Path, ranks: int) -> None:
    program = folder / "program.py"
    program.write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_workflows_call_the_makefile() -> None:
    """What a public host runs can be run at home: targets that exist, and nothing else."""
    if not WORKFLOWS:
        pytest.skip("not in the sdist")
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text()
        commands = re.findall(r"- run: (.+)", text)
        assert commands
        for command in commands:
            if command.startswith("sudo apt-get "):
                continue
            name = command.removeprefix("make ")
            if name == "${{ matrix.target }}":
                names = re.findall(r"target: \[(.+)\]", text)[0].split(", ")
            else:
                names = [name]
            assert command.startswith("make ") and set(names) <= targets, f"{path.name}: {command}"
