"""Horovod's API for torch on ``torch.distributed``.

::

    import fusedpg.hvd as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

See docs/guides/horovod.md.
"""

from fusedpg.hvd import (
    compression,
    elastic,
    exceptions,
    functions,
    optimizer,
    sync_batch_norm,
)
from fusedpg.hvd._basics import (
    ProcessSet,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from fusedpg.hvd._operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from fusedpg.hvd.compression import Compression
from fusedpg.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from fusedpg.hvd.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fusedpg.hvd.optimizer import DistributedOptimizer
from fusedpg.hvd.run import run
from fusedpg.hvd.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "install",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def install() -> None:
    """Serves ``import horovod.torch`` by this package, in this process.

    ``python -m fusedpg.hvd SCRIPT`` and ``fusedpg-run --serve-horovod`` do so before a program.

    Raises:
        RuntimeError: Horovod itself was imported.
    """
    import sys
    import types

    here = sys.modules[__name__]
    known = sys.modules.get("horovod.torch", here)
    if known is not here:
        raise RuntimeError("hvd: horovod.torch was imported already; call install() before")
    horovod = types.ModuleType("horovod", "Horovod's names, served by fusedpg.hvd")
    horovod.torch, horovod.run = here, run  # type: ignore[attr-defined]
    horovod.runner = types.ModuleType("horovod.runner")  # type: ignore[attr-defined]
    horovod.runner.run = run
    horovod.common = types.ModuleType("horovod.common")  # type: ignore[attr-defined]
    horovod.common.exceptions = exceptions
    sys.modules |= {
        "horovod": horovod,
        "horovod.common": horovod.common,
        "horovod.common.exceptions": exceptions,
        "horovod.runner": horovod.runner,
        "horovod.torch": here,
        "horovod.torch.compression": compression,
        "horovod.torch.elastic": elastic,
        "horovod.torch.functions": functions,
        "horovod.torch.mpi_ops": here,
        "horovod.torch.optimizer": optimizer,
        "horovod.torch.sync_batch_norm": sync_batch_norm,
    }
