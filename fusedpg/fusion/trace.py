"""From a Python function to a graph of torch.fx, whose nodes know their lines."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import fx

from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import Source

_HERE = str(Path(__file__).parent)
_NOT_THE_USERS = (_HERE, str(Path(torch.__file__).parent))
# fx patches modules while it traces, for all threads.
_TRACING = threading.RLock()


class _Tracer(fx.Tracer):
    """Notes the line of the user's file with each node."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math, funcol))  # type: ignore[arg-type]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["source"] = _users_line()
        return node


def is_users(file: str) -> bool:
    """Whether code of this file is the user's, and not torch's or ours."""
    return not file.startswith(_NOT_THE_USERS) and not file.startswith("<fusedpg")


def _users_line() -> Source | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return Source(file, frame.f_lineno)
        frame = frame.f_back
    return None


@contextmanager
def _wrapped_names(names: dict[str, Any]) -> Iterator[None]:
    """fx wraps what a module holds; names imported from it are the user's own globals."""
    function = funcol.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, fx.Proxy):
                return arg.tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    found = [name for name, value in names.items() if value is function]
    names.update(dict.fromkeys(found, all_reduce))
    try:
        yield
    finally:
        names.update(dict.fromkeys(found, function))


def line_of(function: Callable[..., Any]) -> Source:
    code = function.__code__
    return Source(code.co_filename, code.co_firstlineno)


def trace(
    function: Callable[..., Any], dynamic: Sequence[str], static: Mapping[str, Any]
) -> fx.Graph:
    """The graph of a function of these parameters, the others having these values."""
    names = ", ".join(dynamic)
    passed = ", ".join(f"{name}={name}" for name in dynamic)
    code = f"def program({names}):\n    return function({passed}{', ' * bool(dynamic)}**static)\n"
    scope: dict[str, Any] = {"function": function, "static": dict(static)}
    exec(compile(code, "<fusedpg program>", "exec"), scope)
    tracer = _Tracer()
    with _TRACING, _wrapped_names(function.__globals__):
        try:
            graph = tracer.trace(scope["program"])
        except IllegalProgram:
            raise
        except Exception as error:
            raise IllegalProgram(_explain(error, function, tracer)) from error
    for node in graph.nodes:
        if node.op == "output":
            node.meta["source"] = line_of(function)
        elif node.op == "get_attr":
            node.meta["value"] = getattr(tracer.root, str(node.target))
    return graph


def _explain(error: Exception, function: Callable[..., Any], tracer: fx.Tracer) -> str:
    line = line_of(function)
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            line = Source(file, trace.tb_lineno)
        trace = trace.tb_next
    graph = getattr(tracer, "graph", None)
    last = list(graph.nodes)[-1].name if graph is not None and len(graph.nodes) else "?"
    text = (str(error) or type(error).__name__).splitlines()[0]
    if "control flow" in text or "bool" in text:
        text = (
            "Python cannot decide by a value that is known only when the program runs: use "
            "torch.where, or a bool parameter, for which a program of its own is traced"
        )
    elif "cannot be interpreted as an integer" in text or "not iterable" in text.lower():
        text = f"{text}: the value is known only when the program runs"
    return f"{line}: `{function.__name__}` cannot be traced after `{last}`: {text}"
