"""A group of some ranks of a group, made by these ranks alone.

``dist.new_group`` needs every rank of the job, or with ``use_local_synchronization`` names the
group by how many groups this rank knows: ranks of which one is in more groups than another (a
pipeline's first stage, say) then wait for each other under different names until their time is up.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedpg._registration import BACKEND
from fusedpg.functional import _is_ours

# The number of groups of a purpose that were made of a group: all of its ranks agree in that.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()


def make(
    parent: dist.ProcessGroup, purpose: str, members: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """A collective of the members, in their order, with the parent's backend and time limit.

    Args:
        purpose: the same on all members.
        members: ranks of the parent, this one among them; default: all.
    """
    ranks = dist.get_process_group_ranks(parent)
    ranks = [ranks[n] for n in (range(len(ranks)) if members is None else members)]
    # A group that serves "gloo" may do so no longer for new groups.
    backend = BACKEND if _is_ours(parent) else dist.get_backend(parent)
    timeout = parent._get_backend(parent._device_types[0]).options._timeout
    counts = _made.setdefault(parent, {})
    count = counts[purpose] = counts.get(purpose, 0) + 1
    helper = getattr(c10d, "_new_process_group_helper", None)
    if helper is None:  # a torch that has not been tried: right where all know as many groups
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    # As new_group does once it has a name.
    group, _ = helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        c10d._get_default_store(),
        f"{parent.group_name}/{purpose}/{count}",
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}
    return group
