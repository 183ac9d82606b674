"""Where compressed gradients travel: process groups and a thread, one for all states of a group.

Where a group spans hosts of several ranks, what crosses a link is compressed once a host.

DDP uses the module's group during backward, in an order that a thread knows nothing of, so this is
a group of its own. What is handed to the thread is done in turn, so states of several modules
need no more than that their buckets come in the same order on all ranks, as DDP does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from fusedpg import _agreement, _own_group
from fusedpg._registration import BACKEND
from fusedpg.compress._base import Compressor
from fusedpg.compress._piece import Piece
from fusedpg.compress.communicators import Communicator
from fusedpg.compress.memories import Memory
from fusedpg.functional import _is_ours, group_info

Make = Callable[[Sequence[int] | None, str], dist.ProcessGroup]
"""Makes a group of these ranks, for a purpose."""


class Hosts:
    """The ranks of this host, and those of the other hosts that have the same place there."""

    def __init__(self, group: dist.ProcessGroup, hosts: list[list[int]], make: Make) -> None:
        rank = dist.get_rank(group)
        mine = next(ranks for ranks in hosts if rank in ranks)
        place = mine.index(rank)
        self.inside = make(mine, f"host of {mine[0]}")
        self.across = make([ranks[place] for ranks in hosts], f"place {place}")
        self.place, self.count = place, len(mine)

    def exchange(
        self, communicator: Communicator, compressor: Compressor, memory: Memory, grad: Tensor,
        piece: Piece,
    ) -> None:  # fmt: skip
        """As a communicator's. The ranks of a host add up first, and each sends a slice."""
        each = -(-piece.numel // self.count)
        edges = [min(n * each, piece.numel) for n in range(self.count + 1)]
        parts = [grad[a:b] for a, b in pairwise(edges)]
        mine = parts[self.place].clone()
        dist.reduce_scatter(mine, parts, group=self.inside)
        if compressor.average:
            mine.div_(self.count)
        part = piece.part(
            edges[self.place],
            edges[self.place + 1],
            dist.get_rank(self.across),
            dist.get_world_size(self.across),
            group=self.inside,
        )
        communicator.exchange(compressor, memory, mine, part, self.across)
        dist.all_gather(parts, mine, group=self.inside)


def _hosts_of(group: dist.ProcessGroup, make: Make) -> Hosts | None:
    """None where every rank compresses for itself: on one host, and with one rank or other numbers
    of ranks a host."""
    if not _is_ours(group):
        return None
    local = group_info(group)["local_ranks"]
    hosts = sorted({tuple(ranks) for ranks in _agreement.by_rank(local, group)})
    counts = {len(ranks) for ranks in hosts}
    if len(hosts) == 1 or counts == {1} or len(counts) > 1:
        return None
    return Hosts(group, [list(ranks) for ranks in hosts], make)


class Lane:
    def __init__(self, parent: dist.ProcessGroup) -> None:
        def make(members: Sequence[int] | None, part: str) -> dist.ProcessGroup:
            return _own_group.make(parent, f"fusedpg.compress/{part}", members)

        self.group = make(None, "all")
        self.hosts = _hosts_of(self.group, make)
        self.submit = concurrent.futures.ThreadPoolExecutor(1, "fusedpg-compress").submit

    def abort(self) -> None:
        """Ranks that wait for this one hear of it now, not when their time is up."""
        parts = [] if self.hosts is None else [self.hosts.inside, self.hosts.across]
        for group in (self.group, *parts):
            # One that has been destroyed meanwhile is in nobody's way.
            with contextlib.suppress(RuntimeError, ValueError):
                if dist.get_backend(group) == BACKEND:
                    group.abort()


_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, Lane] = weakref.WeakKeyDictionary()


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
