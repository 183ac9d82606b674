"""What a group leaves to torch's ProcessGroupNCCL. What that does is tested in tests/gpu."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from fusedpg import _registration
from harness import Context, on_ranks

GPU = torch.device("cuda", 0)


def _options(**more: Any) -> Any:
    return fusedpg.Options(_cpu_as_cuda=True, **more)


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


pytestmark = pytest.mark.fused_only


def timeout_set_later(context: Context) -> float:
    """Seconds until a collective that not all ranks call has failed."""
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


def test_timeout_set_later() -> None:
    with harness.Workers(2) as workers:
        assert max(workers.run(timeout_set_later)) < 20


@on_ranks(3)
def test_group_of_some_ranks_of_a_bound_group(context: Context) -> None:
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


def test_methods_of_nccl() -> None:
    with harness.Workers(2) as workers:
        workers.run(methods_of_nccl)


def test_options_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        is_high_priority_stream = False
        config = "torch's"

    class ProcessGroupNCCL:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.options = options

        def _set_sequence_number_for_group(self) -> None:
            pass

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    mine = types.SimpleNamespace(is_high_priority_stream=True, config="mine")
    for given, expected in ((None, (False, "torch's")), (mine, (True, "mine"))):
        options = types.SimpleNamespace(
            _timeout=timedelta(seconds=7),
            group_name="7",
            global_ranks_in_group=[2, 3],
            nccl_options=given,
        )
        made = _registration._make_delegate("cuda", None, 0, 2, options).options
        assert (made.is_high_priority_stream, made.config) == expected
        assert made is not given
        assert made._timeout == timedelta(seconds=7)
        assert (made.group_name, made.global_ranks_in_group) == ("7", [2, 3])


def test_options_of_another_backend() -> None:
    others: Any = fusedpg.Options()
    with pytest.raises(ValueError, match=r"nccl_options must be ProcessGroupNCCL\.Options"):
        fusedpg.Options(nccl_options=others)
