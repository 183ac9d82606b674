"""What a function's annotations say about its arguments and results."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fusedpg._registration import load_extension
from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import PARTIAL, REPLICATE, SCALAR, SHARD, Layout
from fusedpg.fusion.scattered import flat
from fusedpg.fusion.trace import line_of

_CLASSES = {Partial: PARTIAL, Replicate: REPLICATE, Shard: SHARD}
_RESERVED = ("group", "async_op", "stages")


class Signature:
    """The parameters of a function to be fused, and the layouts that it annotates."""

    def __init__(self, function: Callable[..., object]) -> None:
        if not inspect.isfunction(function):
            raise TypeError(f"fuse takes a Python function, got {function!r}")
        self._function = function
        self.signature = inspect.signature(function)
        self.layouts: dict[str, Layout | None] = {}
        self.kinds: dict[str, type] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                self._fail(name, "a program has a fixed list of parameters")
            if parameter.kind == parameter.POSITIONAL_ONLY:
                self._fail(name, "leave out the `/`: parameters are passed by name")
            if name in _RESERVED:
                self._fail(name, "the call of a fused function has an argument of this name")
            annotation = self._resolved(parameter.annotation)
            if annotation in (float, int):
                self.kinds[name] = annotation
                self.layouts[name] = SCALAR
            else:
                self.layouts[name] = self._layout(name, annotation)
        self.results = self._results(self._resolved(self.signature.return_annotation))
        parameters = self.signature.parameters.values()
        self._names = tuple(self.signature.parameters)
        self._positional = sum(p.kind != p.KEYWORD_ONLY for p in parameters)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        # Of such a type an argument is as it should be, whatever its layout.
        self._exact = {name: self.kinds.get(name, torch.Tensor) for name in self._names}

    def _fail(self, name: str, reason: str) -> typing.NoReturn:
        line = line_of(self._function)
        raise IllegalProgram(f"{line}: `{name}` of `{self._function.__name__}`: {reason}")

    def _resolved(self, annotation: object) -> Any:
        """Annotations are text under `from __future__ import annotations`."""
        if not isinstance(annotation, str):
            return annotation
        closure = inspect.getclosurevars(self._function).nonlocals
        placements = {kind.__name__: kind for kind in _CLASSES}
        scope = placements | dict(closure) | {"torch": torch}
        try:
            return eval(annotation, {**scope, **self._function.__globals__})
        except Exception as error:
            self._fail(annotation, f"this annotation cannot be evaluated: {error}")

    def _layout(self, name: str, annotation: object) -> Layout | None:
        if annotation in _CLASSES:
            return _CLASSES[annotation]
        if isinstance(annotation, Partial):
            if annotation.reduce_op != "sum":
                self._fail(name, f"{annotation}: the collective says how; annotate it as Partial")
            return PARTIAL
        if isinstance(annotation, Replicate):
            return REPLICATE
        if isinstance(annotation, Shard):
            if type(annotation) is not Shard:
                self._fail(name, f"{annotation!r} is not a layout of a fused program")
            return Layout("Shard", int(annotation.dim))
        if isinstance(annotation, Placement):
            self._fail(name, f"{annotation!r} is not a layout of a fused program")
        return None

    def _results(self, annotation: object) -> tuple[Layout | None, ...] | None:
        if typing.get_origin(annotation) is tuple:
            annotation = typing.get_args(annotation)
        if isinstance(annotation, tuple):
            result = tuple(self._result(item) for item in annotation)
            return result if any(result) else None
        layout = self._result(annotation)
        return None if layout is None else (layout,)

    def _result(self, annotation: object) -> Layout | None:
        layout = self._layout("return", annotation)
        if layout is not None and layout.dim is not None:
            self._fail("return", "results are Partial, Replicate or Shard (of the flat tensor)")
        return layout

    @functools.cached_property
    def parameters(self) -> Any:
        """Binds arguments quickly; None where they do not fit, which `inspect` explains."""
        kinds = [self.kinds.get(name) for name in self._names]
        return load_extension()._Parameters(self._names, self._positional, self._defaults, kinds)

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments by name, checked against the annotations."""
        values: dict[str, object] | None = self.parameters.bind(args, kwargs)
        if values is None:
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = dict(bound.arguments)
        exact = self._exact
        for name, value in values.items():
            if type(value) is exact[name]:
                continue
            layout = self.layouts[name]
            if isinstance(value, (list, tuple)) and layout != SCALAR:
                if layout is not None and layout.dim is not None:
                    raise TypeError(f"`{name}` is {layout} and a list, which has one dimension")
                values[name] = flat(name, value)
            elif layout == SCALAR:
                kind = self.kinds[name]
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError(f"`{name}` is {kind.__name__}, got {type(value).__name__}")
                if kind is int and not isinstance(value, int):
                    raise TypeError(f"`{name}` is an int, got {value!r}")
                values[name] = kind(value)
            elif layout is not None and not isinstance(value, torch.Tensor):
                raise TypeError(f"`{name}` is a {layout} tensor, got {type(value).__name__}")
            elif not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
                raise TypeError(
                    f"`{name}` is a {type(value).__name__}: arguments are tensors, lists of them "
                    "and numbers, or bool, str and None, for each of which there is a program"
                )
        return values
