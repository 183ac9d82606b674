"""PyTorch's own DistributedTest: everything that Gloo passes."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

import harness

RUN = Path(__file__).parent / "c10d_suite" / "run.py"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, harness.slow(4)])
def test_suite(world_size: int) -> None:
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("no expecttest: pip install expecttest")
    done = subprocess.run(
        harness.python(str(RUN), "--backend", harness.BACKEND, "--world-size", str(world_size)),
        capture_output=True,
        text=True,
        timeout=580,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
