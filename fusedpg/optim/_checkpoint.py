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
    """Says of each slice in a state dict what it is a slice of."""
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
        if values:
            optimizer._fresh.discard(param)
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
    optimizer._check_layouts(param for param, _ in _params(optimizer))
    receives = to is None or optimizer._rank == to
    state: dict[int, dict[str, Any]] = {}
    for number, (param, its_group) in enumerate(_params(optimizer)):
        values = {}
        for key, value in optimizer.state.get(param, {}).items():
            if not optimizer._is_slice(key, its_group):
                values[key] = copy.deepcopy(value) if copies else value
            elif not copies:
                values[key] = value.as_strided(param.shape, param.stride())
            else:
                full = _gather_one(value, param, optimizer._group, optimizer._world_size, to)
                if full is not None:
                    values[key] = full.cpu() if cpu else full
        if receives:
            state[number] = optimizer._exported(values)
    return state


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
    return to_full([piece for piece in pieces if piece[1].numel()], param.shape, param.stride())
