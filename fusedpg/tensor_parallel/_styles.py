"""Styles for `parallelize_module`, in the places of torch's of the same names."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

from fusedpg.tensor_parallel._linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
)


def _becomes(
    module: nn.Module, kind: type[ParallelLinear], mesh: DeviceMesh, src_data_rank: int | None
) -> nn.Module:
    """In place, as `parallelize_module` does not take another module for it."""
    if type(module) is not nn.Linear:
        raise NotImplementedError(
            f"{kind.__name__} is an nn.Linear, and {type(module).__name__} may be more: take "
            f"torch's style for it, or {kind.__name__}.from_linear"
        )
    module.__class__ = kind
    made: Any = module
    try:
        made._set()
        made._distribute(mesh, src_data_rank)
    except BaseException:
        module.__class__ = nn.Linear
        raise
    return module


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's ColwiseParallel, whose nn.Linear becomes a `ColumnParallelLinear`.

    Arguments are torch's. Embeddings, and layouts other than the default ones, are torch's.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        usual = _are(self.input_layouts, Replicate()) and _are(self.output_layouts, Shard(-1))
        if isinstance(module, nn.Embedding) or not usual or not self.use_local_output:
            return super()._apply(module, device_mesh)
        return _becomes(module, ColumnParallelLinear, device_mesh, self.src_data_rank)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's RowwiseParallel, whose nn.Linear becomes a `RowParallelLinear`.

    Arguments are torch's. Embeddings, and layouts other than the default ones, are torch's. The
    module may then be called with the residual, which is added in the same operation.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        usual = _are(self.input_layouts, Shard(-1)) and _are(self.output_layouts, Replicate())
        if isinstance(module, nn.Embedding) or not usual or not self.use_local_output:
            return super()._apply(module, device_mesh)
        return _becomes(module, RowParallelLinear, device_mesh, self.src_data_rank)


def _are(layouts: tuple[Placement, ...], layout: Placement) -> bool:
    return tuple(layouts) == (layout,)
