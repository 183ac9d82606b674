"""`fuse`: what a user calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from fusedpg import _fork
from fusedpg._refusal import shared_errors, tell, telling
from fusedpg.fusion.alike import AsyncCall
from fusedpg.fusion.autograd import Differentiable, attach
from fusedpg.fusion.captured import Captured
from fusedpg.fusion.custom_op import autocast_of, described, number, register
from fusedpg.fusion.derive import Derived, derive
from fusedpg.fusion.errors import IllegalProgram, IllegalTransformation
from fusedpg.fusion.ir import REPLICATE, SCALAR, SHARD, Program
from fusedpg.fusion.local import generated
from fusedpg.fusion.lower import Parameter, collective, ends, lower
from fusedpg.fusion.messages import give_up
from fusedpg.fusion.places import Ranks, check_part, check_targets, refuse, transformed
from fusedpg.fusion.plan import EarlierCalls, Run, start, wait
from fusedpg.fusion.scattered import Targets, flat
from fusedpg.fusion.schedule import Schedule, cheapest, schedules
from fusedpg.fusion.signature import Signature
from fusedpg.fusion.trace import ambient, trace
from fusedpg.fusion.transformations import AsShard, Overlap, Transformation
from fusedpg.fusion.tune import SECONDS, Report, stand_ins
from fusedpg.fusion.tune import tune as tuned

_STATIC = (bool, str, type(None))
# Programs that are kept; the oldest goes first.
_KEPT = 128

_log = logging.getLogger("fusedpg")
_said = False


def _say_once() -> None:
    global _said
    if not _said:
        _said = True
        _log.info(
            'fused collectives run as generated code on tensors of the backend "fused", all '
            "else operation by operation: %s",
            "docs/guides/fusion.md",
        )


class Pending:
    """A call that has begun: `wait()` does what is left, and returns the results."""

    def __init__(
        self,
        run: Run,
        finish: Callable[[list[torch.Tensor]], object],
        told: telling,
        part: contextlib.AbstractContextManager[None],
    ) -> None:
        """`told` and `part`: the contexts in which each part of the call is done."""
        self._told, self._part = told, part
        self._run = run
        self._finish = finish
        self._lock = threading.Lock()
        self._work: object = None
        self._done = False
        self._error: BaseException | None = None
        self._result: object = None
        self._advance()

    def _advance(self) -> None:
        try:
            # A program has its own types and backward, which torch's modes must not change.
            with self._told, self._part, torch.no_grad(), torch._C._DisableAutocast():
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
                    with self._told:
                        wait(self._work, self._run)
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
        function: Callable[..., object],
        transformations: tuple[Transformation, ...] | None = None,
        backward: tuple[Transformation, ...] | None = None,
        *,
        auto: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self._signature = Signature(function)
        self._function = cast("FunctionType", function)
        self._captured = Captured(self._function)
        self._transformations = transformations
        self._backward = backward
        self._auto = auto
        self._cache: dict[object, object] = {}
        # What the tuner chose. By group, so that all its ranks have and drop the same.
        self._tuned: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, object]] = (
            weakref.WeakKeyDictionary()
        )
        self._reports: dict[object, Report] = {}
        self._earlier = EarlierCalls(self._signature, self._captured)
        self._lock = _fork.rlock()
        self._handle = register(self)
        self._parameters = tuple(parameters := self._signature.signature.parameters)
        self._defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not parameter.empty
        }

    # --- programs and schedules --------------------------------------------------------------

    def scheduled(
        self,
        *transformations: Transformation,
        backward: Sequence[Transformation] | None = None,
    ) -> FusedFunction:
        """The function with these transformations, in this order; none: as written.

        `AsShard` of an argument is what annotating it as Shard is: calls pass the rank's slice.

        Args:
            backward: those of the backward; None: its cheapest schedule.
        """
        layouts = self._signature.layouts
        arguments = [t for t in transformations if isinstance(t, AsShard) and t.node in layouts]
        given = None if backward is None else tuple(backward)
        rest = tuple(t for t in transformations if t not in arguments)
        function = FusedFunction(self._function, rest, given)
        function._signature.layouts |= self._signature.layouts  # with what is a Shard already
        for transformation in arguments:
            assert transformation.node is not None
            if layouts[transformation.node] not in (None, REPLICATE, SHARD):
                transformation.refuse(
                    f"the argument is {layouts[transformation.node]}, and only what all ranks have "
                    "alike can be kept as a slice"
                )
            function._signature.layouts[transformation.node] = SHARD
        return function

    def program(
        self,
        /,
        *args: object,
        group: dist.ProcessGroup | None = None,
        world_size: int = 0,
        **kwargs: object,
    ) -> Program:
        """The program for these arguments, before any transformation.

        Args:
            world_size: without a group: for so many ranks, seen by the first.
        """
        ranks = Ranks(None, world_size, 0, "") if world_size else Ranks.of(group)
        return self._traced(self._signature.bind(args, kwargs), ranks)

    def schedule(self, /, *args: object, **kwargs: Any) -> Schedule:
        """How a call with these arguments is carried out; arguments as for `program`."""
        if not kwargs.get("world_size"):
            rest = {name: value for name, value in kwargs.items() if name != "world_size"}
            ranks = Ranks.of(rest.pop("group", None))
            found = self._choice(self._key(self._signature.bind(args, rest), ranks), ranks)
            if found is not None:
                return cast("Schedule", found)
        program = self.program(*args, **kwargs)
        one_host = bool(kwargs.get("world_size")) or Ranks.of(kwargs.get("group")).one_host
        return self._chosen(program, one_host)

    def schedules(self, /, *args: object, **kwargs: Any) -> list[Schedule]:
        """The legal schedules for these arguments, the program as written first."""
        return schedules(self.program(*args, **kwargs))

    def generated(self, /, *args: object, device: str = "", **kwargs: object) -> str:
        """The C++ or CUDA source that a call runs, or why there is none; else as for `program`.

        Args:
            device: "cpu" or "cuda"; without one that of the tensors.
        """
        if not device:
            tensors = (x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor))
            device = "cuda" if any(x.is_cuda for x in tensors) else "cpu"
        return generated(self.schedule(*args, **kwargs).program, device)

    def derivative(
        self, /, *args: object, wrt: Sequence[str] | None = None, world_size: int = 0, **kwargs: Any
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

    def _chosen(self, program: Program, one_host: bool) -> Schedule:
        return _schedule(program, self._transformations, one_host)

    def _of_forward(self, program: Program, forward: Program, one_host: bool) -> Schedule:
        """The schedule of a program whose backward reads more than its results.

        If that is a slice, which chunks do not have, the forward does without their overlap. Only a
        message keeps it, as the other stage has it, too.
        """
        try:
            return self._chosen(forward, one_host)
        except IllegalTransformation:
            rest = tuple(
                t
                for t in self._transformations or ()
                if not isinstance(t, Overlap) or t.message(program) is not None
            )
            if len(rest) == len(self._transformations or ()):
                raise
            self._chosen(program, one_host)  # raises where it is illegal without gradients, too
            return _schedule(forward, rest, one_host)

    def _traced(self, values: Mapping[str, Any], ranks: Ranks, device: str = "") -> Program:
        parameters: dict[str, Parameter] = {}
        static: dict[str, object] = {}
        for name, value in values.items():
            layout = self._signature.layouts[name]
            if isinstance(value, torch.Tensor):
                parameters[name] = Parameter(layout, shape=tuple(value.shape), dtype=value.dtype)
            elif isinstance(value, _STATIC):
                static[name] = value
            else:
                parameters[name] = Parameter(SCALAR, kind=type(value))
        self._captured()  # refuses
        graph = trace(self._function, list(parameters), static)
        name = self._function.__name__.replace("<lambda>", "function")
        results = self._signature.results
        device = device or device_of(values)
        program = lower(name, graph, parameters, results, ranks.size, ranks.matches, device)
        for node in program.inputs:
            if node.layout == SHARD and program.users[node]:
                check_part(node, node.name, values[node.name], ranks)
        return program

    def _key(
        self, values: Mapping[str, object], ranks: Ranks, device: str = ""
    ) -> tuple[Hashable, ...]:
        """What a program is found by. `device`: its type; else that of the tensors."""
        arguments = tuple(
            (value.shape, value.dtype)
            if isinstance(value, torch.Tensor)
            else (value if isinstance(value, _STATIC) else type(value))
            for value in values.values()
        )
        state = ambient(device or device_of(values))
        return ranks.size, ranks.rank, ranks.name, arguments, state, self._captured()

    def _cached(self, key: object, make: Callable[[], object]) -> Any:
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

    def _cached_program(self, key: object, values: Mapping[str, object], ranks: Ranks) -> Program:
        return cast("Program", self._cached((key, "program"), lambda: self._traced(values, ranks)))

    def _choice(self, key: object, ranks: Ranks) -> Any:
        """What the tuner has chosen for calls of a key."""
        if ranks.group is None or not self._tuned:
            return None
        return self._tuned.get(ranks.group, {}).get(key)

    def _choose(self, key: object, ranks: Ranks, choice: Any, report: Report) -> None:
        assert ranks.group is not None
        # They are of what was chosen before.
        self._earlier = EarlierCalls(self._signature, self._captured)
        for kept, value in (
            (self._tuned.setdefault(ranks.group, {}), choice),
            (self._reports, report),
        ):
            while len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            kept[key] = value

    def _plan_and_program(
        self,
        values: Mapping[str, object],
        ranks: Ranks,
        wrt: tuple[str, ...],
        targets: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Differentiable | None, Program]:
        """By what a call is carried out: where `wrt` need gradients, with its backward."""
        key = (*self._key(values, ranks), wrt) if wrt else self._key(values, ranks)

        def make() -> Differentiable | Schedule:
            program = self._traced(values, ranks)
            if not wrt:
                return self._chosen(program, ranks.one_host)
            derived = derive(program, wrt)
            return Differentiable(
                derived,
                self._of_forward(program, derived.forward, ranks.one_host),
                _schedule(derived.program, self._backward, ranks.one_host),
            )

        found = self._choice(key, ranks)
        if found is None and self._auto and not self._cached_program(key, values, ranks).messages:
            self._tune(values, ranks, wrt, targets, SECONDS)
            found = self._choice(key, ranks)
        if found is None:
            found = self._cached(key, make)
        return (found, found.forward.program) if wrt else (None, found.program)

    # --- the tuner ---------------------------------------------------------------------------

    def tune(
        self,
        /,
        *args: object,
        group: dist.ProcessGroup | None = None,
        into: torch.Tensor | Sequence[torch.Tensor | Sequence[torch.Tensor]] | None = None,
        seconds: float = SECONDS,
        again: bool = False,
        **kwargs: object,
    ) -> Report:
        """Times the legal schedules on these arguments; later calls like it take the fastest.

        A collective: all ranks of the group call it, and all choose alike, by the slowest rank's
        median. It works on copies: the arguments stay as they are. Where an argument requires grad
        the backward's schedule is chosen, too. What has been chosen before, in this process or, as
        FUSEDPG_CACHE_DIR remembers, in another one, is not timed again.

        Args:
            into: the targets, where calls will be of `into`.
            seconds: no schedule is begun after these; of forward and backward each.
            again: time also what is known.

        Returns:
            What was found; print it. `report` has the tables of all.
        """
        if self._transformations is not None:
            raise ValueError("the function has a schedule of its own: tune it without `scheduled`")
        with telling(group, *args, *kwargs.values()):
            ranks = Ranks.of(group)
            values = self._signature.bind(args, kwargs)
            wrt = _requiring_grad(values) if torch.is_grad_enabled() and into is None else ()
            targets: Any = [into] if isinstance(into, torch.Tensor) else into
            targets = None if targets is None else list(targets)
            if any(not isinstance(t, torch.Tensor) for t in targets or ()):
                targets = Targets(targets, ()).flat
            return self._tune(values, ranks, wrt, targets, seconds, again)

    def report(self) -> str:
        """What the tuner has found on this rank: schedules, times, bytes, and what it chose."""
        return "\n".join(map(str, self._reports.values())) or "nothing has been tuned"

    def _tune(
        self,
        values: Mapping[str, object],
        ranks: Ranks,
        wrt: tuple[str, ...],
        targets: Sequence[torch.Tensor] | None,
        seconds: float,
        again: bool = False,
    ) -> Report:
        assert ranks.group is not None
        program = self._traced(values, ranks)
        if program.messages:
            raise ValueError(
                f"`{program.name}` has messages to other stages, which would have to tune with it: "
                "choose a schedule for both with `scheduled`"
            )
        if targets is not None:
            check_targets(program, list(targets), ranks)
        place, key = (ranks.group, ranks.rank), self._key(values, ranks)
        if not wrt:
            report = tuned(program, *place, values, targets or (), seconds=seconds, again=again)
            self._choose(key, ranks, report.chosen, report)
            return report
        derived = derive(program, wrt)
        report = tuned(derived.forward, *place, values, seconds=seconds, again=again)
        device = next(v.device for v in values.values() if isinstance(v, torch.Tensor))
        numbers = {name: values[source] for name, source in derived.numbers}
        given = stand_ins(derived.program, ranks.rank, device, numbers)
        backward = tuned(derived.program, *place, given, seconds=seconds, again=again)
        report = dataclasses.replace(report, backward=backward)
        plan = Differentiable(derived, report.chosen, backward.chosen)
        self._choose((*key, wrt), ranks, plan, report)
        return report

    # --- calls -------------------------------------------------------------------------------

    def __call__(
        self,
        /,
        *args: object,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        stages: dist.ProcessGroup | None = None,
        **kwargs: object,
    ) -> Any:
        """Runs the program on this rank's tensors.

        Every rank of the group calls it, in the same order as its other collectives.

        Args:
            stages: where the function has `send` or `recv`: the group of the ranks that have this
                rank's place in their stages (of a DeviceMesh its dimension of pipeline stages).

        Returns:
            What the function returns, each result in its layout; with `async_op` a `Pending`, whose
            `wait()` returns that.
        """
        if torch.compiler.is_compiling():
            if not async_op and stages is None:
                return self._as_operation(args, kwargs, group)
            return self._outside(args, kwargs, group, async_op, None, stages)
        return self._start(args, kwargs, group, async_op, None, stages)

    def into(
        self,
        targets: torch.Tensor | Sequence[torch.Tensor | Sequence[torch.Tensor]],
        /,
        *args: object,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        **kwargs: object,
    ) -> Any:
        """As a call, and the results are written into `targets`, which may be arguments.

        There is one target for each result, a tensor or a list of tensors.

        An operation that is checked and found wrong leaves them as they were. An error on the way
        (a rank that dies) may leave them half written, and ends the group: compiled code writes
        them as it computes them where no result needs their old values.
        """
        listed: list[Any] = [targets] if isinstance(targets, torch.Tensor) else list(targets)
        for target in listed:
            if not isinstance(target, torch.Tensor):
                return self._into_lists(args, kwargs, group, async_op, listed)
        start = self._outside if torch.compiler.is_compiling() else self._start
        return start(args, kwargs, group, async_op, listed)

    @torch._disable_dynamo
    def _into_lists(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        group: dist.ProcessGroup | None,
        async_op: bool,
        listed: list[Any],
    ) -> Any:
        before = shared_errors()
        try:
            given = self._defaults | dict(zip(self._parameters, args)) | dict(kwargs)
            values = self._signature.bind(args, kwargs)
            lists = [
                (value, values[name])
                for name, value in given.items()
                if isinstance(value, (list, tuple)) and name in values
            ]
            targets = Targets(listed, lists)
        except Exception as error:
            self._refused(args, kwargs, group, async_op, None, error, before)
            raise
        return self._start((), values, group, async_op, targets.flat, written=targets.write)

    # --- as an operation of torch.compile ----------------------------------------------------

    def _as_operation(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        group: dist.ProcessGroup | None,
    ) -> Any:
        """A call in what torch.compile traces: of it these lines alone are seen."""
        given = list(args)
        for name in self._parameters[len(args) :]:
            if name not in kwargs and name not in self._defaults:
                raise TypeError(f"missing argument `{name}`")
            given.append(kwargs[name] if name in kwargs else self._defaults[name])
        if len(args) + len(kwargs) > len(self._parameters) or len(given) > len(self._parameters):
            raise TypeError("too many arguments, or one of another name")
        for place, value in enumerate(given):
            if isinstance(value, (list, tuple)):
                given[place] = flat(self._parameters[place], value)
        kinds = described(given)
        state = autocast_of(given)
        tensors, floats, ints, wrt = [], [], [], []
        for name, value in zip(self._parameters, given):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                if value.requires_grad and torch.is_grad_enabled():
                    wrt.append(name)
            elif isinstance(value, float):
                floats.append(number(value))
            elif isinstance(value, int) and not isinstance(value, bool):
                ints.append(value)
        name = "" if group is None else group.group_name
        marker, *outputs = torch.ops.fusedpg.fused_function(
            tensors, floats, ints, self._handle, kinds, name, ",".join(wrt), state
        )
        count, single, _ = marker.shape
        return outputs[0] if single else tuple(outputs[:count])

    def bound(self, given: tuple[object, ...]) -> dict[str, object]:
        """Arguments by name, as a call checks them."""
        return self._signature.bind(given, {})

    def tensor_names(self, kinds: str) -> list[str]:
        """The parameters that are tensors, of the kinds that `described` gives."""
        return [n for n, kind in zip(self._parameters, kinds.split("\n")) if kind == "tensor"]

    def derived(
        self,
        values: Mapping[str, object],
        group: dist.ProcessGroup | None,
        wrt: tuple[str, ...],
        device: str,
    ) -> tuple[Derived | None, Program]:
        """The program for arguments of which only shapes and types matter, and its derivative.

        Args:
            device: the type of device that it will run on.
        """
        ranks = Ranks.of(group)

        def make() -> tuple[Derived | None, Program]:
            program = self._traced(values, ranks, device)
            return (derive(program, wrt) if wrt else None), program

        found: tuple[Derived | None, Program] = self._cached(
            (*self._key(values, ranks, device), wrt, "derived"), make
        )
        return found

    def planned(
        self, values: Mapping[str, object], group: dist.ProcessGroup | None, wrt: tuple[str, ...]
    ) -> tuple[Differentiable | None, Program, tuple[dist.ProcessGroup, int]]:
        """How a call is carried out, and where."""
        ranks = Ranks.of(group)
        assert ranks.group is not None
        return *self._plan_and_program(values, ranks, wrt), (ranks.group, ranks.rank)

    # --- what calls have in common -----------------------------------------------------------

    def _start(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        group: dist.ProcessGroup | None,
        async_op: bool,
        targets: list[torch.Tensor] | None,
        stages: dist.ProcessGroup | None = None,
        written: Callable[[], Any] | None = None,
    ) -> Any:
        """`written`: what a call returns instead of the targets, and is done behind them."""
        # Of a tensor with a tangent an earlier call knows nothing.
        ordinary = written is None and stages is None and forward_ad._current_level < 0
        if ordinary and not async_op:
            known = self._earlier.repeat(group, args, kwargs, targets or ())
            if known is not None:
                return known
        before = shared_errors()
        try:
            values, ranks, wrt, plan, program = self._prepared(args, kwargs, group, targets)
            into = targets or ()
            assert ranks.group is not None
            place = ranks.group, ranks.rank
            call, run = start(
                program, ranks.group, values, into, async_op=async_op, stages=stages, wrt=wrt
            )
        except Exception as error:
            self._refused(args, kwargs, group, async_op, stages, error, before)
            raise
        _say_once()
        single = plan.derived.single if plan else program.single

        def finish(results: list[torch.Tensor]) -> Any:
            if plan is not None:
                crossing = None if call.messages is None else call.messages.crossing
                results = attach(plan, place, values, results, crossing)
            if written is not None:
                return written()[0] if single else written()
            return results[0] if single else tuple(results)

        told = telling(ranks.group, *values.values(), when=call.meets)
        part = AsyncCall(ranks.group) if async_op else contextlib.nullcontext()
        pending = Pending(run, finish, told, part)
        if async_op:
            return pending
        result = pending.wait()
        if plan is None and written is None and not program.messages:
            self._earlier.add(call, values)
        return result

    # What has no operation breaks the graph; torch.compile must not trace what is below.
    _outside = torch._disable_dynamo(_start)

    def _prepared(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        group: dist.ProcessGroup | None,
        targets: list[torch.Tensor] | None,
    ) -> tuple[Mapping[str, object], Ranks, tuple[str, ...], Differentiable | None, Program]:
        """A call's arguments by name, where it runs, which of them need gradients, and by what."""
        values = self._signature.bind(args, kwargs)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and transformed(value):
                refuse(name, value)
        tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
        _refuse_tangents(tensors)
        ranks = Ranks.of(group)
        wrt = _requiring_grad(values) if torch.is_grad_enabled() else ()
        if wrt and targets is not None:
            raise RuntimeError(
                f"`{wrt[0]}` requires grad, and `into` writes over what a backward would read: "
                "call it under torch.no_grad(), or call the function and use its results"
            )
        if len({tensor.device for tensor in tensors.values()}) > 1:
            raise ValueError("the tensors of a call are on one device")
        plan, program = self._plan_and_program(values, ranks, wrt, targets)
        if targets is not None:
            if program.messages:
                raise ValueError(f"`{program.name}` has messages to other stages: not for `into`")
            check_targets(program, targets, ranks)
        return values, ranks, wrt, plan, program

    def _refused(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        group: dist.ProcessGroup | None,
        async_op: bool,
        stages: dist.ProcessGroup | None,
        error: Exception,
        before: int,
    ) -> None:
        """Tells the group and the other stages of a call that has no schedule.

        Args:
            before: `shared_errors()` before the call.
        """
        of_all = group or dist.group.WORLD
        if async_op and isinstance(of_all, dist.ProcessGroup):
            AsyncCall(of_all)
        given = self._defaults | dict(zip(self._parameters, args)) | dict(kwargs)
        static = {
            name: value
            for name, value in given.items()
            if name in self._parameters and isinstance(value, _STATIC)
        }
        usual = {name: self._defaults[name] for name in static if name in self._defaults}
        graph = None
        for known in (static, usual):  # it may have been refused for arguments of a wrong kind
            with contextlib.suppress(IllegalProgram):
                dynamic = [name for name in self._parameters if name not in known]
                graph = trace(self._function, dynamic, known)
                break
        numbers = any(not isinstance(value, torch.Tensor) for value in given.values())
        if graph is None or numbers or collective(graph):
            tell(group, error, before, given.values())
        if graph is not None and stages is not None:
            give_up(ends(graph), stages, torch.device(device_of(given)), error)


