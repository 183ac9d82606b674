"""Lists of tensors as one argument or one target: a flat tensor of their elements in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fusedpg.fusion.places import has_memory, overlap, refuse, span


def flat(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors as one: where they lie one behind the other without a copy.

    Raises:
        TypeError: for what is no list of ordinary tensors of one type.
    """
    _check(name, tensors, arriving=True)
    whole = None
    # A view of the memory would have no derivatives.
    if not torch.compiler.is_compiling() and not _differs(tensors) and not _has_tangent(tensors):
        whole = _adjacent(tensors)
    return torch.cat([t.reshape(-1) for t in tensors]) if whole is None else whole


def _differs(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _check(name: str, tensors: Sequence[torch.Tensor], *, arriving: bool = False) -> None:
    """`arriving`: they may be results of collectives that are under way."""

    def fail(reason: str) -> NoReturn:
        raise TypeError(f"`{name}` is a list of tensors, which are one long tensor: {reason}")

    if not tensors:
        fail("an empty one has no type")
    for number, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            fail(f"element {number} is a {type(t).__name__}")
        waits = arriving and isinstance(t, AsyncCollectiveTensor)
        if not torch.compiler.is_compiling() and not waits and not has_memory(t):
            refuse(f"{name}[{number}]", t)
        if t.dtype != tensors[0].dtype or t.device != tensors[0].device:
            fail(
                f"element {number} is {t.dtype} on {t.device}, and the first one "
                f"{tensors[0].dtype} on {tensors[0].device}"
            )


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of all of them, if they lie one behind the other in one storage."""
    first = tensors[0]
    storage, at = None, 0
    for t in tensors:
        if isinstance(t, AsyncCollectiveTensor) or t.is_neg() or not t.is_contiguous():
            return None
        own = t.untyped_storage()._cdata
        if storage is None:
            storage, at = own, int(t.storage_offset())
        elif own != storage or t.storage_offset() != at:
            return None
        at += t.numel()
    with torch.no_grad():
        return first.as_strided((at - first.storage_offset(),), (1,), first.storage_offset())


class Targets:
    """The targets of a call, of which some are lists."""

    def __init__(
        self, targets: Sequence[torch.Tensor | Sequence[torch.Tensor]], given: Sequence[Any]
    ) -> None:
        """
        Args:
            given: the arguments that are lists, and what they have become, in pairs.
        """
        self._targets = targets
        self.flat: list[torch.Tensor] = []
        with torch.no_grad():
            for number, target in enumerate(targets):
                if isinstance(target, torch.Tensor):
                    self.flat.append(target)
                    continue
                name = f"target {number}"
                _check(name, target)
                # Written in place where the argument is the same list.
                same = (whole for tensors, whole in given if _same(tensors, target))
                whole = next(same, None)
                whole = _adjacent(target) if whole is None else whole
                self.flat.append(self._new(target) if whole is None else whole.detach())
        listed = [[t] if isinstance(t, torch.Tensor) else t for t in targets]
        _check_written([t for tensors in listed for t in tensors])

    @staticmethod
    def _new(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0].new_empty(sum(t.numel() for t in tensors))

    def write(self) -> Any:
        """Writes the results into the lists, where they are not there already."""
        with torch.no_grad():
            for target, whole in zip(self._targets, self.flat):
                if isinstance(target, torch.Tensor):
                    continue
                parts = whole.split([t.numel() for t in target])
                for t, part in zip(target, parts):
                    if t.data_ptr() != part.data_ptr() or not t.is_contiguous():
                        t.copy_(part.view(t.shape))
                    elif not t.is_inference():  # autograd sees that it has changed
                        torch.autograd.graph.increment_version(t)
        return tuple(self._targets)


def _same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(tensors) == len(others) and all(x is y for x, y in zip(tensors, others))


def _check_written(tensors: Sequence[torch.Tensor]) -> None:
    """Targets have memory of their own, and no gradient is lost."""
    if _differs(tensors):
        raise RuntimeError("a target requires grad: call it under torch.no_grad()")
    behind: list[torch.Tensor] = []
    for t in sorted(tensors, key=span):
        behind = [x for x in behind if span(x)[1] > span(t)[0]]
        if any(overlap(x, t) for x in behind):
            raise ValueError(
                "two targets lie in the same memory: one result would write over the other"
            )
        behind.append(t)
