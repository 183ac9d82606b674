"""The runner of the first hour on a GPU, with steps that need none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _first_hour as hour  # noqa: E402
from _first_hour_steps import STEPS, Step  # noqa: E402


def step(name: str, code: str, limit: int = 30, **more: Any) -> Step:
    command = ("{python}", "-c", code)
    return Step(name, f"what {name} settles", command, limit, "expected", "meant", **more)


TESTS = "print('SKIPPED [3] somewhere.py:9: needs a GPU'); print('=== {} in 1.20s ===')"
# Its child would go on for ever if only the step itself were ended.
HANGS = (
    "import subprocess, sys, time;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('child', p.pid, flush=True);"
    "time.sleep(600)"
)
STUBS = (
    step("good", "print('fine')"),
    step("bad", "print('one'); print('two | three'); raise SystemExit(3)"),
    step("crash", "import os; os.abort()"),
    step("tests", TESTS.format("5 passed, 3 skipped")),
    step("none", TESTS.format("3 skipped")),
    step("failing", TESTS.format("1 failed, 2 passed") + "; raise SystemExit(1)"),
    step("hangs", HANGS, limit=1, least=0),
    step("two gpus", "1", needs=("2 gpus",)),
    step("sanitizer", "1", needs=("gpu", "compute-sanitizer")),
    step("newer", "1", needs=("nccl 2.30.3",)),
    step("ring", "import os; print(os.environ['FUSEDPG_NCCL_LIB'])", needs=("patched nccl",)),
    step("last", "import os; print(os.environ['OWN'])", env={"OWN": "x"}),
)
FOUND = {"gpus": 1, "nccl": "2.29.1", "device": "a GPU", "torch": "2", "commit": "abc"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hour, "environment", lambda patched: dict(FOUND))
    monkeypatch.setattr(hour, "FAKE", False)
    monkeypatch.setattr(hour, "PATIENCE", 1)


def main(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = hour.main([*arguments, "--out", str(out)], STUBS)
    kept = json.loads((out / "results.json").read_text())
    return code, {row["step"]: row for row in kept["steps"]}


@pytest.mark.usefixtures("gpu")
def test_statuses(tmp_path: Path) -> None:
    code, rows = main(tmp_path)
    assert code == 1
    assert list(rows) == [stub.name for stub in STUBS]
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "PASS",
        "bad": "FAIL",
        "crash": "FAIL",
        "tests": "PASS",
        "none": "SKIP",
        "failing": "FAIL",
        "hangs": "TIMEOUT",
        "two gpus": "SKIP",
        "sanitizer": "SKIP",
        "newer": "SKIP",
        "ring": "SKIP",
        "last": "PASS",
    }
    assert rows["bad"]["note"] == "exit status 3" and rows["crash"]["note"] == "signal 6"
    assert rows["none"]["note"] == "3 skipped: needs a GPU"
    assert rows["failing"]["note"] == "1 failed, 2 passed"
    assert rows["bad"]["tail"] == ["one", "two | three"]
    assert rows["last"]["tail"] == ["x"]
    assert 1 <= rows["hangs"]["seconds"] < 10
    pid = int(rows["hangs"]["tail"][0].split()[1])
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the step's child goes on"
        time.sleep(0.05)
    text = (tmp_path / "results.md").read_text()
    assert "| bad | what bad settles | FAIL | 0 | exit status 3 |" in text
    assert "## bad: FAIL" in text and "two | three" in text and "## good" not in text
    assert "a GPU" in text
    assert not list(tmp_path.glob("*.half"))


@pytest.mark.usefixtures("gpu")
def test_pieces_add_up(tmp_path: Path) -> None:
    assert main(tmp_path, "--only", "bad,good")[0] == 1
    code, rows = main(tmp_path, "--from", "last")
    assert code == 0 and list(rows) == ["good", "bad", "last"]
    assert [row["piece"] for row in rows.values()] == [0, 0, 1]
    # Without time nothing runs, and nothing that is known is forgotten.
    code, rows = main(tmp_path, "--minutes", "0")
    assert code == 0
    assert rows["bad"]["status"] == "FAIL" and rows["good"]["status"] == "PASS"
    assert rows["crash"]["status"] == "SKIP" and "--from crash" in rows["crash"]["note"]
    library = str(tmp_path / "libnccl.so.2")
    code, rows = main(tmp_path, "--only", "ring", "--patched-nccl", library)
    assert code == 0 and rows["ring"]["tail"] == [library]
    assert len(json.loads((tmp_path / "results.json").read_text())["pieces"]) == 4


@pytest.mark.usefixtures("gpu")
def test_budget_ends_a_step(tmp_path: Path) -> None:
    stub = step("long", "import time; time.sleep(600)", limit=300, least=1)
    assert hour.main(["--minutes", "0.03", "--out", str(tmp_path)], [stub]) == 1
    assert "what was left of the budget" in (tmp_path / "results.md").read_text()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = hour.environment(None)
    assert found["torch"] and found["python"] and "gpus" in found
    assert found["compute-sanitizer"] == [] and found["nvcc"] == []


def test_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/gpu_first_hour.sh"
    env = {k: v for k, v in os.environ.items() if k != "FUSEDPG_TEST_DEVICE"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}

    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [str(script), *arguments, "--out", str(tmp_path)]
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)

    none = ended()
    assert none.returncode == 2 and "no GPU" in none.stderr
    assert "graphs" in ended("--list").stdout
    wrong = ended("--from", "nowhere")
    assert wrong.returncode == 1 and "no step 'nowhere'" in wrong.stderr


def test_tests_that_steps_name_exist() -> None:
    for one in STEPS:
        for word in one.command:
            if word.endswith(".py") or ".py::" in word:
                path, _, name = word.partition("::")
                assert (ROOT / path).exists(), word
                assert not name or f"def {name}(" in (ROOT / path).read_text(), word


def test_docs_hold_every_step() -> None:
    """The table is what --table prints, but for what has been run since."""

    def without_status(text: str) -> list[str]:
        return [line.rsplit(" | ", 1)[0] for line in text.splitlines()]

    docs = (ROOT / "docs/gpu.md").read_text().splitlines()
    wanted = without_status(hour.table(STEPS))
    missing = [line for line in wanted if not any(has.startswith(line) for has in docs)]
    assert not missing, "benchmarks/gpu_first_hour.sh --table"
