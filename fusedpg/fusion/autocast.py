"""What autocast does in a call of one of torch's functions, found out by calling it.

torch has lists of functions for each device, and they differ between versions. So a function is
called with and without autocast, on tensors without contents, and the operations that torch runs
are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fusedpg.fusion.errors import FusionError

_CAST = torch.ops.aten._to_copy.default
_ASKS = "prim"  # namespace of operations that only ask for a tensor's properties


class Example:
    """Stands for a tensor of a shape and type among a function's arguments."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        self.shape, self.dtype = shape, dtype


class _Log(TorchDispatchMode):
    """The operations that torch runs, and the types that arguments are cast to before them."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._given = {id(tensor): number for number, tensor in enumerate(given)}
        self.casts: dict[int, torch.dtype] = {}
        self.operations: list[tuple[object, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is _CAST:
            number = self._given.get(id(args[0]))
            if number is not None:
                self.casts.setdefault(number, result.dtype)
        elif function.namespace != _ASKS:
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            self.operations.append((function, *(x.dtype for x in tensors)))
        return result


def casts(*call: Any) -> list[torch.dtype | None]:
    """The type that autocast casts each Example among the arguments to; None: it stays.

    Args:
        call: function, args, kwargs, the type of device, and the dtype of autocast.

    Raises:
        FusionError: where autocast does anything else than to cast arguments.
    """
    # In a thread of its own: in this one operations of torch may not be what they usually are, as
    # below autograd, where torch.compile asks for shapes.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_casts, *call).result()


def _casts(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    device: str,
    dtype: torch.dtype,
) -> list[torch.dtype | None]:
    examples = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Example)]

    def run(enabled: bool, types: Sequence[torch.dtype | None]) -> _Log:
        with FakeTensorMode(), torch.autocast(device, dtype=dtype, enabled=enabled):
            given = [
                torch.empty(x.shape, dtype=to or x.dtype, device=device)
                for x, to in zip(examples, types)
            ]
            left = iter(given)
            mine, more = tree_map(lambda x: next(left) if type(x) is Example else x, (args, kwargs))
            with torch.no_grad(), _Log(given) as log:
                function(*mine, **more)
        return log

    own: list[torch.dtype | None] = [x.dtype for x in examples]
    try:
        plain = run(False, own)
    except (RuntimeError, TypeError, ValueError, IndexError):
        plain = None  # it has no types of its own that fit, like a product of two types
    cast = run(True, own)
    if plain is not None and plain.operations == cast.operations and plain.casts == cast.casts:
        return [None] * len(examples)
    found = [cast.casts.get(number) for number in range(len(examples))]
    if run(False, [to or x for to, x in zip(found, own)]).operations != cast.operations:
        raise FusionError(
            f"autocast to {dtype} changes what is computed inside of it: write it in a block of "
            f'`with torch.autocast("{device}", enabled=False)`, or cast what it is given'
        )
    return found
