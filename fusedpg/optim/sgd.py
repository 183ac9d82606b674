"""SGD whose step is one collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from fusedpg.optim._base import FusedOptimizer, Options, defaults_of, documented
from fusedpg.optim._state import ParamGroup, check_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGD(FusedOptimizer, op="fused_sgd_", of=torch.optim.SGD):
    @documented(
        """``torch.optim.SGD`` as one collective over all ranks.

        Formula: torch's (momentum as Sutskever et al. 2013). State: ``momentum_buffer``, with
        ``momentum``.
        """
    )
    def __init__(
        self,
        params: ParamsT,
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, defaults_of(locals()), **options)

    _slices = ("momentum_buffer",)
    _numbers = ("momentum", "dampening", "weight_decay")
    _flags: ClassVar[dict[str, str]] = {"nesterov": "nesterov", "maximize": "maximize"}
    _late = True  # momentum may be turned on later
    _counts = False  # as in torch, the first step is the one that finds no buffer
    _group_defaults: ClassVar[ParamGroup] = {
        "nesterov": False,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": False,
    }

    def _check_options(self, options: ParamGroup) -> None:
        check_options(torch.optim.SGD, options, "lr", *self._numbers, "nesterov")

    def _first_differs(self, group: ParamGroup) -> bool:
        # Without dampening a buffer of zeros does the same.
        return bool(group["momentum"]) and bool(group["dampening"])

    def _loaded(self, values: dict[str, Any]) -> dict[str, object]:
        # Older ones of ours counted steps, and had a buffer before the first.
        if float(values.pop("step", 1)) == 0:
            values.pop("momentum_buffer", None)
        return values

    def _state_keys(self, group: ParamGroup) -> list[str]:
        return ["momentum_buffer"] if group["momentum"] else []
