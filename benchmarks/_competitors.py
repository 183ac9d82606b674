"""A machine that the ranks do not have to themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """So many processes that do nothing but take time of the cores meanwhile."""
    mp = multiprocessing.get_context("spawn")
    processes = [mp.Process(target=_compete, args=(os.getpid(),)) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compete(parent: int) -> None:
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass
