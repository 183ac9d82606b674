"""What users are told of their DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def check_ddp(ddp: Any) -> None:
    """Raises TypeError, saying what to write, unless ``ddp`` is a DistributedDataParallel."""
    if isinstance(ddp, DistributedDataParallel):
        return
    found = f"ddp= takes a DistributedDataParallel, got {type(ddp).__name__}"
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise TypeError(
            f"{found}: with model = torch.compile(DistributedDataParallel(...)) pass the inner one "
            "(ddp=model._orig_mod)"
        )
    if isinstance(ddp, (list, tuple)):
        raise TypeError(
            f"{found}: make one optimizer for each, with its parameters, or put the modules into "
            "one nn.ModuleDict and that into one DistributedDataParallel"
        )
    if any("FSDP" in base.__name__ or "FullySharded" in base.__name__ for base in type(ddp).mro()):
        raise TypeError(
            f"{found}: FSDP has sharded its parameters already. Wrap the model by "
            "ddp = DistributedDataParallel(model) instead of fully_shard(model), or keep FSDP and "
            "torch's optimizer"
        )
    if isinstance(ddp, nn.Module):
        raise TypeError(
            f"{found}: write ddp = DistributedDataParallel(model), call ddp(x) in training and "
            "pass ddp=ddp; or leave ddp= out to train the bare module without DDP"
        )
    raise TypeError(found)


def unsynchronised(name: str) -> str:
    return (
        f"the gradient of parameter {name} was never reduced over ranks. DDP reduces in the first "
        "backward after a forward of the DistributedDataParallel module outside no_sync(). What "
        "another backward accumulates (under no_sync(), through ddp.module, over a retained graph) "
        "is reduced with the next one; parameters that were frozen when DDP was made, that it was "
        "told to ignore, or that belong to two DistributedDataParallel modules never are"
    )
