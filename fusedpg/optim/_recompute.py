"""A guard against recomputation with parameters that have changed already."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fusedpg.optim._torch import in_backward


class RecomputeGuard:
    """Sees modules that run again in backward (checkpointing) after ``overlap=True`` has updated
    their parameters.

    Where a parameter's gradient passes through the module, it cannot be complete before that. So
    this is a use without gradient, such as ``weight.detach()``, which autograd's version counters
    do not see in a recomputation. Costs nothing outside backward.
    """

    def __init__(self, updated: set[torch.Tensor]) -> None:
        self._updated = updated
        self._handle: Any = None

    def start(self) -> None:
        if self._handle is not None:
            return
        this = weakref.ref(self)  # after a backward that has raised nobody calls stop()

        def check(module: nn.Module, inputs: Any) -> None:
            guard = this()
            if guard is not None:
                guard._check(module)

        self._handle = register_module_forward_pre_hook(check)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        self.stop()

    def _check(self, module: nn.Module) -> None:
        if not in_backward():
            return
        for name, param in module.named_parameters(recurse=False):
            if param in self._updated:
                raise RuntimeError(
                    f"overlap=True: {type(module).__name__} is recomputed (checkpointing) after "
                    f"its parameter {name} was updated: it is used there without a gradient, and "
                    "the recomputed values would be other ones; use overlap=False"
                )
