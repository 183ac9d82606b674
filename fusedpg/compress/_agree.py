"""Ranks that compress in different ways would read each other's payloads wrongly."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from fusedpg.compress._wire import gathered_into

# What results depend on and may be an attribute of a class or a property.
_OF_CLASSES = ("average", "linear", "tensors_size_are_same", "scale", "beta", "gamma")


def described(thing: object) -> str:
    """A compressor, memory or communicator: its type, and what it works with. Of the user's classes
    without what is private, which may be a rank's own."""
    ours = type(thing).__module__.startswith("fusedpg.")
    known = {key: getattr(thing, key) for key in _OF_CLASSES if hasattr(thing, key)}
    plain = {
        key.lstrip("_"): value
        for key, value in sorted((known | vars(thing)).items())
        if (value is None or isinstance(value, bool | int | float | str))
        and (ours or not key.startswith("_"))
    }
    arguments = [f"{key}={value!r}" for key, value in plain.items()]
    return f"{type(thing).__qualname__}({', '.join(arguments)})"


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _hash(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def check_quickly(facts: dict[str, Any], group: Any) -> None:
    """``check`` by one small operation, for every step."""
    own = _hash(facts)
    most = torch.tensor([own, -own], device=_device(group))
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if most.tolist() != [own, -own]:
        check(facts, group)


def check(facts: dict[str, Any], group: Any) -> None:
    """Raises, on all ranks, if the ranks of a group have not all been given the same.

    Raises:
        RuntimeError: which names the facts that differ.
    """
    device = _device(group)
    own = torch.tensor([_hash(value) for value in facts.values()], device=device)
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
