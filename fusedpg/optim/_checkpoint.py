"""State dicts: torch's keys, slices that DCP can save, and whole tensors from and to them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedpg.optim._slices import SliceTensor, from_full, to_full

if TYPE_CHECKING:
    from fusedpg.optim._state import ShardedState


def _params(optimizer: ShardedState) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Parameters and their groups, in the order of a state dict's numbers."""
    return [(p, group) for group in optimizer.param_groups for p in group["params"]]


def to_slices(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """A post hook of ``state_dict()``: says of each slice what it is a slice of."""
    optimizer._check_layouts(param for param, _ in _params(optimizer))
    for number, (param, group) in enumerate(_params(optimizer)):
        state = state_dict["state"].get(number)
        if state is None:
            continue
        offset, _ = optimizer._shard(param)
        state_dict["state"][number] = {
            key: SliceTensor(value, param.shape, param.stride(), offset)
            if optimizer._is_slice(key, group)
            else value
            for key, value in state.items()
        }


def without_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What is left for torch to load: groups and whatever hooks add."""
    return {key: {} if key == "state" else value for key, value in state_dict.items()}


def own_slices(optimizer: ShardedState, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    """This rank's part of a state dict, by number of the parameter, as plain new tensors."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = _params(optimizer)
    if len(numbers) != len(params):
        raise ValueError(
            f"the state dict has {len(numbers)} parameters, the optimizer {len(params)}"
        )
    return [
        {
            key: _own(optimizer, f"state[{number!r}][{key!r}]", value, param)
            if isinstance(value, torch.Tensor) and optimizer._is_slice(key, group)
            else value
            for key, value in state_dict["state"].get(number, {}).items()
        }
        for number, (param, group) in zip(numbers, params, strict=True)
    ]


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
    return value.local().clone() if length else value.local().new_empty(0)


def install(optimizer: ShardedState, loaded: list[dict[str, Any]]) -> None:
    """Makes loaded slices the optimizer's state."""
    for (param, group), values in zip(_params(optimizer), loaded, strict=True):
        optimizer._init_state(param, group)
        state = optimizer.state[param]
        for key, value in values.items():
            if isinstance(state.get(key), torch.Tensor) and value is not None:
                # Into our own type: torch would round fp32 moments to a half parameter's. A
                # counter may be a number.
                state[key].copy_(torch.as_tensor(value).reshape(state[key].shape))
            elif value is not None:
                state[key] = copy.deepcopy(value)
        if "step" in state and "step" not in values:
            # torch's SGD: who has a buffer has made a step.
            buffers = [values.get(key) for key in optimizer._state_keys(group)]
            state["step"].fill_(all(buffer is not None for buffer in buffers))


def gather(optimizer: ShardedState, rank0_only: bool) -> dict[str, Any]:
    """Whole tensors on rank 0 or everywhere; one gather for each tensor of state."""
    group, rank = optimizer._group, optimizer._rank
    optimizer._check_layouts(param for param, _ in _params(optimizer))
    whole = torch.optim.Optimizer.state_dict(optimizer)
    receives = rank == 0 or not rank0_only
    state: dict[Any, Any] = {}
    for number, (param, its_group) in enumerate(_params(optimizer)):
        values = {}
        for key, value in optimizer.state[param].items():
            if not optimizer._is_slice(key, its_group):
                values[key] = copy.deepcopy(value)
                continue
            full = _gather_one(value, param, group, optimizer._world_size, rank0_only)
            if full is not None:
                values[key] = full
        state[number] = optimizer._exported(values)
    if not receives:
        return {}
    whole["state"] = state
    return whole


def _gather_one(
    local: torch.Tensor,
    param: torch.Tensor,
    group: dist.ProcessGroup,
    world_size: int,
    rank0_only: bool,
) -> torch.Tensor | None:
    from fusedpg.functional import shard_range

    ranges = [shard_range(param.numel(), world_size, rank) for rank in range(world_size)]
    chunk = ranges[0][1]
    padded = torch.zeros(chunk, dtype=local.dtype, device=local.device)
    padded[: local.numel()] = local
    if rank0_only:
        receives = dist.get_rank(group) == 0
        parts = [torch.empty_like(padded) for _ in ranges] if receives else None
        dist.gather(padded, parts, group=group, group_dst=0)
        if parts is None:
            return None
    else:
        parts = [torch.empty_like(padded) for _ in ranges]
        dist.all_gather(parts, padded, group=group)
    pieces = [(offset, part[:length]) for (offset, length), part in zip(ranges, parts, strict=True)]
    return to_full([piece for piece in pieces if piece[1].numel()], param.shape, param.stride())
