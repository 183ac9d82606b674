"""Batch normalisation with the statistics of all ranks, on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.modules.batchnorm import _BatchNorm

from fusedpg.hvd import _operations as ops
from fusedpg.hvd._basics import is_initialized, size


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm*d`` over the batches of all ranks, which may have other sizes.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as there.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"hvd: SyncBatchNorm needs at least two dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        by_batch = self.training or not self.track_running_stats
        if not by_batch or not is_initialized() or size() == 1:
            return super().forward(input)
        momentum = self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        mean, variance, count = _Statistics.apply(input)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None and momentum is not None
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)


def _dims(input: Tensor) -> list[int]:
    return [d for d in range(input.dim()) if d != 1]


class _Statistics(torch.autograd.Function):
    """Mean, biased variance and number of elements of each channel over all ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = input.double()
        count = torch.tensor(
            [float(input.numel() // max(input.size(1), 1))], dtype=torch.double, device="cpu"
        )
        sums = ops.allreduce(torch.cat([wide.sum(_dims(input)), count]), op=ops.Sum)
        total, mean = sums[-1], sums[:-1] / sums[-1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        squares = (wide - mean.view(shape)).square_().sum(_dims(input))
        variance = ops.allreduce(squares, op=ops.Sum) / total
        ctx.save_for_backward(input, mean, total)
        kind = input.dtype if input.dtype == torch.double else torch.float
        ctx.mark_non_differentiable(total)
        return mean.to(kind), variance.to(kind), total

    @staticmethod
    def backward(ctx: Any, mean_grad: Tensor, variance_grad: Tensor, _: object) -> Tensor:
        input, mean, total = ctx.saved_tensors
        # Every rank's output depends on these statistics: their gradients add up.
        both = ops.allreduce(torch.stack([mean_grad, variance_grad]).double(), op=ops.Sum) / total
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = input.double() - mean.view(shape)
        grad = both[0].view(shape) + 2 * both[1].view(shape) * centred
        return grad.to(input.dtype)
