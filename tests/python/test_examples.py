"""The examples run, learn something, and resume with the other optimizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import harness

pytestmark = pytest.mark.fused_only

EXAMPLES = harness.ROOT / "examples"


def run(program: str, scratch: Path, *arguments: str) -> dict[str, Any]:
    report = scratch / "report.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = str(EXAMPLES / program)
    done = subprocess.run(
        [sys.executable, *launcher, program, "--quick", "--json", str(report), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def test_quickstart() -> None:
    """As the README says it: the ranks end with the same parameters, and it has learned."""
    path = EXAMPLES / "quickstart.py"
    assert len(path.read_text().splitlines()) < 40
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.1 * losses[0]
    assert "2 ranks hold the same 1474 parameters" in done.stdout


def test_own_optimizers() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / "own_optimizers.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.1 * losses[0]
    assert "fused collective" in done.stdout


@pytest.mark.parametrize("program", ["char_transformer.py", harness.slow("resnet9.py")])
def test_learns(program: str, tmp_path: Path) -> None:
    losses = run(program, tmp_path)["losses"]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_skips_blocks_and_learns(tmp_path: Path) -> None:
    losses = run("bag_of_words.py", tmp_path, "--block-skip", "on")["losses"]
    assert sum(losses[-10:]) < 0.97 * sum(losses[:10])


@pytest.mark.slow
def test_skips_blocks_and_learns_the_same(tmp_path: Path) -> None:
    on, off = (run("bag_of_words.py", tmp_path, "--block-skip", mode) for mode in ("on", "off"))
    assert on["losses"] == off["losses"]
    sent_on, sent_off = (float(report["sent"].split()[0]) for report in (on, off))
    assert sent_on < 0.5 * sent_off


@pytest.mark.slow
def test_resumes_with_the_other_optimizer(tmp_path: Path) -> None:
    whole = run("digits_cnn.py", tmp_path)["losses"]
    saved = ["--checkpoint", str(tmp_path / "checkpoint.pt")]
    middle = len(whole) // 2
    begin = run("digits_cnn.py", tmp_path, *saved, "--stop-at", str(middle))
    assert begin["losses"] == whole[:middle]
    rest = run("digits_cnn.py", tmp_path, *saved, "--resume", "--optimizer", "torch")
    assert rest["first_step"] == middle
    for mine, want in zip(rest["losses"], whole[middle:], strict=True):
        assert mine == pytest.approx(want, rel=1e-3, abs=1e-4)
