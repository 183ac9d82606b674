"""The documents: their links, tables, plots and programs."""

from __future__ import annotations

import importlib
import os
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import harness

pytestmark = pytest.mark.fused_only

ROOT = harness.ROOT
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "patches/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^(?:```.*?^```|<!--.*?-->)", re.MULTILINE | re.DOTALL)
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
        if file.is_relative_to(ROOT / "build/figures"):
            continue  # drawn with the site: test_pictures_can_be_drawn
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
    arms = importlib.import_module("_training")
    for name in arms.ARMS:
        assert len(words.arm(name)) > 3, name
    for path in report.RESULTS.glob("*.json"):
        saved = report.load(path)
        for row in saved["rows"]:
            assert len(words.arm(row.arm)) > 3, f"{path.name}: {row.arm}"
        assert saved["unit"] != "seconds" or report.pictures_of(path), path


def test_pictures_can_be_drawn(report: Any, tmp_path: Path) -> None:
    """Documents show pictures of saved results, which the site's build draws."""
    names = report.shown()
    links = [name for document in DOCUMENTS for name in LINK.findall((ROOT / document).read_text())]
    assert len(names) == len({link for link in links if "build/figures/" in link}) >= 20
    pictures = report.pictures()
    assert set(names) <= set(pictures)
    report.plots.save(tmp_path / "plot.png", pictures["ddp_p2.png"])
    assert (tmp_path / "plot.png").stat().st_size > 1000


# What stands before a block of Python, to no reader's eyes:
#   <!-- program: NAME -->            it goes on with the program NAME of its page
#   <!-- program: NAME (4 ranks) -->  on so many ranks instead of 2
#   <!-- program: NAME (3 ranks, rank 2 dies) -->
#   <!-- program: NAME
#   lines -->                         which run before it, or after all if no block follows
#   <!-- not run: GPU -->             for a reason of NOT_RUN
# A block without any is a program of its own. A diff is two programs.
ITEM = re.compile(
    r"^<!-- program: (?P<name>\w+)(?: \((?P<ranks>\d+) ranks(?:, rank (?P<dies>\d+) dies)?\))?"
    r"(?:\n(?P<hidden>.*?))? ?-->\n"
    r"|^<!-- not run: (?P<reason>.+?) -->\n|^```(?P<kind>python|diff)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = {"GPU", "Ray"}
NL = "\n"


class Text(NamedTuple):
    ranks: int
    text: str
    dies: int | None = None  # one of the ranks


def programs_of(document: str) -> dict[str, Text]:
    """The Python of a page, by the name of each program."""
    found: dict[str, Text] = {}
    text = (ROOT / document).read_text()
    name, end, dies = "", -1, None  # of the mark before
    for item in ITEM.finditer(text):
        if not (code := item["code"]):
            name, end = item["name"] or "", item.end()
            assert item["name"] or item["reason"] in NOT_RUN, item[0]
            code, ranks = item["hidden"] or "", int(item["ranks"] or 2)
            dies = int(item["dies"]) if item["dies"] else None
        elif end != item.start():
            # Parts of programs, which the tests of frameworks compare with them.
            name = (
                "" if code.startswith("# examples/") else f"line{text.count(NL, 0, item.start())}"
            )
            ranks, dies = 2, None
        if item["kind"] == "diff":
            lines = code.splitlines(keepends=True)
            before, code = ("".join(x[1:] or NL for x in lines if x[0] != no) for no in "+-")
            found[f"{name}_before"] = Text(ranks, before)
        if name:
            old = found.get(name, Text(ranks, ""))
            found[name] = Text(max(old.ranks, ranks), old.text + code.rstrip() + NL, dies)
    marks = text.count("<!-- program") + text.count("<!-- not run")
    assert marks == sum(not item["code"] for item in ITEM.finditer(text)), "a mark that is none"
    return found


PROGRAMS = {
    f"{document}:{name}": program
    for document in DOCUMENTS
    for name, program in programs_of(document).items()
}


def run_file(context: harness.Context, path: str) -> None:
    os.chdir(context.scratch)
    assert dist.distributed_c10d._world.pg_map == {}
    runpy.run_path(path, run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path) -> None:
    """Each of the documents, in processes of its own that have imported nothing of ours."""
    program = PROGRAMS[name]
    path = tmp_path / "program.py"
    path.write_text(program.text)
    store = harness.serve()
    env = {"WORLD_SIZE": str(program.ranks), **harness.environment_of(store)}
    ranks = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(program.ranks)]
    with harness.Workers(program.ranks, init=False, backend="gloo", env=ranks) as workers:
        if program.dies is None:
            workers.run(run_file, str(path), timeout=120)
            return
        workers.start(run_file, str(path))
        left = [rank for rank in range(program.ranks) if rank != program.dies]
        assert workers.collect(120, ranks=left) == [None] * len(left)
        assert workers.processes[program.dies].exitcode == 1


def test_parts_of_programs() -> None:
    """A block that begins with the name of an example has parts of it, with ... between them."""
    for document in DOCUMENTS:
        blocks = re.findall(
            r"^```python\n# (examples/\S+)\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S
        )
        for name, block in blocks:
            whole = (ROOT / name).read_text()
            for part in block.split("...\n"):
                assert part.strip() in whole, f"{document}: {name} does not have\n{part}"


def test_messages_are_in_the_sources() -> None:
    """Who looks for an error finds the text that the code has."""
    sources = [*ROOT.glob("csrc/**/*.?pp"), *ROOT.glob("fusedpg/**/*.py"), ROOT / "Makefile"]
    text = "".join(path.read_text() for path in sources)
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # of adjacent literals
    count = 0
    for name in ("docs/operate/failures.md", "docs/start/install.md"):
        for row in re.findall(r"^\| (`.+?) \|", (ROOT / name).read_text(), re.MULTILINE):
            for message in re.findall(r"`([^`]+)`", row):
                assert message in text, f"{name}: {message}"
                count += 1
    assert count > 25


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
            if command.startswith(("sudo apt-get ", "gh release create ")):
                continue
            name = command.removeprefix("make ").removesuffix(' TAG="$GITHUB_REF_NAME"')
            if name == "${{ matrix.target }}":
                names = re.findall(r"target: \[(.+)\]", text)[0].split(", ")
            else:
                names = [name]
            assert command.startswith("make ") and set(names) <= targets, f"{path.name}: {command}"
