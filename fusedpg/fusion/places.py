"""Where a call runs, and what a rank holds of a value there."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fusedpg.functional import group_info, shard_range
from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import Node, Program

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
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
        given: object = pg
        if not isinstance(given, dist.ProcessGroup):  # what new_group gives to other ranks
            if given is dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"rank {dist.get_rank()} is not in the group of this call: only its ranks call"
                )
            raise TypeError(f"group is a ProcessGroup, got {type(given).__name__}")
        found = _known.get(pg)
        if found is None:
            rank = dist.get_rank(pg)
            if rank < 0:
                raise ValueError("this rank is not in the group")
            found = dist.get_world_size(pg), rank, pg.group_name, _on_one_host(pg)
            _known[pg] = found
        return Ranks(pg, *found)

    def matches(self, other: object) -> bool:
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


def held(node: Node, size: int, rank: int) -> tuple[int, ...]:
    """The shape of what a rank holds of a value."""
    if not node.layout.parted:
        return node.shape
    row = node.layout.row
    return (shard_range(node.numel * row, size, rank)[1] // row,)


def check_part(node: Node, name: str, tensor: torch.Tensor, ranks: Ranks) -> None:
    expected = held(node, ranks.size, ranks.rank)
    if tuple(tensor.shape) != expected:
        raise IllegalProgram(
            f"`{name}` is a Shard of a tensor of shape {list(node.shape)}: rank {ranks.rank} of "
            f"{ranks.size} holds a 1-d tensor of {expected[0]} elements "
            f"(fusedpg.shard_range), got shape {list(tensor.shape)}"
        )


def span(t: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last one."""
    first, size = t.data_ptr(), t.element_size()
    if not t.numel():
        return first, first
    if t.is_contiguous():
        return first, first + t.numel() * size
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return first, first + (last + 1) * size


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements of both are the same."""
    (a0, a1), (b0, b1) = span(a), span(b)
    if a.device != b.device or a1 <= b0 or b1 <= a0:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    return bool(torch.isin(_bytes(a), _bytes(b)).any())  # as columns of one matrix are not


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The address of each byte of its elements."""
    found = torch.arange(t.data_ptr(), t.data_ptr() + t.element_size(), device="cpu")
    for size, stride in zip(t.shape, t.stride()):
        found = found + torch.arange(size, device="cpu").reshape(-1, 1) * stride * t.element_size()
        found = found.reshape(-1)
    return found


def transformed(tensor: torch.Tensor) -> bool:
    """Whether vmap or torch.func.grad has put it in place of another one."""
    found: bool = _is_wrapped(tensor)
    return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether elements are where it points: not of DTensors, sparse ones and others' wrappers."""
    if transformed(tensor):
        return False
    kind = type(tensor)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return tensor.layout is torch.strided


def with_memory(arguments: Mapping[str, object]) -> Mapping[str, object]:
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
            refuse(name, value)
        elif value.is_neg():  # which is an attribute, and not in its memory
            changed[id(value)] = value.resolve_neg()
    if not changed:
        return arguments
    return {name: changed.get(id(value), value) for name, value in arguments.items()}


def refuse(name: str, value: torch.Tensor) -> NoReturn:
    raise TypeError(
        f"`{name}` is a {_described(value)}: a fused function takes ordinary tensors, of a DTensor "
        "its to_local() in the layout that the function annotates, and outside of torch.func's "
        "transformations (vmap, grad)"
    )


def _described(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    if transformed(tensor):
        return f"{kind} of torch.func"
    return kind if tensor.layout is torch.strided else f"{kind} of layout {tensor.layout}"


def check_targets(program: Program, targets: list[torch.Tensor], ranks: Ranks) -> None:
    if len(targets) != len(program.outputs):
        raise ValueError(f"{len(program.outputs)} results, {len(targets)} targets")
    for number, (node, target) in enumerate(zip(program.outputs, targets)):
        if not has_memory(target):
            raise TypeError(f"target {number} is a {_described(target)}, not an ordinary tensor")
        expected = held(node, ranks.size, ranks.rank)
        if tuple(target.shape) != expected or target.dtype != node.dtype:
            raise ValueError(
                f"target {number} is {target.dtype} of shape {list(target.shape)}; the result "
                f"{node.described()} has {node.dtype} and shape {list(expected)} here"
            )
        if any(target is other for other in targets[:number]):
            raise ValueError(f"target {number} is given twice")
        for before, other in enumerate(targets[:number]):
            if overlap(other, target):
                raise ValueError(
                    f"targets {before} and {number} lie in the same memory: one result would write "
                    "over the other"
                )
        if target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"target {number} requires grad: call it under torch.no_grad()")
