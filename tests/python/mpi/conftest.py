"""One group per MPI job: each process is a rank and runs the tests itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import harness
from fusedpg.launch import init_from_environment


@pytest.fixture(scope="session")
def context() -> Iterator[harness.Context]:
    """What a pool's worker would get, made from the launcher's variables."""
    torch.set_num_threads(1)
    init_from_environment()
    if not dist.is_initialized():
        dist.init_process_group(harness.BACKEND)
    yield harness.Context(
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_backend(),
        oracle=dist.new_group(backend="gloo"),
    )
    dist.destroy_process_group()
