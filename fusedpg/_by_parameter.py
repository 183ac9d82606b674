"""Tensors that stay from step to step, such as what was not sent of a gradient."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fusedpg._layout import is_dense

Order = tuple[int, ...] | None
"""Strides of what is not contiguous."""


def order_in_bucket(parameter: torch.Tensor, buffer: torch.Tensor) -> Order:
    """The order of a parameter's gradient in DDP's bucket: the parameter's when the bucket was
    made. That shows where the gradient is a view of the bucket, else it lies as it does now."""
    grad = parameter.grad
    if parameter.is_contiguous() and (grad is None or grad.is_contiguous()):
        return None
    like = parameter
    if grad is not None:
        home = grad.untyped_storage().data_ptr()
        like = grad if home == buffer.untyped_storage().data_ptr() else parameter
    return None if like.is_contiguous() or not is_dense(like) else like.stride()


def shape_in_memory(parameter: torch.Tensor, order: Order) -> torch.Size:
    """Dimensions from the outermost in memory to the innermost."""
    if order is None:
        return parameter.shape
    sizes = sorted(zip(order, parameter.shape, strict=True), reverse=True)
    return torch.Size(size for _, size in sizes)


@dataclasses.dataclass
class Kept:
    """A tensor that is kept for some parameters, one after the other.

    Attributes:
        pending: what is still to be done to the tensor before anybody else may see it.
    """

    members: tuple[weakref.ref[torch.Tensor], ...]
    orders: tuple[Order, ...]
    tensor: torch.Tensor
    pending: Callable[[torch.Tensor], None] | None = None

    def settle(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending(self.tensor)

    def of(self, parameters: Sequence[torch.Tensor], orders: Sequence[Order]) -> bool:
        return (
            len(parameters) == len(self.members)
            and all(map(is_, [known() for known in self.members], parameters))
            and self.orders == tuple(orders)
        )


class ByParameter:
    """Zeros at first, by name; one flat tensor for all parameters that are asked for together.

    DDP rebuilds its buckets, and gradients may be grouped anew at any time: what is kept of a
    parameter goes with it, element by element, whatever the order in memory (channels_last). It
    ends with the parameter.
    """

    def __init__(self) -> None:
        self._views: dict[str, WeakTensorKeyDictionary] = {}
        self._flats: dict[str, list[Kept]] = {}

    def flat(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        orders: Sequence[Order],
        dtype: torch.dtype,
        device: torch.device,
        moved: Callable[[torch.Tensor], None] | None = None,
        always: bool = False,
    ) -> torch.Tensor:
        """The tensor that is kept for these parameters, in the order of their buckets.
        Arguments as of ``unsettled``."""
        found = self.unsettled(name, parameters, orders, dtype, device, moved, always)
        found.settle()
        return found.tensor

    def unsettled(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        orders: Sequence[Order],
        dtype: torch.dtype,
        device: torch.device,
        moved: Callable[[torch.Tensor], None] | None = None,
        always: bool = False,
    ) -> Kept:
        """The same for whoever knows what may be pending, and may leave something pending.

        ``moved`` is called with a tensor that has been laid out anew and had contents before, or
        ``always``, as others may have some.
        """
        flats = self._flats.setdefault(name, [])
        for flat in flats:
            kept = flat.tensor
            if flat.of(parameters, orders) and (kept.dtype, kept.device) == (dtype, device):
                return flat
        self._settle(name)
        views = self._views.setdefault(name, WeakTensorKeyDictionary())
        total = sum(parameter.numel() for parameter in parameters)
        tensor = torch.zeros(total, dtype=dtype, device=device)
        begin, found = 0, False
        for parameter, order in zip(parameters, orders):
            view = tensor[begin : begin + parameter.numel()].view(parameter.shape)
            if order is not None:
                view = view.as_strided(parameter.shape, order)
            begin += parameter.numel()
            old = views.get(parameter)
            if old is not None:
                view.copy_(old.reshape(parameter.shape))
                found = True
            views[parameter] = view
        # A parameter is in one flat tensor at a time.
        mine = set(map(id, parameters))
        flats[:] = [
            other
            for other in flats
            if all((known := member()) is not None and id(known) not in mine
                   for member in other.members)
        ]  # fmt: skip
        if moved is not None and (found or always):
            moved(tensor)
        made = Kept(tuple(map(weakref.ref, parameters)), tuple(orders), tensor)
        flats.append(made)
        return made

    def _settle(self, name: str) -> None:
        for flat in self._flats.get(name, ()):
            flat.settle()

    def names(self) -> list[str]:
        return sorted(self._views)

    def get(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """Of the parameter's shape."""
        self._settle(name)
        views = self._views.get(name)
        return None if views is None else views.get(parameter)

    def set(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Takes over what a checkpoint kept of a parameter."""
        value = value.detach().reshape(parameter.shape)
        old = self.get(name, parameter)
        if old is not None:
            old.copy_(value)
        else:
            views = self._views.setdefault(name, WeakTensorKeyDictionary())
            views[parameter] = value.clone()
