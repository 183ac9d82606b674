"""Layers whose weights are spread over a group, with one collective for each two of them.

See docs/guides/tensor_parallel.md.
"""

from fusedpg.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from fusedpg.tensor_parallel._styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColumnParallelLinear", "ColwiseParallel", "RowParallelLinear", "RowwiseParallel"]
