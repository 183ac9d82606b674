"""Communication hooks for DistributedDataParallel.

No postponed annotations here: DDP inspects those of its hooks.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fusedpg._by_parameter import ByParameter, order_in_bucket
from fusedpg.functional import sparse_all_reduce


@dataclasses.dataclass
class BlockSparseState:
    """What :func:`block_sparse_hook` works with, one for each DDP module.

    Args:
        group: the module's process group; default: the default group.
        block_size: elements of a block, 32 to 65536.
        threshold: blocks of a gradient bucket without an element of a larger magnitude are not
            sent, but kept and added to the next step's gradients (error feedback, Karimireddy et
            al. 2019, arXiv:1901.09847). Magnitudes are those of the local gradients, before the
            mean. 0: all that is not zero is sent, and training is that without a hook, bit for
            bit.
    """

    group: dist.ProcessGroup | None = None
    block_size: int = 256
    threshold: float = 0.0
    # What was not sent of each parameter's gradient.
    _residuals: ByParameter = dataclasses.field(default_factory=ByParameter, repr=False)

    def residual(self, bucket: GradBucket) -> torch.Tensor:
        """The residual of a bucket, laid out as its buffer; it follows DDP's rebuilt buckets."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        orders = [order_in_bucket(parameter, buffer) for parameter in parameters]
        return self._residuals.flat("residual", parameters, orders, buffer.dtype, buffer.device)


def block_sparse_hook(
    state: BlockSparseState | dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket, moving only blocks that are not zero.

    ::

        ddp.register_comm_hook(fusedpg.ddp.BlockSparseState(threshold=1e-4),
                               fusedpg.ddp.block_sparse_hook)

    Without a threshold, ``Options(block_skip="auto")`` does the same with no hook. Buckets on a GPU
    raise ValueError.
    """
    if not isinstance(state, BlockSparseState):
        state = BlockSparseState(group=state)
    size = dist.get_world_size(state.group)
    # As DDP does without a hook: its gradients are shares of the mean.
    buffer = bucket.buffer().mul_(1.0 / size)
    residual = state.residual(bucket) if state.threshold > 0 else None
    work = sparse_all_reduce(
        buffer,
        group=state.group,
        async_op=True,
        block_size=state.block_size,
        threshold=state.threshold / size,
        residual=residual,
    )
    assert work is not None  # it is asynchronous
    result: torch.futures.Future[torch.Tensor]
    result = work.get_future().then(lambda done: done.value()[0])
    return result
