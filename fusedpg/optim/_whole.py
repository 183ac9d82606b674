"""``state_dict()``: whole, or an error that says how to get it whole; never one rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedpg.optim import _checkpoint
from fusedpg.optim._frameworks import asked_by_accelerate
from fusedpg.optim._state import ShardedState
from fusedpg.optim._torch import asked_by_checkpoint


class WholeState(ShardedState):
    """What a state dict of sharded state is."""

    # By number of the parameter, since consolidate_state_dict(); and what it was made from: the
    # parameters, and the tensors of their state with versions.
    _consolidated: dict[int, dict[str, Any]] | None
    _consolidated_from: list[tuple[torch.Tensor, int]]
    # What the hook makes of the state dict that torch is building, if not slices.
    _fill: Callable[[dict[str, Any]], None] | None

    def _init_state_dict(self) -> None:
        self._consolidated = None
        self._consolidated_from = []
        self._fill = None
        # The first of the hooks: those of users see what the caller gets.
        self.register_state_dict_post_hook(_fill)

    def _build(self, fill: Callable[[dict[str, Any]], None] | None) -> dict[str, Any]:
        before, self._fill = self._fill, fill
        try:
            return super().state_dict()
        finally:
            self._fill = before

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as ``torch.optim``'s; local.

        A rank has it in a group of one, before the first step, and after
        :meth:`consolidate_state_dict` until the state changes. Everywhere else this raises.
        ``torch.distributed.checkpoint`` gets the slices (:meth:`local_state_dict`), or with
        ``StateDictOptions(full_state_dict=True)`` whole tensors. ``Accelerator.save_state`` asks
        all ranks, so for it this is a collective, and the rank that writes gets the whole state.

        Raises:
            RuntimeError: when this rank has only its part of the state.
        """
        asked = asked_by_checkpoint() or asked_by_accelerate()
        if asked == "slices":
            self._wait()
            return self._build(lambda made: _checkpoint.to_slices(self, made, blanks=True))
        if asked is not None:
            return self._gathered(None if asked == "whole" else 0)
        return self._build(self._fill_whole)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's slices, as SliceTensors; local, never a collective.

        :meth:`load_state_dict` takes it on the same rank at the same world size, and
        ``merge_state_dicts`` makes a whole one of those of all ranks.
        """
        self._wait()
        return self._build(None)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gathers the whole state for the next :meth:`state_dict` of rank ``to``; collective.

        As ZeroRedundancyOptimizer's, which Lightning and Fabric call before they save. The copy
        is on the CPU, and the next step drops it.

        Args:
            to: a rank of the process group; None: all ranks.
        """
        with self._telling():
            if to is not None and not 0 <= to < self._world_size:
                raise ValueError(f"to must be a rank of the group of {self._world_size}, got {to}")
            self._wait()
        self._consolidated = None
        state = _checkpoint.gather(self, to, cpu=True)
        if to is None or to == self._rank:
            self._consolidated = state
            self._consolidated_from = self._versions()

    def full_state_dict(self, rank0_only: bool = True) -> dict[str, Any]:
        """The whole state, as ``torch.optim``'s ``state_dict()``; collective.

        Args:
            rank0_only: the other ranks get an empty dict.
        """
        whole = self._gathered(0 if rank0_only else None)
        return {} if rank0_only and self._rank != 0 else whole

    def _gathered(self, to: int | None) -> dict[str, Any]:
        self._wait()
        state = _checkpoint.gather(self, to)
        return self._build(lambda state_dict: state_dict.update(state=state))

    def _versions(self) -> list[tuple[torch.Tensor, int]]:
        params = self._all_parameters()
        state = [
            (value, value._version)
            for param in params
            for value in self.state.get(param, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        # Numbers follow from the parameters, whose values do not matter.
        return [(param, 0) for param in params] + state

    def _has_consolidated(self) -> bool:
        now = self._versions()
        return (
            self._consolidated is not None
            and len(now) == len(self._consolidated_from)
            and all(
                tensor is old and version == before
                for (tensor, version), (old, before) in zip(now, self._consolidated_from)
            )
        )

    def _state_changes(self) -> None:
        """A step begins: the consolidated copy is no longer true."""
        self._consolidated = None
        self._consolidated_from = []

    def _fill_whole(self, state_dict: dict[str, Any]) -> None:
        self._wait()
        self._check_blanks()
        if self._world_size == 1 or not _checkpoint.has_slices(self):
            # What the rank has is everything; views, as torch gives its own tensors.
            state_dict["state"] = _checkpoint.gather(self, None, copies=False)
        elif all(p in self._blank or not self.state.get(p) for _, p in self._named_parameters()):
            # As torch before the first step. Frameworks ask when they wrap an optimizer.
            state_dict["state"] = {}
        elif self._has_consolidated() and self._consolidated is not None:
            state_dict["state"] = {n: dict(values) for n, values in self._consolidated.items()}
        else:
            raise RuntimeError(
                f"{type(self).__name__}.state_dict(): rank {self._rank} of {self._world_size} has "
                "only its slices of the optimizer's state, and what is saved of them cannot be "
                "resumed from. For the whole state either call "
                f"consolidate_state_dict(to={self._rank}) on all ranks after the last step and "
                f"before this call on rank {self._rank}; or full_state_dict() on all ranks; or "
                "save with torch.distributed.checkpoint (get_optimizer_state_dict). "
                "local_state_dict() gives the slices. See docs/guides/frameworks.md of fusedpg"
            )


def _fill(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """The post hook of ``state_dict()``."""
    if optimizer._fill is None:
        _checkpoint.to_slices(optimizer, state_dict, blanks=False)
    else:
        optimizer._fill(state_dict)
