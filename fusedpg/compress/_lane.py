"""Where compressed gradients travel: process groups and a thread, one for all states of a group.

DDP uses the module's group during backward, in an order that a thread knows nothing of, so this is
a group of its own. What is handed to the thread is done in turn, so states of several modules
need no more than that their buckets come in the same order on all ranks, as DDP does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from fusedpg import _own_group
from fusedpg._registration import BACKEND
from fusedpg.compress import _hosts


class Lane:
    def __init__(self, parent: dist.ProcessGroup) -> None:
        def make(members: Sequence[int] | None, part: str) -> Any:
            return _own_group.make(parent, f"fusedpg.compress/{part}", members)

        self.group = make(None, "all")
        self.hosts = _hosts.of(self.group, make)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "fusedpg-compress")

    def abort(self) -> None:
        """Ranks that wait for this one hear of it now, not when their time is up."""
        parts = [] if self.hosts is None else [self.hosts.inside, self.hosts.across]
        for group in (self.group, *parts):
            # One that has been destroyed meanwhile is in nobody's way.
            with contextlib.suppress(RuntimeError, ValueError):
                if dist.get_backend(group) == BACKEND:
                    group.abort()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        return self._thread.submit(call, *arguments)


_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()


def of(parent: dist.ProcessGroup | None) -> Lane:
    """A collective of the group, the first time."""
    if parent is None:
        parent = dist.distributed_c10d._get_default_group()
    lane = _lanes.get(parent)
    if lane is None:
        lane = _lanes[parent] = Lane(parent)
    return lane


def drop(lane: Lane) -> None:
    """After a failure on this rank: who comes later gets another one."""
    lane.abort()
    for parent, known in list(_lanes.items()):
        if known is lane:
            del _lanes[parent]
