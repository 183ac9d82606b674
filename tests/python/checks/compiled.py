"""What each rank does in the tests of generated code."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import fusedpg
from checks import fusion as checks
from checks.fusion import Case
from fusedpg import _agreement
from fusedpg.fusion import compile as compiling
from fusedpg.fusion import compiled
from fusedpg.fusion.ir import Program
from fusedpg.fusion.local import LocalKernel
from harness import Context

CALLS = 6  # of a random program
# Of sums of some thousand elements that are taken in float32 and rounded once.
BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
_cache = os.environ.get("FUSEDPG_CACHE_DIR") or tempfile.gettempdir()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def compiles(context: Context) -> contextlib.AbstractContextManager[None]:
    return environment(FUSEDPG_FUSION="compiled", FUSEDPG_CACHE_DIR=context.scratch or _cache)


def done() -> int:
    """How many programs have run as generated code."""
    return int(fusedpg.stats().get("fused_program", {}).get("calls", 0))


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """The groups that have been computed by generated code meanwhile."""
    done: list[Any] = []
    compute = LocalKernel.compute

    def counting(self: LocalKernel, *given: Any) -> Any:
        done.append(self.source)
        return compute(self, *given)

    with mock.patch.object(LocalKernel, "compute", counting):
        yield done


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """The same elements in another order in memory, where there are several dimensions."""
    return x.clone() if x.dim() < 2 else x.transpose(0, -1).contiguous().transpose(0, -1)


def forget_answers() -> None:
    """As if this rank had never asked; plans keep the answers, too."""
    for of_group in _agreement._answers.values():
        for answer in of_group.values():
            answer.all_have_it = None


def forget() -> None:
    """What is known of functions: who has compiled them, on all ranks at once."""
    compiling._functions.clear()
    forget_answers()


def reductions(program: Program) -> int:
    """The collectives that run as generated code: fused ones, and those with nothing around."""
    inside = {
        node
        for group, nodes in program.units
        if group is not None and group.kind == "collective"
        if compiled.kernel(group, nodes, program).source is not None
        for node in nodes
        if node.op == "all_reduce"
    }
    sums = (node for node in program.nodes if node.op in ("all_reduce", "reduce_scatter"))
    return sum(node not in inside for node in sums)


class Random:
    """A random program, what this rank gives it, and what torch makes of it in one process."""

    def __init__(self, context: Context, case: Case) -> None:
        self.context, self.case = context, case
        self.rank, self.size = context.rank, context.world_size
        self.drawn = checks.tensors(case, self.size)
        function = checks.compiled(case.text, checks.REFERENCE)
        with torch.no_grad():
            whole = {
                key: checks.Contributions(value) if isinstance(value, list) else value
                for key, value in self.drawn.items()
            }
            self._expected = function(**whole, lr=0.25, seed=7)
        self._mine = {
            key: value[self.rank] if isinstance(value, list) else value
            for key, value in self.drawn.items()
        }
        self._mine["m"] = checks.shard(self.drawn["m"], self.size, self.rank)
        self._fused = fusedpg.fuse(checks.compiled(case.text, checks.FUSED))

    def schedules(self, kind: str) -> list[Any]:
        """Those that have a group of a kind."""
        return [
            schedule
            for schedule in self._fused.schedules(**self._mine, lr=0.5, seed=1)
            if any(group.kind == kind for group in schedule.program.groups)
        ]

    def results(self, schedule: Any) -> Any:
        """Of the last of CALLS calls, which have the same bits; the third takes a shortcut.

        One is waited for later, and one writes over arguments, where they fit. In the last one
        shortcuts are for other ranks: this one's tensors have other strides.
        """
        run = self._fused.scheduled(*schedule.transformations)
        first = run(**self._mine, lr=0.25, seed=7)
        for node, x in zip(schedule.program.outputs, first):
            if str(node.layout) != "Shard" and self.context.oracle is not None:
                checks.assert_same(self.context, x.nan_to_num())
        for number in range(CALLS - 2):
            given = {key: t.clone() for key, t in self._mine.items()}
            if number < CALLS - 4:
                again = run(**self._mine, lr=0.25, seed=7)
            elif number == CALLS - 4:
                again = run(**self._mine, lr=0.25, seed=7, async_op=True).wait()
            else:
                again = run.into(self._targets(given, first), **given, lr=0.25, seed=7)
            torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
        given = dict(self._mine)
        if self.rank == 0:
            given = {key: _transposed(value) for key, value in given.items()}
        return run(**given, lr=0.25, seed=7)

    def _targets(self, given: dict[str, Any], results: Any) -> tuple[torch.Tensor, ...]:
        """Of each result, an argument that fits, or other memory."""
        free, targets = dict(given), [torch.empty_like(x) for x in results]
        for number, x in enumerate(targets):
            fits = [k for k, t in free.items() if t.shape == x.shape and t.dtype == x.dtype]
            if fits and (self.case.seed + number) % 3:
                targets[number] = free.pop(fits[(self.case.seed + number) % len(fits)])
        return tuple(targets)

    def compare(self, schedule: Any, results: Any, text: str, exact: bool) -> None:
        """``text``: the generated source. ``exact``: bit by bit, where its mathematics allows."""
        case = self.case
        # Of 16-bit elements that fill no vector torch rounds the root, too.
        rounds = "rsqrt" in case.text and case.dtype.itemsize == 2
        exact = exact and case.exact and "<ATen/" not in text and not rounds
        for node, got, full in zip(schedule.program.outputs, results, self._expected):
            shard = str(node.layout) == "Shard"
            want = checks.shard(full, self.size, self.rank) if shard else full
            # Here and there a rounding of a transcendental function turns a comparison.
            checks.agree(got, want, case, exact, f"{case}\n{node.name}\n{schedule}\n{text}")


def random_program(context: Context, case: Case, fits: Any = None) -> int:
    """Schedules with fused collectives, compiled and not; how many ran as generated code.

    `fits`: of which of them.
    """
    program = Random(context, case)
    ran = 0
    for schedule in filter(fits, program.schedules("collective")):
        if ran >= 2:
            break
        text = "\n".join(compiled.sources(schedule.program))
        program.compare(schedule, program.results(schedule), text, exact=False)
        before = done()
        with compiles(context):
            results = program.results(schedule)
        # Sums over elements have no kernel on a GPU.
        kernel = "= local_" not in text or "FUSEDPG_CUDA_LIB" not in os.environ
        if "extern" in text and kernel and program.drawn["w"].numel():
            assert done() == before + CALLS * reductions(schedule.program), text
            ran += 1
        program.compare(schedule, results, text, exact=True)
    return ran


@contextlib.contextmanager
def no_compiler(here: bool, **more: str) -> Iterator[None]:
    """Nothing is compiled yet, and here there is no compiler, or another environment."""
    forget()
    absent = (more or {"CXX": "/nowhere/c++"}) if here else {}
    with tempfile.TemporaryDirectory() as empty:
        with environment(**{"FUSEDPG_FUSION": "compiled", "FUSEDPG_CACHE_DIR": empty, **absent}):
            yield
    forget()
