"""What a process holds: descriptors, threads and mappings."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import time
from pathlib import Path

# Shared by all groups, and ended when they have been idle for a while.
LASTING = ("fusedpg-future",)
Held = dict[str, collections.Counter[str]]


def held() -> Held:
    """By kind and name."""
    gc.collect()
    names: collections.Counter[str] = collections.Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            names[name] += name not in LASTING
    files: collections.Counter[str] = collections.Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            files[target.split(":")[0] if ":[" in target else target] += 1
    maps: collections.Counter[str] = collections.Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd" in line or "/dev/shm" in line:
            maps[line.split()[-1] if "(deleted)" not in line else line.split()[-2]] += 1
    return {"descriptors": files, "threads": names, "mappings": maps}


def unowned() -> set[str]:
    """What lies in /dev/shm and no process of this machine uses: of one that has died."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            used |= {
                line.split("/dev/shm/")[1] for line in maps.splitlines() if "/dev/shm/" in line
            }
            used |= {os.path.basename(os.readlink(entry)) for entry in (process / "fd").iterdir()}
    return {path.name for path in Path("/dev/shm").iterdir()} - used


def leaks(before: Held, patience: float = 3.0) -> list[str]:
    """What is held now and was not before; threads may need a moment to end."""
    deadline = time.monotonic() + patience
    while True:
        now = held()
        grown = [
            f"leaked {kind}: {dict(now[kind] - before[kind])}"
            for kind in now
            if now[kind] - before[kind]
        ]
        if not grown or time.monotonic() > deadline:
            return grown
        time.sleep(0.02)
