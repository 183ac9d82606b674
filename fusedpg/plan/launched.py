"""The common part of commands that run on all ranks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence

import torch.distributed as dist

import fusedpg  # noqa: F401 - registers the backend
from fusedpg.plan.config import PlanError


def facts_of(texts: Sequence[str]) -> dict[str, object]:
    """``num_layers=12`` and the like.

    Raises:
        PlanError: for anything else.
    """
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            equals = ""
        if not equals:
            raise PlanError(f"{text!r} is not of the form num_layers=12")
    return found


@contextlib.contextmanager
def in_group() -> Iterator[None]:
    """The default group, made of what the launcher says if there is none."""
    made = not dist.is_initialized()
    if made:
        if "RANK" not in os.environ:
            raise PlanError("start it by torchrun, with a process for each device")
        dist.init_process_group("fused")
    try:
        yield
    finally:
        if made:
            dist.destroy_process_group()
