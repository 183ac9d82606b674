"""Processes that share one GPU, each of them a node of its own to NCCL.

Stock NCCL refuses two ranks on one device of one host. Ranks with different NCCL_HOSTID look like
hosts of one GPU each and talk over sockets of the loopback interface. The GPU switches between the
processes, so this says nothing about speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import harness

# Processes take turns on the GPU, and the first collective loads and connects everything.
DEADLINE = 300.0


def environment(rank: int) -> dict[str, str]:
    return {
        "NCCL_HOSTID": f"fusedpg-test-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        # A "host" has one rank, so these find nothing; said in case NCCL looks further.
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        # Memory and threads of many communicators on one device.
        "NCCL_MAX_NCHANNELS": "2",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        # A failed group must raise, not end the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }


class Ranks:
    """A pool of the harness with the patience that a shared GPU needs."""

    def __init__(self, workers: harness.Workers) -> None:
        self.workers = workers
        self.world_size = workers.world_size

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.workers.run(function, *args, timeout=DEADLINE)


def _options(world_size: int, env: dict[str, str]) -> dict[str, Any]:
    return {"timeout": 120.0, "env": [environment(rank) | env for rank in range(world_size)]}


def pool(world_size: int, **env: str) -> Ranks:
    """Shared, alive until the session ends."""
    return Ranks(harness.pool(world_size, **_options(world_size, env)))


def fresh(world_size: int, **env: str) -> harness.Workers:
    """For tests that break their ranks."""
    return harness.Workers(world_size, oracle=False, **_options(world_size, env))
