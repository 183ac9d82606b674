"""Every command of .github/workflows and of .ci/run exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import harness
from fusedpg.optim._torch import KNOWN

WORKFLOWS = sorted((harness.ROOT / ".github/workflows").glob("*.yml"))
RUNNER = {"sudo", "gh"}  # the programs of a public runner that are not ours
MATRIX = re.compile(r"\$\{\{ *matrix\.(\w+) *\}\}")


def matrix(text: str) -> dict[str, list[str]]:
    """The values of each name in the matrices of a workflow."""
    values: dict[str, list[str]] = {}
    for name, listed in re.findall(r"^ +(\w+): \[(.+)\]$", text, re.MULTILINE):
        values.setdefault(name, []).extend(word.strip(' "') for word in listed.split(","))
    for entry in re.findall(r"^ +- \{(.+)\}$", text, re.MULTILINE):
        for name, value in re.findall(r'(\w+): "?([^",}]+?)"? *(?:,|$)', entry.strip()):
            values.setdefault(name, []).append(value)
    return values


def commands(path: Path) -> list[str]:
    text = path.read_text()
    if path.suffix != ".yml":
        return re.findall(r"^stage \w+ (.+)$", text, re.MULTILINE)
    lines = re.findall(r"^ +(?:- )?run: (.+)$", text, re.MULTILINE)
    assert not [line for line in lines if line[0] in "|>"], "this test reads single lines"
    values = matrix(text)
    return [
        MATRIX.sub(lambda match, i=i: values[match[1]][i], line)
        for line in lines
        for names in [MATRIX.findall(line)]
        for i in range(len(values[names[0]]) if names else 1)
    ]


def refused(command: str) -> str:
    """Why a command cannot run in a checkout; nothing where it can."""
    program, *arguments = shlex.split(command)
    if program in RUNNER:
        return ""
    if program != "make":
        return f"{command}: neither a target of the Makefile nor one of {RUNNER}"
    done = subprocess.run(
        ["make", "-n", *arguments],
        cwd=harness.ROOT,
        env={**os.environ, "GITHUB_REF_NAME": "v0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return "" if done.returncode == 0 else f"{command}: {done.stderr}"


@pytest.mark.parametrize("path", [*WORKFLOWS, harness.ROOT / ".ci/run"], ids=lambda path: path.name)
def test_each_command_exists(path: Path) -> None:
    found = commands(path)
    assert any(command.startswith("make ") for command in found)
    assert [why for why in map(refused, found) if why] == []


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yml"
    path.write_text(
        "        target: [lint, no-such-target]\n"
        "      - run: make ${{ matrix.target }}\n"
        "      - run: pytest\n"
    )
    right, *wrong = (bool(refused(command)) for command in commands(path))
    assert (right, wrong) == (False, [True, True])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_matrices_and_jobs_are_defined(path: Path) -> None:
    text = path.read_text()
    assert set(MATRIX.findall(text)) <= set(matrix(text))
    jobs = re.findall(r"^  (\w+):$", text.partition("\njobs:\n")[2], re.MULTILINE)
    needed = re.findall(r"^    needs: \[?([\w, ]+)\]?$", text, re.MULTILINE)
    assert {name.strip() for names in needed for name in names.split(",")} <= set(jobs)


def test_torches_of_ci_are_those_of_the_documents() -> None:
    """One of each minor release that is promised, the oldest and the newest tested."""
    torches = matrix((harness.ROOT / ".github/workflows/ci.yml").read_text())["torch"]
    built = sorted({tuple(map(int, torch.split(".")[:2])) for torch in torches})
    (first, last) = built[0], built[-1]
    assert built == [(2, minor) for minor in range(first[1], last[1] + 1)]
    promise = "torch {}.{} to {}.{}".format(*first, *last)
    for name in ("README.md", "docs/start/install.md"):
        assert promise in (harness.ROOT / name).read_text(), name
    tried = (harness.ROOT / "docs/start/install.md").read_text()
    assert re.findall(r"^\| (\d\.\d+\.\d+) \|", tried, re.MULTILINE) == list(dict.fromkeys(torches))
    assert "MIN_TORCH = ({}, {})".format(*first) in (harness.ROOT / "setup.py").read_text()
    assert "OLDEST = ({}, {})".format(*first) in (harness.ROOT / "tools/wheels.py").read_text()
    assert (first, last) == KNOWN


def test_ci_begins_as_a_stranger_does() -> None:
    """In the bare clone, before anything else was built or set."""
    script = (harness.ROOT / ".ci/run").read_text()
    assert commands(harness.ROOT / ".ci/run")[:2] == ["make train", "make test"]
    assert "export" not in script.partition("\nstage test make test\n")[0]


@pytest.mark.parametrize(
    ("version", "known"),
    [(f"2.{KNOWN[1][1]}.9", True), (f"2.{KNOWN[1][1] + 1}.0", False), ("3.0", False)],
)
def test_newest_torch_is_compared(version: str, known: bool) -> None:
    newest_torch = harness.tool("newest_torch")
    index = f"torch ({version})\nAvailable versions: {version}, 2.3.1\n"
    assert newest_torch.verdict(newest_torch.newest(index))[1] == known
