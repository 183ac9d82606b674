"""Groups that span machines, as far as FUSEDPG_HOST_ID can pretend."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch

from harness import Context


def engine(context: Context, local: int) -> None:
    """The group knows that it spans machines."""
    import fusedpg

    info = fusedpg.group_info()
    assert info["engine"] == "gloo"
    assert info["world_size"] == context.world_size
    assert info["local_world_size"] == local


def transport(context: Context) -> None:
    """What the environment asks for carries messages once an operation has needed them."""
    import fusedpg

    group = torch.distributed.new_group()
    assert "transport" not in fusedpg.group_info(group)
    x = torch.ones(1000)
    fusedpg.sparse_all_reduce(x, group=group)
    assert bool((x == context.world_size).all())
    wanted = os.environ["FUSEDPG_TRANSPORT"]
    assert fusedpg.group_info(group)["transport"].startswith(wanted)
    torch.distributed.destroy_process_group(group)


def choice(context: Context, expected: str) -> None:
    """The transport, or what every rank's error says."""
    import fusedpg

    x = torch.ones(1000)
    if " " in expected:
        with pytest.raises(torch.distributed.DistBackendError, match=expected):
            fusedpg.sparse_all_reduce(x)
        return
    fusedpg.sparse_all_reduce(x)
    assert bool((x == context.world_size).all())
    assert fusedpg.group_info()["transport"].startswith(expected)


def sums(context: Context, kind: str, numel: int) -> str:
    """A digest of an all-reduce's result."""
    generator = torch.Generator().manual_seed(100 + context.rank)
    x = (1000 * torch.randn(numel, generator=generator)).to(getattr(torch, kind))
    torch.distributed.all_reduce(x)
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def memory(context: Context) -> None:
    """empty gives usable memory on every machine."""
    import fusedpg

    tensor = fusedpg.empty(1000)
    tensor.fill_(2)
    assert bool((tensor == 2).all())
    torch.distributed.all_reduce(tensor)
    assert bool((tensor == 2 * context.world_size).all())
