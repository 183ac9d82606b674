"""Uneven inputs: torch's ``Join``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer


class StepOnJoin(JoinHook):
    """A rank without data left takes part in the others' steps."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._shadow_step()
