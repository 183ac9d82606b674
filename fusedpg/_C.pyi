from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, ReduceOp, Store, Work

from fusedpg._types import GroupInfo, Stats

torch_version: str
version: str

class Options(Backend.Options):
    def __init__(
        self,
        *,
        timeout: timedelta = ...,
        arena_bytes: int | None = None,
        threads: int | None = None,
        nan_check: bool | None = None,
        block_skip: Literal["off", "auto", "on"] | None = None,
        block_size: int | None = None,
        cuda_chunk_bytes: int | None = None,
        cuda_arena_bytes: int | None = None,
        nccl: Literal["auto", "patched", "stock"] | None = None,
        nccl_options: Backend.Options | None = None,
        half_sums: Literal["fp32", "wire"] | None = None,
        transport: Literal["tcp"] | None = None,
        order: Literal["hosts", "flat"] | None = None,
        aggregators: str | None = None,
        aggregate: Literal["auto", "on"] | None = None,
        aggregate_rates: str | None = None,
        aggregate_message_bytes: int | None = None,
        _cpu_as_cuda: bool = False,
        _name: str = "fused",
        _gloo_for_cuda: bool = False,
    ) -> None: ...
    _threads: int
    @property
    def _devices(self) -> list[Any]: ...
    @property
    def _gloo_for_cuda(self) -> bool: ...
    @property
    def block_skip(self) -> str | None: ...
    @property
    def block_size(self) -> int | None: ...
    @property
    def cuda_chunk_bytes(self) -> int | None: ...
    @property
    def cuda_arena_bytes(self) -> int | None: ...
    @property
    def nccl(self) -> str | None: ...
    @property
    def nccl_options(self) -> Backend.Options | None: ...
    @property
    def half_sums(self) -> str | None: ...
    @property
    def transport(self) -> str | None: ...
    @property
    def order(self) -> str | None: ...
    @property
    def aggregators(self) -> str | None: ...
    @property
    def aggregate(self) -> str | None: ...
    @property
    def aggregate_rates(self) -> str | None: ...
    @property
    def aggregate_message_bytes(self) -> int | None: ...
    @property
    def arena_bytes(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def nan_check(self) -> bool | None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[Any, Any], /) -> Options: ...

class Hyper:
    # By the names of csrc/kernels/formulas/hyper.hpp.
    def __init__(self, *, lr: float | torch.Tensor, **hyperparameters: float) -> None: ...

class LoadedProgram: ...

