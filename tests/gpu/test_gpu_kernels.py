"""The kernels alone, and under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from gpu_checks import direct, kernels
from ranks import DEADLINE, environment

pytestmark = pytest.mark.timeout(900)
DRIVER = Path(__file__).with_name("kernel_driver.py")


def test_kernels() -> None:
    # In a worker: the process of the tests itself stays away from the GPU.
    with harness.Workers(1, init=False, oracle=False, env=[environment(0)]) as worker:
        assert worker.run(kernels.run_all, timeout=DEADLINE)[0] > 50


@pytest.mark.real_gpu
@pytest.mark.parametrize("in_turn", [False, True], ids=["at-once", "in-turn"])
def test_direct_kernels_of_two_ranks(in_turn: bool) -> None:
    pytest.importorskip("cuda.bindings")
    with harness.Workers(1, init=False, oracle=False, env=[environment(0)]) as worker:
        assert worker.run(direct.run_all, in_turn, timeout=DEADLINE)[0] > 10


@pytest.mark.real_gpu
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("what", ["kernels", "direct-in-turn"])
def test_sanitizer(what: str, tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    ended = subprocess.run(
        [*command, sys.executable, str(DRIVER), what],
        env=os.environ | environment(0) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "checks of kernels passed" in ended.stdout
