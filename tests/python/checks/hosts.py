"""Groups that span machines, as far as FUSEDPG_HOST_ID can pretend."""

from __future__ import annotations

import torch

from harness import Context


def engine(context: Context, local: int) -> None:
    """The group knows that it spans machines."""
    import fusedpg

    info = fusedpg.group_info()
    assert info["engine"] == "gloo"
    assert info["world_size"] == context.world_size
    assert info["local_world_size"] == local


def memory(context: Context) -> None:
    """empty gives usable memory on every machine."""
    import fusedpg

    tensor = fusedpg.empty(1000)
    tensor.fill_(2)
    assert bool((tensor == 2).all())
    torch.distributed.all_reduce(tensor)
    assert bool((tensor == 2 * context.world_size).all())
