"""``DistributedOptimizer(fused=True)``: an optimizer of ``fusedpg.optim`` as one of Horovod's.

Its collectives go by call order in the default group, not through the engine. The engine's cycles
tell ranks that have joined which of them to take part in. State is in slices; what Horovod's
programs send and commit of it is whole.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, StateDict

from fusedpg.hvd import _basics
from fusedpg.hvd import _operations as ops
from fusedpg.hvd.exceptions import HorovodInternalError
from fusedpg.hvd.functions import broadcast_object
from fusedpg.optim import FusedOptimizer, from_torch
from fusedpg.optim._from_torch import _HOOKS
from fusedpg.optim._slices import SliceTensor

# Joined ranks take part in these.
_STEP, _REDUCE = 0, 1

_made: list[weakref.ref[Fused]] = []


def _alive() -> list[Fused]:
    """The optimizers that there are, in the order in which they were made."""
    return [one for ref in _made if (one := ref()) is not None]


class Fused(FusedOptimizer):
    """A fused optimizer with the methods of Horovod's."""

    # The whole state while no step has changed it: loaded, restored, or gathered.
    _hvd_held: dict[object, object] | None = None

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hvd_begin(_STEP)
        self._hvd_held = None
        super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch's hooks are around the step inside

    def reduce_gradients(self) -> None:
        """Reduces gradients now, to clip them, for example.

        Raises:
            HorovodInternalError: after a rank has joined, which cannot clip.
        """
        self._hvd_begin(_REDUCE)
        try:
            super().reduce_gradients()
        except dist.DistBackendError as error:
            joined = _basics.engine().joined() if _basics.is_initialized() else []
            if joined:
                raise HorovodInternalError(_cannot_reduce(joined)) from error
            raise

    def synchronize(self) -> None:
        """Reduces gradients, to clip them, for example."""
        self.reduce_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        self.reduce_gradients()
        return super().clip_grad_norm_(max_norm, norm_type)

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: gradients are accumulated until ``step()``."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict(state_dict)
        values = [v for one in state_dict["state"].values() for v in one.values()]
        in_slices = any(isinstance(value, SliceTensor) for value in values)
        self._hvd_held = None if in_slices else state_dict["state"]

    # --- joining ------------------------------------------------------------------------

    def _hvd_begin(self, what: int) -> None:
        if _basics.is_initialized():
            number = next(i for i, one in enumerate(_alive()) if one is self)
            _basics.engine().begin_turn(2 * number + what)

    # --- the whole state ----------------------------------------------------------------

    def _hvd_whole(self, state: dict[object, object]) -> dict[str, object]:
        return self._build(lambda made: made.update(state=state))

    def _hvd_copy(self) -> dict[str, Any]:
        """The whole state on every rank, with groups of its own; collective."""
        whole = self.full_state_dict(rank0_only=False)
        return {**whole, "param_groups": copy.deepcopy(whole["param_groups"])}

    def _hvd_hold(self) -> None:
        """Keeps the whole state on every rank, as ranks are about to leave; collective."""
        self._hvd_held = self._hvd_copy()["state"]

    def _hvd_broadcast_state(self, root: int) -> None:
        """Takes over the root's state and groups; collective."""
        is_root = _basics.rank() == root
        # A state that only the root has loaded is whole there; otherwise ranks have slices.
        held = self._hvd_held
        whole = self._hvd_whole(held) if is_root and held is not None else None
        whole = broadcast_object(whole, root, "optimizer.fused")
        if whole is None:
            whole = self._gathered(root)
            whole = broadcast_object(whole if is_root else None, root, "optimizer.fused")
        self.load_state_dict(whole)

    def _hvd_restore(self, whole: dict[str, Any]) -> None:
        """Returns to a state; local, also when the group has failed in the middle of a step."""
        self._context.in_flight = []
        self._context.drop_gradients()
        self.load_state_dict(whole)

    def _hvd_rebind(self) -> None:
        """Goes on in the present default group, with the state that is held; collective."""
        if self._context.group is dist.distributed_c10d._get_default_group():
            return
        held, groups = self._hvd_held, self.param_groups
        hooks = {name: getattr(self, name) for name in _HOOKS}
        self._context.in_flight = []
        self._context.drop_gradients()
        self._mode.leave()
        if self._context.memory.shared:
            for param in self._context.parameters():
                param.data = param.data.clone()
        whole = None if held is None else self._hvd_whole(held)
        FusedOptimizer.__init__(
            self,
            [dict(group) for group in groups],
            self.defaults,
            ddp=None,
            process_group=None,
            overlap=self._overlap,
            max_grad_norm=self._context.max_grad_norm,
            master_dtype=self._master_dtype,
            reduce=self._reduce,
            share_parameters=self._context.memory.shared,
            comm_hook=self._comm_hook,
        )
        self.param_groups = groups
        for name, those in hooks.items():
            setattr(self, name, those)
        if whole is not None:
            self.load_state_dict(whole)


def _cannot_reduce(joined: list[int]) -> str:
    return (
        f"hvd: ranks {joined} have joined, and cannot clip gradients that are reduced before "
        "step(): clip in the step, by hvd.DistributedOptimizer(fusedpg.optim.SGD(..., "
        "max_grad_norm=...), fused=True), or join() without synchronize()"
    )


def serve_turn(turn: int) -> None:
    """Takes part in what another rank's optimizer does, on a rank that has joined."""
    number, what = divmod(turn, 2)
    optimizer = _alive()[number]
    if what == _STEP:
        optimizer._shadow_step()
        return
    engine = _basics.engine()
    engine.begin_turn(turn)
    engine.leave()
    with contextlib.suppress(dist.DistBackendError):
        # Not what the others call, so that they raise and do not wait.
        dist.barrier(group=optimizer.join_process_group)
    raise HorovodInternalError(_cannot_reduce(sorted({*engine.joined(), engine.rank})))


def fused_optimizer(optimizer: Optimizer, op: int) -> Fused:
    """Makes a fused optimizer of one of torch's, or has one stand for Horovod's.

    Raises:
        ValueError: for another reduction than means and sums.
        TypeError: for an optimizer that has no fused one.
    """
    if op not in (ops.Average, ops.Sum):
        raise ValueError("hvd: fused=True averages gradients, or adds them")
    made: Any = optimizer
    held = None
    if not isinstance(optimizer, FusedOptimizer):
        held = optimizer.state_dict()["state"] if optimizer.state else None
        made = from_torch(optimizer, reduce="mean" if op == ops.Average else "sum")
    if not isinstance(made, Fused):
        made.__class__ = type(type(made).__name__, (Fused, type(made)), {"__module__": __name__})
        _made.append(weakref.ref(made))
    made._hvd_held = held
    return made
