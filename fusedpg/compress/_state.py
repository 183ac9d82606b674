"""The state of a communication hook that compresses.

No postponed annotations here: DDP inspects those of its hooks.
"""

import concurrent.futures
import dataclasses
import math
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakTensorKeyDictionary

from fusedpg._by_parameter import ByParameter, Kept, Order, order_in_bucket, shape_in_memory
from fusedpg.compress import (
    _agree,
    _checkpoint,
    _hosts,
    _lane,
    _numbers,
    _params,
    _schedule,
    memories,
)
from fusedpg.compress._base import Compressor
from fusedpg.compress._each import EachParameter, EachParametersMemory
from fusedpg.compress._lane import Lane
from fusedpg.compress._low_rank import PowerSGD
from fusedpg.compress._piece import Parts, Piece, Run, Runs, mixed
from fusedpg.compress._schedule import Layout
from fusedpg.compress._warm_up import WarmUp
from fusedpg.compress.communicators import Allgather, Allreduce, Communicator
from fusedpg.compress.memories import Memory
from fusedpg.functional import _is_ours


@dataclasses.dataclass
class _Bucket:
    """A bucket that DDP waits for."""

    buffer: torch.Tensor
    future: Any


@dataclasses.dataclass
class _Unit:
    """Gradients that are compressed at once: slices of buckets, whole parameters."""

    index: int
    step: int
    plain: bool  # sent as they are
    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)
    orders: list[Order] = dataclasses.field(default_factory=list)
    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of parameters
    sources: list[torch.Tensor] = dataclasses.field(default_factory=list)  # where they lie
    slices: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of buckets
    ends: list[_Bucket] = dataclasses.field(default_factory=list)  # complete with this unit
    timing: Any = None
    after: Any = None  # on a GPU: what has been queued before


class _Known(NamedTuple):
    """A parameter, as checkpoints have it."""

    name: str | None
    key: int  # of what is drawn for it
    dtype: str
    shape: tuple[int, ...] | None  # None: of a checkpoint that does not say

    @property
    def label(self) -> str:
        return f"parameter.{self.key}" if self.name is None else self.name


