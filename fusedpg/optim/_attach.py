"""Between an optimizer and its DistributedDataParallel: getting on, and off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedpg._registration import load_extension
from fusedpg.functional import _backend
from fusedpg.optim._bridge import Bridge, Bucket, Gradient, unfinished, unsynchronised
from fusedpg.optim._gradients import Collected, GradContext, Lists, ShardedGrad, SpentGrad
from fusedpg.optim._parameters import laid_out, refuse_sharded, watch_gradient
from fusedpg.optim._recompute import RecomputeGuard
from fusedpg.optim._state import ShardedState, Started
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
    overlap: bool
    _recompute: RecomputeGuard
    _stepped: bool
    _updated: set[torch.Tensor]
    _idle: set[torch.Tensor]
    _applied: dict[int, dict[str, Any]]
    _watches: dict[torch.Tensor, Any]  # hooks of manual mode
    _context: GradContext
    _lists: Lists
    _in_flight: list[Callable[[], None]]
    _looked = False  # in manual mode, at what became of the parameters until the first step

    def _accumulated(self, param: torch.Tensor) -> None:
        """Manual mode: autograd's news of a gradient."""
        raise NotImplementedError

    def _watch(self, param: torch.Tensor) -> None:
        """Manual mode: has ``p.grad`` know that it is one rank's part of a gradient."""
        if self._is_manual():
            cls = type(self)
            self._watches[param] = watch_gradient(
                param, self, cls._accumulated, cls._accumulated_again, ShardedGrad
            )

    def _accumulated_again(self) -> bool:
        """Manual mode: a gradient of ours gets another value."""
        self._context.changed()
        return self._is_manual()

    def _reduction(self, shadow: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _update_lists(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        used: torch.Tensor | None,
        shadow: bool,
    ) -> None:
        raise NotImplementedError

    def _gradients_ready(
        self, gradients: list[Gradient], used: torch.Tensor | None, shadow: bool
    ) -> None:
        """The bridge's call for one bucket."""
        raise NotImplementedError

    def _hyperparameters(self, number: int) -> dict[str, Any]:
        raise NotImplementedError

    def _fused_step(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        *,
        used: torch.Tensor | None = None,
        **options: Any,
    ) -> list[Started]:
        raise NotImplementedError

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

        Call it on all ranks, after ``step()`` or ``zero_grad()``; gradients that were applied are
        dropped. A backward whose forward came before is DDP's own. Without an optimizer the module
        is a plain DistributedDataParallel again from its next synchronised forward on, and may be
        trained with an optimizer of torch. Parameters keep their values, and shared ones become
        each rank's own; the optimizer keeps its state, which can be saved, and can be attached
        again, also to another module with the same parameters.

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
                "step(): call step() first (also when backward has raised)"
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
        self._lists.drop()
        self._unwatch()
        # Those that were taken out of param_groups, too.
        self._parameters.own(self._layouts)
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

    def _check_finished(self) -> None:
        waiting = set() if self._bridge is None else self._bridge.unfinished()
        for name, param in self._named_parameters() if waiting else ():
            if param in waiting:
                raise RuntimeError(unfinished(name))

    # --- many parameters at once -----------------------------------------------------

    def _bucket_ready(
        self, bucket: Bucket, grads: list[torch.Tensor], used: torch.Tensor | None
    ) -> None:
        """The bridge's call for a bucket in the usual case: plain gradients of this rank."""
        if self.overlap:
            self._stepped = False
            self._update_lists(bucket.params, grads, used, shadow=False)
            return
        self._stepped = False
        slices = self._lists.slices(bucket)
        if slices is None:
            self._check_layouts(bucket.params)
            pairs = zip(bucket.views, bucket.params, strict=True)
            slices = [self._owned(view, param) for view, param in pairs]
        work = self._backend.reduce_shards_(
            grads, bucket.views, used=used, async_op=True, **self._reduction(shadow=False)
        )
        extension = load_extension()
        extension.set_gradients(bucket.params, None)

        def finish() -> None:
            work.wait()
            if used is None or bool(used.all()):
                grads = self._lists.placeholders(bucket, slices, self._context)
                extension.set_gradients(bucket.params, grads)
                return
            flags = used.tolist()
            for param, local, flag in zip(bucket.params, slices, flags, strict=True):
                param.grad = ShardedGrad(param, self._context, reduced=local) if flag else None

        self._in_flight.append(finish)

    def _all_local(self) -> bool:
        """Manual mode: whether nothing that was reduced stands in ``p.grad``."""
        return self._unreduced() is not None or not any(
            isinstance(param.grad, ShardedGrad) and param.grad.holds_reduced()
            for _, param in self._named_parameters()
        )

    def _unreduced(self) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Manual mode: all parameters and their gradients, if each has one, of this rank alone."""
        params = [param for group in self.param_groups for param in group["params"]]
        grads = load_extension().unreduced_gradients(params, ShardedGrad)
        return None if grads is None else (params, grads)

    def _reduced_slices(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters with a gradient, and its slices."""
        everything = [p for group in self.param_groups for p in group["params"]]
        known = self._lists.collected(everything)
        if known is not None:
            return everything, known
        params, grads, slices = [], [], []
        for name, param in self._named_parameters():
            grad = param.grad
            if grad is None:
                continue
            if not isinstance(grad, ShardedGrad) or not grad.is_reduced():
                self._check_known(param)
                raise RuntimeError(unsynchronised(name))
            self._check_same_layout(name, param, grad)
            params.append(param)
            grads.append(grad)
            slices.append(grad.local())
        # Those of manual mode, and copies, are not to be kept alive.
        full = self._bridge is not None and len(params) == len(everything)
        full = full and not any(grad.is_copy() for grad in grads)
        self._lists.collect(Collected(everything, grads, slices) if full else None)
        return params, slices
