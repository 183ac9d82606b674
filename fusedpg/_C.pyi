from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import Store, Work

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
    ) -> None: ...
    @property
    def arena_bytes(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def nan_check(self) -> bool | None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[Any, Any], /) -> Options: ...

class ProcessGroupFused(Backend):
    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def options(self) -> Options: ...
    def empty(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def in_arena(self, tensor: torch.Tensor) -> bool: ...
    def info(self) -> dict[str, Any]: ...
    def fused_adamw_(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        max_exp_avg_sqs: Sequence[torch.Tensor],
        state_steps: Sequence[torch.Tensor],
        *,
        lr: float | torch.Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        mean: bool,
        async_op: bool,
    ) -> Work | None: ...

def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]: ...
def isa() -> str: ...
def _set_delegate_factory(factory: Any) -> None: ...
def _shutdown_all_groups() -> None: ...