class _Loaded:
    """What a checkpoint has that has not been given to a parameter yet."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.memory = {name: list(kept) for name, kept in state_dict["memory"].items()}
        self.known = [_Known(*one) for one in state_dict["parameters"]]
        wrong = [name for name, kept in self.memory.items() if len(kept) != len(self.known)]
        if wrong:
            raise ValueError(
                f"the checkpoint has {len(self.known)} parameters, and another number of "
                f"{', '.join(wrong)}"
            )
        self.left = list(range(len(self.known)))

    def place(self, parameter: torch.Tensor, name: str | None) -> int:
        """Which of the checkpoint's parameters the next one of the model is.

        Raises:
            ValueError: if it is none of them.
        """
        what = "the next parameter" if name is None else repr(name)
        named = name is not None and all(one.name is not None for one in self.known)
        if named:
            fits = [n for n in self.left if self.known[n].name == name]
        else:
            # How buckets of several types alternate depends on their sizes. A single type may
            # change.
            kinds = {one.dtype for one in self.known}
            fits = [n for n in self.left if kinds == {self.known[n].dtype}
                    or self.known[n].dtype == str(parameter.dtype)]  # fmt: skip
        if not fits:
            raise ValueError(
                f"the checkpoint is of another model: it has no {what}, of {parameter.dtype} and "
                f"shape {tuple(parameter.shape)}, among {len(self.known)} parameters, "
                f"{len(self.left)} of which are left"
            )
        place = fits[0]
        one = self.known[place]
        if one.shape not in (None, tuple(parameter.shape)):
            raise ValueError(
                f"the checkpoint is of another model: {what} has shape {tuple(parameter.shape)}, "
                f"expected {one.shape} as {one.label!r} has there"
            )
        self.left.remove(place)
        return place


class State:
    """What :func:`hook` works with, one for each DDP module; :func:`from_params` makes it.

    Gradients are averaged as DDP does (compressors that vote: the sign of the majority) and the
    optimizer is any. What is not sent stays in the memory, of each parameter and rank. Work is done
    beside backward, by a thread and on a process group that the states of a group share, and which
    end with ``destroy_process_group()``.

    Args:
        compressor, memory, communicator: see :mod:`fusedpg.compress.compressors`, ``memories`` and
            ``communicators``.
        group: of the module; default: the default group. Any backend.
        schedule: what is compressed at once: "bucket" (each of DDP's), "layer" (each parameter),
            "one" (all), a number of groups of about equal size, or "auto": 1 to 4 groups, or no
            compression, whichever takes the least time (see ``report()``).
        seed: of what is drawn at random; the same on all ranks. torch's generators are not used.
        uncompressed_steps: so many first steps are not compressed.
        uncompressed_every: nor is every step whose number is a multiple of this (0: all are). What
            was kept is sent in such a step. For memories and compressors that allow it (see
            "auto").
        warmup_ratios: ``compress_ratio`` by epoch, as in DGC (0.25, 0.0625, 0.015625, 0.004); after
            them the compressor's own. Tell the state of epochs by ``set_epoch()``.
        named_parameters: of the model, ``model.named_parameters()``: by these names checkpoints,
            errors and one's own compressors know parameters. Without it they are known by the
            order of the first backward.

    Raises:
        ValueError: for parts that do not fit each other, and a schedule that is none.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        communicator: Communicator,
        *,
        group: dist.ProcessGroup | None = None,
        schedule: str | int = "bucket",
        seed: int = 0,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        uncompressed_steps: int = 0,
        uncompressed_every: int = 0,
        warmup_ratios: Sequence[float] = (),
    ) -> None:
        _params.check(compressor, memory, communicator)
        self.compressor, self.memory, self.communicator = compressor, memory, communicator
        self.seed = _numbers.whole("seed", seed)
        self._parent = group
        self.schedule = schedule
        self._schedule = _schedule.make(schedule)
        if isinstance(self._schedule, _schedule.Auto):
            self._schedule.with_plain = _may_be_plain(compressor, memory)
        self._warm_up = WarmUp(compressor, uncompressed_steps, uncompressed_every, warmup_ratios)
        if self._warm_up.any_plain and not _may_be_plain(compressor, memory):
            raise ValueError(
                f"uncompressed_steps and uncompressed_every with {type(compressor).__name__} and "
                f"{type(memory).__name__}: a step that is not compressed would not be one of the "
                "same training, as votes have another magnitude, and the memory dgc is a momentum"
            )
        self._kept = ByParameter()
        self._step = 0
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, parameter in named_parameters or ():
            # DDP's own names are those of its module.
            self._names[parameter] = name.removeprefix("module.")
        # Parameters in the order of their first appearance, and those of a checkpoint.
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._order: list[tuple[weakref.ref[torch.Tensor], _Known]] = []
        self._next_key = 0
        self._loaded: _Loaded | None = None
        self._keeps = False  # whether anything but zeros may be kept of earlier steps
        self._has_loaded = False  # any rank, a checkpoint's memory
        self._clear()

    def set_epoch(self, epoch: int) -> None:
        """Which of ``warmup_ratios`` holds in the steps that follow; the same on all ranks."""
        self._wait()
        self._warm_up.set_epoch(epoch)

    def check_module(self, group: dist.ProcessGroup) -> None:
        """Raises ValueError where a module's gradients would be averaged over other ranks."""
        mine, its = (dist.get_process_group_ranks(g) for g in (self._parent, group))
        if mine != its:
            raise ValueError(
                f"the state combines gradients of ranks {mine}, and the module is one of ranks "
                f"{its}: give the state its group, from_params(..., group=process_group)"
            )

    def _clear(self) -> None:
        """What begins anew in another process."""
        self._group: Any = None
        self._hosts: _hosts.Hosts | None = None
        self._lane: Lane | None = None
        self._finishing: concurrent.futures.Future[None] | None = None
        self._plain = self._direct = self._forced = False
        self._sent: list[Any] = []  # futures of this step's buckets that took DDP's own way
        self._failure: BaseException | None = None
        self._open: _Unit | None = None
        self._waiting: list[_Bucket] = []  # for the unit that is open
        self._position = self._units = 0
        self._splits: frozenset[int] | None = None
        self._layout = Layout()
        self._seen = Layout()
        self._scratch: dict[int, torch.Tensor] = {}
        # By unit: of which parameters, in which orders.
        self._runs: dict[int, tuple[list[weakref.ref[torch.Tensor]], list[Order], Runs]] = {}

    # --- groups -----------------------------------------------------------------------------

    def _connect(self) -> Lane:
        lane = _lane.of(self._parent)
        facts = {"seed": self.seed, "step": self._step, "schedule": self.schedule}
        facts |= self._warm_up.options()
        if isinstance(self.compressor, PowerSGD):
            # Every rank multiplies and orthogonalises for itself, with what BLAS has for it.
            facts["processor"] = torch.backends.cpu.get_cpu_capability()
        lane.submit(_agree.check, facts | self._parts(), lane.group).result()
        self._group = lane.group
        loaded = [float(self._loaded is not None and any(self._loaded.memory.values()))]
        self._has_loaded = lane.submit(self._agree, loaded).result() != [0.0]
        self._keeps |= self._has_loaded
        # The engine's all_reduce adds up inside of hosts itself.
        self._hosts = None if isinstance(self.communicator, Allreduce) else lane.hosts
        return lane

    def _parts(self) -> dict[str, Any]:
        """What ranks compress with, which may change from step to step."""
        return {
            "compressor": _agree.described(self.compressor),
            "memory": _agree.described(self.memory),
            "communicator": _agree.described(self.communicator),
        }

    # --- a pass of DDP's, bucket by bucket ------------------------------------------------------

    def take(
        self,
        bucket: GradBucket,
        gradients: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """What the hook does.

        Args:
            gradients: those that are not in the bucket but here, by parameter, laid out alike and
                contiguous. They must not change before the result is there.
        """
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise ValueError(
                f"fusedpg.compress: compresses dense gradients, found {buffer.layout}: use "
                "nn.Embedding(sparse=False)"
            )
        if self._lane is None:
            self._lane = self._connect()
        if bucket.index() == 0:
            self._begin()
        parameters = bucket.parameters()
        # DDP's first buckets are the model's parameters from the last to the first, but for the
        # order in a bucket.
        try:
            self._know(parameters[::-1])
            if bucket.is_last():
                self._loaded_all()
        except ValueError as error:
            self._fail(error)  # the others wait for this rank
            raise
        splits = self._follow(parameters, buffer)
        as_known = (self._splits is not None or self._forced) and self._failure is None
        found = [None if gradients is None else gradients.get(p) for p in parameters]
        if self._direct and as_known and buffer.device.type == "cpu":
            self._position += len(parameters)
            _fill(buffer, parameters, found)
            answer = self._as_without_hook(buffer)
        else:
            answer = self._compressed(parameters, buffer, splits, found)
        if bucket.is_last():
            self._end()
        return answer

    def _compressed(
        self,
        parameters: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        splits: frozenset[int],
        gradients: Sequence[torch.Tensor | None],
    ) -> torch.futures.Future[torch.Tensor]:
        """Hands the units that end in a bucket to the thread."""
        devices: Any = [buffer.device] if buffer.is_cuda else None
        result: Any = torch.futures.Future(devices=devices)
        mine = _Bucket(buffer, result)
        # Only an exception out of a callback is one to DDP, too.
        answer: Any = result.then(self._answer)
        begin = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            end = begin + parameter.numel()
            source = None if gradient is None else gradient.view(-1)
            self._add(parameter, order_in_bucket(parameter, buffer), buffer[begin:end], source)
            begin = end
            self._position += 1
            if self._position in splits:
                self._close()
        self._waiting.append(mine)
        if self._open is None:
            self._close()
        return answer

    def _as_without_hook(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Nothing is compressed and nothing was kept: the mean, by the module's own group.

        In that group's arena the bucket can be read where it lies, and no thread is woken for it.
        DDP calls hooks in the order in which it would call that group itself.
        """
        timing = self._timing()
        self._scale(buffer)
        begin = time.perf_counter()
        work = dist.all_reduce(buffer, dist.ReduceOp.AVG, group=self._parent, async_op=True)

        def done(sent: torch.futures.Future[Any]) -> torch.Tensor:
            sent.value()  # raises what the operation has raised
            timing(begin, time.perf_counter(), buffer.numel())
            return buffer

        answer: Any = work.get_future().then(done)
        self._sent.append(answer)
        return answer

    def abandon(self) -> None:
        """After a backward that was cut short: the rest of an open unit never comes, and whoever
        waits for its buckets would do so forever."""
        waiting, self._waiting, self._open = self._waiting, [], None
        for bucket in waiting:
            bucket.future.set_result(None)

    def _begin(self) -> None:
        self.abandon()  # of an earlier backward, which may go on
        self._position = self._units = 0
        self._sent = []
        self._seen = Layout()
        self._step += 1
        if self._finishing is not None:
            # The ranks' next candidate is the same, once it has been agreed on.
            self._finishing.result()
        # Of a search such a step is none: it goes on afterwards.
        self._forced = self._warm_up.plain(self._step)
        self._splits = None if self._forced else self._schedule.begin(self._layout)
        self._plain = self._forced or self._schedule.plain
        self._direct = self._plain and not self._keeps and _is_ours(self._parent)

    def _timing(self) -> _schedule.Timing:
        if self._forced:
            return lambda begin, end, numel: None
        return self._schedule.timing(self._position)

    def _follow(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> frozenset[int]:
        """Where units end in this bucket, by positions after parameters.

        A schedule is made for the layout of the pass before: where DDP's buckets are others now,
        each of them is a unit.
        """
        self._seen.add([p.numel() for p in parameters], (buffer.dtype, buffer.device))
        if self._splits is not None and not self._seen.begins(self._layout):
            self._splits = None
            self._close()
        if self._splits is None:
            if self._schedule.by_layer and not self._forced:
                return frozenset(range(self._position, self._position + len(parameters) + 1))
            return frozenset({self._position + len(parameters)})
        return self._splits

    def _add(
        self,
        parameter: torch.Tensor,
        order: Order,
        part: torch.Tensor,
        source: torch.Tensor | None,
    ) -> None:
        unit = self._open
        if unit is None:
            unit = self._open = _Unit(self._units, self._step, self._plain)
            self._units += 1
        unit.parameters.append(parameter)
        unit.orders.append(order)
        unit.parts.append(part)
        unit.sources.append(part if source is None else source)
        last = unit.slices[-1] if unit.slices else None
        if last is not None and _follows(last, part):
            joined = last.numel() + part.numel()
            unit.slices[-1] = last.as_strided((joined,), (1,), last.storage_offset())
        else:
            unit.slices.append(part)

    def _close(self) -> None:
        """Hands the open unit, and the buckets that end with it, to the thread."""
        unit, self._open = self._open, None
        if unit is None:
            unit = _Unit(-1, self._step, True)
        unit.ends, self._waiting = self._waiting, []
        unit.timing = self._timing()
        if unit.slices and unit.slices[0].is_cuda:
            unit.after = torch.cuda.current_stream(unit.slices[0].device).record_event()
        assert self._lane is not None
        self._lane.submit(self._run, unit)

    def _end(self) -> None:
        if self._open is not None or self._waiting:
            self._close()
        if self._seen != self._layout:
            self._layout = self._seen
            self._schedule.restart()
        assert self._lane is not None
        sent, self._sent = self._sent, []
        self._finishing = self._lane.submit(self._finish, self._plain, self._forced, sent)

    # --- on the thread ----------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, unit: _Unit) -> None:
        if self._failure is None and unit.parameters:
            try:
                begin = time.perf_counter()
                if unit.after is not None:
                    # This thread has streams of its own.
                    device = unit.slices[0].device
                    torch.cuda.set_device(device)
                    torch.cuda.current_stream(device).wait_event(unit.after)
                self._exchange(unit)
                unit.timing(begin, time.perf_counter(), sum(s.numel() for s in unit.slices))
            except BaseException as error:
                self._fail(error)
        for bucket in unit.ends:
            bucket.future.set_result(bucket.buffer)

    def _answer(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        if self._failure is not None:
            raise RuntimeError(
                "fusedpg.compress: a step has failed on this rank: "
                f"{type(self._failure).__name__}: {self._failure}. Gradients and memories of this "
                "step are undefined; make a new state, or load a checkpoint in a new process"
            ) from self._failure
        result: torch.Tensor | None = done.value()
        if result is None:
            raise RuntimeError(
                "fusedpg.compress: a backward has raised, or another backward has begun with this "
                "state, before all buckets of this one were there: a state is for one DDP module, "
                "make one for each"
            )
        return result

    def _finish(self, plain: bool, forced: bool, sent: Sequence[Any]) -> None:
        # Where no unit of the step was compressed, all that had been kept was sent.
        self._keeps &= not plain
        if self._failure is None:
            try:
                for one in sent:
                    one.wait()
                if not forced:
                    self._schedule.finish(self._agree)
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        assert self._lane is not None
        _lane.drop(self._lane)

    def _agree(self, numbers: Sequence[float]) -> list[float]:
        """The largest of all ranks', each."""
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        found = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

    def _exchange(self, unit: _Unit) -> None:
        slices = unit.slices
        wide = torch.float64 if slices[0].dtype == torch.float64 else torch.float32
        grad: Any = slices[0]
        in_parts = (
            not unit.plain
            and self._hosts is None
            and type(self.communicator).exchange in (Allgather.exchange, Allreduce.exchange)
            and self.compressor.each_parameter
            and grad.dtype == wide
        )
        copied = not in_parts and (len(slices) > 1 or grad.dtype != wide)
        if in_parts:
            grad = Parts(unit.sources, unit.parts)
        else:
            for part, source in zip(unit.parts, unit.sources, strict=True):
                if source is not part:
                    part.copy_(source)
            if copied:
                grad = self._gathered(unit, wide)
        state, kept = self._states_of(unit, wide)
        piece = Piece(
            str(unit.index),
            sum(part.numel() for part in slices),
            self._runs_of(unit),
            dist.get_rank(self._group),
            dist.get_world_size(self._group),
            mixed(self.seed, unit.step),
            wide,
            slices[0].device,
            state,
            kept=kept,
        )
        self._keeps |= not unit.plain
        if unit.index == 0:
            # Before anything is sent whose size or meaning depends on it.
            _agree.check_quickly(self._parts(), self._group)
        if unit.plain:
            self._uncompressed(grad, piece)
        elif self._hosts is not None:
            self._hosts.exchange(self.communicator, *self._each(), grad, piece)
        else:
            self.communicator.exchange(*self._each(), grad, piece, self._group)
        if copied:
            begin = 0
            for part in slices:
                part.copy_(grad[begin : begin + part.numel()])
                begin += part.numel()

    def _each(self) -> tuple[Compressor, Memory]:
        """What communicators work with; both parts may be replaced between steps."""
        if not self.compressor.each_parameter:
            return self.compressor, self.memory
        return EachParameter(self.compressor), EachParametersMemory(self.memory)

    def _runs_of(self, unit: _Unit) -> Runs:
        known = self._runs.get(unit.index)
        if (
            known is not None
            and len(known[0]) == len(unit.parameters)
            and all(ref() is parameter for ref, parameter in zip(known[0], unit.parameters))
            and known[1] == unit.orders
        ):
            return known[2]
        runs = Runs(map(self._run_of, unit.parameters, unit.orders))
        self._runs[unit.index] = [*map(weakref.ref, unit.parameters)], unit.orders, runs
        return runs

    def _run_of(self, parameter: torch.Tensor, order: Order) -> Run:
        known: _Known = self._known[parameter]
        return Run(known.label, known.key, 0, parameter.numel(), shape_in_memory(parameter, order))

    def _gathered(self, unit: _Unit, dtype: torch.dtype) -> torch.Tensor:
        total = sum(part.numel() for part in unit.slices)
        device = unit.slices[0].device
        known = self._scratch.get(unit.index)
        if known is None or (known.numel(), known.dtype, known.device) != (total, dtype, device):
            known = self._scratch[unit.index] = torch.empty(total, dtype=dtype, device=device)
        begin = 0
        for part in unit.slices:
            known[begin : begin + part.numel()] = part
            begin += part.numel()
        return known

    def _uncompressed(self, grad: torch.Tensor, piece: Piece) -> None:
        """The mean of what a memory makes of gradients, with what was kept of earlier steps."""
        self._scale(grad)
        scale = self.memory.scale
        for name in self._kept.names() if self._keeps else ():
            if not name.startswith("residual"):
                continue
            residual = piece.state(name)
            # A server's is of the mean, a host's of the mean of its ranks, and what a memory keeps
            # may have another unit.
            share = scale * self.memory.beta
            if name.endswith("@server"):
                sums = self.memory.for_sums()
                share = piece.world_size * sums.scale * sums.beta
            if self._hosts is not None and not name.endswith("@server"):
                share *= self._hosts.count
            grad.add_(residual, alpha=share)
            residual.zero_()
        if _is_ours(self._group):
            dist.all_reduce(
                grad, dist.ReduceOp.AVG, group=self._group
            )  # the same bits, in one pass
        else:
            dist.all_reduce(grad, group=self._group)
            grad.div_(piece.world_size)

    def _scale(self, grad: torch.Tensor) -> None:
        """What a memory makes of gradients that are sent as they are."""
        factor = self.memory.scale * self.memory.gamma
        # Of EFSignSGD's memory this is 1 but for rounding.
        if self.memory.gamma != 1 and not math.isclose(factor, 1):
            grad.mul_(factor)

    def _states_of(self, unit: _Unit, dtype: torch.dtype) -> tuple[Any, Any]:
        """``state`` and ``kept`` of a unit's piece."""
        wholes: dict[str, torch.Tensor] = {}

        def unsettled(name: str, shared: Sequence[Any] = ()) -> Kept:
            def moved(tensor: torch.Tensor) -> None:
                """Slices that ranks share out are others than before."""
                for group, _, _ in shared:
                    dist.all_reduce(tensor, group=group)
                if shared:
                    # All of this rank's slice, of which what is asked for may be a part.
                    _, first, last = shared[0]
                    tensor[:first].zero_()
                    tensor[last:].zero_()

            wholes.pop(name, None)
            return self._kept.unsettled(
                name, unit.parameters, unit.orders, dtype, unit.slices[0].device, moved,
                self._has_loaded,
            )  # fmt: skip

        def state(name: str, begin: int, end: int, shared: Sequence[Any]) -> torch.Tensor:
            if name not in wholes:
                found = unsettled(name, shared)
                found.settle()
                wholes[name] = found.tensor
            return wholes[name][begin:end]

        return state, unsettled

    # --- what was tried, and checkpoints ----------------------------------------------------------

    def report(self) -> _schedule.Report:
        """What ``schedule="auto"`` has tried so far; ``print`` it, or ``.plot(path)``.

        Raises:
            ValueError: for another schedule.
        """
        self._wait()
        return self._schedule.report()

    def _wait(self) -> None:
        if self._finishing is not None:
            self._finishing.result()

    def _know(self, parameters: Sequence[torch.Tensor]) -> None:
        """Numbers parameters that are new, and gives them what a checkpoint has of them."""
        for parameter in parameters:
            if parameter in self._known:
                continue
            name, key = self._names.get(parameter), self._next_key
            if self._loaded is not None and self._loaded.known:
                place = self._loaded.place(parameter, name)
                key = self._loaded.known[place].key
                name = name or self._loaded.known[place].name
                for kept, saved in self._loaded.memory.items():
                    if saved[place] is not None:
                        self._kept.set(kept, parameter, saved[place].to(parameter.device))
            known = _Known(name, key, str(parameter.dtype), tuple(parameter.shape))
            self._next_key = max(self._next_key, key + 1)
            self._known[parameter] = known
            self._order.append((weakref.ref(parameter), known))

    def _loaded_all(self) -> None:
        """After the first backward with a checkpoint: another model may have fewer parameters."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.left:
            first = loaded.known[loaded.left[0]]
            raise ValueError(
                f"the checkpoint is of another model: of its {len(loaded.known)} parameters "
                f"{len(loaded.left)} are not in this one, the first of which is {first.label!r} of "
                f"shape {first.shape}"
            )

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps of gradients, and the number of steps, under a key that names it.

        Each rank saves its own: in a file, or all of them by ``torch.distributed.checkpoint``.
        The values can be read by name: ``state_dict()["memory"]["residual"]``.
        """
        return _checkpoint.RankStateDict(_checkpoint.place(self._parent), self._values())

    def _values(self) -> dict[str, Any]:
        self._wait()
        # Without those of modules that have gone: who loads it has never seen them.
        known = [(p, one) for ref, one in self._order if (p := ref()) is not None]
        memory = {
            name: [
                None
                if (kept := self._kept.get(name, parameter)) is None
                else kept.detach().reshape(-1).to("cpu", copy=True)
                for parameter, _ in known
            ]
            for name in self._kept.names()
        }
        parameters = [tuple(one) for _, one in known]
        if not known and self._loaded is not None:
            # What was loaded and has not been asked for yet.
            memory = dict(self._loaded.memory)
            parameters = [tuple(one) for one in self._loaded.known]
        return {
            "step": self._step,
            "epoch": self._warm_up.epoch,
            "seed": self.seed,
            "parameters": parameters,
            "memory": memory,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, memory: bool = True) -> None:
        """Of a model whose parameters are the same: their names, if both have some, else their
        order, types and shapes.

        Args:
            state_dict: this rank's own.
            memory: False begins with an empty memory, and takes any rank's ``state_dict``: for
                ranks that have none of their own, or are more or fewer than those that saved.

        Raises:
            ValueError: for another rank's; here or in the first backward, for another model's.
        """
        self._load(_checkpoint.values_of(state_dict, _checkpoint.place(self._parent), memory))

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        self._wait()
        loaded = _Loaded(state_dict)
        known = [parameter for ref, _ in self._order if (parameter := ref()) is not None]
        if known and loaded.known:
            # Nothing is changed unless all of it fits.
            trial = _Loaded(state_dict)
            for parameter in known:
                trial.place(parameter, self._names.get(parameter))
        self._keeps = True
        # Not every rank may have something of each kind until a step has been compressed, which
        # the first one of a layout is.
        self._layout = Layout()
        self._schedule.restart()
        if self._failure is None:
            self._lane = None  # the next backward asks again whether all ranks have the same
        self._step, self.seed = int(state_dict["step"]), int(state_dict["seed"])
        self._warm_up.set_epoch(state_dict.get("epoch", 0))  # older checkpoints have none
        self._loaded = loaded
        self._kept = ByParameter()
        self._order.clear()
        self._known.clear()
        self._runs.clear()
        self._know(known)

    def __getstate__(self) -> dict[str, Any]:
        """Without the process group, as torch's states of hooks."""
        return {
            "parts": (self.compressor, self.memory, self.communicator),
            "schedule": self.schedule,
            "warm_up": (self._warm_up.options(), self._warm_up.ratio),
            "state": self._values(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, ratio = state["warm_up"]
        State.__init__(
            self, *state["parts"], schedule=state["schedule"], seed=state["state"]["seed"],
            **options,
        )  # fmt: skip
        if ratio is not None:
            self._warm_up.begin(ratio, 0)  # the compressor has that of the epoch
        self._load(state["state"])


def _fill(
    buffer: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Copies those that are not in the bucket."""
    begin = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        end = begin + parameter.numel()
        if gradient is not None:
            buffer[begin:end] = gradient.view(-1)
        begin = end


def _follows(last: torch.Tensor, part: torch.Tensor) -> bool:
    """In one bucket: two may lie side by side by chance."""
    return (
        last.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        and last.dtype == part.dtype
        and last.storage_offset() + last.numel() == part.storage_offset()
    )


def _may_be_plain(compressor: Compressor, memory: Memory) -> bool:
    """Whether a step without compression is one of the same training: a vote has another
    magnitude, and DGC's memory is the momentum."""
    known = (memories.NoneMemory, memories.ResidualMemory, memories.EFSignSGDMemory,
             memories.PowerSGDMemory)  # fmt: skip
    mean = compressor.average and type(compressor).aggregate is Compressor.aggregate
    return compressor.keeps_magnitude and mean and type(memory) in known
