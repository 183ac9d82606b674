"""The names of `fusedpg.hvd` that need torch: the first of them that a program uses loads all."""
# ruff: noqa: F401

from types import ModuleType as _ModuleType

from fusedpg.hvd import compression, elastic, exceptions, functions, optimizer, sync_batch_norm
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
from fusedpg.hvd.sync_batch_norm import SyncBatchNorm

# The modules are attributes, too, but `import *` takes none of them except `elastic`.
__all__ = sorted(
    name
    for name, value in globals().items()
    if not name.startswith("_") and (value is elastic or not isinstance(value, _ModuleType))
)
