"""Calls that torch.compile leaves to Python. A file, since the decorator imports torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="a layer of fusedpg.tensor_parallel calls its group by itself")
def uncompiled(function: Callable[..., object], *args: object, **kwargs: object) -> Any:
    return function(*args, **kwargs)
