"""Ranks that Open MPI starts, so that its all-reduce can be timed in the same processes.

The benchmark starts itself once more under mpirun: those processes are the ranks. They have the
common clock from a file in shared memory, the store from the first process, and no binding to
cores, as the ranks that the harness starts itself.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from _harness import Row, Worker

FOLDER, PORT = "FUSEDPG_BENCH_MPI_FOLDER", "FUSEDPG_BENCH_MPI_PORT"


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
    return FOLDER in os.environ


def launch(args: argparse.Namespace) -> list[Row]:
    """This program under mpirun; what rank 0 reports. Exits non-zero if a rank fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "cells").write_bytes(bytes(8 * 3 * args.world_size))
        options = ["-n", str(args.world_size), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        done = subprocess.run(
            [str(mpirun()), *options, sys.executable, *sys.argv],
            env={
                **os.environ,
                FOLDER: folder,
                PORT: str(store.port),
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            },
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"a rank failed: mpirun ended with exit code {done.returncode}")
        rows: list[Row] = pickle.loads(Path(folder, "rows").read_bytes())
        return rows


class File:
    """Where rank 0 reports, in place of a pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, rows: list[Row] | None) -> None:
        self._path.write_bytes(pickle.dumps(rows))


def be_rank(worker: Worker, args: argparse.Namespace, rank_main: Callable[..., None]) -> None:
    """The whole life of a process that `launch` started."""
    from fusedpg.launch import init_from_environment

    place = init_from_environment()
    assert place is not None
    assert place.world_size == args.world_size
    folder = Path(os.environ[FOLDER])
    with open(folder / "cells", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    cells = (ctypes.c_int64 * (3 * place.world_size)).from_buffer(memory)
    port = int(os.environ[PORT])
    rank_main(worker, args, place.rank, cells, [port], File(folder / "rows"))


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
