"""Styles for `parallelize_module`, in the places of torch's of the same names."""

from __future__ import annotations

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
    module: nn.Module,
    kind: type[ParallelLinear],
    mesh: DeviceMesh,
    src_data_rank: int | None,
    sequence_dim: int | None,
) -> nn.Module:
    """In place, as `parallelize_module` does not take another module for it."""
    if type(module) is not nn.Linear:
        raise NotImplementedError(
            f"{kind.__name__} is an nn.Linear, and {type(module).__name__} may be more: take "
            f"torch's style for it, or {kind.__name__}.from_linear"
        )
    module.__class__ = kind
    made = module
    assert isinstance(made, kind)
    try:
        made._set(sequence_dim=sequence_dim)
        made._distribute(mesh, src_data_rank)
    except BaseException:
        module.__class__ = nn.Linear
        raise
    return module


class ColwiseParallel(torch_styles.ColwiseParallel):
    """torch's ColwiseParallel, whose nn.Linear becomes a `ColumnParallelLinear`.

    Arguments are torch's. With `input_layouts=Shard(dim)` the input is this rank's part of that
    dimension, as `SequenceParallel` leaves it. Embeddings and other layouts are torch's.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        usual, dim = _sequence(self.input_layouts)
        usual = usual and tuple(self.output_layouts) == (Shard(-1),)
        if isinstance(module, nn.Embedding) or not usual or not self.use_local_output:
            return super()._apply(module, device_mesh)
        return _becomes(module, ColumnParallelLinear, device_mesh, self.src_data_rank, dim)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """torch's RowwiseParallel, whose nn.Linear becomes a `RowParallelLinear`.

    Arguments are torch's. With `output_layouts=Shard(dim)` the output is this rank's part of that
    dimension, as `SequenceParallel` takes it. Embeddings and other layouts are torch's. The module
    may then be called with the residual, which is added in the same operation.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        usual, dim = _sequence(self.output_layouts)
        usual = usual and tuple(self.input_layouts) == (Shard(-1),)
        if isinstance(module, nn.Embedding) or not usual or not self.use_local_output:
            return super()._apply(module, device_mesh)
        return _becomes(module, RowParallelLinear, device_mesh, self.src_data_rank, dim)


def _sequence(layouts: tuple[Placement, ...]) -> tuple[bool, int | None]:
    """Whether our layers have the layout, and which dimension it divides."""
    if tuple(layouts) == (Replicate(),):
        return True, None
    layout = layouts[0]
    # Exactly: torch has kinds of Shard that divide otherwise. The last dimension has features.
    if len(layouts) > 1 or type(layout) is not Shard or layout.dim == -1:
        return False, None
    return True, layout.dim
