"""What a group leaves to torch's ProcessGroupNCCL; Gloo stands for it, CPU tensors for a GPU's."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Context

GPU = torch.device("cuda", 0)


def _options(**more: Any) -> Any:
    import fusedpg

    return fusedpg.Options(_cpu_as_cuda=True, **more)


def timeout_set_later(context: Context) -> float:
    """Seconds until a collective that not all ranks call has failed."""
    import fusedpg

    group = dist.new_group(
        backend="fused",
        timeout=timedelta(seconds=60),
        pg_options=fusedpg.Options(_cpu_as_cuda=True),
    )
    dist.all_reduce(torch.ones(4), group=group)
    backend: Any = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=1))
    begin = time.monotonic()
    if context.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(4), group=group)
        context.store.set("failed", "1")
    context.store.wait(["failed"])
    return time.monotonic() - begin


def group_of_some_ranks(context: Context) -> None:
    """As after init_process_group(device_id=...), which a torch without CUDA refuses."""
    world: Any = dist.group.WORLD
    world.bound_device_id = GPU
    try:
        some = dist.new_group([0, 2], pg_options=_options())
        if context.rank in (0, 2):
            one = torch.ones(1)
            dist.all_reduce(one, group=some)
            assert one == 2
    finally:
        world.bound_device_id = None


class _Recorder:
    """Makes Gloo groups that have ProcessGroupNCCL's methods, and notes their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.made: list[Any] = []

    def __call__(self, device: str, store: Any, rank: int, size: int, options: Any) -> Any:
        from fusedpg._serve_gloo import Gloo

        def method(name: str) -> Callable[..., str]:
            return lambda _, *args: self.calls.append((name, args)) or name

        names = ("register_mem_pool", "deregister_mem_pool", "_add_ephemeral_timeout")
        names += ("_start_time_estimate", "_end_time_estimate", "suspend", "resume")
        methods = {name: method(name) for name in (*names, "memory_stats")}
        kind = type("Recorded", (Gloo,), methods)
        self.made.append(kind(store, rank, size, timeout=options._timeout))
        return self.made[-1]


def methods_of_nccl(context: Context) -> None:
    from fusedpg import _registration

    module: Any = _registration.load_extension()
    recorder = _Recorder()
    module._set_delegate_factory(recorder)
    try:
        group: Any = dist.new_group(backend="fused", pg_options=_options(), group_desc="mine")
        backend = group._get_backend(torch.device("cpu"))
        assert not backend.supports_time_estimate and not recorder.made
        backend.eager_connect_single_device(torch.device("cpu"))
        assert not recorder.made, "a GPU was not meant"
        backend.eager_connect_single_device(GPU)
        [delegate] = recorder.made
        assert backend.register_mem_pool("a pool") == "register_mem_pool"
        assert backend._add_ephemeral_timeout(timedelta(seconds=1)) == "_add_ephemeral_timeout"
        for name in ("_start_time_estimate", "_end_time_estimate", "suspend", "resume"):
            assert getattr(backend, name)() == name
        assert backend.memory_stats() == "memory_stats"
        assert backend.deregister_mem_pool("a pool") == "deregister_mem_pool"
        assert [name for name, _ in recorder.calls][:1] == ["register_mem_pool"]
        assert recorder.calls[0][1] == ("a pool",)
        assert len(recorder.calls) == 8
        # What Gloo has not, it refuses in its own name.
        for call in (
            group._wait_for_pending_works,
            lambda: group._register_on_completion_hook(lambda info: None),
        ):
            with pytest.raises(RuntimeError, match="got gloo backend"):
                call()
        assert not group._has_hooks()
        group._enable_collectives_timing()
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one == context.world_size
        assert recorder.made == [delegate]
    finally:
        module._set_delegate_factory(_registration._make_delegate)
