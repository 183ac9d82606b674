"""Calls of fused functions as operations that torch.compile takes as they are.

An operation gets tensors and numbers, floats as tensors of one element: torch.compile would make a
constant of a float, and another graph of each value. What else there is travels as text: the kinds
of the arguments, the group's name, and which arguments require grad. A function is found by a text,
too: where the same lines call several functions, torch.compile would make a variable of a number.
"""

from __future__ import annotations

import ast
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusedpg._refusal import telling
from fusedpg.fusion.autograd import Differentiable, kept_values, numbers_of, run_backward
from fusedpg.fusion.derive import Derived
from fusedpg.fusion.ir import Node, Program
from fusedpg.fusion.places import Ranks, held
from fusedpg.fusion.plan import complete, start

if TYPE_CHECKING:
    from fusedpg.fusion.api import FusedFunction

_functions: weakref.WeakValueDictionary[str, FusedFunction] = weakref.WeakValueDictionary()
_numbers = itertools.count()
# Plans of forwards whose backward may come; of each function the oldest goes first.
_plans: weakref.WeakKeyDictionary[FusedFunction, dict[int, Differentiable]] = (
    weakref.WeakKeyDictionary()
)
_KEPT = 128


def register(function: FusedFunction) -> str:
    """The name by which operations find a function."""
    name = str(next(_numbers))
    _functions[name] = function
    return name


def described(values: Sequence[object]) -> str:
    """The kinds of arguments, a line each; torch.compile traces this."""
    lines = []
    for value in values:
        if isinstance(value, torch.Tensor):
            lines.append("tensor")
        elif isinstance(value, (bool, str)) or value is None:
            lines.append("= " + repr(value))
        else:
            lines.append("int" if isinstance(value, int) else "float")
    return "\n".join(lines)


def _values(
    function: FusedFunction,
    kinds: str,
    tensors: Sequence[object],
    floats: Sequence[float],
    ints: Sequence[int],
) -> dict[str, object]:
    sources = {"tensor": iter(tensors), "float": iter(floats), "int": iter(ints)}
    given = [
        ast.literal_eval(line[2:]) if line.startswith("= ") else next(sources[line])
        for line in kinds.split("\n")
    ]
    return function.bound(tuple(given))


def number(value: float) -> Tensor:
    """A float on its way into an operation; of this product torch.compile makes no constant."""
    return torch.ones((), dtype=torch.float64, device="cpu") * value


def _read(floats: Sequence[Tensor]) -> list[float]:
    return [float(value) for value in floats]


def _without_numbers(
    function: FusedFunction, kinds: str, tensors: Sequence[object]
) -> dict[str, object]:
    """With others in their places: torch.compile has symbols for those that change."""
    many = kinds.count("\n") + 1
    return _values(function, kinds, tensors, [0.5] * many, [1] * many)


def _group(name: str) -> dist.ProcessGroup | None:
    return dist.distributed_c10d._resolve_process_group(cast("Any", name)) if name else None


