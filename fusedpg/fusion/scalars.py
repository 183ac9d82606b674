"""The numbers that a generated function gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusedpg.fusion.codegen import Source
from fusedpg.fusion.codegen_rows import RowSource
from fusedpg.fusion.ir import Node
from fusedpg.fusion.ops import exact


def checked(value: object, node: Node) -> Any:
    """A number as an operand of tensors.

    Raises:
        ValueError: for an int that no float64 holds: what is computed with it would depend on who
            rounds it to the tensors' type.
    """
    if not exact(value):
        raise ValueError(
            f"{value} is no float64: as an operand of tensors pass float({value}); "
            f"{node.described()}"
        )
    return value


def scalars(
    source: Source | RowSource, value: Callable[[Node], Any]
) -> tuple[list[float], list[int]]:
    """Numbers, behind them threshold and scale of each dropout; and seeds.

    Raises:
        ValueError: for a probability or a seed that is none, or as `checked`.
    """
    numbers = [float(checked(value(node), node)) for node in source.numbers]
    for node in source.dropouts:
        p = value(node.operands[1])
        if not 0 <= p <= 1:
            raise ValueError(f"dropout: p is a probability, got {p}; {node.described()}")
        numbers += [math.ceil(p * (1 << 24)), 1 / (1 - p) if p < 1 else 1.0]
    seeds = [int(value(node)) for node in source.seeds]
    for seed in seeds:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"a seed is a number from 0 to 2^64 - 1, got {seed}")
    return numbers, seeds
