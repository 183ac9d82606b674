"""Choices of the tuner that are remembered: in the process, and under FUSEDPG_CACHE_DIR.

A choice is the title of a schedule, found by the program (with its shapes and types) and by where
it was timed. A file that is damaged, or of schedules that there are no longer, is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.functional import group_info
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.ir import Program
from fusedpg.fusion.private import content, directory

_log = logging.getLogger("fusedpg")
_memory: dict[str, str] = {}
_KEPT = 4096


def _place(group: dist.ProcessGroup) -> str:
    """What the times depend on besides the program."""
    try:
        info = group_info(group)
    except ValueError:  # another backend
        return dist.get_backend(group)
    facts = ("engine", "world_size", "local_world_size", "threads", "isa", "transport")
    return ", ".join(f"{fact} {info.get(fact)}" for fact in facts)


def _key(program: Program, group: dist.ProcessGroup, device: str, into: bool) -> str:
    text = re.sub(r"  \S+:\d+$", "", str(program), flags=re.MULTILINE)  # lines of the user's file
    compiled = load_extension()._fusion_settings()[0]
    facts = [text, _place(group), device, "into" if into else "new", f"compiled {compiled}"]
    if device == "cuda":
        facts.append(torch.cuda.get_device_name())
    facts += [torch.__version__, platform.machine(), platform.node(), str(os.cpu_count())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:40]


def known(
    program: Program, group: dist.ProcessGroup, device: str, into: bool
) -> tuple[str | None, str]:
    """The title of what was chosen, and whether from "memory" or "disk"."""
    key = _key(program, group, device, into)
    if key in _memory:
        return _memory[key], "memory"
    try:
        with _directory() as place:
            lines = (content(place / key) or b"").decode().splitlines()
    except (OSError, FusionError, UnicodeDecodeError):
        return None, ""
    return (lines[0], "disk") if lines else (None, "")


def remember(
    program: Program, group: dist.ProcessGroup, device: str, into: bool, title: str
) -> None:
    key = _key(program, group, device, into)
    while len(_memory) >= _KEPT:
        del _memory[next(iter(_memory))]
    _memory[key] = title
    try:
        with _directory() as place:
            with tempfile.NamedTemporaryFile("w", dir=place, prefix=f"{key}.", delete=False) as new:
                new.write(f"{title}\n{program.name}, {_place(group)}\n")
            Path(new.name).replace(place / key)
    except (OSError, FusionError) as error:
        _log.info("what the tuner chose is not kept on disk: %s", error)


def _directory() -> AbstractContextManager[Path]:
    return directory(load_extension()._fusion_settings()[1], "tuned")
