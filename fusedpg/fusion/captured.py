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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.trace import is_users, line_of

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SAFE = (type, types.BuiltinFunctionType, types.MethodDescriptorType, enum.Enum)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_NOTHING = object()
# Packages whose functions give the same for the same arguments. Random numbers the trace notices.
_PURE = frozenset(
    (
        *("torch", "fusedpg", "math", "cmath", "operator", "_operator", "functools", "_functools"),
        *("itertools", "builtins", "typing", "typing_extensions", "collections", "dataclasses"),
        *("enum", "contextlib", "numbers", "abc", "types", "copy", "string", "re", "warnings"),
        *("numpy", "einops", "random", "_random"),
    )
)
# Python's own functions that read what is computed, or what is outside of the process.
_COMPUTED = frozenset(
    (
        *("globals", "locals", "vars", "dir", "eval", "exec", "compile", "open", "input"),
        *("getattr", "hasattr", "setattr", "delattr", "__import__", "__builtins__"),
    )
)

Path = tuple[str, ...]
# Of what a function's code names: the paths that it reads, all names, and one that it assigns to.
_Named = tuple[tuple[Path, ...], tuple[str, ...], str]
_known: weakref.WeakKeyDictionary[types.CodeType, _Named] = weakref.WeakKeyDictionary()


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
            for get, name, value in lookups:
                if get(name, _NOTHING) is not value:
                    break
            else:
                return reads
        reader = _Reader(self._function)
        reads = Reads(tuple(reader.items))
        self._last = (reader.lookups, reads) if reader.kept else None
        return reads


_Lookup = tuple[Callable[[str, Any], Any], str, Any]


