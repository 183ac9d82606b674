"""Groups that span hosts of several ranks: what crosses a link is compressed once a host."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fusedpg import _agreement
from fusedpg.compress._base import Compressor
from fusedpg.compress._piece import Piece
from fusedpg.compress.communicators import Communicator
from fusedpg.compress.memories import Memory
from fusedpg.functional import _is_ours, group_info


class Hosts:
    """The ranks of this host, and those of the other hosts that have the same place there."""

    def __init__(self, group: dist.ProcessGroup, hosts: list[list[int]], make: Any) -> None:
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


def of(group: dist.ProcessGroup, make: Any) -> Hosts | None:
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
