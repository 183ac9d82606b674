"""What torch.compile leaves to Python. A file of its own: the decorator imports torch._dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@torch.compiler.disable(reason="a layer of fusedpg.tensor_parallel calls its group by itself")
def uncompiled(
    function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    return function(*args, **kwargs)
