"""PyTorch's own DistributedTest: everything that Gloo passes."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

import harness

RUN = Path(__file__).parent / "c10d_suite" / "run.py"


def run(*arguments: str) -> None:
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("no expecttest: pip install expecttest")
    done = subprocess.run(
        harness.python(str(RUN), *arguments),
        capture_output=True,
        text=True,
        timeout=580,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [harness.slow(2), harness.slow(4)])
def test_suite(world_size: int) -> None:
    run("--backend", harness.BACKEND, "--world-size", str(world_size))


@pytest.mark.timeout(600)
@pytest.mark.fused_only
@pytest.mark.parametrize("world_size", [2, harness.slow(4)])
def test_served_as_gloo(world_size: int) -> None:
    """By the name "gloo", of which torch's tests know more: more of them run than above."""
    run("--backend", "gloo", "--serve", "--world-size", str(world_size))


@pytest.mark.timeout(600)
@pytest.mark.fused_only
@pytest.mark.parametrize(
    ("counts", "tests"),
    [
        harness.slow("2+1", "quick"),
        ("2+2", "quick"),
        *(harness.slow(counts, "all") for counts in ("1+1", "2+1", "2+2")),
    ],
)
def test_between_hosts(counts: str, tests: str) -> None:
    """With ranks that take themselves to be on two hosts."""
    run(
        "--backend",
        harness.BACKEND,
        "--hosts",
        counts,
        *(["--quick"] * (tests == "quick")),
    )
