"""`fuse`: what a user calls."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist

from fusedpg.functional import shard_range
from fusedpg.fusion.autograd import Differentiable, attach
from fusedpg.fusion.captured import captured
from fusedpg.fusion.compiled import generated
from fusedpg.fusion.derive import Derived, derive
from fusedpg.fusion.eager import Executor, Run, say_once
from fusedpg.fusion.errors import IllegalProgram
from fusedpg.fusion.ir import SCALAR, SHARD, Layout, Node, Program
from fusedpg.fusion.lower import Parameter, lower
from fusedpg.fusion.schedule import Schedule, cheapest, schedules
from fusedpg.fusion.signature import Signature
from fusedpg.fusion.trace import trace
from fusedpg.fusion.transformations import AsShard, Transformation

_STATIC = (bool, str, type(None))
# Programs that are kept; the oldest goes first.
_KEPT = 128


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """The group of a call, and this rank's place."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    name: str

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> _Ranks:
        if not dist.is_initialized():
            raise RuntimeError("a fused function runs on a group: call init_process_group first")
        pg = dist.distributed_c10d._get_default_group() if group is None else group
        rank = dist.get_rank(pg)
        if rank < 0:
            raise ValueError("this rank is not in the group")
        return _Ranks(pg, dist.get_world_size(pg), rank, pg.group_name)

    def matches(self, other: Any) -> bool:
        """Whether what was passed to a functional collective is this group."""
        if self.group is None:
            return True
        if isinstance(other, dist.ProcessGroup):
            return other.group_name == self.name
        if isinstance(other, list):
            return other == dist.get_process_group_ranks(self.group)
        return bool(other == self.name)


class Pending:
    """A call that has begun: `wait()` does what is left, and returns the results."""

    def __init__(self, run: Run, finish: Callable[[list[torch.Tensor]], Any]) -> None:
        self._run = run
        self._finish = finish
        self._lock = threading.Lock()
        self._work: Any = None
        self._done = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._advance()

    def _advance(self) -> None:
        try:
            with torch.no_grad():
                self._work = next(self._run)
        except StopIteration as stop:
            self._result = self._finish(stop.value)
            self._done = True
        except BaseException as error:
            self._error = error
            raise

    def wait(self) -> Any:
        """The results, as a call without async_op returns them."""
        with self._lock:
            if self._error is not None:
                raise self._error
            while not self._done:
                try:
                    self._work.wait()
                except BaseException as error:
                    self._error = error
                    raise
                self._advance()
            return self._result

    def is_completed(self) -> bool:
        """Whether wait() returns at once."""
        return self._done


