"""State dicts: torch's keys, slices that DCP can save, and whole tensors from and to them.

``state_dict()`` is whole, or an error that says how to get it whole; never one rank's part. The
whole state takes a collective. Accelerate asks all ranks for it and writes what rank 0 gets;
transformers' Trainer asks rank 0 alone, from a method that runs on all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import StateDict

from fusedpg import _agreement
from fusedpg.functional import shard_range
from fusedpg.optim._slices import SliceTensor, from_full, to_full
from fusedpg.optim._state import ParamGroup, ShardedState
from fusedpg.optim._torch import asked_by_checkpoint


class WholeState(ShardedState):
    """State dicts of sharded state."""

    # By number of the parameter, since consolidate_state_dict(); and what it was made from: the
    # parameters, and the tensors of their state with versions.
    _consolidated: dict[int, dict[str, Any]] | None
    _consolidated_from: list[tuple[torch.Tensor, int]]
    # The hook's way to fill the state dict that torch is building, if not by slices.
    _fill: Callable[[StateDict], None] | None

    def _init_state_dict(self) -> None:
        self._consolidated = None
        self._consolidated_from = []
        self._fill = None
        # The first of the hooks: those of users see what the caller gets.
        self.register_state_dict_post_hook(WholeState._finish_state_dict)  # type: ignore[arg-type]

    def _finish_state_dict(self, state_dict: StateDict) -> None:
        """Makes what torch has built what the caller gets."""
        if self._fill is None:
            self._to_slices(state_dict, blanks=False)
        else:
            self._fill(state_dict)

    def _build(self, fill: Callable[[StateDict], None] | None) -> StateDict:
        before, self._fill = self._fill, fill
        try:
            return super().state_dict()
        finally:
            self._fill = before

    def state_dict(self) -> StateDict:
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
            self._context.wait()
            return self._build(lambda made: self._to_slices(made, blanks=True))
        if asked is not None:
            return self._gathered(None if asked == "whole" else 0)
        return self._build(self._fill_whole)

    def local_state_dict(self) -> StateDict:
        """This rank's slices, as SliceTensors; local, never a collective.

        :meth:`load_state_dict` takes it on the same rank at the same world size, and
        ``merge_state_dicts`` makes a whole one of those of all ranks.
        """
        self._context.wait()
        return self._build(None)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gathers the whole state for the next :meth:`state_dict` of rank ``to``; collective.

        As ZeroRedundancyOptimizer's, which Lightning and Fabric call before they save. The copy
        is on the CPU, and the next step drops it.

        Args:
            to: a rank of the process group; None: all ranks.
        """
        with self._context.telling():
            if to is not None and not 0 <= to < self._context.world_size:
                raise ValueError(
                    f"to must be a rank of the group of {self._context.world_size}, got {to}"
                )
            self._context.wait()
        self._consolidated = None
        state = self._gather(to, cpu=True)
        if to is None or to == self._context.rank:
            self._consolidated = state
            self._consolidated_from = self._versions()

    def full_state_dict(self, rank0_only: bool = True) -> StateDict:
        """The whole state, as ``torch.optim``'s ``state_dict()``; collective.

        Args:
            rank0_only: the other ranks get an empty dict.
        """
        whole = self._gathered(0 if rank0_only else None)
        return {} if rank0_only and self._context.rank != 0 else whole

    def _gathered(self, to: int | None) -> StateDict:
        self._context.wait()
        state = self._gather(to)
        return self._build(lambda state_dict: state_dict.update(state=state))

    def _versions(self) -> list[tuple[torch.Tensor, int]]:
        params = self._context.parameters()
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

    def _fill_whole(self, state_dict: StateDict) -> None:
        context = self._context
        context.wait()
        self._check_blanks()
        if context.world_size == 1 or not self._has_slices():
            # This rank has everything. These are views, as torch gives its own tensors.
            state_dict["state"] = self._gather(None, copies=False)
        elif all(p in self._blank or not self.state.get(p) for p in context.parameters()):
            # As torch before the first step. Frameworks ask when they wrap an optimizer.
            state_dict["state"] = {}
        elif self._has_consolidated() and self._consolidated is not None:
            state_dict["state"] = {n: dict(values) for n, values in self._consolidated.items()}
        else:
            raise RuntimeError(
                f"{type(self).__name__}.state_dict(): rank {context.rank} of {context.world_size} "
                "has only its slices of the optimizer's state, and what is saved of them cannot be "
                "resumed from. For the whole state either call "
                f"consolidate_state_dict(to={context.rank}) on all ranks after the last step and "
                f"before this call on rank {context.rank}; or full_state_dict() on all ranks; or "
                "save with torch.distributed.checkpoint (get_optimizer_state_dict). "
                "local_state_dict() gives the slices. See docs/guides/frameworks.md of fusedpg"
            )

    # --- what is saved

    def _numbered_parameters(self) -> list[tuple[torch.Tensor, ParamGroup]]:
        """Parameters and their groups, in the order of a state dict's numbers."""
        return [(p, group) for group in self.param_groups for p in group["params"]]

    def _to_slices(self, state_dict: StateDict, blanks: bool) -> None:
        """Says of each slice in a state dict what it is a slice of.

        Args:
            blanks: also state that was made before a step, for a checkpoint to be loaded into.
        """
        self._check_blanks()
        self._context.check_layouts(self._context.parameters())
        for number, (param, group) in enumerate(self._numbered_parameters()):
            state = state_dict["state"].get(number)
            if state is None:
                continue
            if param in self._blank and not blanks:
                del state_dict["state"][number]
                continue
            offset, _ = self._context.shard(param)
            state_dict["state"][number] = {
                key: SliceTensor(value, param.shape, param.stride(), offset)
                if self._is_slice(key, group)
                else value
                for key, value in state.items()
            }

    def _has_slices(self) -> bool:
        """Not the state of an SGD without momentum."""
        return any(
            self._is_slice(key, group)
            for param, group in self._numbered_parameters()
            for key in self.state.get(param, ())
        )

    def _gather(
        self, to: int | None, *, cpu: bool = False, copies: bool = True
    ) -> dict[int, dict[str, object]]:
        """The whole state by number of the parameter, as torch's optimizer has it; collective.

        Args:
            to: the rank that gets it, the others get nothing; None: all ranks.
            cpu: copies are on the CPU.
            copies: or the state itself and views of it, where no rank has a part.
        """
        with self._context.telling() if copies else contextlib.nullcontext():
            self._context.check_layouts(self._context.parameters())
            self._check_blanks()
            if copies:
                self._check_agreement()
        receives = to is None or self._context.rank == to
        state: dict[int, dict[str, object]] = {}
        for number, (param, its_group) in enumerate(self._numbered_parameters()):
            if not self.state.get(param) or param in self._blank:
                continue
            values = {}
            for key, value in self.state[param].items():
                if not self._is_slice(key, its_group):
                    values[key] = copy.deepcopy(value) if copies else value
                elif not copies:
                    values[key] = value.as_strided(param.shape, param.stride())
                else:
                    full = self._gather_one(value, param, to)
                    if full is not None:
                        values[key] = full.cpu() if cpu else full
            if receives:
                state[number] = values
        return state

    def _gather_one(
        self, local: torch.Tensor, param: torch.Tensor, to: int | None
    ) -> torch.Tensor | None:
        """The whole tensor of which each rank has a slice; None on ranks that do not get it."""
        context = self._context
        ranges = [
            shard_range(param.numel(), context.world_size, r) for r in range(context.world_size)
        ]
        padded = torch.zeros(ranges[0][1], dtype=local.dtype, device=local.device)
        padded[: local.numel()] = local
        receives = to is None or context.rank == to
        parts = [torch.empty_like(padded) for _ in ranges] if receives else None
        if to is not None:
            dist.gather(padded, parts, group=context.group, group_dst=to)
        else:
            dist.all_gather(parts, padded, group=context.group)
        if parts is None:
            return None
        pieces = [
            (offset, part[:length]) for (offset, length), part in zip(ranges, parts, strict=True)
        ]
        return to_full(pieces, param.shape, param.stride())

    def _check_agreement(self) -> None:
        """Raises on all ranks unless they have the same state: who clears it does so everywhere."""
        mine = [
            (number, sorted(self.state[param]))
            for number, (param, _) in enumerate(self._numbered_parameters())
            if self.state.get(param) and param not in self._blank
        ]
        if not _agreement.same(mine, self._context.group, self._context.device()):
            raise RuntimeError(
                "ranks have state of different parameters: self.state must be cleared, and state "
                "dicts loaded, on all ranks alike"
            )

    # --- what is loaded

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a full torch state dict, or one of this class, and never changes it.

        Local, not a collective. Values may be whole tensors of the parameter's shape
        (``torch.optim``, ``full_state_dict()``, ``merge_state_dicts()``) or this rank's own slices
        (``local_state_dict()`` of the same rank and world size).

        Raises:
            ValueError: for slices of another rank or world size, or groups that do not match.
            RuntimeError: with ``overlap=True`` between backward and ``step()``.
        """
        self._mode.end_before_loading()
        self._context.wait()
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = self._loaded_groups(state_dict)
        state = self._loaded_state(state_dict)
        self._load_digest = self._digest(state_dict)
        # The same dicts: from_torch() shares them with an optimizer of torch and its schedulers.
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.clear()
            group.update(loaded)
        self._blank.clear()
        self.__setstate__({"state": state, "param_groups": self.param_groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_groups(self, state_dict: StateDict) -> list[ParamGroup]:
        """The parameter groups of a state dict, with our parameters."""
        ours, groups = self.param_groups, copy.deepcopy(state_dict["param_groups"])
        if len(ours) != len(groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for mine, group in zip(ours, groups, strict=True):
            if len(mine["params"]) != len(group["params"]):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    "optimizer's group"
                )
            self._check_kind(group)
            if group.get("differentiable"):
                raise ValueError("differentiable=True is not supported by fused optimizers")
            group["params"] = mine["params"]
            if "param_names" in mine:
                group.setdefault("param_names", mine["param_names"])
        return groups

    # The option by which one tells groups of Adam and AdamW, LAMB, and SGD from each other.
    _MARKS = ("amsgrad", "trust_clip", "momentum")

    def _check_kind(self, group: ParamGroup) -> None:
        """Raises for a group of another kind of optimizer, whose state would be misread."""
        mark = next((mark for mark in self._MARKS if mark in self.defaults), None)
        missing = self.defaults.keys() - self._group_defaults.keys() - group.keys()
        foreign = [] if mark in group else [other for other in self._MARKS if other in group]
        if missing or foreign:
            has = f"has {foreign[0]}" if foreign else f"has no {' and no '.join(sorted(missing))}"
            raise ValueError(
                f"loaded state dict is not {type(self).__name__}'s: a parameter group {has}"
            )

    def _digest(self, state_dict: StateDict) -> int:
        """A digest of the whole tensors in a state dict; every rank takes its slices, so ranks must
        load the same. 0: there are none, or there is nobody to differ from."""
        found = 0
        if self._context.world_size == 1:
            return found
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for place, (number, (_, group)) in enumerate(
            zip(numbers, self._numbered_parameters(), strict=True)
        ):
            for key, value in sorted(state_dict["state"].get(number, {}).items()):
                whole = isinstance(value, torch.Tensor) and not isinstance(value, SliceTensor)
                if whole and self._is_slice(key, group):
                    found = zlib.crc32(f"{place} {key} {value.dtype} {value.shape}".encode(), found)
                    plain = value.detach().cpu().contiguous().reshape(-1)
                    found = zlib.crc32(plain.view(torch.uint8).numpy(), found)
        return found

    def _loaded_state(self, state_dict: StateDict) -> collections.defaultdict[object, object]:
        """This rank's part of the state in a state dict, as new tensors."""
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        given = dict(state_dict["state"])
        state: collections.defaultdict[object, Any] = collections.defaultdict(dict)
        for number, (param, group) in zip(numbers, self._numbered_parameters(), strict=True):
            values = self._loaded(
                {key: value for key, value in given.pop(number, {}).items() if value is not None}
            )
            if values and self._counts and "step" not in values:
                raise ValueError(f"state[{number!r}] has no step")
            if not self._has_master(param):
                values.pop("master_param", None)  # of a half parameter
            if values and self._has_master(param) and "master_param" not in values:
                state[param]["master_param"] = self._new_slice(param, "master_param")
            for key, value in values.items():
                if key == "step":
                    # May be a number. Ours are float32, at the parameter.
                    step = torch.as_tensor(value, dtype=torch.float32).reshape(())
                    state[param][key] = step.to(param.device, copy=True)
                elif isinstance(value, torch.Tensor) and self._is_slice(key, group):
                    # Into our own type: torch would round fp32 moments to a half parameter's.
                    own = self._own(f"state[{number!r}][{key!r}]", value, param)
                    state[param][key] = self._new_slice(param, key).copy_(own)
                else:
                    state[param][key] = copy.deepcopy(value)
        # Values that belong to no parameter stay as they are.
        state.update(given)
        return state

    def _own(self, where: str, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        offset, length = self._context.shard(param)
        if not isinstance(value, SliceTensor):
            if value.shape != param.shape:
                raise ValueError(
                    f"{where} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}"
                )
            return from_full(value, param, offset, length)
        theirs = [(s, d) for s, d in zip(value.shape, value.stride(), strict=True) if s != 1]
        ours = [(s, d) for s, d in zip(param.shape, param.stride(), strict=True) if s != 1]
        if theirs != ours or (length and (value.offset, value.local().numel()) != (offset, length)):
            raise ValueError(
                f"{where} is the slice of another rank or world size (elements from "
                f"{value.offset}, {value.local().numel()} of them; this rank has {length} from "
                f"{offset}) or of another shape. Load a full_state_dict(), the result of "
                "fusedpg.optim.merge_state_dicts() on the state dicts of all ranks, or use "
                "torch.distributed.checkpoint"
            )
        return value.local() if length else value.local().new_empty(0)


def asked_by_accelerate() -> str | None:
    """True if ``Accelerator.save_state`` asks for a state dict, which it does on all ranks.

    Returns:
        None, or who needs the whole state: "whole" (all ranks), or "whole on rank 0".
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if (
            frame.f_globals.get("__name__") == "accelerate.checkpointing"
            and frame.f_code.co_name == "save_accelerator_state"
        ):
            # If nodes share no file system, one rank of each of them writes.
            each_node = frame.f_locals.get("save_on_each_node", True)
            return "whole" if each_node else "whole on rank 0"
    return None


_SAVE = "_save_optimizer_and_scheduler"


def consolidate_in_trainer(kind: type) -> None:
    """Has transformers' ``Trainer``, if it is loaded, gather the state before it saves.

    Args:
        kind: the class of optimizers that this is done for; others are saved as before.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    save = getattr(trainer, _SAVE, None)
    if save is None or hasattr(save, "fusedpg"):
        return

    @functools.wraps(save)
    def consolidate_and_save(self: Any, *args: object, **kwargs: object) -> Any:
        optimizer = self.optimizer
        while not isinstance(optimizer, kind) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # Accelerate's wrapper
        if isinstance(optimizer, kind):
            each_node = getattr(self.args, "save_on_each_node", True)
            optimizer.consolidate_state_dict(None if each_node else 0)  # type: ignore[attr-defined]
        return save(self, *args, **kwargs)

    consolidate_and_save.fusedpg = True  # type: ignore[attr-defined]
    setattr(trainer, _SAVE, consolidate_and_save)
