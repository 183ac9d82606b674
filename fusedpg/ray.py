"""The backend "fused" of ``ray.util.collective``.

Import this module in the driver and in every actor, before a group is created::

    import fusedpg.ray
    from ray.util import collective

    collective.init_collective_group(world_size, rank, backend="fused", group_name="mine")
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.torch_gloo_collective_group import TorchGLOOGroup

from fusedpg import _serve_gloo

BACKEND = "FUSED"


class FusedGroup(TorchGLOOGroup):
    """Ray's group of torch's Gloo, whose torch groups are fusedpg's."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        before = _serve_gloo.serving()
        _serve_gloo.serve_gloo()
        try:
            super().__init__(world_size, rank, group_name)
        finally:
            _serve_gloo.serve_gloo(before)

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    def reducescatter(self, output_tensor: Any, tensor_list: Any, options: Any = None) -> None:
        """In one operation; Ray's does it by an all_reduce of every part."""
        from ray.util.collective.collective_group import torch_gloo_collective_group as of_ray
        from ray.util.collective.types import ReduceScatterOptions

        inputs = self._check_tensor_list_input(tensor_list)
        output = self._check_tensor_input(output_tensor)
        op = of_ray.TORCH_REDUCE_OP_MAP[(options or ReduceScatterOptions()).reduceOp]
        dist.reduce_scatter(output, inputs, op=op, group=self._pg)


register_collective_backend(BACKEND, FusedGroup)
