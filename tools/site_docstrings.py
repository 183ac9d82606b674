"""An extension of griffe (mkdocs.yml): docstrings that a decorator writes, asked of the object.

griffe reads sources and runs nothing, so what `_documented` puts together is not there for it.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class DecoratedDocstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._ask(func)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        self._ask(cls)

    def _ask(self, found: griffe.Function | griffe.Class) -> None:
        names = {decorator.callable_path.rpartition(".")[2] for decorator in found.decorators}
        if found.docstring is None and names & {"_documented", "documented"}:
            module = importlib.import_module(found.module.path)
            name = found.path.removeprefix(f"{found.module.path}.")
            text = inspect.getdoc(operator.attrgetter(name)(module))
            assert text, found.path
            found.docstring = griffe.Docstring(
                text,
                parent=found,
                parser="google",
                parser_options={"warn_unknown_params": False, "warn_missing_types": False},
            )
