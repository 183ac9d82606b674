"""``overlap=True``: the step is made during backward."""

from __future__ import annotations

from typing import Any

import torch

from fusedpg._registration import load_extension
from fusedpg.optim._attach import Attachable
from fusedpg.optim._bridge import Gradient, unsynchronised
from fusedpg.optim._gradients import SpentGrad
from fusedpg.optim._recompute import RecomputeGuard
from fusedpg.optim._state import Started


class UpdatesInBackward(Attachable):
    """An optimizer that can do so: parameters have changed when backward returns, and ``step()``
    waits for what is under way, and finds what cannot have worked."""

    _shadow: bool

    def _init_overlap(self) -> None:
        self._spent: dict[torch.Tensor, SpentGrad] = {}
        self._updated: set[torch.Tensor] = set()  # by the hook, since the last step
        self._idle: set[torch.Tensor] = set()  # of these, those that this rank did not use
        self._applied: dict[int, dict[str, Any]] = {}  # hyperparameters of that, by group
        self._half_updated = False  # the backward that does it has not ended
        self._recompute = RecomputeGuard(self._updated)

    def _fused_step(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        *,
        used: torch.Tensor | None = None,
        **options: Any,
    ) -> list[Started]:
        """Starts the step of some parameters."""
        raise NotImplementedError

    def _update_in_backward(
        self, gradients: list[Gradient], used: torch.Tensor | None, shadow: bool
    ) -> None:
        params = [gradient.param for gradient in gradients]
        self._update_lists(params, [gradient.local for gradient in gradients], used, shadow)
        if used is not None:
            self._idle.update(gradient.param for gradient in gradients if not gradient.used)

    def _update_lists(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        used: torch.Tensor | None,
        shadow: bool,
    ) -> None:
        """Starts the step of some parameters."""
        if self._parameters.shared:
            self._parameters.check((f"of shape {tuple(p.shape)}", p) for p in params)
        if self._updated and not self._updated.isdisjoint(params):
            SpentGrad.refuse_accumulation()
        self._updated.update(params)
        self._half_updated = True
        self._recompute.start()
        self._number_groups()
        alone = len(self.param_groups) == 1
        numbers = {0} if alone else {self._group_of[param] for param in params}
        for number in numbers - self._applied.keys():
            self._applied[number] = self._hyperparameters(number)
        works = self._fused_step(params, grads, used=used, **self._reduction(shadow))

        def finish() -> None:
            for work in works:
                work.wait()

        self._in_flight.append(finish)
        load_extension().set_gradients(params, None)

    def _updated_in_backward(self) -> None:
        """The end of backward."""
        self._half_updated = False
        self._recompute.stop()
        for param in load_extension().place_spent(list(self._updated), self._spent):
            param.grad = self._spent[param] = SpentGrad(param, self._context)

    def _commit(self, scale: Any, found_inf: Any) -> None:
        """overlap=True: the work is under way since backward."""
        if scale is not None or found_inf is not None:
            raise RuntimeError("GradScaler needs overlap=False")
        updated, idle, applied = self._end_update()
        self._wait()
        self._check_finished()
        self._check_unedited(updated, idle)
        everything = [param for group in self.param_groups for param in group["params"]]
        quickly = not self._shadow and load_extension().all_spent(everything, updated, SpentGrad)
        for name, param in () if quickly else self._named_parameters():
            if param.grad is not None and not isinstance(param.grad, SpentGrad):
                self._check_known(param)
                raise RuntimeError(unsynchronised(name))
            if param in updated and param.grad is None and not self._shadow:
                raise RuntimeError(
                    f"overlap=True: the gradient of parameter {name} was dropped between backward, "
                    "which has updated it, and step(), or DDP still waits for others"
                )
        for number, used in applied.items():
            for key, value in self._hyperparameters(number).items():
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

    def _check_unedited(self, updated: set[torch.Tensor], idle: set[torch.Tensor]) -> None:
        """overlap=True: backward has taken groups and state as they were."""
        gone = updated - self._number_groups().keys()
        slices = [self._state_keys(group) for group in self.param_groups]
        without = updated - idle - self.state.keys() - gone
        cleared = [p for p in without if self._missing(p, slices[self._group_of[p]])]
        if gone or cleared:
            shape = tuple(next(iter(gone or cleared)).shape)
            raise RuntimeError(
                f"overlap=True: a parameter of shape {shape} was taken out of param_groups, or its "
                "state was cleared, between backward and step(), but backward has updated it "
                "already. Do that after step(), or use overlap=False"
            )

    def _end_update(self) -> tuple[set[torch.Tensor], set[torch.Tensor], dict[int, Any]]:
        """What backward has done of the step; the next one begins anew, whatever this one does."""
        self._recompute.stop()
        done = set(self._updated), set(self._idle), self._applied
        self._updated.clear()
        self._idle.clear()
        self._applied = {}
        self._half_updated = False
        return done

    def _end_before_loading(self) -> None:
        if self._updated and not self._half_updated:
            raise RuntimeError(
                "overlap=True: load_state_dict() between backward, which has updated parameters "
                "and state, and step(): call step() first. (After a step(), or a backward, that "
                "has raised, state can be loaded.)"
            )
        self._end_update()
        self._wait()

    def _hyperparameters(self, number: int) -> dict[str, Any]:
        """What the step reads of a group. Of tensors which it is and its version: comparing values
        would wait for a GPU."""
        return {
            key: f"tensor {id(value):#x} version {value._version}"
            if isinstance(value, torch.Tensor)
            else value
            for key, value in self._hyper(self.param_groups[number]).items()
        }
