"""Groups that span machines, as far as FUSEDPG_HOST_ID can pretend."""

from __future__ import annotations

import hashlib
import os
import threading
import time

import pytest
import torch

from harness import Context


def engine(context: Context, local: list[int]) -> None:
    """The group knows that it spans machines."""
    import fusedpg

    info = fusedpg.group_info()
    assert info["engine"] == "gloo"
    assert info["world_size"] == context.world_size
    assert info["local_world_size"] == local[context.rank]


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


def info_while_connecting(context: Context) -> None:
    """Who asks what a group is does not wait for ranks that have not come yet."""
    import fusedpg

    group = torch.distributed.new_group()
    store = torch.distributed.PrefixStore("info", context.store)
    if context.rank != 0:
        store.wait(["asked"])
        fusedpg.sparse_all_reduce(torch.ones(10), group=group)
        torch.distributed.destroy_process_group(group)
        return
    thread = threading.Thread(target=lambda: fusedpg.sparse_all_reduce(torch.ones(10), group=group))
    thread.start()
    time.sleep(0.3)
    # Would wait for ever: the others come when this has answered.
    info = fusedpg.group_info(group)
    store.set("asked", "")
    thread.join()
    assert "transport" not in info
    assert "transport" in fusedpg.group_info(group)
    torch.distributed.destroy_process_group(group)


def connects_once(context: Context) -> None:
    """What has failed to connect is not tried again: the keys in the store have been used."""
    import fusedpg
    from fusedpg import _registration

    calls = []

    def fails(*arguments: object) -> None:
        calls.append(arguments)
        raise RuntimeError("no Gloo today")

    group = torch.distributed.new_group()
    module = _registration.load_extension()
    module._set_delegate_factory(fails)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no Gloo today"):
                fusedpg.sparse_all_reduce(torch.ones(10), group=group)
    finally:
        module._set_delegate_factory(_registration._make_delegate)
    assert len(calls) == 1
    torch.distributed.destroy_process_group(group)
