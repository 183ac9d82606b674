"""Compressed gradients: by ``fusedpg.compress``, or by objects of GRACE's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedpg.hvd._basics import ProcessSet

if TYPE_CHECKING:
    from fusedpg.compress import State


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
        grace: object,
        names: dict[Tensor, str],
        params: Sequence[Tensor],
        process_set: ProcessSet,
    ) -> None:
        self._names, self._params = names, params
        self._steps: Any = None
        self._state: State | None = None
        self._waited = 0  # gradients of this step
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
        if self._state is not None:
            return partial(self._all, self._state)
        # A class with `step` takes gradients in the order in which they are waited for, which all
        # ranks have in common.
        name, steps = self._names[param], self._steps
        sent = steps.send_step(grad, name) if hasattr(steps, "send_step") else None

        def wait() -> None:
            with torch.no_grad():
                result = steps.step(grad, name) if sent is None else steps.receive_step(*sent)
                grad.copy_(result.view_as(grad))

        return wait

    def _all(self, state: State) -> None:
        """All gradients, once a step: the first that is waited for brings the others."""
        self._waited += 1
        if self._waited == 1:
            with torch.no_grad():
                self._exchange(state)
        if self._waited == len(self._params):
            self._waited = 0

    def _exchange(self, state: State) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for param in reversed(self._params):
            by_type.setdefault(param.dtype, []).append(param)
        buckets = [
            _Bucket(index, params, index + 1 == len(by_type))
            for index, params in enumerate(by_type.values())
        ]
        for bucket, future in [(bucket, state.take(bucket)) for bucket in buckets]:
            for grad, result in bucket.views(future.wait()):
                grad.copy_(result)


class _Bucket:
    """Gradients of an optimizer, with the methods of DDP's bucket that a state calls."""

    def __init__(self, index: int, params: list[Tensor], is_last: bool) -> None:
        self._index, self._params, self._is_last = index, params, is_last
        self._buffer = params[0].new_empty(sum(p.numel() for p in params))
        for grad, view in self.views(self._buffer):
            view.copy_(grad)

    def views(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each gradient, and its elements in a buffer."""
        begin = 0
        for param in self._params:
            assert param.grad is not None
            yield param.grad, buffer.as_strided(param.size(), param.stride(), begin)
            begin += param.numel()

    def buffer(self) -> Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[Tensor]:
        return self._params
