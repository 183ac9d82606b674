from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import Backend, ReduceOp, Store, Work

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
        _cpu_as_cuda: bool = False,
    ) -> None: ...
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
    def arena_bytes(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def nan_check(self) -> bool | None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[Any, Any], /) -> Options: ...

class Hyper:
    def __init__(
        self,
        *,
        lr: float | torch.Tensor,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        first_step: bool = False,
        decoupled: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        trust_clip: bool = False,
        always_adapt: bool = False,
    ) -> None: ...

class ProcessGroupFused(Backend):
    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def options(self) -> Options: ...
    def empty(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device = ...
    ) -> torch.Tensor: ...
    def in_arena(self, tensor: torch.Tensor) -> bool: ...
    def info(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, dict[str, Any]]: ...
    def reset_stats(self) -> None: ...
    def sparse_all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp | ReduceOp.RedOpType,
        block_size: int,
        threshold: float,
        residual: torch.Tensor | None,
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
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        async_op: bool = False,
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

def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]: ...
def sum_squares(tensor: torch.Tensor) -> float: ...
def find_blocks(tensor: torch.Tensor, block_size: int) -> torch.Tensor: ...
def isa() -> str: ...
def _set_delegate_factory(factory: Any) -> None: ...
def _shutdown_all_groups() -> None: ...
