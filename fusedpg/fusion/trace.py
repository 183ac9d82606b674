"""From a Python function to a graph of torch.fx, whose nodes know their lines."""

from __future__ import annotations

import math
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx
from torch.fx.node import map_aggregate

from fusedpg import _fork, _fx
from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import Source

_HERE = str(Path(__file__).parent)
# Devices that programs run on, and that autocast may be on for.
_DEVICES = ("cpu", "cuda")
_NOT_THE_USERS = (_HERE, str(Path(torch.__file__).parent))
# Python's in-place operators.
IN_PLACE: dict[Callable[..., object], str] = {
    operator.iadd: "+",
    operator.isub: "-",
    operator.imul: "*",
    operator.itruediv: "/",
    operator.ifloordiv: "//",
    operator.imod: "%",
    operator.ipow: "**",
    operator.imatmul: "@",
    operator.iand: "&",
    operator.ior: "|",
    operator.ixor: "^",
    operator.ilshift: "<<",
    operator.irshift: ">>",
}
# fx patches modules while it traces, for all threads.
_TRACING = threading.RLock()
_fork.wait_before_fork(_TRACING)  # a child would have the patched ones for ever


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on a device in this thread; None where it is off."""
    if device in _DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def ambient(device: str) -> tuple[torch.dtype | None, torch.dtype]:
    """This thread's state that decides which types torch's functions give."""
    return autocast_dtype(device), torch.get_default_dtype()


class _Stand(fx.Proxy):
    """Stands for a tensor: assignments to its attributes would be lost."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("tracer", "node"):
            raise IllegalProgram(
                f"{_users_line()}: `{name}` of a tensor is assigned to; programs do not write into "
                "tensors: compute a new one, and return it"
            )
        object.__setattr__(self, name, value)


def _recorded(function: Callable[..., object]) -> Callable[..., fx.Proxy]:
    def method(x: fx.Proxy, y: object) -> fx.Proxy:
        return x.tracer.create_proxy("call_function", function, (x, y), {})

    return method


# Python takes `x = x ** y` for an in-place operator that a class does not have.
for _function in IN_PLACE:
    setattr(_Stand, f"__{_function.__name__}__", _recorded(_function))


class _Tracer(_fx.Tracer):
    """Notes with each node the line of the user's file and the state of torch in that line."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math,))
        self._default = torch.get_default_dtype()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Stand(node, self)

    def create_arg(self, a: object) -> Any:
        # fx of torch 2.11 refuses process groups.
        if isinstance(a, dist.ProcessGroup):
            name = self.get_fresh_qualname("_process_group")
            setattr(self.root, name, a)
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["source"] = _users_line()
        node.meta["autocast"] = {device: autocast_dtype(device) for device in _DEVICES}
        node.meta["changed"] = self._changed()
        return node

    def _changed(self) -> str:
        """What a context manager inside of the function has changed, of what cannot be kept."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return "gradients are off"
        if torch.get_default_dtype() != self._default:
            return "the default dtype has changed"
        return ""


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


# By identity, as a module may hold unhashable values. Classes stay as they are, and so do functions
# that the module imports: other threads use them.
_FUNCTIONAL = {
    id(value)
    for name, value in vars(funcol).items()
    if isinstance(value, FunctionType) and value.__module__ == funcol.__name__ and name[0] != "_"
}


def _leaf(function: Callable[..., object]) -> Callable[..., object]:
    """The function, but calls with what stands for a tensor are recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        stands: list[fx.Proxy] = []

        def look(arg: object) -> None:
            if isinstance(arg, fx.Proxy):
                stands.append(arg)

        map_aggregate((args, kwargs), look)
        if stands:
            return stands[0].tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call


@contextmanager
def _recorded_functional(names: dict[str, Any]) -> Iterator[None]:
    """Has fx record torch's functional collectives, by their module and by the user's globals."""
    scopes = vars(funcol), names
    found = [(s, name, f) for s in scopes for name, f in s.items() if id(f) in _FUNCTIONAL]
    for scope, name, function in found:
        scope[name] = _leaf(function)
    try:
        yield
    finally:
        for scope, name, function in found:
            scope[name] = function


def _random_state() -> tuple[object, ...]:
    """That of the generators of Python, torch and, where it is used, NumPy, to be compared."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ("", b"", 0)
    with torch._C._DisableFuncTorch():
        of_torch = torch.get_rng_state().tolist()
    return random.getstate(), of_torch, bytes(state[1]), state[2]


def line_of(function: Callable[..., object]) -> Source:
    code = function.__code__
    return Source(code.co_filename, code.co_firstlineno)


def trace(
    function: Callable[..., object], dynamic: Sequence[str], static: Mapping[str, object]
) -> fx.Graph:
    """The graph of a function of these parameters, the others having these values."""
    names = ", ".join(dynamic)
    passed = ", ".join(f"{name}={name}" for name in dynamic)
    given = f"{passed}{', ' * bool(dynamic)}**fusedpg_static"  # no parameter is called so
    code = f"def program({names}):\n    return fusedpg_function({given})\n"
    scope: dict[str, Any] = {"fusedpg_function": function, "fusedpg_static": dict(static)}
    exec(compile(code, "<fusedpg program>", "exec"), scope)
    tracer = _Tracer()
    random_before = _random_state()
    functional = _recorded_functional(function.__globals__)
    # Whether a call wants gradients does not belong to the trace.
    with _TRACING, functional, torch.inference_mode(False), torch.enable_grad():
        try:
            graph = tracer.trace(scope["program"])
        except IllegalProgram:
            raise
        except Exception as error:
            raise IllegalProgram(_explain(error, function, tracer)) from error
    if _random_state() != random_before:
        raise IllegalProgram(
            f"{line_of(function)}: `{function.__name__}` draws random numbers, which would be "
            "drawn once, when it is traced: use fusedpg.fusion.dropout, or pass them as arguments"
        )
    for node in graph.nodes:
        if node.op == "output":
            node.meta["source"] = line_of(function)
        elif node.op == "get_attr":
            node.meta["value"] = getattr(tracer.root, str(node.target))
    return graph


def _explain(error: Exception, function: Callable[..., object], tracer: fx.Tracer) -> str:
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
