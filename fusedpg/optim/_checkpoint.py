"""State dicts: torch's keys, slices that DCP can save, and whole tensors from and to them."""

from __future__ import annotations

import collections
import contextlib
import copy
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedpg.optim._slices import SliceTensor, from_full, to_full

if TYPE_CHECKING:
    from fusedpg.optim._state import ShardedState


def _params(optimizer: ShardedState) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Parameters and their groups, in the order of a state dict's numbers."""
    return [(p, group) for group in optimizer.param_groups for p in group["params"]]


def to_slices(optimizer: Any, state_dict: dict[str, Any], blanks: bool) -> None:
    """Says of each slice in a state dict what it is a slice of.

    Args:
        blanks: also state that was made before a step, for a checkpoint to be loaded into.
    """
    optimizer._check_blanks()
    optimizer._check_layouts(optimizer._all_parameters())
    for number, (param, group) in enumerate(_params(optimizer)):
        state = state_dict["state"].get(number)
        if state is None:
            continue
        if param in optimizer._blank and not blanks:
            del state_dict["state"][number]
            continue
        offset, _ = optimizer._shard(param)
        state_dict["state"][number] = {
            key: SliceTensor(value, param.shape, param.stride(), offset)
            if optimizer._is_slice(key, group)
            else value
            for key, value in state.items()
        }


