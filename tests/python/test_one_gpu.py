"""The stages of one_gpu.sh, with steps that need no GPU, and on the fake one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

import harness

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _one_gpu as runner  # noqa: E402
from _one_gpu_steps import MOST, STEPS, Step  # noqa: E402

SCRIPT = ROOT / "benchmarks/one_gpu.sh"
FILES = {"results.json", "results.md", "logs.tar.gz", "state.tar.gz"}


def step(name: str, code: str, limit: int = 30, stage: int = 1, **more: Any) -> Step:
    command = ("{python}", "-c", code)
    return Step(
        stage, name, f"what {name} settles", command, "expected", "meant", limit=limit, **more
    )


TESTS = "print('SKIPPED [3] somewhere.py:9: needs a GPU'); print('=== {} in 1.20s ===')"
# Its child would go on for ever if only the step itself were ended.
HANGS = (
    "import subprocess, sys, time;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('child', p.pid, flush=True);"
    "time.sleep(600)"
)
COMPILES = "import time; print('one', flush=True); time.sleep(2.5); print('two')"
STUBS = (
    step("compile-1", COMPILES, limit=1, build=True),
    step("compile-2", COMPILES, limit=20, build=True),
    step("good", "print('fine')"),
    step("bad", "print('one'); print('two | three'); raise SystemExit(3)"),
    step("crash", "import os; os.abort()"),
    step("tests", TESTS.format("5 passed, 3 skipped")),
    step("none", TESTS.format("3 skipped")),
    step("failing", TESTS.format("1 failed, 2 passed") + "; raise SystemExit(1)"),
    step("hangs", HANGS, limit=5),
    step("sanitizer", "1", needs=("gpu", "compute-sanitizer")),
    step("last", "import os; print(os.environ['OWN'])", env={"OWN": "x"}),
    step("other", "print('{architecture}')", stage=2),
)
FOUND = {"gpus": 1, "capability": "9.0", "nccl": "2.29.1", "device": "a GPU", "commit": "abc"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "environment", lambda: dict(FOUND))
    monkeypatch.setattr(runner, "FAKE", False)
    monkeypatch.setattr(runner, "PATIENCE", 1)
    monkeypatch.setattr(runner, "WORK", tmp_path / "work")
    monkeypatch.setattr(runner, "BUILT", ("pyproject.toml",))
    monkeypatch.delenv("OUT", raising=False)


def main(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = runner.main([*arguments, "--state", str(out / "state.tar.gz")], STUBS)
    kept = json.loads((out / "results.json").read_text())
    return code, {row["step"]: row for row in kept["steps"]}


@pytest.mark.usefixtures("gpu")
def test_statuses(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, rows = main(out, "1", str(out))
    assert code == 1
    assert {name: row["status"] for name, row in rows.items()} == {
        "compile-1": "GOES ON",
        "compile-2": "PASS",
        "good": "PASS",
        "bad": "FAIL",
        "crash": "FAIL",
        "tests": "PASS",
        "none": "SKIP",
        "failing": "FAIL",
        "hangs": "TIMEOUT",
        "sanitizer": "SKIP",
        "last": "PASS",
    }
    assert rows["compile-2"]["tail"] == ["one", "two"]
    assert rows["bad"]["note"] == "exit status 3" and rows["crash"]["note"] == "signal 6"
    assert rows["none"]["note"] == "3 skipped: needs a GPU"
    assert rows["failing"]["note"] == "1 failed, 2 passed"
    assert rows["bad"]["tail"] == ["one", "two | three"]
    assert rows["last"]["tail"] == ["x"]
    pid = int(rows["hangs"]["tail"][0].split()[1])
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the step's child goes on"
        time.sleep(0.05)
    text = (out / "results.md").read_text()
    assert re.search(r"\| 1 \| bad \| what bad settles \| FAIL \| \d+ \| exit status 3 \|", text)
    assert "## bad: FAIL" in text and "two | three" in text and "## good" not in text
    assert "a GPU" in text
    assert {path.name for path in out.iterdir()} == FILES
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert {"bad.log", "hangs.log"} <= set(logs.getnames())


@pytest.mark.usefixtures("gpu")
def test_stages_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state alone goes from one machine to the next."""
    out = tmp_path / "out"
    assert main(out, "1", str(out), "--only", "compile-2,bad,good")[0] == 1
    with tarfile.open(out / "state.tar.gz") as state:
        assert set(state.getnames()) == {"results.json", "pyproject.toml"}
    monkeypatch.setenv("OUT", str(out))
    code, rows = main(out, "2")
    assert code == 0 and rows["other"]["tail"] == ["90"]
    assert [(name, row["piece"]) for name, row in rows.items()] == [
        ("compile-2", 0),
        ("good", 0),
        ("bad", 0),
        ("other", 1),
    ]
    # Without time nothing runs, and nothing that is known is forgotten.
    code, rows = main(out, "1", "--minutes", "0")
    assert code == 0
    assert rows["bad"]["status"] == "FAIL" and rows["good"]["status"] == "PASS"
    assert rows["crash"]["status"] == "SKIP" and "--from crash" in rows["crash"]["note"]
    # With other sources the build is another one.
    monkeypatch.setattr(runner, "SOURCES", ("README.md",))
    code, rows = main(out, "2")
    assert code == 0 and rows["compile-2"]["piece"] == 3


