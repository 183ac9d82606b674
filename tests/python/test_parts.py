"""The parts of the tests, and the rows of their summary."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import harness
import parts

TESTS = Path(__file__).resolve().parents[1]
FILES = [path.name for path in TESTS.rglob("test_*.py") if "mpi" not in path.parts]


def test_each_file_has_a_row() -> None:
    rowless = [file for file in FILES if parts.capability(file) not in parts.CAPABILITIES]
    assert rowless == [], "add it to CAPABILITIES in parts.py"
    assert [p for p in parts.REST if not any(parts.fits(file, [p]) for file in FILES)] == []


@pytest.mark.long
@pytest.mark.parametrize("file", ["test_detach.py", "test_fusion_torch_modes.py"])
def test_parts_are_the_whole(file: str) -> None:
    def collected(*arguments: str) -> list[str]:
        command = ["-m", "pytest", "--collect-only", "-q", "-n", "0", *arguments]
        done = subprocess.run(
            harness.python(*command, str(TESTS / "python" / file)),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return [line for line in done.stdout.split("\n") if "::" in line]

    quick, rest = collected("--part", "quick"), collected("--part", "rest")
    assert sorted(quick + rest) == sorted(collected())
    functions = [test.partition("[")[0] for test in quick]
    assert len(functions) == len(set(functions))
    assert all("world2" in test for test in quick if "world" in test)
    assert rest and bool(quick) == (file not in parts.REST)
