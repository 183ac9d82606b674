"""A group of some ranks of a group, made by these ranks alone.

``dist.new_group`` needs every rank of the job, or with ``use_local_synchronization`` names the
group by how many groups this rank knows: ranks of which one is in more groups than another (a
pipeline's first stage, say) then wait for each other under different names until their time is up.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def make(ranks: Sequence[int], name: str, backend: str, timeout: timedelta) -> Any:
    """A collective of the ranks named, in their order.

    Args:
        ranks: of the default group.
        name: the same on all of them, and of no other group of this process.
    """
    helper = getattr(c10d, "_new_process_group_helper", None)
    if helper is None:  # a torch that has not been tried: right where all know as many groups
        return dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
        )
    # What new_group does once it has a name.
    group, _ = helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        c10d._get_default_store(),
        name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}
    return group