class FusedFunction:
    """A function whose collectives and elementwise operations are scheduled together.

    Made by `fuse`. Each combination of shapes, types, flags and world size is traced once; numbers
    may differ from call to call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        transformations: tuple[Transformation, ...] | None = None,
        backward: tuple[Transformation, ...] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._signature = Signature(function)
        self._function = cast("FunctionType", function)
        self._transformations = transformations
        self._backward = backward
        self._cache: dict[Any, Any] = {}
        self._lock = threading.RLock()

    # --- programs and schedules --------------------------------------------------------------

    def scheduled(
        self,
        *transformations: Transformation,
        backward: Sequence[Transformation] | None = None,
    ) -> FusedFunction:
        """The function with these transformations, in this order; none: as written.

        Args:
            backward: those of the backward; None: its cheapest schedule.
        """
        for transformation in transformations:
            name = transformation.node
            if isinstance(transformation, AsShard) and name in self._signature.layouts:
                transformation.refuse(
                    f"a schedule does not change what is passed: annotate `{name}` as Shard"
                )
        given = None if backward is None else tuple(backward)
        return FusedFunction(self._function, transformations, given)

    def program(
        self, *args: Any, group: dist.ProcessGroup | None = None, world_size: int = 0, **kwargs: Any
    ) -> Program:
        """The program for these arguments, before any transformation.

        Args:
            world_size: without a group: for so many ranks, seen by the first.
        """
        ranks = _Ranks(None, world_size, 0, "") if world_size else _Ranks.of(group)
        return self._traced(self._signature.bind(args, kwargs), ranks)

    def schedule(self, *args: Any, **kwargs: Any) -> Schedule:
        """How a call with these arguments is carried out; arguments as for `program`."""
        return self._chosen(self.program(*args, **kwargs))

    def schedules(self, *args: Any, **kwargs: Any) -> list[Schedule]:
        """The legal schedules for these arguments, the program as written first."""
        return schedules(self.program(*args, **kwargs))

    def generated(self, *args: Any, **kwargs: Any) -> str:
        """The C++ source that a call runs, or why there is none; arguments as for `program`."""
        return generated(self.schedule(*args, **kwargs).program)

    def derivative(
        self, *args: Any, wrt: Sequence[str] | None = None, world_size: int = 0, **kwargs: Any
    ) -> Derived:
        """The backward as a program, and what the forward keeps for it; arguments as for `program`.

        Args:
            wrt: the arguments whose gradients it gives; None: those that require grad, or all
                where none does.

        Raises:
            IllegalProgram: where there is no derivative, with the node.
        """
        program = self.program(*args, world_size=world_size, **kwargs)
        kwargs.pop("group", None)
        if wrt is None:
            values = self._signature.bind(args, kwargs)
            wrt = _requiring_grad(values) or tuple(node.name for node in program.inputs)
        return derive(program, wrt)

    def _chosen(self, program: Program) -> Schedule:
        return _schedule(program, self._transformations)

    def _traced(self, values: Mapping[str, Any], ranks: _Ranks) -> Program:
        parameters: dict[str, Parameter] = {}
        static: dict[str, Any] = {}
        for name, value in values.items():
            layout = self._signature.layouts[name]
            if isinstance(value, torch.Tensor):
                parameters[name] = Parameter(layout, shape=tuple(value.shape), dtype=value.dtype)
            elif isinstance(value, _STATIC):
                static[name] = value
            else:
                parameters[name] = Parameter(SCALAR, kind=type(value))
        captured(self._function)  # refuses
        graph = trace(self._function, list(parameters), static)
        name = self._function.__name__.replace("<lambda>", "function")
        results = self._signature.results
        program = lower(name, graph, parameters, results, ranks.size, ranks.matches)
        for node in program.inputs:
            if node.layout == SHARD and program.users[node]:
                _check_part(node, node.name, values[node.name], ranks)
        return program

    def _key(self, values: Mapping[str, Any], ranks: _Ranks) -> Any:
        arguments = tuple(
            (value.shape, value.dtype)
            if isinstance(value, torch.Tensor)
            else (value if isinstance(value, _STATIC) else type(value))
            for value in values.values()
        )
        return ranks.size, ranks.name, arguments, captured(self._function)

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self._cache.get(key)
        if found is None:
            with self._lock:
                found = self._cache.get(key)
                if found is None:
                    found = make()
                    while len(self._cache) >= _KEPT:
                        del self._cache[next(iter(self._cache))]
                    self._cache[key] = found
        return found

    def _lookup(self, values: Mapping[str, Any], ranks: _Ranks) -> Schedule:
        found: Schedule = self._cached(
            self._key(values, ranks), lambda: self._chosen(self._traced(values, ranks))
        )
        return found

    def _differentiable(
        self, values: Mapping[str, Any], ranks: _Ranks, wrt: tuple[str, ...]
    ) -> Differentiable:
        def make() -> Differentiable:
            derived = derive(self._traced(values, ranks), wrt)
            return Differentiable(
                derived,
                self._chosen(derived.forward),
                _schedule(derived.program, self._backward),
            )

        found: Differentiable = self._cached((*self._key(values, ranks), wrt), make)
        return found

    # --- calls -------------------------------------------------------------------------------

    def __call__(
        self,
        *args: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs the program on this rank's tensors.

        Every rank of the group calls it, in the same order as its other collectives.

        Returns:
            What the function returns, each result in its layout; with `async_op` a `Pending`, whose
            `wait()` returns that.
        """
        return self._start(args, kwargs, group, async_op, None)

    def into(
        self,
        targets: torch.Tensor | Sequence[torch.Tensor],
        *args: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As a call, and the results are written into `targets`, which may be arguments.

        They are written when all is computed: an error before leaves them as they were.
        """
        listed = [targets] if isinstance(targets, torch.Tensor) else list(targets)
        return self._start(args, kwargs, group, async_op, listed)

    def _start(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        async_op: bool,
        targets: list[torch.Tensor] | None,
    ) -> Any:
        ranks = _Ranks.of(group)
        values = self._signature.bind(args, kwargs)
        tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
        wrt = _requiring_grad(values) if torch.is_grad_enabled() else ()
        if wrt and targets is not None:
            raise RuntimeError(
                f"`{wrt[0]}` requires grad, and `into` writes over what a backward would read: "
                "call it under torch.no_grad(), or call the function and use its results"
            )
        if len({tensor.device for tensor in tensors.values()}) > 1:
            raise ValueError("the tensors of a call are on one device")
        plan = self._differentiable(values, ranks, wrt) if wrt else None
        schedule = plan.forward if plan else self._lookup(values, ranks)
        program = schedule.program
        single = plan.derived.single if plan else program.single
        if targets is not None:
            _check_targets(program, targets, ranks)
        say_once()

        def finish(results: list[torch.Tensor]) -> Any:
            if targets is not None:
                with torch.no_grad():
                    # A result may be an argument that is a target of another one.
                    safe = [
                        r.clone() if r is not target and _is_any(r, tensors) else r
                        for target, r in zip(targets, results)
                    ]
                    for target, result in zip(targets, safe):
                        if target is not result:  # written where it was computed
                            target.copy_(result.reshape(target.shape))
                results = targets
            if plan is not None:
                results = attach(plan, (ranks.group, ranks.rank), values, results)
            return results[0] if single else tuple(results)

        executor = Executor(program, ranks.group, ranks.rank, targets or ())
        pending = Pending(executor.run(values), finish)
        return pending if async_op else pending.wait()


def _requiring_grad(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        name
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    )


def _schedule(program: Program, transformations: tuple[Transformation, ...] | None) -> Schedule:
    if transformations is None:
        return cheapest(program)
    return Schedule(program).then(*transformations)


def _is_any(result: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> bool:
    return any(result is tensor for tensor in tensors.values())


def _held(layout: Layout, node: Node, ranks: _Ranks) -> tuple[int, ...]:
    """The shape of what a rank holds."""
    if layout == SHARD:
        return (shard_range(node.numel, ranks.size, ranks.rank)[1],)
    return node.shape


def _check_part(node: Node, name: str, tensor: torch.Tensor, ranks: _Ranks) -> None:
    expected = _held(SHARD, node, ranks)
    if tuple(tensor.shape) != expected:
        raise IllegalProgram(
            f"`{name}` is a Shard of a tensor of shape {list(node.shape)}: rank {ranks.rank} of "
            f"{ranks.size} holds a 1-d tensor of {expected[0]} elements "
            f"(fusedpg.shard_range), got shape {list(tensor.shape)}"
        )


def _check_targets(program: Program, targets: list[torch.Tensor], ranks: _Ranks) -> None:
    if len(targets) != len(program.outputs):
        raise ValueError(f"{len(program.outputs)} results, {len(targets)} targets")
    for number, (node, target) in enumerate(zip(program.outputs, targets)):
        expected = _held(node.layout, node, ranks)
        if tuple(target.shape) != expected or target.dtype != node.dtype:
            raise ValueError(
                f"target {number} is {target.dtype} of shape {list(target.shape)}; the result "
                f"{node.described()} has {node.dtype} and shape {list(expected)} here"
            )
        if any(target is other for other in targets[:number]):
            raise ValueError(f"target {number} is given twice")
        if target.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"target {number} requires grad: call it under torch.no_grad()")


def fuse(function: Callable[..., Any]) -> FusedFunction:
    """A function of tensors in which collectives and elementwise operations are one program.

    ::

        @fusedpg.fuse
        def step(g: Partial, w: Replicate, m: Shard, lr: float):
            m = 0.9 * m + all_reduce(g, "mean")
            return w - lr * m, m

        w, m = step(g, w, m, lr=0.1)

    Annotations are the layouts of torch.distributed.tensor: `Partial` (each rank has a
    contribution), `Replicate`, `Shard` (the rank has the elements `fusedpg.shard_range` of the flat
    tensor, as a 1-d tensor), `Shard(dim)` for operands of a matmul. A tensor without one is Partial
    if it goes straight into all_reduce or reduce_scatter, else Replicate. `float` and `int`
    parameters are numbers that may differ between calls; of a bool, str or None each value has a
    program of its own. docs/fusion.md has the operations and the rules.

    Raises:
        IllegalProgram: at the first call with arguments of some shapes, naming node and line.
    """
    return FusedFunction(function)
