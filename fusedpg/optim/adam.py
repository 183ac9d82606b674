"""Adam and AdamW whose step is one collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from fusedpg.optim._base import FusedOptimizer, Options, defaults_of, documented
from fusedpg.optim._state import ParamGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _AdamBase(FusedOptimizer):
    _slices = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _numbers = ("betas", "eps", "weight_decay")
    _flags: ClassVar[dict[str, str]] = {
        "decoupled": "decoupled_weight_decay",
        "amsgrad": "amsgrad",
        "maximize": "maximize",
    }
    # As torch's.
    _group_defaults: ClassVar[ParamGroup] = {
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "decoupled_weight_decay": False,
        "fused": None,
    }

    def _state_keys(self, group: ParamGroup) -> list[str]:
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])


class Adam(_AdamBase, op="fused_adam_", of=torch.optim.Adam):
    @documented(
        """``torch.optim.Adam`` as one collective over all ranks.

        Formula: Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1; with ``amsgrad`` Reddi et al.
        2018, algorithm 2. State: ``step``, ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``.
        """
    )
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, defaults_of(locals()), **options)


class AdamW(_AdamBase, op="fused_adamw_", of=torch.optim.AdamW):
    @documented(
        """``torch.optim.AdamW`` as one collective over all ranks.

        Formula: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2. State: ``step``,
        ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``.
        """
    )
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, defaults_of(locals(), decoupled_weight_decay=True), **options)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        # As torch does: whatever is loaded into AdamW, also of Adam or an older AdamW.
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
