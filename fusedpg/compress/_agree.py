"""Ranks that compress in different ways would read each other's payloads wrongly."""

from __future__ import annotations

import torch.distributed as dist

from fusedpg import _agreement

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


def check(facts: dict[str, object], group: dist.ProcessGroup) -> None:
    """Raises, on all ranks, if the ranks of a group have not all been given the same.

    One small operation, so that every step can ask.

    Raises:
        RuntimeError: which names the facts that differ.
    """
    if not _agreement.same(facts, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        theirs = _agreement.by_rank([f"{key} {value!r}" for key, value in facts.items()], group)
        raise RuntimeError(
            "fusedpg.compress: the ranks' states differ in what all must have the same: "
            f"{_agreement.in_words(theirs, rank)}. This is rank {rank} of {size}"
        )
