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


def launched(program: str, *arguments: str, timeout: float = 120) -> str:
    """What two ranks of an example print."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / program), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(program: str, scratch: Path, *arguments: str) -> dict[str, Any]:
    report = scratch / "report.json"
    launched(program, "--quick", "--json", str(report), *arguments, timeout=240)
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def learns_in_print(output: str) -> None:
    losses = [float(line.split()[-1]) for line in output.splitlines() if "loss" in line]
    assert losses[-1] < 0.1 * losses[0]


def test_quickstart() -> None:
    """As the README says it: the ranks end with the same parameters, and it has learned."""
    path = EXAMPLES / "quickstart.py"
    assert len(path.read_text().splitlines()) < 40
    output = launched(path.name)
    learns_in_print(output)
    assert "2 ranks hold the same 1474 parameters" in output


@pytest.mark.long
@pytest.mark.parametrize("compress", [None, "own", harness.slow("topk")])
def test_horovod(compress: str | None) -> None:
    output = launched("horovod_digits.py", *(["--compress", compress] if compress else []))
    assert float(output.split("accuracy")[1]) > 0.9


@pytest.mark.long
def test_own_optimizers() -> None:
    output = launched("own_optimizers.py")
    learns_in_print(output)
    assert "fused collective" in output


@pytest.mark.long
@pytest.mark.parametrize("program", ["char_transformer.py", harness.slow("resnet9.py")])
def test_learns(program: str, tmp_path: Path) -> None:
    losses = run(program, tmp_path)["losses"]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.long
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
