"""LAMB whose step is one collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from fusedpg.optim._base import FusedOptimizer, Options, defaults_of, documented
from fusedpg.optim._state import ParamGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LAMB(FusedOptimizer, op="fused_lamb_"):
    @documented(
        """LAMB as one collective over all ranks.

        Formula: You et al. 2020 (arXiv:1904.00962), algorithm 2, with the identity for phi::

            u = m^ / (sqrt(v^) + eps) + weight_decay * x
            x -= lr * (|x| / |u|) * u

        Norms are of whole parameters, computed from the ranks' slices in float64; where one is
        zero the ratio is 1. State: ``step``, ``exp_avg``, ``exp_avg_sq``, in float32 (float64 for
        float64 parameters).
        """,
        """
            trust_clip: limit the ratio |x| / |u| to 1.
            always_adapt: use the ratio even for groups with ``weight_decay=0``; without, it is 1
                there.""",
    )
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        trust_clip: bool = False,
        always_adapt: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, defaults_of(locals()), **options)

    _slices = ("exp_avg", "exp_avg_sq")
    _numbers = ("betas", "eps", "weight_decay")
    _flags: ClassVar[dict[str, str]] = {
        "trust_clip": "trust_clip",
        "always_adapt": "always_adapt",
        "maximize": "maximize",
    }
    _group_defaults: ClassVar[ParamGroup] = {
        "trust_clip": False,
        "always_adapt": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
    }

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else torch.float32
