"""Interpreters that end without destroy_process_group, and starts by name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import harness

SCRIPT = Path(__file__).parent / "scripts" / "exits.py"
EXPECTED = {
    "quiet": (0, 0),
    "work": (0, 0),
    "arena": (0, 0),
    "destroy": (0, 0),
    "exit": (5, 5),
    "raise": (1, 1),
    "compress": (0, 0),
    "fork": (0, 0),
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_exit(mode: str) -> None:
    times = 3 if mode in ("quiet", "work", "compress") else 2
    done = subprocess.run(
        harness.python(str(SCRIPT), mode, str(times), harness.BACKEND),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == times
    for seconds, *codes in lines:
        if mode == "raise" and not harness.IS_FUSED:
            continue
        assert tuple(map(int, codes)) == EXPECTED[mode], done.stderr[-3000:]
        assert float(seconds) < 8
    if mode == "raise" and harness.IS_FUSED:
        assert "after ValueError: rank 1 gives up" in done.stderr, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.fused_only
@pytest.mark.parametrize(("first", "times"), [(0, 20), harness.slow(1000, 200)])
def test_exit_whatever_is_under_way(first: int, times: int) -> None:
    """Pending works, callbacks and threads in waits: a rank ends with its own exit code."""
    done = subprocess.run(
        harness.python(str(SCRIPT), "drawn", str(times), harness.BACKEND, str(first)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert len(done.stdout.splitlines()) == times
    assert "terminate called" not in done.stderr, done.stderr[-5000:]


def test_interpreters_of_their_own() -> None:
    """Without forking: two plain python processes that just end."""
    program = (
        "import torch, torch.distributed as dist\n"
        f"dist.init_process_group({harness.BACKEND!r})\n"
        "dist.all_reduce(torch.ones(5), async_op=True).wait()\n"
        "print(dist.get_backend())\n"
    )
    for done in harness.run_ranks(program):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == harness.BACKEND


@pytest.mark.fused_only
def test_backend_needs_no_import() -> None:
    """The entry point registers the backend when torch is imported."""
    program = (
        "import torch, torch.distributed as dist, sys\n"
        "dist.init_process_group('fused', store=dist.HashStore(), rank=0, world_size=1)\n"
        "t = torch.arange(3.0)\n"
        "dist.all_reduce(t)\n"
        "assert t.tolist() == [0, 1, 2]\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('cpu:fused', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(t)\n"
        "assert 'fused' in dist.get_backend_config()\n"
    )
    done = subprocess.run(
        harness.python("-c", program), capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.fused_only
def test_broken_installation_does_not_break_torch() -> None:
    """import torch must work even where our library cannot be loaded."""
    program = (
        "import sys\n"
        "sys.modules['fusedpg._C'] = None\n"
        "import torch\n"
        "assert torch.ones(2).sum() == 2\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
        "dist.destroy_process_group()\n"  # without it Gloo itself may abort at exit
    )
    done = subprocess.run(harness.python("-c", program), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
