"""What each rank does in the tests of fused functions, and the same on one process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusedpg
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import philox
from fusedpg.fusion.codegen import MATH
from harness import Context

NAMES = {
    "torch": torch,
    "F": F,
    "Partial": fusion.Partial,
    "Replicate": fusion.Replicate,
    "Shard": fusion.Shard,
}


# Of random programs: `tensors` draws them, of which `m` is parted.
ARGUMENTS = (
    "g: Partial, h: Partial, w: Replicate, m: Shard, b: Replicate, c: Replicate, o: Replicate, "
    "lr: float, seed: int"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program's text, and what it is run with."""

    text: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: bool  # no sums but those over ranks
    seed: int = 0


class Contributions:
    """A Partial value: all ranks' tensors in one process."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts

    def _with(self, other: Any, function: Callable[[Any, Any], Any]) -> Contributions:
        others = other.parts if isinstance(other, Contributions) else [other] * len(self.parts)
        return Contributions([function(x, y) for x, y in zip(self.parts, others)])

    def __add__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x + y)

    def __sub__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x - y)

    def __mul__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x * y)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Contributions:
        return self._with(other, lambda x, y: x / y)

    def __neg__(self) -> Contributions:
        return Contributions([-x for x in self.parts])


def reference_all_reduce(x: Contributions, op: str = "sum") -> torch.Tensor:
    parts = [part.float() if part.dtype.itemsize == 2 else part for part in x.parts]
    total = parts[0].clone()
    for part in parts[1:]:
        pair = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
        total = pair(total, part)
    if op == "mean":
        total = total / len(parts)
    return total.to(x.parts[0].dtype)


def reference_dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    keep = philox.kept(p, seed, 0, x.numel(), x.device).reshape(x.shape)
    return torch.where(keep, x * (1 / (1 - p)), torch.zeros_like(x))


REFERENCE = {
    "all_reduce": reference_all_reduce,
    "reduce_scatter": reference_all_reduce,
    "all_gather": lambda x: x,
    "broadcast": lambda x, src: x.parts[src] if isinstance(x, Contributions) else x,
    "dropout": reference_dropout,
}
FUSED = {name: getattr(fusion, name) for name in (*REFERENCE, "send", "recv")}


def compiled(text: str, names: dict[str, Any]) -> Callable[..., Any]:
    scope = {**NAMES, **names}
    exec(compile(text, "program.py", "exec"), scope)
    function: Callable[..., Any] = scope["program"]
    return function


def tensors(case: Case, world_size: int) -> dict[str, Any]:
    """All ranks' inputs, alike on all ranks."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    return {
        "g": [draw(*case.shape) for _ in range(world_size)],
        "h": [draw(*case.shape) for _ in range(world_size)],
        "w": draw(*case.shape),
        "m": draw(*case.shape),
        "b": draw(*case.shape[-1:]),
        "c": draw(*case.shape[:-1], 1),
        "o": draw(),
    }


def shard(x: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    begin, length = fusedpg.shard_range(x.numel(), world_size, rank)
    return x.reshape(-1)[begin : begin + length].clone()


def agree(got: torch.Tensor, expected: torch.Tensor, case: Case, exact: bool, what: str) -> None:
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, f"{what}: {got.shape}, {expected.shape}"
    bound = {torch.float64: 1e-9, torch.float32: 2e-4}.get(case.dtype, 5e-2)
    bound = 5e-2 if "F.linear" in case.text else bound  # in 16 bits under autocast
    bound = 0 if exact else bound
    torch.testing.assert_close(
        got, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda m: f"{m}\n{what}"
    )


def random_program(context: Context, case: Case, wrong: str = "") -> int:
    """Every schedule gives what one process computes with plain torch; how many there were.

    Args:
        wrong: a line, of a result r0, with which the program is refused.
    """
    state = [None, torch.bfloat16, None, torch.float16][len(case.text) % 4]
    with torch.autocast("cpu", dtype=state, enabled=state is not None):
        if wrong:
            first = "r0 = all_reduce(g, 'mean')\n    "
            text = case.text.replace(first, first + wrong.format(x="r0") + "\n    ")
            with refused("program.py:", fusion.IllegalProgram):
                drawn = {
                    key: t[0] if isinstance(t, list) else t for key, t in tensors(case, 1).items()
                }
                drawn["m"] = shard(drawn["m"], context.world_size, context.rank)
                fusedpg.fuse(compiled(text, FUSED)).program(
                    **drawn, lr=0.5, seed=1, group=context.oracle
                )
            assert torch.is_grad_enabled()
        return _random_program(context, case)


def differs(context: Context, run: Any, mine: dict[str, Any], group: Any, uses_lr: bool) -> None:
    """With another number on the last rank all ranks raise, if it is used; else none does."""
    lr = 0.375 if context.rank == context.world_size - 1 else 0.25
    raised = False
    try:
        run(**mine, lr=lr, seed=7, group=group)
    except dist.DistBackendError:
        raised = True
    assert raised == (uses_lr and context.world_size > 1)


def _random_program(context: Context, case: Case) -> int:
    size, rank = context.world_size, context.rank
    drawn = tensors(case, size)
    function = compiled(case.text, REFERENCE)
    with torch.no_grad():
        whole = {
            key: Contributions(value) if isinstance(value, list) else value
            for key, value in drawn.items()
        }
        expected = function(**whole, lr=0.25, seed=7)
    expected = expected if isinstance(expected, tuple) else (expected,)
    mine = {key: value[rank] if isinstance(value, list) else value for key, value in drawn.items()}
    mine["m"] = shard(drawn["m"], size, rank)
    fused = fusedpg.fuse(compiled(case.text, FUSED))
    count = 0
    for group in (None, context.oracle):
        # In another order there may be other bits, from three ranks on.
        ordered = group is None and context.fused and context.one_host
        exact = case.exact and (size < 3 or ordered)
        # Generated code has these from another library than torch, on some processors.
        exact = exact and MATH.isdisjoint(re.findall(r"\w+", case.text))
        for schedule in fused.schedules(**mine, lr=0.5, seed=1, group=group):
            before = {key: value.clone() for key, value in mine.items()}
            run = fused.scheduled(*schedule.transformations)
            results = run(**mine, lr=0.25, seed=7, group=group)
            results = results if isinstance(results, tuple) else (results,)
            for node, got, full in zip(schedule.program.outputs, results, expected):
                want = shard(full, size, rank) if str(node.layout) == "Shard" else full
                agree(got, want, case, exact, f"{case}\n{node.name}\n{schedule}")
            for key, value in mine.items():
                assert torch.equal(value, before[key]), f"{key} has changed\n{schedule}"
            if (count + len(case.text)) % 5 == 0:
                inputs = {node.name: node for node in schedule.program.inputs}
                used = bool(schedule.program.users[inputs["lr"]])
                differs(context, run, mine, group, used)
            count += 1
        run = fused(**mine, lr=0.25, seed=7, group=group)
    dist.barrier(group=context.oracle)
    return count


def assert_same(context: Context, x: torch.Tensor) -> None:
    """All ranks hold the same bits."""
    everyone = [torch.empty_like(x) for _ in range(context.world_size)]
    dist.all_gather(everyone, x.contiguous(), group=context.oracle)
    assert all(torch.equal(x, other) for other in everyone)
