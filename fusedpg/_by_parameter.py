"""Tensors that stay from step to step, such as what was not sent of a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class _Flat(NamedTuple):
    members: tuple[weakref.ref[torch.Tensor], ...]
    tensor: torch.Tensor

    def of(self, parameters: Sequence[torch.Tensor]) -> bool:
        return len(parameters) == len(self.members) and all(
            known() is parameter for known, parameter in zip(self.members, parameters)
        )


class ByParameter:
    """Zeros at first, by name; one flat tensor for all parameters that are asked for together.

    DDP rebuilds its buckets, and gradients may be grouped anew at any time: what is kept of a
    parameter goes with it. It ends with the parameter.
    """

    def __init__(self) -> None:
        self._views: dict[str, WeakTensorKeyDictionary] = {}
        self._flats: dict[str, list[_Flat]] = {}

    def flat(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        moved: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """What is kept of these parameters, one after the other.

        ``moved`` is called with a tensor that has been laid out anew and had contents before.
        """
        flats = self._flats.setdefault(name, [])
        for flat in flats:
            if flat.of(parameters) and flat.tensor.dtype == dtype:
                return flat.tensor
        views = self._views.setdefault(name, WeakTensorKeyDictionary())
        total = sum(parameter.numel() for parameter in parameters)
        tensor = torch.zeros(total, dtype=dtype, device=device)
        begin, found = 0, False
        for parameter in parameters:
            view = tensor[begin : begin + parameter.numel()]
            begin += parameter.numel()
            old = views.get(parameter)
            if old is not None:
                view.copy_(old)
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
        if found and moved is not None:
            moved(tensor)
        flats.append(_Flat(tuple(map(weakref.ref, parameters)), tensor))
        return tensor

    def names(self) -> list[str]:
        return sorted(self._views)

    def get(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        views = self._views.get(name)
        return None if views is None else views.get(parameter)

    def set(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Takes over what a checkpoint kept of a parameter."""
        old = self.get(name, parameter)
        if old is not None:
            old.copy_(value)
        else:
            views = self._views.setdefault(name, WeakTensorKeyDictionary())
            views[parameter] = value.detach().clone().view(-1)
