"""Parameters by the names that GRACE gave them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from fusedpg.compress import _numbers, communicators, compressors, memories
from fusedpg.compress.communicators import Allreduce, Communicator
from fusedpg.compress.compressors import Compressor, EFSignSGD, PowerSGD
from fusedpg.compress.memories import (
    DGCMemory,
    EFSignSGDMemory,
    Memory,
    PowerSGDMemory,
    ResidualMemory,
)

_T = TypeVar("_T", Compressor, Memory, Communicator)

# Other names of the same things in GRACE and MergeComp.
_OTHER_NAMES = {
    "all-to-all": "alltoall", "parameter_server": "ps", "topK": "topk",
    "natural_cuda": "natural", "qsgd_cuda": "qsgd",
}  # fmt: skip
_OTHER_KEYS = {"ratio": "compress_ratio", "quantum": "quantum_num"}
# Without a meaning here: the group knows its size, and there is one exact top-k.
_IGNORED = {"world_size", "kernel"}
# Parameters of MergeComp's helper that are arguments of the state here.
_FOR_STATE = {"fusion_num": "schedule", "params": "named_parameters"}


def _made(kind: str, known: Mapping[str, type[_T]], base: Any, given: object, rest: Any) -> _T:
    """An object of a base class by name, with those of the parameters that its constructor has."""
    if isinstance(given, base):
        return cast("_T", given)
    name = _OTHER_NAMES.get(given, given) if isinstance(given, str) else None
    if name is None or name not in known:
        names = ", ".join(sorted(known))
        if hasattr(given, "send_step") or hasattr(given, "send_receive"):
            raise ValueError(
                f"{kind} {type(given).__name__} is GRACE's, which calls Horovod or "
                "torch.distributed itself: give it to fusedpg.hvd.DistributedOptimizer(optimizer, "
                f"grace=...), or choose one of {names}"
            )
        raise ValueError(
            f"{kind} {given!r} is not known: there are {names}, those of register_{kind}(), and "
            f"instances of fusedpg.compress.{base.__name__}"
        )
    wanted = inspect.signature(known[name]).parameters
    return known[name](**{key: value for key, value in rest.items() if key in wanted})


def _accepted(kind: Mapping[str, type[object]]) -> set[str]:
    return {key for made in kind.values() for key in inspect.signature(made).parameters}


def for_state(params: Mapping[str, object], given: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of the state, of which MergeComp has some among the parameters."""
    found = dict(given)
    for key, argument in _FOR_STATE.items():
        if key not in params:
            continue
        if argument in found:
            raise ValueError(f"parameter {key!r} and argument {argument}= are the same: give one")
        found[argument] = params[key]
    number = params.get("fusion_num")
    if number is not None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"fusion_num is 0 (layers) or a number of groups, got {number!r}")
        found["schedule"] = number or "layer"
    return found


def _renamed(params: Mapping[str, object]) -> dict[str, object]:
    """Parameters by GRACE's names."""
    found = {key: value for key, value in params.items() if key not in _FOR_STATE}
    for key, name in _OTHER_KEYS.items():
        if key not in found:
            continue
        if key == "ratio" and params.get("compressor") == "threshold":
            name = "threshold"  # as MergeComp has it
        if name in found:
            raise ValueError(f"parameters {key!r} and {name!r} are the same: give one of them")
        found[name] = found.pop(key)
    return found


def parts(params: Mapping[str, object]) -> tuple[Compressor, Memory, Communicator]:
    """The three that the parameters name, which fit each other."""
    rest = _renamed(params)
    chosen = [rest.pop(k, "none") for k in ("compressor", "memory")]
    carrier = rest.pop("communicator", None)
    tables: tuple[Mapping[str, type[object]], ...] = (
        compressors.BY_NAME, memories.BY_NAME, communicators.BY_NAME,
    )  # fmt: skip
    known = set().union(*map(_accepted, tables)) | _IGNORED
    for key in rest:
        if key not in known:
            names = sorted(known | set(_OTHER_KEYS) | set(_FOR_STATE))
            raise ValueError(f"parameter {key!r} is not known: there are {', '.join(names)}")
    compressor = _made("compressor", compressors.BY_NAME, Compressor, chosen[0], rest)
    memory = _made("memory", memories.BY_NAME, Memory, chosen[1], rest)
    if carrier is None:
        # GRACE's default, where its sums mean something.
        carrier = "allreduce" if compressor.linear else "allgather"
    communicator = _made("communicator", communicators.BY_NAME, Communicator, carrier, rest)
    check(compressor, memory, communicator)
    if (
        isinstance(compressor, EFSignSGD)
        and "lr" in rest
        and not isinstance(memory, EFSignSGDMemory)
    ):
        raise ValueError(
            'compressor "efsignsgd" with lr, which is of the memory "efsignsgd": here the result '
            "is the mean of what the ranks send, not the sum divided by lr as in GRACE. Use the "
            'memory "efsignsgd", or leave lr out and scale the learning rate'
        )
    return compressor, memory, communicator


