"""The part of the optimizers' docstrings that is common to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

_COMMON = """
        Every rank passes the same parameters and ends every step with the same bits in them; the
        state of a parameter is split between the ranks. Arguments are torch's; ``foreach`` and
        ``fused`` are accepted and ignored.

        Args:
            params, lr, ...: as for ``torch.optim``. Parameters are dense tensors of float32,
                float64, bfloat16 or float16, on the CPU or all on one GPU. ``lr`` and all
                others are read at each step.{extra}
            ddp: take gradients from this DistributedDataParallel module, during backward. Without:
                manual mode, in which ``step()`` reduces ``p.grad`` and parameters are broadcast
                from rank 0 when they are added. ``attach(ddp)`` does the same later.
            process_group: of the fused backend; default: the module's, or the default group.
            overlap: update parameters during backward as soon as their gradients are there. Then
                there is no clipping, no GradScaler, and one backward for each step.
            max_grad_norm: clip the norm of all gradients in ``step()``.
            master_dtype: torch.float32 keeps float32 copies (this rank's slices) of bfloat16 and
                float16 parameters, which the updates go to.
            reduce: "mean" divides summed gradients by the number of ranks, "sum" does not.
            share_parameters: the ranks of the machine hold one copy of the parameters in shared
                memory. Nobody may write to them outside ``step()``; see ``writing_parameters()``.
            comm_hook: what ``register_comm_hook`` takes, (state, hook): combines gradients, into
                their mean, in place of the reduce-scatter; for example ``(state,
                fusedpg.compress.hook)``. Then ``process_group`` may be a part of the module's.

        Raises:
            ValueError, TypeError: for arguments and parameters that are not supported.
        """


def documented(text: str, extra: str = "") -> Callable[[_F], _F]:
    """Sets the docstring of a constructor."""

    def set_doc(function: _F) -> _F:
        function.__doc__ = text.rstrip() + "\n" + _COMMON.format(extra=extra)
        return function

    return set_doc