def _stand_ins(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Shapes and types alone: a program has fixed shapes."""
    return [
        torch.empty(tuple(int(size) for size in x.shape), dtype=x.dtype, device="meta")
        for x in tensors
    ]


def _marker(count: int, single: bool) -> Tensor:
    """An empty tensor whose shape tells how many of the outputs are results."""
    return torch.empty(count, int(single), 0, device="cpu")


def _distinct(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """An operation's outputs share memory neither with its inputs nor with one another."""
    taken = {x.untyped_storage()._cdata for x in given}
    found = []
    for result in results:
        place = result.untyped_storage()._cdata
        found.append(result.clone() if place in taken else result)
        taken.add(place)
    return found


@torch.library.custom_op("fusedpg::fused_function", mutates_args=())
def fused_function(
    tensors: Sequence[Tensor],
    floats: Sequence[Tensor],
    ints: Sequence[int],
    handle: str,
    kinds: str,
    group: str,
    wrt: str,
    state: str,
) -> list[Tensor]:
    """A marker, the results, what the backward needs of them, and by which plan they were made."""
    function = _functions[handle]
    with telling(_group(group), *tensors):
        values = _values(function, kinds, tensors, _read(floats), ints)
        with _autocast(state):
            plan, program, place = function.planned(values, _group(group), _names(wrt))
        results = complete(start(program, place[0], values)[1])
    count = plan.results if plan else len(results)
    single = plan.derived.single if plan else program.single
    number = [torch.tensor(_keep(function, plan), device="cpu")] if plan else []
    return [_marker(count, single), *_distinct(results, tensors), *number]


@fused_function.register_fake
def _(
    tensors: Sequence[Tensor],
    floats: Sequence[Tensor],
    ints: Sequence[int],
    handle: str,
    kinds: str,
    group: str,
    wrt: str,
    state: str,
) -> list[Tensor]:
    derived, program = _seen(tensors, handle, kinds, group, wrt, state)
    count = len(derived.differentiable) if derived else len(program.outputs)
    outputs = derived.forward.outputs if derived else program.outputs
    single = derived.single if derived else program.single
    device = tensors[0].device if tensors else torch.device("cpu")
    ranks = Ranks.of(_group(group))
    number = [torch.empty((), dtype=torch.int64, device="cpu")] if derived else []
    return [_marker(count, single), *(_like(node, ranks, device) for node in outputs), *number]


def _keep(function: FusedFunction, plan: Differentiable) -> int:
    """A number by which the backward finds the forward's plan, whatever has changed meanwhile."""
    plans = _plans.setdefault(function, {})
    plans.pop(plan.number, None)
    while len(plans) >= _KEPT:
        del plans[next(iter(plans))]
    plans[plan.number] = plan
    return plan.number


def _names(wrt: str) -> tuple[str, ...]:
    return tuple(wrt.split(",")) if wrt else ()


def autocast_of(values: Sequence[object]) -> str:
    """The device of the tensors, and what autocast casts to there, as text; torch.compile traces
    this.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            device = value.device.type
            if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
                return f"{device} {torch.get_autocast_dtype(device)}"
            return f"{device} "
    return "cpu "


def _autocast(state: str) -> torch.autocast:
    """The state of such a text: when an operation runs, torch may have another one."""
    device, _, name = state.partition(" ")
    dtype = getattr(torch, name.removeprefix("torch.")) if name else None
    return torch.autocast(device if name else "cpu", dtype=dtype, enabled=bool(name))


def _seen(
    tensors: Sequence[Tensor], handle: str, kinds: str, group: str, wrt: str, state: str
) -> tuple[Derived | None, Program]:
    """The program of a call, and its derivative; of numbers only the kinds matter."""
    function = _functions[handle]
    with unset_fake_temporarily(), _autocast(state):
        values = _without_numbers(function, kinds, _stand_ins(tensors))
        device = state.partition(" ")[0]
        return function.derived(values, _group(group), _names(wrt), device)


def _like(node: Node, ranks: Ranks, device: torch.device) -> Tensor:
    return torch.empty(held(node, ranks.size, ranks.rank), dtype=node.dtype, device=device)


# --- gradients -----------------------------------------------------------------------------------


@torch.library.custom_op("fusedpg::fused_function_backward", mutates_args=())
def fused_function_backward(
    kept: Sequence[Tensor],
    gradients: Sequence[Tensor],
    like: Sequence[Tensor],
    number: Tensor,
    floats: Sequence[Tensor],
    ints: Sequence[int],
    handle: str,
    kinds: str,
    group: str,
    wrt: str,
    state: str,
) -> list[Tensor]:
    """The gradients of `wrt`; `like` has the shapes and types of the function's tensors."""
    function = _functions[handle]
    values = _values(function, kinds, like, _read(floats), ints)
    plan = _plans.get(function, {}).get(int(number))
    if plan is None:
        raise RuntimeError(f"more than {_KEPT} kinds of calls since the forward of this backward")
    ranks = Ranks.of(_group(group))
    assert ranks.group is not None
    place = ranks.group, ranks.rank
    found = run_backward(plan, place, kept, numbers_of(plan, values), gradients)
    return _distinct([found[name] for name in _names(wrt)], [*kept, *gradients])


@fused_function_backward.register_fake
def _(
    kept: Sequence[Tensor],
    gradients: Sequence[Tensor],
    like: Sequence[Tensor],
    number: Tensor,
    floats: Sequence[Tensor],
    ints: Sequence[int],
    handle: str,
    kinds: str,
    group: str,
    wrt: str,
    state: str,
) -> list[Tensor]:
    derived, _ = _seen(like, handle, kinds, group, wrt, state)
    assert derived is not None
    nodes: Mapping[str, Node] = dict(zip(derived.gradients, derived.program.outputs))
    ranks = Ranks.of(_group(group))
    return [_like(nodes[name], ranks, like[0].device) for name in _names(wrt)]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, floats, ints, handle, kinds, group, wrt, state = inputs
    ctx.rest = (ints, handle, kinds, group, wrt, state)
    ctx.count, ctx.floats = len(tensors), len(floats)
    if not wrt:
        return
    derived, _ = _seen(tensors, handle, kinds, group, wrt, state)
    assert derived is not None
    values = _without_numbers(_functions[handle], kinds, tensors)
    plan = Differentiable(derived, None, None)  # type: ignore[arg-type]  # its kept values alone
    kept = kept_values(plan, values, output[1:])
    ctx.results = len(derived.differentiable)
    ctx.kept = len(kept)
    # Shapes and types of the arguments, in no memory.
    like = [x.new_empty(1).expand(x.shape) if math.prod(x.shape) else x for x in tensors]
    ctx.save_for_backward(output[-1], *floats, *kept, *like)


def _backward(ctx: Any, outputs: Sequence[Tensor | None]) -> Any:
    ints, handle, kinds, group, wrt, state = ctx.rest
    # A list of numbers has no gradient; an empty one counts as a list of tensors.
    none: tuple[object, ...] = ([None] * ctx.floats, None if ints else [], *[None] * 5)
    if not wrt:
        return [None] * ctx.count, *none
    number, *saved = ctx.saved_tensors
    floats, saved = saved[: ctx.floats], saved[ctx.floats :]
    kept, like = saved[: ctx.kept], saved[ctx.kept :]
    gradients = [x.contiguous() for x in outputs[1 : 1 + ctx.results] if x is not None]
    # torch gives zeros for results that nobody used; one left out would shift the others.
    assert len(gradients) == ctx.results
    found = torch.ops.fusedpg.fused_function_backward(
        list(kept),
        gradients,
        list(like), number, list(floats), ints, handle, kinds, group, wrt, state,
    )  # fmt: skip
    names = _functions[handle].tensor_names(kinds)
    by_name = dict(zip(_names(wrt), found))
    return [by_name.get(name) for name in names], *none


fused_function.register_autograd(_backward, setup_context=_set_up)
