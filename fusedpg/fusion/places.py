"""Where a call runs, and what a rank holds of a value there."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fusedpg.functional import group_info, shard_range
from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import SHARD, Layout, Node, Program

# Of groups that this rank is in: size, rank, name, and whether all ranks are on one host.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int, str, bool]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The group of a call, and this rank's place."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    name: str
    one_host: bool = True

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Ranks:
        if not dist.is_initialized():
            raise RuntimeError("a fused function runs on a group: call init_process_group first")
        pg = dist.distributed_c10d._get_default_group() if group is None else group
        found = _known.get(pg)
        if found is None:
            rank = dist.get_rank(pg)
            if rank < 0:
                raise ValueError("this rank is not in the group")
            found = dist.get_world_size(pg), rank, pg.group_name, _on_one_host(pg)
            _known[pg] = found
        return Ranks(pg, *found)

    def matches(self, other: Any) -> bool:
        """Whether what was passed to a functional collective is this group."""
        if self.group is None:
            return True
        if isinstance(other, dist.ProcessGroup):
            return other.group_name == self.name
        if isinstance(other, list):
            return other == dist.get_process_group_ranks(self.group)
        return bool(other == self.name)


def _on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether the group's own memory is between its ranks; of other backends we do not know."""
    try:
        info = group_info(group)
    except ValueError:
        return False
    return info["local_world_size"] == info["world_size"]


def held(layout: Layout, node: Node, size: int, rank: int) -> tuple[int, ...]:
    """The shape of what a rank holds."""
    if layout == SHARD:
        return (shard_range(node.numel, size, rank)[1],)
    return node.shape


def check_part(node: Node, name: str, tensor: torch.Tensor, ranks: Ranks) -> None:
    expected = held(SHARD, node, ranks.size, ranks.rank)
    if tuple(tensor.shape) != expected:
        raise IllegalProgram(
            f"`{name}` is a Shard of a tensor of shape {list(node.shape)}: rank {ranks.rank} of "
            f"{ranks.size} holds a 1-d tensor of {expected[0]} elements "
            f"(fusedpg.shard_range), got shape {list(tensor.shape)}"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether elements are where it points: not of DTensors, sparse ones and others' wrappers."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return tensor.layout is torch.strided


def with_memory(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors as generated code can read them; what is one tensor stays one.

    Raises:
        TypeError: for those that hold their elements in another way.
    """
    changed: dict[int, torch.Tensor] = {}
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or id(value) in changed:
            continue
        if isinstance(value, AsyncCollectiveTensor):  # on its way
            changed[id(value)] = value.wait()
        elif not has_memory(value):
            raise TypeError(
                f"`{name}` is a {_described(value)}: a fused function takes ordinary tensors, of a "
                "DTensor its to_local() in the layout that the function annotates"
            )
        elif value.is_neg():  # which is an attribute, and not in its memory
            changed[id(value)] = value.resolve_neg()
    if not changed:
        return arguments
    return {name: changed.get(id(value), value) for name, value in arguments.items()}


def _described(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    return kind if tensor.layout is torch.strided else f"{kind} of layout {tensor.layout}"


def check_targets(program: Program, targets: list[torch.Tensor], ranks: Ranks) -> None:
    if len(targets) != len(program.outputs):
        raise ValueError(f"{len(program.outputs)} results, {len(targets)} targets")
    for number, (node, target) in enumerate(zip(program.outputs, targets)):
        if not has_memory(target):
            raise TypeError(f"target {number} is a {_described(target)}, not an ordinary tensor")
        expected = held(node.layout, node, ranks.size, ranks.rank)
        if tuple(target.shape) != expected or target.dtype != node.dtype:
            raise ValueError(
                f"target {number} is {target.dtype} of shape {list(target.shape)}; the result "
                f"{node.described()} has {node.dtype} and shape {list(expected)} here"
            )
        if any(target is other for other in targets[:number]):
            raise ValueError(f"target {number} is given twice")
        if target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"target {number} requires grad: call it under torch.no_grad()")
