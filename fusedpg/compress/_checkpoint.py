"""State dicts that differ by rank, in a form of which every checkpoint keeps all ranks'."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

_PLACE = re.compile(r"rank \d+ of .*\d")


def place(group: dist.ProcessGroup | None) -> str:
    """This rank and the ranks of its group, as the key of what no other rank may load."""
    if not dist.is_initialized():
        return "rank 0 of 1"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(world_size)):
        return f"rank {rank} of {world_size}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"rank {rank} of ranks {ranks[0]} to {ranks[-1]}"
    return f"rank {rank} of ranks {', '.join(map(str, ranks))}"


class RankStateDict(dict[str, Any]):
    """``{"rank 1 of 4": ({...},)}``, whose values can be read by their own names, too.

    ``torch.distributed.checkpoint`` takes tensors with equal keys for copies of one and keeps
    some rank's, a different rank's from one tensor to the next. So the key names the rank. The
    tuple is a value that it does not look into: a state that has not trained yet has no tensors
    to load into, and would get none of those of the checkpoint.
    """

    def __init__(self, key: str, values: dict[str, Any]) -> None:
        super().__init__({key: (values,)})

    def __missing__(self, key: str) -> Any:
        # dcp.load() has put another tuple there.
        ((values,),) = self.values()
        return values[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Files need no class of ours, also with weights_only=True.
        return collections.OrderedDict, (), None, None, iter(self.items())


def values_of(state_dict: Mapping[str, Any], own: str, memory: bool) -> Mapping[str, Any]:
    """What a state dict has for this rank.

    Args:
        own: the rank's ``place``.
        memory: if not, any rank's state dict will do, and has no memory.

    Raises:
        ValueError: for the state dict of another rank or of another number of ranks.
    """
    places = [key for key in state_dict if _PLACE.fullmatch(key)]
    if not places:  # of an older version, each rank's in a file of its own
        return state_dict if memory else {**state_dict, "memory": {}}
    others = [key for key in state_dict if key not in places]
    if others:
        raise ValueError(
            f"the state dict of a fusedpg.compress.State has the entry of {places[0]} alone, found "
            f"{', '.join(map(repr, others))} beside it; to begin with an empty memory call "
            "load_state_dict(state_dict, memory=False)"
        )
    if memory and own not in places:
        raise ValueError(
            f"this is {own}, and the state dict is of {', '.join(places)}: what a rank has kept of "
            "its gradients is added to them once more where another rank loads it, or a rank "
            "loads it twice. Load each rank's own; where there is none, or the number of "
            "ranks is another, load_state_dict(state_dict, memory=False) takes any rank's "
            "and begins with an empty memory"
        )
    (values,) = state_dict[own if own in places else places[0]]
    return values if memory else {**values, "memory": {}}
