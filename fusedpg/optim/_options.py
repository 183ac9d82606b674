"""Hyperparameters are checked by torch's own classes, so that errors are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def check_options(kind: type[Optimizer], options: dict[str, Any], *names: str) -> None:
    """Raises what a class of torch does for some of its arguments, and for NaN."""
    arguments: dict[str, Any] = {name: options[name] for name in names}
    kind([torch.empty(0)], **arguments)
    # torch's SGD does not see it.
    for name, value in arguments.items():
        if isinstance(value, (float, torch.Tensor)) and bool(value != value):
            raise ValueError(f"Invalid {name} value: {value}")
    # ``foreach`` and ``fused`` are accepted and ignored; this would change what a step means.
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not supported by fused optimizers")
