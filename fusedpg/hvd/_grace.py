"""Compressed gradients: by ``fusedpg.compress``, or by objects of GRACE's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedpg.hvd._basics import ProcessSet


def is_communicator(thing: object) -> bool:
    """Whether it is a communicator of GRACE's, of either of its variants."""
    return hasattr(thing, "send_step") or hasattr(thing, "send_receive")


class Grace:
    """Sends gradients one by one, or, with a state of ours, all of them when the last is there.

    Args:
        grace: a state, parameters of one, or a communicator of GRACE's: what has ``send_step`` and
            ``receive_step``, or, in its variants for ``torch.distributed``, ``step``.
        names: of the parameters.
        params: those that have gradients.
    """

    def __init__(
        self,
        grace: Any,
        names: dict[Tensor, str],
        params: Sequence[Tensor],
        process_set: ProcessSet,
    ) -> None:
        self._names, self._params = names, params
        self._steps: Any = None
        self._state: Any = None
        self._result = None
        if is_communicator(grace):
            self._steps = grace
            return
        from fusedpg import compress

        if isinstance(grace, Mapping):
            if process_set.process_set_id != 0:
                raise ValueError("hvd: give fusedpg.compress.from_params(..., group=) a group")
            grace = compress.from_params(grace, named_parameters=[(n, p) for p, n in names.items()])
        if not isinstance(grace, compress.State):
            raise TypeError(
                "hvd: grace= takes a fusedpg.compress.State, parameters of one, or a communicator "
                "of GRACE's (an object with send_step and receive_step, or with send_receive and "
                f"step), got {type(grace).__name__}"
            )
        self._state = grace

    def send(self, grad: Tensor, param: Tensor) -> Callable[[], None]:
        """Begins with one gradient; the result is a function that waits for it."""
        if grad.is_sparse:
            raise ValueError("hvd: grace= compresses dense gradients only")
        if self._steps is None:
            return self._all
        if not hasattr(self._steps, "send_step"):

            def step() -> None:  # in the order in which gradients are waited for, alike everywhere
                with torch.no_grad():
                    grad.copy_(self._steps.step(grad, self._names[param]).view_as(grad))

            return step
        handles, ctx = self._steps.send_step(grad, self._names[param])

        def wait() -> None:
            with torch.no_grad():
                grad.copy_(self._steps.receive_step(handles, ctx).view_as(grad))

        return wait

    def _all(self) -> None:
        """All gradients, once a step: the first that is waited for brings the others."""
        waited = self._waited = getattr(self, "_waited", 0) + 1
        if waited == 1:
            with torch.no_grad():
                self._exchange()
        if waited == len(self._params):
            self._waited = 0

    def _exchange(self) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for param in reversed(self._params):
            by_type.setdefault(param.dtype, []).append(param)
        buckets = []
        for index, params in enumerate(by_type.values()):
            bucket = _Bucket(index, params, index + 1 == len(by_type))
            buckets.append((bucket, self._state.take(bucket)))
        for bucket, future in buckets:
            bucket.give_back(future.wait())


class _Bucket:
    """Gradients of an optimizer, with the methods of DDP's bucket that a state calls."""

    def __init__(self, index: int, params: list[Tensor], is_last: bool) -> None:
        self._index, self._params, self._last = index, params, is_last
        self._buffer = params[0].new_empty(sum(p.numel() for p in params))
        for param, view in self._views(self._buffer):
            assert param.grad is not None
            view.copy_(param.grad)

    def _views(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        found, begin = [], 0
        for param in self._params:
            found.append((param, buffer.as_strided(param.size(), param.stride(), begin)))
            begin += param.numel()
        return found

    def give_back(self, result: Tensor) -> None:
        for param, view in self._views(result):
            assert param.grad is not None
            param.grad.copy_(view)

    def buffer(self) -> Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[Tensor]:
        return self._params

    def gradients(self) -> list[Tensor]:
        return [view for _, view in self._views(self._buffer)]