def loaded_groups(optimizer: ShardedState, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups of a state dict, with our parameters."""
    ours, groups = optimizer.param_groups, copy.deepcopy(state_dict["param_groups"])
    if len(ours) != len(groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for mine, group in zip(ours, groups, strict=True):
        if len(mine["params"]) != len(group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )
        _check_kind(optimizer, group)
        if group.get("differentiable"):
            raise ValueError("differentiable=True is not supported by fused optimizers")
        group["params"] = mine["params"]
        if "param_names" in mine:
            group.setdefault("param_names", mine["param_names"])
    return groups


# The option by which one tells groups of Adam and AdamW, LAMB, and SGD from each other.
_MARKS = ("amsgrad", "trust_clip", "momentum")


def _check_kind(optimizer: ShardedState, group: dict[str, Any]) -> None:
    """Raises for a group of another kind of optimizer, whose state would be misread."""
    mark = next(mark for mark in _MARKS if mark in optimizer.defaults)
    missing = optimizer.defaults.keys() - optimizer._group_defaults.keys() - group.keys()
    foreign = [] if mark in group else [other for other in _MARKS if other in group]
    if missing or foreign:
        has = f"has {foreign[0]}" if foreign else f"has no {' and no '.join(sorted(missing))}"
        raise ValueError(
            f"loaded state dict is not {type(optimizer).__name__}'s: a parameter group {has}"
        )


def digest(optimizer: ShardedState, state_dict: dict[str, Any]) -> int:
    """Of the whole tensors in a state dict, of which every rank takes its slices: ranks must load
    the same. 0: there are none, or there is nobody to differ from."""
    found = 0
    if optimizer._world_size == 1:
        return found
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    for place, (number, (_, group)) in enumerate(zip(numbers, _params(optimizer), strict=True)):
        for key, value in sorted(state_dict["state"].get(number, {}).items()):
            whole = isinstance(value, torch.Tensor) and not isinstance(value, SliceTensor)
            if whole and optimizer._is_slice(key, group):
                found = zlib.crc32(f"{place} {key} {value.dtype} {value.shape}".encode(), found)
                plain = value.detach().cpu().contiguous().reshape(-1)
                found = zlib.crc32(plain.view(torch.uint8).numpy(), found)
    return found


def loaded_state(
    optimizer: ShardedState, state_dict: dict[str, Any]
) -> collections.defaultdict[Any, Any]:
    """This rank's part of the state in a state dict, as new tensors."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    given = dict(state_dict["state"])
    state: collections.defaultdict[Any, Any] = collections.defaultdict(dict)
    for number, (param, group) in zip(numbers, _params(optimizer), strict=True):
        values = optimizer._loaded(
            {key: value for key, value in given.pop(number, {}).items() if value is not None}
        )
        if values and optimizer._counts and "step" not in values:
            raise ValueError(f"state[{number!r}] has no step")
        if not optimizer._has_master(param):
            values.pop("master_param", None)  # of a half parameter
        if values and optimizer._has_master(param) and "master_param" not in values:
            state[param]["master_param"] = optimizer._new_slice(param, "master_param")
        for key, value in values.items():
            if key == "step":
                # May be a number. Ours are float32, at the parameter.
                step = torch.as_tensor(value, dtype=torch.float32).reshape(())
                state[param][key] = step.to(param.device, copy=True)
            elif isinstance(value, torch.Tensor) and optimizer._is_slice(key, group):
                # Into our own type: torch would round fp32 moments to a half parameter's.
                own = _own(optimizer, f"state[{number!r}][{key!r}]", value, param)
                state[param][key] = optimizer._new_slice(param, key).copy_(own)
            else:
                state[param][key] = copy.deepcopy(value)
    # What belongs to no parameter is kept as it is.
    state.update(given)
    return state


def _own(
    optimizer: ShardedState, where: str, value: torch.Tensor, param: torch.Tensor
) -> torch.Tensor:
    offset, length = optimizer._shard(param)
    if not isinstance(value, SliceTensor):
        if value.shape != param.shape:
            raise ValueError(
                f"{where} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}"
            )
        return from_full(value, param, offset, length)
    theirs = [(s, d) for s, d in zip(value.shape, value.stride(), strict=True) if s != 1]
    ours = [(s, d) for s, d in zip(param.shape, param.stride(), strict=True) if s != 1]
    if theirs != ours or (length and (value.offset, value.local().numel()) != (offset, length)):
        raise ValueError(
            f"{where} is the slice of another rank or world size (elements from {value.offset}, "
            f"{value.local().numel()} of them; this rank has {length} from {offset}) or of another "
            "shape. Load a full_state_dict(), the result of fusedpg.optim.merge_state_dicts() on "
            "the state dicts of all ranks, or use torch.distributed.checkpoint"
        )
    return value.local() if length else value.local().new_empty(0)


def has_slices(optimizer: ShardedState) -> bool:
    """Not the state of an SGD without momentum."""
    return any(
        optimizer._is_slice(key, group)
        for param, group in _params(optimizer)
        for key in optimizer.state.get(param, ())
    )


def gather(
    optimizer: ShardedState, to: int | None, *, cpu: bool = False, copies: bool = True
) -> dict[int, dict[str, Any]]:
    """The whole state by number of the parameter, as torch's optimizer has it; collective.

    Args:
        to: the rank that gets it, the others get nothing; None: all ranks.
        cpu: copies are on the CPU.
        copies: or the state itself and views of it, where no rank has a part.
    """
    with optimizer._telling() if copies else contextlib.nullcontext():
        optimizer._check_layouts(optimizer._all_parameters())
        optimizer._check_blanks()
        if copies:
            _check_agreement(optimizer)
    receives = to is None or optimizer._rank == to
    state: dict[int, dict[str, Any]] = {}
    for number, (param, its_group) in enumerate(_params(optimizer)):
        if not optimizer.state.get(param) or param in optimizer._blank:
            continue
        values = {}
        for key, value in optimizer.state[param].items():
            if not optimizer._is_slice(key, its_group):
                values[key] = copy.deepcopy(value) if copies else value
            elif not copies:
                values[key] = value.as_strided(param.shape, param.stride())
            else:
                full = _gather_one(value, param, optimizer._group, optimizer._world_size, to)
                if full is not None:
                    values[key] = full.cpu() if cpu else full
        if receives:
            state[number] = values
    return state


def _check_agreement(optimizer: ShardedState) -> None:
    """Raises on all ranks unless they have the same state: who clears it does so everywhere."""
    optimizer._check_blanks()
    mine = [
        (number, sorted(optimizer.state.get(param, ())))
        for number, (param, _) in enumerate(_params(optimizer))
        if param not in optimizer._blank
    ]
    digest = zlib.crc32(repr([one for one in mine if one[1]]).encode())
    both = torch.tensor([digest, -digest], device=optimizer._device())
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=optimizer._group)
    if int(both[0]) != -int(both[1]):
        raise RuntimeError(
            "ranks have state of different parameters: optimizer.state must be cleared, and state "
            "dicts loaded, on all ranks alike"
        )


def _gather_one(
    local: torch.Tensor,
    param: torch.Tensor,
    group: dist.ProcessGroup,
    world_size: int,
    to: int | None,
) -> torch.Tensor | None:
    from fusedpg.functional import shard_range

    ranges = [shard_range(param.numel(), world_size, rank) for rank in range(world_size)]
    chunk = ranges[0][1]
    padded = torch.zeros(chunk, dtype=local.dtype, device=local.device)
    padded[: local.numel()] = local
    if to is not None:
        receives = dist.get_rank(group) == to
        parts = [torch.empty_like(padded) for _ in ranges] if receives else None
        dist.gather(padded, parts, group=group, group_dst=to)
        if parts is None:
            return None
    else:
        parts = [torch.empty_like(padded) for _ in ranges]
        dist.all_gather(parts, padded, group=group)
    pieces = [(offset, part[:length]) for (offset, length), part in zip(ranges, parts, strict=True)]
    return to_full(pieces, param.shape, param.stride())
