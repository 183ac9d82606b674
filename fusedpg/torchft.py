"""torchft's process group between replicas, made by fusedpg.

It is reconfigured by each quorum like ``torchft.ProcessGroupGloo``, and has ``reduce_scatter``,
which that one refuses::

    from fusedpg.torchft import ProcessGroupFused

    manager = torchft.Manager(pg=ProcessGroupFused(timeout=timedelta(seconds=20)), ...)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from fusedpg._registration import DEVICES, load_extension


class ProcessGroupFused(ProcessGroupWrapper):
    """A group of fusedpg's that can be configured again.

    Args:
        timeout: of creating the group, and of each operation.
    """

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        module = load_extension()
        group = dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        backend = module.ProcessGroupFused(
            store, rank, world_size, module.Options(timeout=self._timeout)
        )
        backend.options.global_ranks_in_group = self._global_ranks or []
        for device in DEVICES:
            group._register_backend(torch.device(device), kind, backend)
        return group

    def getBackendName(self) -> str:
        return "torchft-fused"
