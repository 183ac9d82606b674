"""``overlap=True``: the step is made during backward.

Parameters have changed when backward returns, and ``step()`` finds what cannot have worked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fusedpg._registration import load_extension
from fusedpg.optim._bridge import Bridge, Bucket, Gradient
from fusedpg.optim._ddp import unsynchronised
from fusedpg.optim._gradients import SpentGrad
from fusedpg.optim._modes import Attached
from fusedpg.optim._recompute import RecomputeGuard

if TYPE_CHECKING:
    from fusedpg.optim._base import FusedOptimizer


class Overlap(Attached):
    tells = False  # all is done in backward

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self.updated: set[torch.Tensor] = set()  # in backward, since the last step
        self.applied: dict[int, dict[str, Any]] = {}  # hyperparameters of that, by group
        self._idle: set[torch.Tensor] = set()  # of the updated, those that this rank did not use
        self._half_updated = False  # the backward that does it has not ended
        self._spent: dict[torch.Tensor, SpentGrad] = {}
        self._recompute = RecomputeGuard(self.updated)

    # --- in backward: the bridge's calls ------------------------------------------------

    def bucket_ready(
        self,
        optimizer: FusedOptimizer,
        bucket: Bucket,
        grads: list[torch.Tensor],
        used: torch.Tensor | None,
    ) -> None:
        """A bucket in the usual case: plain gradients of this rank."""
        self._update(optimizer, bucket.params, grads, used, shadow=False)

    def gradients_ready(
        self,
        optimizer: FusedOptimizer,
        gradients: list[Gradient],
        used: torch.Tensor | None,
        shadow: bool,
    ) -> None:
        """A bucket in any other case."""
        params = [gradient.param for gradient in gradients]
        self._update(optimizer, params, [gradient.local for gradient in gradients], used, shadow)
        if used is not None:
            self._idle.update(gradient.param for gradient in gradients if not gradient.used)

    def _update(
        self,
        optimizer: FusedOptimizer,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        used: torch.Tensor | None,
        shadow: bool,
    ) -> None:
        """Starts the step of some parameters."""
        optimizer._stepped = False
        optimizer._check_shared(params)
        if self.updated and not self.updated.isdisjoint(params):
            SpentGrad.refuse_accumulation()
        self.updated.update(params)
        self._half_updated = True
        self._recompute.start()
        group_of = optimizer._number_groups()
        alone = len(optimizer.param_groups) == 1
        numbers = {0} if alone else {group_of[param] for param in params}
        for number in numbers - self.applied.keys():
            self.applied[number] = _hyperparameters(optimizer, number)
        works = optimizer._fused_step(params, grads, used=used, **optimizer._reduction(shadow))

        optimizer._in_flight += [work.wait for work in works]
        load_extension().set_gradients(params, None)

    def nested_done(self, optimizer: FusedOptimizer) -> None:
        optimizer._end_operations()

    def shadow_done(self, optimizer: FusedOptimizer) -> None:
        super().shadow_done(optimizer)
        self._end_update()  # with ``ddp.join()`` alone nobody calls step()

    def backward_done(self, optimizer: FusedOptimizer) -> None:
        optimizer._wait()
        self._half_updated = False
        self._recompute.stop()
        for param in load_extension().place_spent(list(self.updated), self._spent):
            param.grad = self._spent[param] = SpentGrad(param, optimizer._context)

    # --- after it -----------------------------------------------------------------------

    def operations_ahead(self) -> int:
        # A step is local: the next are those of a backward.
        return self.bridge.buckets_left()

    def step(self, optimizer: FusedOptimizer, scale: Any, found_inf: Any) -> None:
        optimizer._check_shared()
        if scale is not None or found_inf is not None:
            raise RuntimeError("GradScaler needs overlap=False")
        updated, idle, applied = self._end_update()
        optimizer._wait()
        self.bridge.check_finished(optimizer._named_parameters())
        _check_unedited(optimizer, updated, idle)
        everything = optimizer._all_parameters()
        shadow = optimizer._shadow
        quickly = not shadow and load_extension().all_spent(everything, updated, SpentGrad)
        for name, param in () if quickly else optimizer._named_parameters():
            if param.grad is not None and not isinstance(param.grad, SpentGrad):
                optimizer._check_known(param)
                raise RuntimeError(unsynchronised(name))
            if param.grad is not None and param not in updated and not shadow:
                raise RuntimeError(
                    f"overlap=True: the gradient of parameter {name} was applied by an earlier "
                    "backward and is gone, so step() cannot apply it again: call step() once and "
                    "zero_grad() after every synchronised backward, or use overlap=False"
                )
            if param in updated and param.grad is None and not shadow:
                raise RuntimeError(
                    f"overlap=True: the gradient of parameter {name} was dropped between backward, "
                    "which has updated it, and step(), or DDP still waits for others"
                )
        for number, used in applied.items():
            for key, value in _hyperparameters(optimizer, number).items():
                if value != used[key]:
                    raise RuntimeError(
                        f"overlap=True: {key} of parameter group {number} was changed between "
                        f"backward and step() from {used[key]} to {value}, but backward has "
                        "updated the parameters already. Change it after step(), or use "
                        "overlap=False"
                    )
        # The others' stays what it is, so that a forgotten zero_grad() is seen.
        for param in idle:
            param.grad = None

    def _end_update(self) -> tuple[set[torch.Tensor], set[torch.Tensor], dict[int, Any]]:
        """What backward has done of the step; the next one begins anew, whatever this one does."""
        self._recompute.stop()
        done = set(self.updated), set(self._idle), self.applied
        self.updated.clear()
        self._idle.clear()
        self.applied = {}
        self._half_updated = False
        return done

    def prepare_clipping(self, optimizer: FusedOptimizer) -> None:
        raise RuntimeError("clipping needs overlap=False")

    def check_scaling(self) -> None:
        raise RuntimeError(
            "GradScaler needs overlap=False: see fusedpg's docs/guides/optimizers.md"
        )

    def end_before_loading(self) -> None:
        if self.updated and not self._half_updated:
            raise RuntimeError(
                "overlap=True: load_state_dict() between backward, which has updated parameters "
                "and state, and step(): call step() first. (After a step(), or a backward, that "
                "has raised, state can be loaded.)"
            )
        self._end_update()

    def check_detaching(self) -> None:
        if self.updated:
            raise RuntimeError(
                "detach() between backward, which has updated parameters (overlap=True), and "
                "step(): call step() first (also when backward has raised)"
            )

    def leave(self, optimizer: FusedOptimizer) -> None:
        super().leave(optimizer)
        self._recompute.stop()


def _check_unedited(
    optimizer: FusedOptimizer, updated: set[torch.Tensor], idle: set[torch.Tensor]
) -> None:
    """Backward has taken groups and state as they were."""
    group_of = optimizer._number_groups()
    gone = updated - group_of.keys()
    slices = [optimizer._state_keys(group) for group in optimizer.param_groups]
    without = updated - idle - optimizer.state.keys() - gone
    cleared = [p for p in without if optimizer._missing(p, slices[group_of[p]])]
    if gone or cleared:
        shape = tuple(next(iter(gone or cleared)).shape)
        raise RuntimeError(
            f"overlap=True: a parameter of shape {shape} was taken out of param_groups, or its "
            "state was cleared, between backward and step(), but backward has updated it "
            "already. Do that after step(), or use overlap=False"
        )


def _hyperparameters(optimizer: FusedOptimizer, number: int) -> dict[str, Any]:
    """What the step reads of a group. Of tensors which it is and its version: comparing values
    would wait for a GPU."""
    return {
        key: f"tensor {id(value):#x} version {value._version}"
        if isinstance(value, torch.Tensor)
        else value
        for key, value in optimizer._hyper(optimizer.param_groups[number]).items()
    }
