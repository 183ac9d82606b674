"""Gradients that a communication hook of the user's has combined, such as one that compresses.

No postponed annotations here: DDP inspects those of its hooks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

CommHook = tuple[Any, Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]]


def check(comm_hook: Any, overlap: bool, reduce: str) -> None:
    """Raises for what is no hook, and for options that do not go with one."""
    if not (isinstance(comm_hook, tuple) and len(comm_hook) == 2 and callable(comm_hook[1])):
        raise TypeError(
            "comm_hook takes what register_comm_hook() does, as a tuple: (state, hook); got "
            f"{comm_hook!r}"
        )
    if overlap:
        raise ValueError(
            "overlap=True updates parameters by the operation that reduces them, which a "
            "comm_hook takes the place of: use overlap=False"
        )
    if reduce != "mean":
        raise ValueError(f'a comm_hook gives the mean: use reduce="mean", not {reduce!r}')


def takes_gradients(comm_hook: CommHook | None) -> bool:
    """Whether the state takes gradients where autograd has left them (fusedpg.compress.State)."""
    return comm_hook is not None and getattr(comm_hook[1], "takes_gradients", False)


def abandon(comm_hook: CommHook | None) -> None:
    """Tells the state, if it wants to know (fusedpg.compress.State), that a backward was cut short:
    buckets that it holds back for others would be waited for in vain."""
    told = None if comm_hook is None else getattr(comm_hook[0], "abandon", None)
    if told is not None:
        told()


def check_state(comm_hook: CommHook | None, modules: dist.ProcessGroup) -> None:
    """Asks the state, if it knows its ranks (fusedpg.compress.State), whether they are these."""
    known = None if comm_hook is None else getattr(comm_hook[0], "check_module", None)
    if known is not None:
        known(modules)


def check_group(group: dist.ProcessGroup, modules: dist.ProcessGroup, device: Any) -> None:
    """A hook's mean is the same on all of the module's ranks, so each may share its optimizer's
    state with some of them. Norms are the same bits everywhere if all groups are of one size.

    Collective. Raises ValueError on all ranks.
    """
    size = dist.get_world_size(group)
    ranks = set(dist.get_process_group_ranks(modules))
    strangers = float(not ranks.issuperset(dist.get_process_group_ranks(group)))
    most = torch.tensor([size, -size, strangers], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=modules)
    if most[0] != -most[1] or most[2]:
        raise ValueError(
            f"process_group of the optimizer: {size} ranks here, {int(-most[1])} to "
            f"{int(most[0])} elsewhere{', and some of other modules' if most[2] else ''}; with a "
            "comm_hook the module's ranks are split into groups of equally many"
        )


class Exchange:
    """A bucket that the hook was called with."""

    def __init__(
        self,
        hook: CommHook,
        bucket: GradBucket,
        buffer: torch.Tensor,
        gradients: dict[torch.Tensor, torch.Tensor],
    ) -> None:
        """``gradients`` are those not in the bucket, for hooks that take them."""
        state, function = hook
        self._buffer = buffer
        self._future: Any = state.take(bucket, gradients) if gradients else function(state, bucket)

    def wait(self) -> None:
        """Then the bucket has what the hook gives."""
        if self._future is None:
            return
        result = self._future.wait()
        self._future = None
        if isinstance(result, (list, tuple)):
            (result,) = result
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view_as(self._buffer))


def any_rank(used: torch.Tensor | None, group: dist.ProcessGroup) -> Any:
    """Has flags become whether any rank has set them, asynchronously."""
    return None if used is None else dist.all_reduce(used, dist.ReduceOp.MAX, group, async_op=True)


class Combined:
    """The part of a bucket that belongs to one optimizer, as a work that its mode waits for."""

    def __init__(self, exchange: Exchange, asked: Any) -> None:
        self._exchange, self._asked = exchange, asked

    def wait(self) -> None:
        if self._asked is not None:
            self._asked.wait()
        self._exchange.wait()
