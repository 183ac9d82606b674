"""State dicts that differ by rank, in a form of which every checkpoint keeps all ranks'."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
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


class RankStateDict(dict[str, tuple[dict[str, object]]]):
    """``{"rank 1 of 4": ({...},)}``, whose values can be read by their own names, too.

    ``torch.distributed.checkpoint`` takes tensors with equal keys for copies of one and keeps
    some rank's, a different rank's from one tensor to the next. So the key names the rank. The
    tuple is a value that it does not look into: a state that has not trained yet has no tensors
    to load into, and would get none of those of the checkpoint.
    """

    def __init__(self, key: str, values: dict[str, object]) -> None:
        super().__init__({key: (values,)})

    def __missing__(self, key: str) -> Any:
        # dcp.load() has put another tuple there.
        ((values,),) = self.values()
        return values[key]

    def __reduce_ex__(self, protocol: object) -> Any:
        # Files need no class of ours, also with weights_only=True.
        return collections.OrderedDict, (), None, None, iter(self.items())


def values_of(state_dict: Mapping[str, Any], own: str, memory: bool) -> Mapping[str, Any]:
    """The part of a state dict that is this rank's.

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
    if memory and others:
        raise ValueError(
            "a state dict of fusedpg.compress.State must have one entry, that of its rank: this "
            f"one has {', '.join(map(repr, others))} and {', '.join(places)}. Load the state "
            "dict as state_dict() gave it, or call load_state_dict(state_dict, memory=False) to "
            "begin with an empty memory"
        )
    if memory and own not in places:
        raise ValueError(
            f"{own} got the state dict of {', '.join(places)}. Only the rank that saved a residual "
            "may load it, and once: otherwise it is added to other ranks' gradients, or twice. "
            "Load each rank's own state dict; if there is none, or the number of ranks has "
            "changed, call load_state_dict(state_dict, memory=False), which takes any rank's and "
            "begins with an empty memory"
        )
    (values,) = state_dict[own if own in places else places[0]]
    return values if memory else {**values, "memory": {}}


class ParameterRecord(NamedTuple):
    """A parameter, as checkpoints have it."""

    name: str | None
    key: int  # of what is drawn for it
    dtype: str
    shape: tuple[int, ...] | None  # None: of a checkpoint that does not say

    @property
    def label(self) -> str:
        return f"parameter.{self.key}" if self.name is None else self.name


class Loaded:
    """The part of a checkpoint that no parameter has been given yet."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.memory = {name: list(kept) for name, kept in state_dict["memory"].items()}
        self.records = [ParameterRecord(*record) for record in state_dict["parameters"]]
        wrong = [name for name, kept in self.memory.items() if len(kept) != len(self.records)]
        if wrong:
            raise ValueError(
                f"the checkpoint has {len(self.records)} parameters, but another number of values "
                f"of {', '.join(wrong)}: it is damaged; load another one, or call "
                "load_state_dict(state_dict, memory=False)"
            )
        self._left = list(range(len(self.records)))

    def take(self, parameter: torch.Tensor, name: str | None) -> int:
        """Which of the checkpoint's parameters the next one of the model is.

        Raises:
            ValueError: if it is none of them.
        """
        what = "the model's next parameter" if name is None else repr(name)
        if name is not None and all(record.name is not None for record in self.records):
            fits = [n for n in self._left if self.records[n].name == name]
        else:
            # How buckets of several types alternate depends on their sizes. A single type may
            # change.
            kinds = {record.dtype for record in self.records}
            fits = [n for n in self._left if kinds == {self.records[n].dtype}
                    or self.records[n].dtype == str(parameter.dtype)]  # fmt: skip
        if not fits:
            raise ValueError(
                f"the checkpoint is of another model: {what} is of "
                f"{parameter.dtype} and of shape {tuple(parameter.shape)}; none of the "
                f"{len(self._left)} parameters that are left of the checkpoint's "
                f"{len(self.records)} fits it"
            )
        record = self.records[fits[0]]
        if record.shape not in (None, tuple(parameter.shape)):
            raise ValueError(
                f"the checkpoint is of another model: {what} has shape {tuple(parameter.shape)} in "
                f"the model, and {record.label!r} has shape {record.shape} in the checkpoint"
            )
        self._left.remove(fits[0])
        return fits[0]

    def check_complete(self) -> None:
        """After the first backward with a checkpoint: another model may have fewer parameters.

        Raises:
            ValueError: which names the first parameter that the model does not have.
        """
        if self._left:
            first = self.records[self._left[0]]
            raise ValueError(
                f"the checkpoint is of another model: this model lacks {len(self._left)} of the "
                f"checkpoint's {len(self.records)} parameters; the first is {first.label!r}, of "
                f"shape {first.shape}"
            )
