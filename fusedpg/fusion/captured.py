"""What a traced function reads besides its arguments.

Numbers and flags become part of the trace, so that they must be part of what it is found by. What
could change unnoticed is refused.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.trace import is_users, line_of

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
# Tensors are refused by the trace, which knows where they are used.
_SAFE = (
    type,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    dist.ProcessGroup,
    torch.Tensor,
)


# The names that a function's code reads, sorted, by function.
_known: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


def captured(function: types.FunctionType) -> tuple[tuple[Any, ...], ...]:
    """The values, with their names.

    Raises:
        IllegalProgram: when the function reads an object whose contents may change.
    """
    return tuple(_captured(function, set()))


def _captured(function: types.FunctionType, seen: set[Any]) -> Iterator[tuple[Any, ...]]:
    if function in seen:
        return
    seen.add(function)
    names = _names_of(function)
    for name, value in _read(function, names):
        if _plain(value):
            yield name, type(value), value
        elif isinstance(value, types.ModuleType):
            found = ((key, getattr(value, key)) for key in names if key in vars(value))
            yield from ((name, key, type(item), item) for key, item in found if _plain(item))
        elif isinstance(value, types.FunctionType):
            if is_users(value.__code__.co_filename):
                yield from _captured(value, seen)
        elif not (isinstance(value, _SAFE) or (callable(value) and _of_torch(value))):
            raise IllegalProgram(
                f"{line_of(function)}: `{name}` is a {type(value).__name__} from outside of "
                f"`{function.__name__}`: what is read from it would be read once. Pass numbers and "
                "tensors as arguments"
            )


def _of_torch(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").split(".")[0] in ("torch", "fusedpg")


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _names(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that a function and those inside of it name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _names_of(function: types.FunctionType) -> tuple[str, ...]:
    known = _known.get(function)
    if known is None or known[0] is not function.__code__:
        names = tuple(sorted(set(_names(function.__code__))))
        known = _known[function] = function.__code__, names
    return known[1]


def _read(function: types.FunctionType, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
