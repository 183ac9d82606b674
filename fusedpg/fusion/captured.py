"""What a traced function reads besides its arguments.

Numbers, flags and functions become part of the trace, so that they must be part of what it is found
by. What could change unnoticed is refused.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.trace import is_users, line_of

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SAFE = (type, types.BuiltinFunctionType, types.MethodDescriptorType, enum.Enum)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_NOTHING = object()

Path = tuple[str, ...]
# Of what a function's code names: the paths that it reads, and all names.
_known: weakref.WeakKeyDictionary[types.CodeType, tuple[tuple[Path, ...], tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


class Reads:
    """What a function has read. Where it equals another, both are traced alike."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: tuple[Hashable, ...]) -> None:
        self._items = items
        self._hash = hash(items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Reads) and self._items == other._items)


class Captured:
    """Reads for a function what it reads; quick where that is what it was."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._last: tuple[list[_Lookup], Reads] | None = None

    def __call__(self) -> Reads:
        """The values, with their names.

        Raises:
            IllegalProgram: when the function reads an object whose contents may change.
        """
        if self._last is not None:
            lookups, reads = self._last
            if all(get(name, _NOTHING) is value for get, name, value in lookups):
                return reads
        reader = _Reader()
        reader.function("", self._function, strict=True)
        reads = Reads(tuple(reader.items))
        self._last = (reader.lookups, reads) if reader.kept else None
        return reads


_Lookup = tuple[Callable[[str, Any], Any], str, Any]


class _Reader:
    def __init__(self) -> None:
        self.items: list[Hashable] = []
        self.lookups: list[_Lookup] = []
        self.kept = True  # whether what was read may be held
        self._seen: set[Any] = set()
        self._names: tuple[str, ...] = ()
        self._of: types.FunctionType | None = None

    def _look(self, get: Callable[[str, Any], Any], name: str) -> Any:
        value = get(name, _NOTHING)
        self.lookups.append((get, name, value))
        return value

    def function(self, title: str, function: types.FunctionType, strict: bool) -> None:
        """`strict`: what it reads is refused where that may change unnoticed."""
        if function in self._seen:
            return
        self._seen.add(function)
        own: Any = functools.partial(getattr, function)
        code = self._look(own, "__code__")
        self.items.append((title, code))
        paths, names = _paths_of(code)
        before = self._names, self._of
        self._names, self._of = names, function
        if title:  # a call of the program itself has been given these
            for number, value in enumerate(self._look(own, "__defaults__") or ()):
                self._value(f"default {number} of {title}", value, strict)
            more = self._look(own, "__kwdefaults__") or {}
            for name in more:
                value = self._look(more.get, name)
                self._value(f"default {name} of {title}", value, strict)
        cells = dict(zip(code.co_freevars, function.__closure__ or ()))
        for path in paths:
            cell = cells.get(path[0])
            get = function.__globals__.get if cell is None else _content(cell)
            value = self._look(get, path[0])
            if value is not _NOTHING:  # a built-in function, or a name that is not bound yet
                self._follow(path, value, strict)
        self._names, self._of = before

    def _follow(self, path: Path, value: Any, strict: bool) -> None:
        """Through modules and classes, whose contents may change, to what is read."""
        title, own = path[0], True
        for name in path[1:]:
            if not isinstance(value, (types.ModuleType, type)):
                break
            own = _is_own(value)
            value = self._attribute(value, name)
            if value is _NOTHING:  # made when it is asked for
                return
            title += f".{name}"
        if own:
            self._value(title, value, strict)
        else:
            self._foreign(title, value)

    def _attribute(self, space: Any, name: str) -> Any:
        if isinstance(space, enum.EnumMeta) and name in space.__members__:
            return space.__members__[name]
        for one in space.__mro__ if isinstance(space, type) else (space,):
            value = self._look(vars(one).get, name)
            if value is not _NOTHING:
                return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        return _NOTHING

    def _value(self, title: str, value: Any, strict: bool) -> None:
        if isinstance(value, types.FunctionType) and is_users(value.__code__.co_filename):
            self.function(title, value, strict)
        elif isinstance(value, types.ModuleType) or (isinstance(value, type) and _is_own(value)):
            self._inside(title, value)
        elif not self._foreign(title, value) and strict:
            assert self._of is not None
            raise IllegalProgram(
                f"{line_of(self._of)}: `{title}` is a {type(value).__name__} from outside of "
                f"`{self._of.__name__}`: what is read from it would be read once. Pass numbers and "
                "tensors as arguments"
            )

    def _foreign(self, title: str, value: Any) -> bool:
        """What needs no look inside of it; whether it is such."""
        if _plain(value):
            self.items.append((title, type(value), repr(value)))  # 0.0 equals -0.0, and 1 True
        elif isinstance(value, torch.Tensor):  # the trace refuses it, and knows where it is used
            self.kept = False
        elif isinstance(value, dist.ProcessGroup):
            self.items.append((title, value.group_name))
            self.kept = False
        elif isinstance(value, DeviceMesh):  # which stays as it is
            self.items.append((title, value))
        elif isinstance(value, (types.FunctionType, *_SAFE)) or (
            callable(value) and _of_torch(value)
        ):
            name = getattr(value, "__qualname__", None)
            # By its name, which stays where a tracer wraps it for a while.
            known = (getattr(value, "__module__", None), name) if name else value
            self.items.append((title, known))
        else:
            return False
        return True

    def _inside(self, title: str, space: Any) -> None:
        """A module or class that is held: what of it may be read by the names in the code."""
        if space in self._seen:
            return
        self._seen.add(space)
        own = _is_own(space)
        for name in self._names:
            value = self._attribute(space, name)
            if own and value is not _NOTHING:
                self._value(f"{title}.{name}", value, strict=False)
            elif _plain(value):
                self._foreign(f"{title}.{name}", value)


def _content(cell: types.CellType) -> Callable[[str, Any], Any]:
    def get(name: str, default: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not bound yet
            return default

    return get


def _is_own(space: Any) -> bool:
    """Whether a module or class is the user's, and not installed: its contents may change."""
    if isinstance(space, type):
        space = sys.modules.get(space.__module__)
    file = getattr(space, "__file__", None)
    if file is None:
        return getattr(space, "__name__", "") not in sys.builtin_module_names
    return is_users(file) and not file.startswith(_INSTALLED)


def _of_torch(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").split(".")[0] in ("torch", "fusedpg")


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's, and those of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _paths_of(code: types.CodeType) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """What a code reads from outside, with the attributes that it takes at once; and all names."""
    known = _known.get(code)
    if known is None:
        found: dict[Path, None] = dict.fromkeys((name,) for name in code.co_freevars)
        names: set[str] = set()
        for part in _codes(code):
            names.update(part.co_names)
            path: Path = ()
            for step in dis.get_instructions(part):
                if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
                    path += (step.argval,)
                elif step.opname != "EXTENDED_ARG":
                    found |= {path: None} if path else {}
                    begins = step.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (
                        step.opname == "LOAD_DEREF" and step.argval in code.co_freevars
                    )
                    path = (step.argval,) if begins else ()
        known = _known[code] = tuple(found), tuple(sorted(names))
    return known


__all__ = ["Captured", "Reads"]