class _Reader:
    """Follows what a function names, through functions, classes and modules of the user's own."""

    def __init__(self, function: types.FunctionType) -> None:
        self.items: list[Hashable] = []
        self.lookups: list[_Lookup] = []
        self.kept = True  # whether what was read may be held
        self._seen: set[object] = set()
        self._names: dict[str, None] = {}  # of all codes
        # Modules and classes that are values: any name of any code may be read from them.
        self._spaces: dict[object, str] = {}
        self._of = function
        self._function("", function)
        looked: set[tuple[object, str]] = set()
        while waiting := [
            (space, name)
            for space in self._spaces
            for name in (*self._names, *_called_by_itself(space))
            if (space, name) not in looked
        ]:
            looked.update(waiting)
            for space, name in waiting:
                value = self._attribute(space, name)
                if value is not _NOTHING:
                    self._value(f"{self._spaces[space]}.{name}", value, _is_own(space))

    def _refuse(self, reason: str) -> NoReturn:
        raise IllegalProgram(
            f"{line_of(self._of)}: {reason}. Pass numbers and tensors as arguments"
        )

    def _look(self, get: Callable[[str, object], object], name: str) -> Any:
        value = get(name, _NOTHING)
        self.lookups.append((get, name, value))
        return value

    def _function(self, title: str, function: types.FunctionType) -> None:
        if function in self._seen:
            return
        self._seen.add(function)
        before, self._of = self._of, function
        own: Any = functools.partial(getattr, function)
        code = self._look(own, "__code__")
        self.items.append((title, code))
        paths, names, assigned = _paths_of(code)
        if assigned:
            self._refuse(
                f"`{assigned}` is assigned to, which would be done once, when it is traced"
            )
        self._names.update(dict.fromkeys(names))
        if title:  # a call of the program itself has been given these
            for number, value in enumerate(self._look(own, "__defaults__") or ()):
                self._value(f"default {number} of {title}", value)
            more = self._look(own, "__kwdefaults__") or {}
            for name in more:
                self._value(f"default {name} of {title}", self._look(more.get, name))
        cells = dict(zip(code.co_freevars, function.__closure__ or ()))
        for path in paths:
            cell = cells.get(path[0])
            get = function.__globals__.get if cell is None else _content(cell)
            value = self._look(get, path[0])
            if value is not _NOTHING:
                self._follow(path, value)
            elif path[0] in _COMPUTED:  # else a pure function of Python's, or not bound yet
                self._refuse(f"`{path[0]}` reads what could change unnoticed")
        self._of = before

    def _follow(self, path: Path, value: object) -> None:
        """Through modules and classes, whose contents may change, to what is read."""
        title, own = path[0], True
        for name in path[1:]:
            if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
                break
            if isinstance(value, types.FunctionType) and not is_users(value.__code__.co_filename):
                break
            own = _is_own(value)
            space, value = value, self._attribute(value, name)
            if value is _NOTHING:  # made when it is asked for
                if isinstance(space, types.FunctionType):
                    self._value(title, space)
                return
            title += f".{name}"
        self._value(title, value, own)

    def _attribute(self, space: Any, name: str) -> Any:
        if isinstance(space, enum.EnumMeta) and name in space.__members__:
            return space.__members__[name]
        for one in space.__mro__ if isinstance(space, type) else (space,):
            value = self._look(vars(one).get, name)
            if value is not _NOTHING:
                if isinstance(value, classmethod):  # which may read the class
                    self._spaces.setdefault(space, space.__qualname__)
                if isinstance(value, property):
                    value = value.fget
                return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        return _NOTHING

    def _value(self, title: str, value: object, own: bool = True) -> None:
        """`own`: whether it is read from a function, module or class of the user's."""
        if isinstance(value, types.FunctionType) and is_users(value.__code__.co_filename):
            if not own or _is_installed(value.__code__.co_filename):
                self._installed(title, value)
            else:
                self._function(title, value)
        elif isinstance(value, types.ModuleType) or (isinstance(value, type) and _is_own(value)):
            if _is_own(value) or _pure(value.__name__):
                self._spaces.setdefault(value, title)
            else:
                self._refuse(f"`{title}` is a module whose functions may give something else later")
        elif not self._known(title, value):
            self._refuse(
                f"`{title}` is a {type(value).__name__} from outside of "
                f"`{self._of.__name__}`: what is read from it would be read once"
            )

    def _known(self, title: str, value: object) -> bool:
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
        elif isinstance(value, torch.nn.Module):
            self._refuse(
                f"`{title}` is a module of torch.nn, {type(value).__name__}, whose settings and "
                "parameters could change unnoticed: call torch.nn.functional's function"
            )
        elif isinstance(value, (types.FunctionType, *_SAFE)) or (
            callable(value) and _of_torch(value)
        ):
            self._installed(title, value)
        else:
            return False
        return True

    def _installed(self, title: str, value: object) -> None:
        """A function or class of torch, Python or another package."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(module, str):
            module = getattr(value.__self__, "__name__", "builtins")
        if name in _COMPUTED and module == "builtins":
            self._refuse(f"`{title}` reads what could change unnoticed")
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and not _pure(module):
            self._refuse(
                f"`{title}` of {module} would be called once, when the function is traced, and may "
                "give something else later"
            )
        # By its name, which stays where a tracer wraps it for a while.
        self.items.append((title, (module, name) if name else value))


def _called_by_itself(space: object) -> tuple[str, ...]:
    """The functions of a class that Python calls, without their names in the code."""
    if not isinstance(space, type) or not _is_own(space):
        return ()
    own = (item for one in space.__mro__ if _is_own(one) for item in vars(one).items())
    return tuple(n for n, f in own if n.startswith("__") and isinstance(f, types.FunctionType))


def _content(cell: types.CellType) -> Callable[[str, object], object]:
    def get(name: str, default: object) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not bound yet
            return default

    return get


def _is_own(space: object) -> bool:
    """Whether a module, class or function is the user's, not installed: its contents may change."""
    if isinstance(space, types.FunctionType):
        return not _is_installed(space.__code__.co_filename)
    if isinstance(space, type):
        space = sys.modules.get(space.__module__)
    file = getattr(space, "__file__", None)
    if not isinstance(file, str):
        return getattr(space, "__name__", "") not in sys.builtin_module_names
    return not _is_installed(file)


def _is_installed(file: str) -> bool:
    return not is_users(file) or file.startswith(_INSTALLED)


def _pure(module: object) -> bool:
    """By the name of a function's module; one without a name is torch's or of C."""
    return not isinstance(module, str) or module.split(".")[0] in _PURE


def _of_torch(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").split(".")[0] in ("torch", "fusedpg")


def _plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's, and those of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _paths_of(code: types.CodeType) -> _Named:
    """What a code reads from outside, with the attributes that it takes at once."""
    known = _known.get(code)
    if known is None:
        found: dict[Path, None] = dict.fromkeys((name,) for name in code.co_freevars)
        names: set[str] = set()
        assigned = ""
        for part in _codes(code):
            names.update(part.co_names)
            path: Path = ()
            for step in dis.get_instructions(part):
                outer = step.opname in ("STORE_DEREF", "DELETE_DEREF")
                if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
                    outer and step.argval in code.co_freevars
                ):
                    assigned = step.argval
                if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
                    path += (step.argval,)
                elif step.opname != "EXTENDED_ARG":
                    found |= {path: None} if path else {}
                    begins = step.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (
                        step.opname == "LOAD_DEREF" and step.argval in code.co_freevars
                    )
                    path = (step.argval,) if begins else ()
        known = _known[code] = tuple(found), tuple(sorted(names)), assigned
    return known
