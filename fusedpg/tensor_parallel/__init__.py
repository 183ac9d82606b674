"""Layers whose weights are spread over a group: one collective a row-parallel layer, epilogue in it.

See docs/tensor_parallel.md.
"""

from fusedpg.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from fusedpg.tensor_parallel._styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColumnParallelLinear", "ColwiseParallel", "RowParallelLinear", "RowwiseParallel"]
