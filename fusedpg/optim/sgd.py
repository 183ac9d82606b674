"""SGD whose step is one collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusedpg.optim._base import FusedOptimizer, check_unsupported
from fusedpg.optim._documentation import documented


class SGD(FusedOptimizer):
    @documented(
        """``torch.optim.SGD`` as one collective over all ranks.

        Formula: torch's (momentum as Sutskever et al. 2013). State: ``momentum_buffer``, with
        ``momentum``.
        """
    )
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        ddp: DistributedDataParallel | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = False,
        max_grad_norm: float | None = None,
        master_dtype: torch.dtype | None = None,
        reduce: str = "mean",
        share_parameters: bool = False,
    ) -> None:
        check_unsupported(differentiable=differentiable)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(
            params,
            defaults,
            ddp=ddp,
            process_group=process_group,
            overlap=overlap,
            max_grad_norm=max_grad_norm,
            master_dtype=master_dtype,
            reduce=reduce,
            share_parameters=share_parameters,
        )

    _op = "fused_sgd_"

    def _has_steps(self, group: dict[str, Any]) -> bool:
        # torch has no counter: there the first step is the one that makes the buffer. It differs
        # from the others only with dampening; else a buffer of zeros does the same.
        return bool(group["momentum"]) and bool(group["dampening"])

    def _is_first(self, param: torch.Tensor, group: dict[str, Any]) -> bool:
        return self._has_steps(group) and float(self.state[param]["step"]) == 0

    def _state_keys(self, group: dict[str, Any]) -> list[str]:
        return ["momentum_buffer"] if group["momentum"] else []

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "momentum": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "weight_decay": float(group["weight_decay"]),
            "nesterov": bool(group["nesterov"]),
            "maximize": bool(group["maximize"]),
        }

    def _exported(self, values: dict[str, Any]) -> dict[str, Any]:
        first = float(values.pop("step", 1)) == 0
        return {} if first else values
