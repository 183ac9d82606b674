"""What a rank computes of a program by torch's functions, of its own tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from fusedpg.functional import shard_range
from fusedpg.fusion.compiled import unfit
from fusedpg.fusion.ir import LOCAL_REDUCTIONS, REDUCTIONS, SHARD, Node
from fusedpg.fusion.ops import POINTWISE, reduce_locally
from fusedpg.fusion.philox import kept
from fusedpg.fusion.scalars import checked

_EMPTY = {"local_max": -torch.inf, "local_min": torch.inf}


class TorchOps:
    """What is computed on one rank of so many."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size = world_size
        self._rank = rank

    def compute(self, node: Node, values: Sequence[object]) -> torch.Tensor:
        """The value of a node that is no number and needs no other rank."""
        result = self._compute(node, values)
        if node.dtype is not None and result.dtype is not node.dtype:
            raise unfit(node, result)
        return result

    def _compute(self, node: Node, values: Sequence[Any]) -> torch.Tensor:
        if node.op == "slice":
            return self.slice(values[0], node.shape, node.layout.row)
        if node.op == "dropout":
            return self._dropout(node, *values)
        if node.op == "matmul":
            return matmul(values[0], values[1], node.attribute("transposed"))
        if node.op == "outer":
            rows, others = map(as_rows, values)
            return rows.t() @ others
        if node.op == "expand" and node.layout == SHARD:
            each: torch.Tensor = values[0].unsqueeze(1)
            return each.expand(-1, node.operands[0].layout.row).reshape(-1)
        if node.op == "expand":
            return cast("torch.Tensor", values[0]).expand(node.shape)
        if node.op == "view":  # a slice is of the flat tensor
            same: torch.Tensor = values[0]
            return same if node.layout.parted else same.reshape(node.shape)
        if node.op in REDUCTIONS and node.layout.row > 1:
            return reduce_locally(node.op, values[0].reshape(-1, node.layout.row), (1,), False)
        if node.op in REDUCTIONS:
            return reduce_locally(
                node.op, values[0], node.attribute("dims"), node.attribute("keepdim")
            )
        if node.op in LOCAL_REDUCTIONS:
            return self._local_reduction(node, values[0])
        for operand, value in zip(node.operands, values):
            checked(value, operand)
        result: torch.Tensor = POINTWISE[node.op](*values, **dict(node.attributes))
        return result

    def range(self, shape: tuple[int, ...], row: int = 1) -> tuple[int, int]:
        begin, length = shard_range(math.prod(shape) * row, self._world_size, self._rank)
        return begin // row, length // row

    def slice(self, value: torch.Tensor, shape: tuple[int, ...], row: int = 1) -> torch.Tensor:
        """This rank's elements of a tensor that is broadcast to a shape.

        Or, of one number for each `row` elements, those of its rows.
        """
        begin, length = self.range(shape, row)
        if tuple(value.shape) == shape:
            return value.reshape(-1)[begin : begin + length]
        if not length:
            return value.new_empty(0)
        value = value.expand(shape)
        row = value[0].numel()
        first, last = begin // row, (begin + length - 1) // row
        rows = value[first : last + 1].reshape(-1)  # only what is needed is written out
        return rows[begin - first * row :][:length]

    def _dropout(self, node: Node, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout: p is a probability, got {p}; {node.described()}")
        begin, length = self.range(node.shape) if node.layout == SHARD else (0, node.numel)
        keep = kept(p, seed, begin, length, x.device).reshape(x.shape)
        scaled = x * (1 / (1 - p)) if p < 1 else x
        return torch.where(keep, scaled, torch.zeros_like(x))

    def _local_reduction(self, node: Node, part: torch.Tensor) -> torch.Tensor:
        """The reduction of this rank's elements, in the shape of the whole's."""
        domain = node.operands[0].shape
        dims = node.attribute("dims")
        kind = LOCAL_REDUCTIONS[node.op]
        if len(dims) == len(domain):
            if not part.numel() and kind != "sum":
                return part.new_full(node.shape, _EMPTY[node.op])
            return reduce_locally(kind, part, (0,), False).reshape(node.shape)
        kept_shape = [1 if d in dims else size for d, size in enumerate(domain)]
        places = torch.arange(node.numel, device=part.device).reshape(kept_shape)
        index = self.slice(places, domain)
        if kind == "sum":
            result = part.new_zeros(node.numel).index_add_(0, index, part)
        else:
            result = part.new_full((node.numel,), _EMPTY[node.op])
            result.scatter_reduce_(0, index, part, f"a{kind}")
        return result.reshape(node.shape)


def own(value: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that does not share memory with an argument."""
    storage = value.untyped_storage().data_ptr()
    shared = any(storage == tensor.untyped_storage().data_ptr() for tensor in given)
    return value.clone() if shared else value


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix of all rows. They may be empty, of which a reshape could not tell the number."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def matmul(a: torch.Tensor, b: torch.Tensor, transposed: bool) -> torch.Tensor:
    return torch.matmul(a, b.t() if transposed else b)
