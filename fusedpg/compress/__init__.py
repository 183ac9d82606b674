"""Compressed gradients for DistributedDataParallel.

::

    state = fusedpg.compress.from_params(
        {"compressor": "topk", "memory": "residual", "communicator": "allgather",
         "compress_ratio": 0.01})
    ddp.register_comm_hook(state, fusedpg.compress.hook)

Names and parameters are those of GRACE (Xu et al. 2021). See docs/guides/compression.md.

No postponed annotations here: DDP inspects those of its hooks.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fusedpg.compress import _params
from fusedpg.compress._params import register_communicator, register_compressor, register_memory
from fusedpg.compress._piece import Piece
from fusedpg.compress._schedule import Report
from fusedpg.compress._state import State
from fusedpg.compress.communicators import Communicator
from fusedpg.compress.compressors import Compensated, Compressor, Context
from fusedpg.compress.memories import Memory

__all__ = [
    "Communicator",
    "Compensated",
    "Compressor",
    "Context",
    "Memory",
    "Piece",
    "Report",
    "State",
    "from_params",
    "hook",
    "register_communicator",
    "register_compressor",
    "register_memory",
]


def from_params(
    params: Mapping[str, object],
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | int | None = None,
    seed: int = 0,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    uncompressed_steps: int = 0,
    uncompressed_every: int = 0,
    warmup_ratios: Sequence[float] = (),
) -> State:
    """A state for :func:`hook` from GRACE's parameters.

    Args:
        params: ``compressor``, ``memory`` and ``communicator``, by name or as instances, and what
            their constructors take, such as ``compress_ratio``, ``quantum_num``, ``momentum``,
            ``lr``; what the chosen ones do not take is ignored, as long as one of the others does.
            By default "none" and "none", with "allreduce" where payloads can be added, else
            "allgather". MergeComp's ``ratio``, ``quantum``, ``fusion_num`` and ``params`` work.
        group, schedule, seed, named_parameters: see :class:`State`.
        uncompressed_steps, uncompressed_every, warmup_ratios: see :class:`State`.

    Raises:
        ValueError: for a name that is not known, and for parts that do not fit each other.
    """
    given = {"schedule": schedule, "named_parameters": named_parameters}
    more = _params.for_state(params, {k: v for k, v in given.items() if v is not None})
    return State(
        *_params.parts(params),
        group=group,
        seed=seed,
        uncompressed_steps=uncompressed_steps,
        uncompressed_every=uncompressed_every,
        warmup_ratios=warmup_ratios,
        **more,
    )


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket, compressed: for ``ddp.register_comm_hook(state, hook)``."""
    return state.take(bucket)


# Fused optimizers hand the state gradients where autograd has left them (state.take).
hook.takes_gradients = True  # type: ignore[attr-defined]
