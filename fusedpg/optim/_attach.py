"""Between an optimizer and its DistributedDataParallel: getting on, and off again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedpg.functional import _backend
from fusedpg.optim._bridge import Bridge
from fusedpg.optim._gradients import ShardedGrad, SpentGrad
from fusedpg.optim._parameters import laid_out, refuse_sharded, watch_gradient
from fusedpg.optim._recompute import RecomputeGuard
from fusedpg.optim._state import ShardedState
from fusedpg.optim._torch import in_backward


def check_ddp(ddp: Any) -> None:
    """Raises TypeError, saying what to write, unless ``ddp`` is a DistributedDataParallel."""
    if isinstance(ddp, DistributedDataParallel):
        return
    found = f"ddp= takes a DistributedDataParallel, got {type(ddp).__name__}"
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise TypeError(
            f"{found}: with model = torch.compile(DistributedDataParallel(...)) pass the inner one "
            "(ddp=model._orig_mod)"
        )
    if isinstance(ddp, (list, tuple)):
        raise TypeError(
            f"{found}: make one optimizer for each, with its parameters, or put the modules into "
            "one nn.ModuleDict and that into one DistributedDataParallel"
        )
    if any("FSDP" in base.__name__ or "FullySharded" in base.__name__ for base in type(ddp).mro()):
        raise TypeError(
            f"{found}: FSDP has sharded its parameters already. Wrap the model by "
            "ddp = DistributedDataParallel(model) instead of fully_shard(model), or keep FSDP and "
            "torch's optimizer"
        )
    if isinstance(ddp, nn.Module):
        raise TypeError(
            f"{found}: write ddp = DistributedDataParallel(model), call ddp(x) in training and "
            "pass ddp=ddp; or leave ddp= out to train the bare module without DDP"
        )
    raise TypeError(found)


class Attachable(ShardedState):
    """An optimizer that can take the gradients of a DistributedDataParallel module."""

    _backend: Any
    _recompute: RecomputeGuard
    _stepped: bool
    _updated: set[torch.Tensor]
    _idle: set[torch.Tensor]
    _applied: dict[int, dict[str, Any]]
    _watches: dict[torch.Tensor, Any]  # hooks of manual mode
    _detached = False
    _looked = False  # in manual mode, at what became of the parameters until the first step

    def _accumulated(self, param: torch.Tensor) -> None:
        """Manual mode: autograd's news of a gradient."""
        raise NotImplementedError

    def _watch(self, param: torch.Tensor) -> None:
        """Manual mode: has ``p.grad`` know that it is one rank's part of a gradient."""
        if self._bridge is None:
            self._watches[param] = watch_gradient(param, self, type(self)._accumulated)

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Takes the gradients of a DistributedDataParallel module from now on.

        For libraries that wrap the model after the optimizer was made. The module's parameters
        must be this optimizer's, and its process group the same. Several optimizers may be
        attached to one module, each with parameters of its own.

        Raises:
            RuntimeError: when DDP already has a communication hook, or the optimizer a module.
            ValueError: for another process group or foreign parameters.
            TypeError: for anything but a DistributedDataParallel.
        """
        check_ddp(ddp)
        if self._bridge is not None:
            if self._bridge.serves(ddp):
                return
            raise RuntimeError(
                "the optimizer is attached to another DistributedDataParallel: make one optimizer "
                "for each, with its parameters, or detach() this one first"
            )
        if _backend(ddp.process_group) is not self._backend:
            raise ValueError(
                "the module's process group is not the optimizer's: pass "
                "process_group=ddp.process_group"
            )
        params = [p for group in self.param_groups for p in group["params"]]
        bridge = Bridge.of(ddp, self, params)
        self._bridge = bridge
        self._unwatch()
        self._detached = False
        # DDP's constructor has broadcast them.
        self._parameters.accept(params)

    def detach(self) -> None:
        """Takes the optimizer off its module, and its hooks off all parameters.

        Call it on all ranks, after ``step()`` or ``zero_grad()``. With its last optimizer the
        module is a plain DistributedDataParallel again, which may be trained with an optimizer of
        torch. Parameters keep their values, and shared ones become each rank's own; the
        optimizer keeps its state, which can be saved, and can be attached again, also to another
        module with the same parameters.

        Raises:
            RuntimeError: inside backward, or with gradients that no ``step()`` has applied.
        """
        if in_backward():
            raise RuntimeError("detach() inside backward: call it after step()")
        self._wait()
        attached = self._bridge is not None
        if attached and self._updated:
            raise RuntimeError(
                "detach() between backward, which has updated parameters (overlap=True), and "
                "step(): call step() first"
            )
        for name, param in self._named_parameters():
            if self._is_pending(param.grad, attached):
                raise RuntimeError(
                    f"detach(): the reduced gradient of parameter {name} was not applied: call "
                    "step() or zero_grad() first"
                )
        if self._bridge is not None:
            self._bridge.remove(self)
        for _, param in self._named_parameters():
            grad: Any = param.grad
            if isinstance(grad, (ShardedGrad, SpentGrad)):
                # In manual mode it is this rank's.
                own = grad.unreduced() if isinstance(grad, ShardedGrad) and not attached else None
                param.grad = None if own is None else laid_out(own, param)
        self._recompute.stop()
        self._bridge = None
        self._unwatch()
        self._parameters.own(p for _, p in self._named_parameters())
        self._detached = True

    def _is_pending(self, grad: Any, attached: bool) -> bool:
        if not isinstance(grad, ShardedGrad):
            return False
        return (attached or grad.holds_reduced()) and (
            not self._stepped or grad.unreduced() is not None
        )

    def _unwatch(self) -> None:
        for handle in self._watches.values():
            handle.remove()
        self._watches.clear()

    def _check_attached(self) -> None:
        if self._detached:
            raise RuntimeError(
                "the optimizer was detached: attach(ddp) it again, or make a new one"
            )
        if not self._looked:
            for name, param in self._named_parameters():
                refuse_sharded(param, f"parameter {name}")
            self._looked = True
