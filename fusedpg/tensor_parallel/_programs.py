"""Dropout behind a row-parallel product, as programs, and their schedules as one operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fusedpg.fusion as fusion
from fusedpg.fusion.api import fuse


@fuse
def whole(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int) -> Tensor:
    return _rest(fusion.all_reduce(x), bias, residual, p, seed)


@fuse
def _part(x: Tensor, bias: Tensor | None, p: float, seed: int) -> Tensor:
    return _rest(fusion.reduce_scatter(x), bias, None, p, seed)


@fuse
def _part_and_residual(
    x: Tensor, bias: Tensor | None, residual: fusion.Shard, p: float, seed: int
) -> Tensor:
    return _rest(fusion.reduce_scatter(x), bias, residual, p, seed)


def _rest(y: Tensor, bias: Tensor | None, residual: Any, p: float, seed: int) -> Tensor:
    y = fusion.dropout(y if bias is None else y + bias, p, seed)
    return y if residual is None else residual + y


@fuse
def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    return fusion.dropout(fusion.all_reduce(x), p, seed)


# A fused collective needs these; the cheapest schedule of a small program may be another.
_ONE = (fusion.Split(), fusion.Reorder(), fusion.FuseCollective())
whole_at_once = whole.scheduled(*_ONE)
part_at_once = _part.scheduled(fusion.FuseCollective())
part_and_residual_at_once = _part_and_residual.scheduled(fusion.FuseCollective())
dropped_at_once = _dropped.scheduled(*_ONE)