def _name(thing: object, known: Mapping[str, type[object]]) -> str:
    return next((n for n, t in known.items() if type(thing) is t), type(thing).__name__)


def check(compressor: Compressor, memory: Memory, communicator: Communicator) -> None:
    """Refuses what cannot work together, and says what does."""
    for factor in ("scale", "beta", "gamma"):  # the user's classes have them, too
        _numbers.real(f"{type(memory).__name__}.{factor}", getattr(memory, factor))
    what = _name(compressor, compressors.BY_NAME)
    keeper = _name(memory, memories.BY_NAME)
    carrier = _name(communicator, communicators.BY_NAME)
    if isinstance(communicator, Allreduce) and not compressor.linear:
        raise ValueError(
            f'compressor "{what}" with communicator "allreduce": the sum of its payloads is no '
            'payload of the sum. Use "allgather", "alltoall" or "ps"; "allreduce" is for '
            + ", ".join(f'"{n}"' for n, t in compressors.BY_NAME.items() if t.linear)
            + ", and for classes that say linear = True"
        )
    if isinstance(compressor, PowerSGD):
        if not isinstance(communicator, Allreduce):
            raise ValueError(
                f'compressor "powersgd" with communicator "{carrier}": its second factor needs the '
                'sum of the first ones. Use "allreduce" or "quantized"'
            )
        if type(memory) not in (PowerSGDMemory, ResidualMemory, memories.NoneMemory):
            raise ValueError(
                f'compressor "powersgd" with memory "{keeper}": use "powersgd", "residual" or '
                '"none"'
            )
    elif isinstance(memory, PowerSGDMemory):
        raise ValueError(f'memory "powersgd" with compressor "{what}": use "residual"')
    if isinstance(memory, DGCMemory) and not compressor.sparse:
        names = ", ".join(f'"{n}"' for n, t in compressors.BY_NAME.items() if t.sparse)
        raise ValueError(
            f'memory "dgc" with compressor "{what}": it forgets what was sent, element by element. '
            f'Use it with {names}, or memory "residual"'
        )
    keeps = isinstance(memory, (ResidualMemory, EFSignSGDMemory))
    if keeps and not compressor.keeps_magnitude:
        raise ValueError(
            f'compressor "{what}" with memory "{keeper}": a vote has no magnitude that a residual '
            'could be measured in. Use memory "none", or compressor "efsignsgd"'
        )


def register_compressor(name: str, made: type[Compressor]) -> None:
    """Makes ``from_params({"compressor": name})`` know a class; its parameters, too."""
    _register("compressor", compressors.BY_NAME, Compressor, name, made)


def register_memory(name: str, made: type[Memory]) -> None:
    """Makes ``from_params({"memory": name})`` know a class; its parameters, too."""
    _register("memory", memories.BY_NAME, Memory, name, made)


def register_communicator(name: str, made: type[Communicator]) -> None:
    """Makes ``from_params({"communicator": name})`` know a class; its parameters, too."""
    _register("communicator", communicators.BY_NAME, Communicator, name, made)


def _register(kind: str, known: Any, base: type[object], name: str, made: object) -> None:
    if not (isinstance(made, type) and issubclass(made, base)):
        raise TypeError(f"{kind} {name!r} is a subclass of {base.__name__}, got {made!r}")
    if known.get(name, made) is not made:
        raise ValueError(f"{kind} {name!r} exists already: {known[name].__name__}")
    known[name] = made
