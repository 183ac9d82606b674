"""Counts the memory that tensors take, on devices whose allocator does not say."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MB = 1 << 20


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations create while it is entered.

    Earlier tensors do not count. Every operation takes microseconds longer, so times that
    are measured at the same time mean nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # A view, or what was changed in place, has the storage of an argument.
        given = {
            tensor.untyped_storage()._cdata
            for tensor in tree_iter((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._counted:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed() -> None:
            self._counted.discard(key)
            self.now -= size

        # The storage's object dies with it, whether Python or C++ holds it.
        weakref.finalize(storage, freed).atexit = False
