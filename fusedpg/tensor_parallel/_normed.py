"""The RMS norm of a row-parallel layer's output, by the operation that computes the output.

It is the program's own formula on this rank's rows. Backward is torch's, from the output. LayerNorm
stays torch's: that goes over a row as rarely as generated code would, and is as fast behind it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call


@dataclasses.dataclass
class Norm:
    """What an operation needs to know of a norm over the features, and where it leaves the result.

    Ranks choose alike: by the module's type, which is the same everywhere, and not by its hooks.
    """

    weight: torch.Tensor | None
    eps: float
    result: torch.Tensor | None = None

    @staticmethod
    def of(norm: nn.Module | None, dtype: torch.dtype, features: int) -> Norm | None:
        """None for a module that may compute anything else, or in another type."""
        if not isinstance(norm, nn.RMSNorm) or type(norm) is not nn.RMSNorm:
            return None
        if norm.normalized_shape != (features,) or "forward" in norm.__dict__:
            return None
        weight, eps = norm.weight, norm.eps
        if weight is not None and (
            type(weight) not in (nn.Parameter, torch.Tensor)
            or weight.dtype != dtype
            or weight.device.type != "cpu"
        ):
            return None
        if eps is None:  # what torch takes then for 16-bit types is another one
            if dtype not in (torch.float32, torch.float64):
                return None
            eps = torch.finfo(dtype).eps
        return Norm(weight, eps)

    def applied(self, y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """The result that there is, with a backward; the weight as that shall see it."""
        assert self.result is not None
        if not torch.is_grad_enabled():
            return self.result.view(y.shape)
        z: torch.Tensor = _Given.apply(self, y, self.weight if weight is None else weight)
        return z


class _Given(torch.autograd.Function):
    """A norm whose result is known: its gradients are those of torch's function."""

    @staticmethod
    def forward(ctx: Any, norm: Norm, y: torch.Tensor, weight: torch.Tensor | None) -> Any:
        ctx.eps = norm.eps
        ctx.save_for_backward(y, weight)
        assert norm.result is not None
        return norm.result.view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needs = ctx.needs_input_grad[1:]
        given = [
            None if x is None else x.detach().requires_grad_(n)
            for x, n in zip(ctx.saved_tensors, needs)
        ]
        y, weight = given
        assert y is not None
        with torch.enable_grad():
            z = F.rms_norm(y, y.shape[-1:], weight, ctx.eps)
        wanted = [x for x in given if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(z, wanted, gradient))
        return None, *(next(found) if n else None for n in needs)


def called(
    norm: nn.Module, y: torch.Tensor, z: torch.Tensor, parameters: dict[str, torch.Tensor]
) -> Any:
    """What calling the module gives where its forward is known to give z: hooks see it.

    `parameters` are in place of its own, for a hook that changes y.
    """
    hooks = norm._forward_hooks or norm._forward_pre_hooks
    hooks = hooks or norm._backward_hooks or norm._backward_pre_hooks
    if not hooks and not torch.nn.modules.module._has_any_global_hook():
        return z
    kind = type(norm)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return z if x is y else kind.forward(norm, x)

    norm.__dict__["forward"] = forward
    try:
        return functional_call(norm, parameters, (y,))
    finally:
        del norm.__dict__["forward"]


__all__ = ["Norm", "called"]