@pytest.mark.usefixtures("gpu")
def test_side_by_side(tmp_path: Path) -> None:
    """Steps of several stages at once; builds before them, and timings after them, alone."""
    folder = tmp_path / "seen"
    folder.mkdir()
    code = """
import pathlib, time
folder, name, others = pathlib.Path({folder!r}), {name!r}, {others!r}
(folder / (name + ".began")).touch()
give_up = time.monotonic() + 40
while not all((folder / (other + ".began")).exists() for other in others):
    assert time.monotonic() < give_up
    time.sleep(0.01)
time.sleep(0.5)  # whoever may begin meanwhile does
print(*sorted(path.name for path in folder.iterdir()))
(folder / (name + ".ended")).touch()
"""

    def busy(name: str, others: tuple[str, ...] = (), **more: Any) -> Step:
        """Ends once the others have begun, and prints who has begun and who has ended by then."""
        return step(name, code.format(folder=str(folder), name=name, others=others), **more)

    together = ("one", "two", "three")
    steps = (
        busy("timing", stage=2, alone=True),
        busy("one", together),
        busy("two", together),
        busy("three", together, stage=2),
        busy("compile-1", build=True),
        step("bad", "raise SystemExit(3)"),
    )
    out = tmp_path / "out"
    code_of_exit = runner.main(["1,2", str(out), "--jobs", "4"], steps)
    rows = {row["step"]: row for row in json.loads((out / "results.json").read_text())["steps"]}
    assert code_of_exit == 1
    assert {name: row["status"] for name, row in rows.items() if row["status"] != "PASS"} == {
        "bad": "FAIL"
    }
    assert rows["compile-1"]["tail"] == ["compile-1.began"]
    assert rows["timing"]["tail"] == [
        "compile-1.began compile-1.ended one.began one.ended three.began three.ended"
        " timing.began two.began two.ended"
    ]


@pytest.mark.usefixtures("gpu")
def test_budget_ends_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST", 0)
    stub = step("long", "import time; time.sleep(600)", limit=300)
    assert runner.main(["1", str(tmp_path), "--minutes", "0.03"], [stub]) == 1
    assert "what was left of the budget" in (tmp_path / "results.md").read_text()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = runner.environment()
    assert found["torch"] and found["python"] and "gpus" in found
    assert found["compute-sanitizer"] == [] and found["nvcc"] == [] and not found["mps"]


def started(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("FUSEDPG_TEST_DEVICE", "OUT")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable} | env
    line = [str(SCRIPT), *arguments]
    return subprocess.run(line, env=clean, capture_output=True, text=True, timeout=170)


def test_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    none = started("1", str(tmp_path))
    assert none.returncode == 2 and "no GPU" in none.stderr
    assert "graphs" in started("2", "--list").stdout
    wrong = started("2", str(tmp_path), "--from", "nowhere")
    assert wrong.returncode == 1 and "no step 'nowhere'" in wrong.stderr
    assert "set OUT" in started("2").stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "only"),
    [("1", "package,kernels"), ("3", ""), *map(harness.slow, ("1", "2", "4"), ("", "", ""))],
)
def test_dry_run(stage: str, only: str, tmp_path: Path) -> None:
    """On the fake device: what needs a real one is skipped, all else passes."""
    options = harness.fake_gpu(FUSEDPG_TEST_DEVICE="cpu", OUT=str(tmp_path / "out"))
    ended = started(
        *(stage, "--state", str(tmp_path / "none")),
        *(("--only", only) if only else ()),
        **options["env"],
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    rows = json.loads((tmp_path / "out/results.json").read_text())["steps"]
    needs = {step.name: step.needs for step in STEPS}
    for row in rows:
        wanted = "SKIP" if "gpu" in needs[row["step"]] else "PASS"
        assert row["status"] == wanted, row


def test_steps_fit() -> None:
    """A hang costs 100 seconds, and a stage whose steps all pass in half of that fits."""
    for stage in (1, 2, 3, 4):
        steps = [one for one in STEPS if one.stage == stage]
        assert steps and all(one.limit <= MOST for one in steps)
        assert sum(one.limit for one in steps) / 2 <= 60 * runner.MINUTES


@pytest.mark.parametrize("tensors", [1, 3])
def test_ways_of_a_step_of_one_rank_agree(tensors: int) -> None:
    """Those that benchmarks/gpu.py times, on the CPU; torch.compile and graphs are for a GPU."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import torch
import torch.distributed as dist
import fusedpg
import _gpu_one_rank as one
dist.init_process_group("fused", store=dist.HashStore(), rank=0, world_size=1)
state = one.State(9_000, {tensors}, torch.device("cpu"))
for name in (one.OURS, one.SMART, one.EAGER):
    one.check(state, name, one.ARMS[name](state))
dist.destroy_process_group()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_tests_that_steps_name_exist() -> None:
    for one in STEPS:
        for word in one.command:
            if word.endswith(".py") or ".py::" in word:
                path, _, name = word.partition("::")
                assert (ROOT / path).exists(), word
                assert not name or f"def {name}(" in (ROOT / path).read_text(), word


def test_docs_hold_every_step() -> None:
    """The table is that of the steps, but for what has been run since."""

    def without_status(text: str) -> list[str]:
        return [line.rsplit(" | ", 1)[0] for line in text.splitlines()]

    docs = (ROOT / "docs/guides/gpu.md").read_text().splitlines()
    wanted = without_status(runner.table(STEPS))
    missing = [line for line in wanted if not any(has.startswith(line) for has in docs)]
    assert not missing, "\n".join(missing)
