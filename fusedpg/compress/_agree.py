"""Ranks that compress in different ways would read each other's payloads wrongly."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from fusedpg.compress._wire import gathered_into


def described(thing: object) -> str:
    """A compressor, memory or communicator: its type, and what it was made with."""
    plain = {
        key.lstrip("_"): value
        for key, value in sorted(vars(thing).items())
        if value is None or isinstance(value, bool | int | float | str)
    }
    arguments = ", ".join(f"{key}={value!r}" for key, value in plain.items())
    return f"{type(thing).__qualname__}({arguments})"


def check(facts: dict[str, Any], group: Any) -> None:
    """Raises, on all ranks, if the ranks of a group have not all been given the same.

    Raises:
        RuntimeError: which names the facts that differ.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    hashes = [zlib.crc32(repr(value).encode()) for value in facts.values()]
    own = torch.tensor(hashes, dtype=torch.int64, device=device)
    found = own.new_empty(dist.get_world_size(group) * own.numel())
    gathered_into(found, own, group=group)
    theirs = found.view(-1, own.numel()).cpu()
    differ = (theirs != theirs[0]).any(0).tolist()
    mine = ", ".join(f"{key} {facts[key]!r}" for key, other in zip(facts, differ) if other)
    if mine:
        raise RuntimeError(
            f"fusedpg.compress: the ranks' states differ in what all must have the same. Rank "
            f"{dist.get_rank(group)} of the group has {mine}"
        )