def device_of(values: Mapping[str, object]) -> str:
    """The type of device that the tensors are on."""
    for value in values.values():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor):
                return one.device.type
    return "cpu"


def _requiring_grad(values: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(
        name
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    )


def _refuse_tangents(tensors: Mapping[str, torch.Tensor]) -> None:
    """Of forward-mode derivatives, which results would lack unnoticed."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"`{name}` has a tangent, and a fused function has no forward-mode derivative: use "
                "its backward, or write this part without fusedpg.fuse"
            )


def _schedule(
    program: Program, transformations: tuple[Transformation, ...] | None, one_host: bool
) -> Schedule:
    if transformations is None:
        return cheapest(program, one_host)
    return Schedule(program).then(*transformations)


@overload
def fuse(
    function: Callable[..., object], *, schedule: Literal["auto"] | None = ...
) -> FusedFunction: ...
@overload
def fuse(*, schedule: Literal["auto"] | None = ...) -> Callable[..., FusedFunction]: ...
def fuse(
    function: Callable[..., object] | None = None, *, schedule: Literal["auto"] | None = None
) -> FusedFunction | Callable[..., FusedFunction]:
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
    program of its own. docs/guides/fusion.md has the operations and the rules.

    Args:
        schedule: "auto": the first call with each shape and type times the legal schedules on the
            group (`FusedFunction.tune`), and later ones take the fastest. None: the cheapest by a
            model.

    Raises:
        IllegalProgram: at the first call with arguments of some shapes, naming node and line.
    """
    if schedule not in (None, "auto"):
        raise ValueError(f'schedule is "auto" or None, got {schedule!r}')
    if function is None:
        return functools.partial(FusedFunction, auto=schedule == "auto")
    return FusedFunction(function, auto=schedule == "auto")
