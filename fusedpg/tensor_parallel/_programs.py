"""What follows a row-parallel product, as programs, and their schedules as one operation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import fusedpg.fusion as fusion
from fusedpg.fusion.api import fuse


@fuse
def whole(
    x: Any,
    bias: Any,
    residual: Any,
    p: float,
    seed: int,
    drops: bool,
) -> torch.Tensor:
    return rest(fusion.all_reduce(x), bias, residual, p, seed, drops)


@fuse
def _part(x: Any, bias: Any, p: float, seed: int, drops: bool) -> torch.Tensor:
    return rest(fusion.reduce_scatter(x), bias, None, p, seed, drops)


@fuse
def _part_and_residual(
    x: Any,
    bias: Any,
    residual: fusion.Shard,
    p: float,
    seed: int,
    drops: bool,
) -> torch.Tensor:
    return rest(fusion.reduce_scatter(x), bias, residual, p, seed, drops)


def rest(y: Any, bias: Any, residual: Any, p: float, seed: int, drops: bool) -> Any:
    if bias is not None:
        y = y + bias
    if drops:
        y = fusion.dropout(y, p, seed)
    if residual is not None:
        y = residual + y
    return y


@fuse
def _dropped(x: Any, p: float, seed: int) -> torch.Tensor:
    return fusion.dropout(fusion.all_reduce(x), p, seed)


@fuse
def _part_and_norm(
    x: Any,
    bias: Any,
    weight: Any,
    p: float,
    seed: int,
    eps: float,
    drops: bool,
) -> Any:
    y = rest(fusion.reduce_scatter(x), bias, None, p, seed, drops)
    return y, F.rms_norm(y, (y.shape[-1],), weight, eps)


@fuse
def _part_residual_and_norm(
    x: Any,
    bias: Any,
    residual: fusion.Shard,
    weight: Any,
    p: float,
    seed: int,
    eps: float,
    drops: bool,
) -> Any:
    y = rest(fusion.reduce_scatter(x), bias, residual, p, seed, drops)
    return y, F.rms_norm(y, (y.shape[-1],), weight, eps)


# What a fused collective needs; the cheapest schedule of a small program may be another.
_ONE = (fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
whole_at_once = whole.scheduled(*_ONE)
part_at_once = _part.scheduled(fusion.FuseCollective())
part_and_residual_at_once = _part_and_residual.scheduled(fusion.FuseCollective())
dropped_at_once = _dropped.scheduled(*_ONE)
_ROWS = (fusion.OwnRows(), fusion.FuseCollective())
part_and_norm = _part_and_norm.scheduled(*_ROWS)
part_residual_and_norm = _part_residual_and_norm.scheduled(*_ROWS)
