"""What groups say about themselves."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class _GroupInfo(TypedDict):
    backend: Literal["fused", "gloo"]
    engine: Literal["shm", "tcp"]
    world_size: int
    local_world_size: int
    local_ranks: list[int]
    threads: int
    isa: str
    arena_reserved: int
    arena_used: int
    cuda_arena: int
    sequence_number: int
    state: Literal["ok", "failed"]


class GroupInfo(_GroupInfo, total=False):
    """Facts about a group on one rank; see :func:`fusedpg.group_info`."""

    transport: Literal["tcp"]
    address: str
    aggregators: list[str]
    aggregate: str
    nccl_version: int
    cuda_path: Literal["stock", "ring", "direct"]


class OpStats(TypedDict):
    """What one operation has cost a rank; see :func:`fusedpg.stats`."""

    calls: int
    paths: dict[str, int]
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    blocks: int
    blocks_present: int
    blocks_union: int
    density: float | None
    union_density: float | None


Stats = dict[str, Any]
"""An :class:`OpStats` by operation, and seconds by rank under "waited"."""
