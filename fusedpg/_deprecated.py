"""Old names of public objects: each works for one minor release more, and warns."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], object]:
    """A module's ``__getattr__``, which finds objects by their old names.

    Args:
        module: its ``__name__``.
        renamed: the new name in this module by the old one.
    """

    def find(name: str) -> object:
        new = renamed.get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # `from module import name` asks twice, at first for submodules: that one warning is enough.
        if sys._getframe(1).f_code.co_name != "_handle_fromlist":
            text = f"{module}.{name} is now {module}.{new}; fusedpg 0.3 drops the old name"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), new)

    return find
