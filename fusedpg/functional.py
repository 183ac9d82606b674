"""Functional operations on a group of the fused backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from fusedpg._registration import BACKEND, load_extension


def _backend(group: dist.ProcessGroup | None) -> Any:
    """The ProcessGroupFused behind a group's CPU tensors."""
    module = load_extension()
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
    wrapped = getattr(backend, "wrapped_pg", None)
    backend = backend if wrapped is None else wrapped
    if not isinstance(backend, module.ProcessGroupFused):
        raise ValueError(
            f"this needs a group of backend {BACKEND!r}, found {type(backend).__name__}: create it "
            f'with init_process_group("{BACKEND}") or new_group(backend="{BACKEND}")'
        )
    return backend


def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The elements of a tensor that a rank reduces, updates and keeps optimizer state for.

    It depends on these three numbers alone, so checkpoints may rely on it: chunks of
    ``ceil(numel / world_size)`` rounded up to 32 elements, clipped to the end.

    Returns:
        ``(offset, length)`` in elements of the tensor flattened in memory order; the length may
        be 0.

    Raises:
        ValueError: unless ``numel >= 0`` and ``0 <= rank < world_size``.
    """
    return cast("tuple[int, int]", load_extension().shard_range(numel, world_size, rank))


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in the group's shared arena, which peers read and write in place.

    Collectives on it skip the staging copies. Local: never a collective. The tensor may outlive
    the group. A group that spans hosts has no arena: there it is ``torch.empty``.

    Args:
        size: as for ``torch.empty``.
        dtype: default ``torch.get_default_dtype()``.
        device: only ``"cpu"`` in this version.

    Raises:
        torch.OutOfMemoryError: when the arena (``FUSEDPG_ARENA_BYTES``) or the memory limit of the
            process is exhausted.
        ValueError: for another device or a group of another backend.
    """
    if torch.device(device).type != "cpu":
        raise ValueError(f"fusedpg.empty: only CPU tensors in this version, got device {device}")
    sizes = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return cast("torch.Tensor", _backend(group).empty(list(sizes), dtype))


def in_arena(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a tensor's storage lies in the group's arena (DDP's buckets do)."""
    return bool(_backend(group).in_arena(tensor))


def group_info(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Facts about a group on this rank.

    Keys: ``engine`` ("shm" or "gloo"), ``world_size``, ``local_world_size``, ``threads``, ``isa``,
    ``arena_reserved`` and ``arena_used`` (bytes), ``sequence_number``, ``state`` ("ok" or
    "failed").
    """
    return cast("dict[str, Any]", _backend(group).info())


def fused_adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    state_steps: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    reduce: str = "mean",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """One AdamW step as one collective: reduce-scatter, update of the owned slice, all-gather.

    Formula: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, in the order of
    operations of ``torch._fused_adamw_``. Every rank passes the same parameters and its own
    gradients, and ends with the same parameters, bit for bit.

    Args:
        params: full replicas, float32 CPU tensors, dense in memory; updated in place.
        grads: this rank's gradients, shaped as ``params``; read and never written.
        exp_avgs, exp_avg_sqs: this rank's slices of the moments: 1-D float32, element count
            ``shard_range(param.numel(), world_size, rank)[1]``, in the memory order of the param.
        max_exp_avg_sqs: likewise with ``amsgrad``, else empty.
        state_steps: one float32 scalar tensor each; incremented by the operation, unless an
            infinity was found.
        lr: a number or a scalar tensor, read when the operation runs.
        grad_scale: gradients are divided by it (as ``torch.amp.GradScaler`` gives it).
        found_inf: float32 scalar; when it is non-zero on any rank, nothing is updated on all
            ranks, and it is 1 on all of them.
        reduce: "mean" divides the summed gradients by the world size, "sum" does not.
        async_op: return a Work to wait for; arguments must stay untouched until then.

    Raises:
        ValueError: for arguments this rank can check alone.
        torch.distributed.DistBackendError: when ranks disagree or a rank fails.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'fused_adamw_: reduce must be "mean" or "sum", got {reduce!r}')
    work = _backend(group).fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        list(max_exp_avg_sqs),
        list(state_steps),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
        mean=reduce == "mean",
        async_op=async_op,
    )
    return cast("dist.Work | None", work)
