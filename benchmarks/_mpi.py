"""Ranks that Open MPI starts, so that its all-reduce can be timed in the same processes.

The benchmark starts itself once more under mpirun: those processes are the ranks. They have the
common clock from a file in shared memory, the store from the first process, and no binding to
cores, as the ranks that the harness starts itself.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from _harness import Job, Row

PORT = "FUSEDPG_BENCH_MPI_PORT"


def why_not() -> str | None:
    """Why there is no Open MPI here."""
    if importlib.util.find_spec("mpi4py") is None:
        return "no mpi4py: pip install -r requirements/mpi.txt"
    if mpirun() is None:
        return "no mpirun: pip install -r requirements/mpi.txt"
    return None


def mpirun() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def is_rank() -> bool:
    return PORT in os.environ


def launch(job: Job) -> list[Row]:
    """The job under mpirun. Exits non-zero if a rank fails."""
    import _harness as harness

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = ["-n", str(job.args.world_size)]

    def start(program: list[str], env: dict[str, str]) -> None:
        cells = Path(env[harness.FOLDER], "cells")
        cells.write_bytes(bytes(8 * 3 * job.args.world_size))
        options = [*ranks, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            [str(mpirun()), *options, sys.executable, *program],
            env={**os.environ, **env, **more, PORT: str(store.port)},
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"a rank failed: mpirun ended with exit code {done.returncode}")

    return harness.launched(job, start)


def be_rank(job: Job, send: Callable[[list[Row]], object]) -> None:
    """The whole life of a process that `launch` started."""
    import _harness as harness
    from fusedpg.launch import init_from_environment

    place = init_from_environment()
    assert place is not None
    assert place.world_size == job.args.world_size
    with open(Path(os.environ[harness.FOLDER], "cells"), "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    cells = (ctypes.c_int64 * (3 * place.world_size)).from_buffer(memory)
    harness.rank_main(job, place.rank, cells, [int(os.environ[PORT])], send)


def load() -> Callable[[Tensor], Callable[[], object]]:
    """Binds a tensor to Open MPI's in-place sum of it over all ranks."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # the ranks call it from one thread only
    from mpi4py import MPI

    communicator: Any = MPI.COMM_WORLD

    def bind(tensor: Tensor) -> Callable[[], object]:
        buffer = [tensor.numpy(), MPI.FLOAT]
        return lambda: communicator.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)

    return bind
