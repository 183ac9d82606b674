"""What a fused function reads from outside of it, and what happens when that changes."""

from __future__ import annotations

import enum
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

import fusedpg
from checks.refused import refused
from fusedpg import fusion
from harness import Context

FACTOR = 2.0


class Config:
    factor = 2.0
    factors: ClassVar[list[float]] = [2.0]

    @staticmethod
    def times(x: Any) -> Any:
        return x * Config.factor

    @classmethod
    def scale(cls) -> float:
        return cls.factor


class Held:
    def __init__(self) -> None:
        self.factor = FACTOR


def scaled(x: Any) -> Any:
    return x * scaled.factor  # type: ignore[attr-defined]


scaled.factor = 2.0  # type: ignore[attr-defined]


class Mode(enum.Enum):
    DOUBLE = 2.0


class Derived(Config):
    pass


def times(x: Any, factor: float = 2.0) -> Any:
    return x * factor


def library() -> types.ModuleType:
    """A module of the user's with one in it."""
    module, inside = types.ModuleType("library"), types.ModuleType("library.inside")
    exec("def times(x):\n    return x * FACTOR\n", vars(module))
    module.FACTOR = inside.FACTOR = 2.0
    module.FACTORS = [2.0]
    module.inside = inside
    return module


lib = library()
act: Any = torch.square
gelu = torch.nn.GELU()


def again(name: str, factor: float) -> Callable[[], None]:
    """A definition of `times` that is run again, like a cell of a notebook."""

    def change() -> None:
        text = f"def {name}(x, factor={factor}):\n    return x * factor\n"
        exec(compile(text, __file__, "exec"), globals())

    return change


def other_code() -> None:
    times.__code__ = (lambda x, factor=2.0: x * factor + 1).__code__


def other_default() -> None:
    times.__defaults__ = (3.0,)


def local_import(x: Any) -> Any:
    module = lib
    return module.inside.FACTOR * fusion.all_reduce(x)


def cases() -> Iterator[tuple[str, Callable[..., Any], Callable[[], Any], float]]:
    """A function of ones and 2, how the 2 changes, and what it is then."""
    yield (
        "a module in a module",
        lambda x: fusion.all_reduce(x) * lib.inside.FACTOR,
        (lambda: setattr(lib.inside, "FACTOR", 3.0)),
        3,
    )
    yield "a module that is renamed", local_import, (lambda: setattr(lib.inside, "FACTOR", 5.0)), 5
    yield (
        "another module",
        lambda x: fusion.all_reduce(x) * lib.inside.FACTOR,
        (lambda: setattr(lib, "inside", types.SimpleNamespace(FACTOR=7.0))),
        None,
    )
    yield (
        "a function of a module",
        lambda x: lib.times(fusion.all_reduce(x)),
        (lambda: setattr(lib, "FACTOR", 4.0)),
        4,
    )
    yield (
        "a class",
        lambda x: fusion.all_reduce(x) * Config.factor,
        (lambda: setattr(Config, "factor", 3.0)),
        3,
    )
    yield (
        "a base class",
        lambda x: fusion.all_reduce(x) * Derived.factor,
        (lambda: setattr(Config, "factor", 5.0)),
        5,
    )
    yield (
        "a class that comes between",
        lambda x: fusion.all_reduce(x) * Derived.factor,
        (lambda: setattr(Derived, "factor", 6.0)),
        6,
    )
    yield (
        "a function of a class",
        lambda x: Config.times(fusion.all_reduce(x)),
        (lambda: setattr(Config, "factor", 8.0)),
        8,
    )
    yield "a function's default", lambda x: times(fusion.all_reduce(x)), other_default, 3
    yield "a function's code", lambda x: times(fusion.all_reduce(x)), other_code, 4
    yield "a function", lambda x: times(fusion.all_reduce(x)), again("times", 9.0), 9
    yield (
        "a class of a class method",
        lambda x: fusion.all_reduce(x) * Config.scale(),
        (lambda: setattr(Config, "factor", 9.0)),
        9,
    )
    yield (
        "an attribute of a function",
        lambda x: scaled(fusion.all_reduce(x)),
        (lambda: setattr(scaled, "factor", 3.0)),
        3,
    )
    yield (
        "a global that a constructor reads",
        lambda x: fusion.all_reduce(x) * Held().factor,
        (lambda: globals().update(FACTOR=7.0)),
        7,
    )
    yield (
        "torch's functions",
        lambda x: act(2 * fusion.all_reduce(x)),
        (lambda: globals().update(act=torch.neg)),
        -2,
    )


def changes(context: Context) -> None:
    """Each function is traced again when what it reads is another."""
    for name, function, change, factor in cases():
        fused = fusedpg.fuse(function)
        x, y = torch.ones(5), torch.zeros(5)

        def call(fused: Any = fused, x: torch.Tensor = x, y: torch.Tensor = y) -> list[float]:
            into = fused.into(y, x).tolist()
            assert fused(x).tolist() == into
            return [value / context.world_size for value in into]

        before = call()
        assert call() == call() == before, name
        change()
        if factor is None:
            with refused("`lib.inside` is a SimpleNamespace from outside", fusion.IllegalProgram):
                call()
            continue
        found = call()
        bias = 1 - 1 / context.world_size if name == "a function's code" else 0
        assert found == [factor - bias] * 5, (name, before, found)
        if name != "a function's code":
            assert before != found, name


def refuses(context: Context) -> None:
    """What could change unnoticed, and what cannot."""
    x = torch.ones(3)
    for function, name in (
        (lambda x: x * lib.FACTORS[0], "lib.FACTORS"),
        (lambda x: x * Config.factors[0], "Config.factors"),
    ):
        with refused(f"`{name}` is a list from outside of", fusion.IllegalProgram):
            fusedpg.fuse(function)(x)

    def assigns(x: Any) -> Any:
        global FACTOR
        FACTOR += 1
        return x * FACTOR

    def counts(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * count

    count, name = 0, "factor"
    unwatched: list[tuple[Callable[..., Any], str]] = [
        (lambda x: x * float(os.environ["HOME"] == ""), "`os.environ` is a"),
        (lambda x: x * len(os.getenv("HOME", "")), "`os.getenv` of os would be called once"),
        (lambda x: x * globals()["FACTOR"], "`globals` reads what could change"),
        (lambda x: x * getattr(Config, name), "`getattr` reads what could change"),
        (lambda x: x * vars(Config)["factor"], "`vars` reads what could change"),
        (lambda x: x * eval("FACTOR"), "`eval` reads what could change"),
        (lambda x: x * sys.modules[__name__].FACTOR, "`sys.modules` is a dict"),
        (lambda x: x * time.time(), "`time.time` of time would be called once"),
        (lambda x: x * random.random(), "draws random numbers"),
        (lambda x: x * torch.rand(()).item(), "draws random numbers"),
        (lambda x: gelu(x), "`gelu` is a module of torch.nn, GELU"),
        (assigns, "`FACTOR` is assigned to"),
        (counts, "`count` is assigned to"),
    ]
    for function, text in unwatched:
        with refused(text, fusion.IllegalProgram):
            fusedpg.fuse(function)(x)

    def constant(x: Any) -> Any:
        return x * 2 if Mode.DOUBLE is Mode(2.0) else x

    assert fusedpg.fuse(constant)(x).tolist() == [2.0] * 3
    lib.mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[attr-defined]

    def by_mesh(x: Any) -> Any:
        return functional.all_reduce(x, "sum", lib.mesh.get_group())

    assert fusedpg.fuse(by_mesh)(x).tolist() == [context.world_size] * 3
