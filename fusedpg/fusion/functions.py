"""The collectives and dropout of a fused function.

They mean something only while a function is traced: `fuse` decides how they are carried out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy


def _record(function: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    proxy = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Proxy)), None)
    if proxy is None:
        raise TypeError(
            f"{function.__name__} of fusedpg.fusion is for tensors inside a function decorated "
            "with @fusedpg.fuse; elsewhere use torch.distributed"
        )
    return proxy.tracer.create_proxy("call_function", function, args, kwargs)


def all_reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """All ranks' contributions combined: "sum", "mean", "max" or "min". x is Partial.

    The result is there as Replicate or as Shard, as those that use it like.
    """
    return _record(all_reduce, (x,), {"op": op})


def reduce_scatter(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """As all_reduce, but each rank keeps its slice: Partial to Shard."""
    return _record(reduce_scatter, (x,), {"op": op})


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor on every rank: Shard to Replicate.

    What is made of a Shard and of Replicate values is computed on slices, which it joins.
    """
    return _record(all_gather, (x,), {})


def broadcast(x: torch.Tensor, src: int) -> torch.Tensor:
    """The tensor of one rank (its number in the group) on every rank: Partial to Replicate."""
    return _record(broadcast, (x,), {"src": src})


def send(x: torch.Tensor, dst: int | None = None, tag: int = 0) -> torch.Tensor:
    """A Replicate or Shard value to the ranks that stand in another stage where these stand here.

    Return the result, a token without contents. A call waits until the value has been received. In
    the backward of the token the gradient of x comes back.

    Args:
        dst: the stage, a rank of the group that the call gets as `stages`; None: the next one.
        tag: messages of a tag between two stages are received in the order in which they are sent.
    """
    return _record(send, (x,), {"dst": dst, "tag": tag})


def recv(like: torch.Tensor, src: int | None = None, tag: int = 0) -> torch.Tensor:
    """What another stage sends; it is there as Replicate or as Shard, as those that use it like.

    Args:
        like: an argument of the shape and type of what comes; its contents are not read. Where it
            requires grad, the gradient of what came is sent back in the backward.
        src: the stage, a rank of the group that the call gets as `stages`; None: the previous one.
        tag: as in `send`.
    """
    return _record(recv, (like,), {"src": src, "tag": tag})


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Zeros with probability p, and the rest divided by 1 - p.

    Which elements stay depends on the seed and on their index in the full tensor alone, by
    Philox4x32-10: not on the schedule, nor on the world size. Two calls with the same seed drop the
    same elements, so give each its own.
    """
    return _record(dropout, (x, p, seed), {})