class ProcessGroupFused(Backend):
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options,
        world: ProcessGroupFused | None = None,
    ) -> None: ...
    @staticmethod
    def _layout_is_gloos(gloo: Backend, threads: int) -> bool: ...
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def register_mem_pool(self, pool: torch.cuda.MemPool, *args: Any) -> None: ...
    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None: ...
    @property
    def options(self) -> Options: ...
    def empty(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device = ...
    ) -> torch.Tensor: ...
    def in_arena(self, tensor: torch.Tensor) -> bool: ...
    def set_async_call(self, number: int) -> None: ...
    def info(self) -> GroupInfo: ...
    def stats(self) -> Stats: ...
    def reset_stats(self) -> None: ...
    def sparse_all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp | ReduceOp.RedOpType,
        block_size: int | None,
        threshold: float,
        residual: torch.Tensor | None,
        bitmap: torch.Tensor | None,
        async_op: bool,
    ) -> Work | None: ...
    def empty_shared(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def fused_step_(
        self,
        op: str,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        state_steps: Sequence[torch.Tensor],
        hypers: Sequence[Hyper],
        *,
        hyper_index: Sequence[int] = ...,
        master_params: Sequence[torch.Tensor] = ...,
        masters_follow: bool = ...,
        mean: bool = True,
        weight: float | None = None,
        used: torch.Tensor | None = None,
        reduced: bool = False,
        shared_params: bool = False,
        block_skip: bool = False,
        done_before: int = 0,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Work | None: ...
    def on_gpu(self, tensor: torch.Tensor) -> bool: ...
    def program_architecture(self, tensor: torch.Tensor) -> int: ...
    def load_program(
        self, image: str, entry: str, parameters: int, tensor: torch.Tensor
    ) -> LoadedProgram: ...
    def fused_program_(
        self,
        function: int | LoadedProgram | None,
        program: int,
        op: str,
        source: torch.Tensor,
        operands: Sequence[torch.Tensor],
        kinds: Sequence[int],
        reads: Sequence[int],
        outputs: Sequence[torch.Tensor],
        gathered: Sequence[bool],
        numbers: Sequence[float],
        seeds: Sequence[int],
        done: torch.Tensor,
        async_op: bool = False,
        layout: tuple[int, int, int, int, int] = ...,
        phases: tuple[Any, ...] = ...,
    ) -> Work | None: ...
    def reduce_shards_(
        self,
        grads: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = ...,
        *,
        mean: bool = True,
        weight: float | None = None,
        used: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Work | None: ...

class GradientWatch:
    armed: bool
    takes: bool
    as_view: bool
    before: Any
    def __init__(self) -> None: ...
    def add(self) -> Any: ...
    def look(self, params: Sequence[torch.Tensor], /) -> None: ...
    def take(self, number: int, /) -> torch.Tensor | None: ...
    def take_all(
        self, numbers: Sequence[int], params: Sequence[torch.Tensor], /
    ) -> list[torch.Tensor] | None: ...
    def unfinished(self) -> list[int]: ...
    def drop_taken(self) -> None: ...
    def finish(self) -> None: ...
    def forget(self, number: int, /) -> None: ...
    def used(self, number: int, /) -> bool: ...
    def own(self, number: int, owned: bool, /) -> None: ...
    def set_view(self, number: int, view: torch.Tensor, /) -> None: ...

def same_objects(a: list[Any], b: list[Any], /) -> bool: ...
def set_gradients(params: list[torch.Tensor], grads: list[torch.Tensor] | None) -> None: ...
def have_gradients(params: list[torch.Tensor], grads: list[torch.Tensor], /) -> bool: ...
def without_gradient(params: list[torch.Tensor], /) -> list[int]: ...
def only_here(tensors: list[torch.Tensor], /) -> bool: ...

class Flag:
    set: bool
    def __init__(self) -> None: ...

class LocalWatch:
    def __init__(
        self, type: type, owner: Any, wrap: Any, norms_known: Flag, changed: Any, /
    ) -> None: ...
    def __call__(self, param: torch.Tensor, /) -> None: ...

def step_lists(
    params: list[torch.Tensor],
    numbers: dict[torch.Tensor, int],
    layouts: dict[torch.Tensor, tuple[int, ...]],
    state: dict[torch.Tensor, Any],
    keys: list[str],
    one_type: bool,
    /,
) -> tuple[list[int], list[list[torch.Tensor]]] | None: ...
def gradients_of(params: list[torch.Tensor], type: type, /) -> list[Any] | None: ...
def have_layouts(
    params: list[torch.Tensor], layouts: dict[torch.Tensor, tuple[int, ...]], /
) -> bool: ...
def dtypes_of(tensors: list[torch.Tensor], /) -> list[torch.dtype]: ...
def versions_of(tensors: list[torch.Tensor], /) -> list[int]: ...
def reduced_slices(
    grads: list[Any], type: type, /
) -> tuple[list[torch.Tensor], list[Any]] | None: ...
def scalars_of(tensor: torch.Tensor, /) -> list[torch.Tensor]: ...
def owned_slices(
    tensors: list[torch.Tensor], world_size: int, rank: int, /
) -> list[torch.Tensor]: ...
def set_reduced(grads: list[Any], slices: list[torch.Tensor], /) -> None: ...
def unreduced_gradients(params: list[torch.Tensor], type: type, /) -> list[torch.Tensor] | None: ...
def place_spent(
    params: list[torch.Tensor], spent: dict[torch.Tensor, Any], /
) -> list[torch.Tensor]: ...
def all_spent(params: list[torch.Tensor], updated: set[torch.Tensor], type: type, /) -> bool: ...
def all_reduce_(tensor: torch.Tensor, op: str, group: ProcessGroup, /) -> bool: ...
def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]: ...
def sum_squares(tensor: torch.Tensor) -> float: ...
def sums_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor: ...
def scale_slices(slices: list[torch.Tensor], factor: float) -> bool: ...
def find_blocks(tensor: torch.Tensor, block_size: int) -> torch.Tensor: ...
def isa() -> str: ...
def _set_delegate_factory(factory: Any) -> None: ...
def _set_announcer(announcer: Any) -> None: ...
def _shared_errors() -> int: ...
def _shared_memory_refusal(size: int) -> str: ...
def _flight_recorder_dump() -> tuple[
    list[dict[str, Any]], dict[int, tuple[str, str, list[int]]]
]: ...
def _fusion_settings() -> tuple[bool, str, str, str]: ...
def _load_cuda_kernels() -> None: ...
def _end_at_exit(exit: str) -> None: ...

class _Parameters:
    """The parameters of a function: how arguments belong to them."""

    def __init__(
        self,
        names: Sequence[str],
        positional: int,
        defaults: dict[str, Any],
        kinds: Sequence[type | None],
    ) -> None: ...
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The values by name, numbers as float or int; None where they do not fit."""

class _EarlierCalls:
    """What the calls of a function were given, without keeping it, each with a number."""

    def __init__(self, parameters: _Parameters) -> None: ...
    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]
    ) -> tuple[int, list[Any]] | None:
        """The number of the call that this one is like, and its values by position."""

    def add(self, values: list[Any], targets: Sequence[torch.Tensor], number: int) -> int | None:
        """Remembers a call; the number of one that it is like, and which is forgotten."""

    def __len__(self) -> int: ...
    def clear(self) -> None: ...

class _PreparedProgram:
    """A fused collective on CPU tensors of the kinds of `read` and `made`; keeps none of them."""

    def __init__(
        self,
        group: ProcessGroupFused,
        program: int,
        op: str,
        read: Sequence[torch.Tensor],
        kinds: Sequence[int],
        reads: Sequence[int],
        made: Sequence[torch.Tensor],
        gathered: Sequence[bool],
        periods: Sequence[int],
        layout: tuple[int, int, int, int, int],
        phases: tuple[Any, ...],
    ) -> None: ...
    def run(
        self,
        function: int,
        read: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        numbers: Sequence[float],
        seeds: Sequence[int],
        mark: int,
    ) -> list[torch.Tensor] | None:
        """The results, new ones where none are given; None where a rank has no function."""

def _call_generated(
    function: int,
    sum: torch.Tensor | None,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    numbers: Sequence[float],
    seeds: Sequence[int],
    begin: int,
    count: int,
    scratch: int = 0,
) -> None: ...

class UdpWorker:
    def __init__(
        self,
        place: str,
        session: str,
        *,
        rank: int,
        workers: int,
        packet_numel: int,
        slots: int,
        timeout_ms: float,
        with_seal: bool,
        deadline_ms: int,
    ) -> None: ...
    def all_reduce(self, tensor: torch.Tensor, deadline_ms: int) -> None: ...
    def end(self) -> None: ...
    @property
    def slots(self) -> int: ...
    def stats(self) -> dict[str, int]: ...

compress: Any  # its functions are those of fusedpg/compress/_reference.py
