"""The state of a communication hook that compresses.

No postponed annotations here: DDP inspects those of its hooks.
"""

import concurrent.futures
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusedpg import _agreement
from fusedpg.compress import _checkpoint, _lane, _numbers, _params, _schedule, memories
from fusedpg.compress._base import Compressor
from fusedpg.compress._each import EachParameter, EachParametersMemory
from fusedpg.compress._lane import Hosts, Lane
from fusedpg.compress._low_rank import PowerSGD
from fusedpg.compress._piece import Parts, Piece, mixed
from fusedpg.compress._residuals import Residuals
from fusedpg.compress._units import Unit, Units
from fusedpg.compress._warm_up import WarmUp
from fusedpg.compress.communicators import Allgather, Allreduce, Communicator
from fusedpg.compress.memories import Memory
from fusedpg.functional import _is_ours


class _GradBucket(Protocol):
    """The methods of DDP's bucket that a state calls; other callers have their own buckets."""

    def buffer(self) -> torch.Tensor: ...
    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def parameters(self) -> list[torch.Tensor]: ...


class State:
    """The state of :func:`hook`, one for each DDP module; :func:`from_params` makes it.

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
        self._units = Units(_schedule.make(schedule, _can_send_uncompressed(compressor, memory)))
        self._warm_up = WarmUp(compressor, uncompressed_steps, uncompressed_every, warmup_ratios)
        some_plain = uncompressed_steps or uncompressed_every
        if some_plain and not _can_send_uncompressed(compressor, memory):
            raise ValueError(
                f"uncompressed_steps and uncompressed_every with {type(compressor).__name__} and "
                f"{type(memory).__name__}: a step that is not compressed would not be one of the "
                "same training, as votes have another magnitude, and the memory dgc is a momentum"
            )
        self._residuals = Residuals(named_parameters)
        self._step = 0
        self._group: dist.ProcessGroup | None = None
        self._hosts: Hosts | None = None
        self._lane: Lane | None = None
        self._finishing: concurrent.futures.Future[None] | None = None
        self._direct = False  # buckets take DDP's own way
        # Futures of the buckets of this step that did.
        self._sent: list[torch.futures.Future[torch.Tensor]] = []
        self._failure: BaseException | None = None
        self._scratch: dict[int, torch.Tensor] = {}

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

    # --- groups -----------------------------------------------------------------------------

    def _connect(self) -> Lane:
        lane = _lane.of(self._parent)
        facts = {"seed": self.seed, "step": self._step, "schedule": self.schedule}
        facts |= self._warm_up.options()
        if isinstance(self.compressor, PowerSGD):
            # Every rank multiplies and orthogonalises for itself, with what BLAS has for it.
            facts["processor"] = torch.backends.cpu.get_cpu_capability()
        lane.submit(_check_agreement, facts | self._parts(), lane.group).result()
        self._group = lane.group
        residuals = self._residuals
        loaded = lane.submit(_agreement.largest, [residuals.has_loaded], lane.group).result()
        residuals.loaded_anywhere = loaded != [0.0]
        residuals.pending |= residuals.loaded_anywhere
        # The engine's all_reduce adds up inside of hosts itself.
        self._hosts = None if isinstance(self.communicator, Allreduce) else lane.hosts
        return lane

    def _parts(self) -> dict[str, object]:
        """Describes what ranks compress with, which may change from step to step."""
        return {
            "compressor": _described(self.compressor),
            "memory": _described(self.memory),
            "communicator": _described(self.communicator),
        }

    # --- a backward of DDP's, bucket by bucket --------------------------------------------------

    def take(
        self,
        bucket: _GradBucket,
        gradients: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Takes a bucket, as the hook does.

        Args:
            gradients: those that are not in the bucket but here, by parameter, laid out alike and
                contiguous. They must not change before the result is there.
        """
        buffer, last = bucket.buffer(), bucket.is_last()
        if buffer.layout != torch.strided:
            raise ValueError(
                f"fusedpg.compress: compresses dense gradients, found {buffer.layout}: use "
                "nn.Embedding(sparse=False)"
            )
        if self._lane is None:
            self._lane = self._connect()
        if bucket.index() == 0:
            self._begin()
        parameters, units = bucket.parameters(), self._units
        try:
            self._residuals.know(bucket.index(), parameters, last)
        except ValueError as error:
            self._fail(error)  # the others wait for this rank
            raise
        closed = units.follow(parameters, buffer)
        found = [None if gradients is None else gradients.get(p) for p in parameters]
        answer: torch.futures.Future[torch.Tensor]
        if (
            self._direct
            and units.expected
            and self._failure is None
            and buffer.device.type == "cpu"
        ):
            units.skip(len(parameters))
            _fill(buffer, parameters, found)
            answer = self._as_without_hook(buffer)
        else:
            future: torch.futures.Future[torch.Tensor | None] = torch.futures.Future(
                devices=[buffer.device] if buffer.is_cuda else None
            )
            # Only an exception out of a callback is one to DDP, too.
            answer = future.then(self._answer)
            closed += units.add(parameters, buffer, found, future)
        if last:
            closed += units.end()
        for unit in closed:
            self._lane.submit(self._run, unit)
        if last:
            sent, self._sent = self._sent, []
            self._finishing = self._lane.submit(self._finish, sent)
        return answer

    def _as_without_hook(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Nothing is compressed and nothing was kept: the mean, by the module's own group.

        In that group's arena the bucket can be read where it lies, and no thread is woken for it.
        DDP calls hooks in the order in which it would call that group itself.
        """
        timing = self._units.timing()
        self._scale(buffer)
        begin = time.perf_counter()
        work = dist.all_reduce(buffer, dist.ReduceOp.AVG, group=self._parent, async_op=True)

        def done(sent: torch.futures.Future) -> torch.Tensor:
            sent.value()  # raises what the operation has raised
            timing(begin, time.perf_counter(), buffer.numel())
            return buffer

        answer = work.get_future().then(done)
        self._sent.append(answer)
        return answer

    def abandon(self) -> None:
        """After a backward that was cut short: its buckets end, as the rest never comes."""
        self._units.abandon()

    def _begin(self) -> None:
        self._units.abandon()  # of an earlier backward, which may go on
        self._sent = []
        self._step += 1
        if self._finishing is not None:
            # The ranks' next candidate is the same, once it has been agreed on.
            self._finishing.result()
        # Such a step does not belong to a search, which goes on afterwards.
        self._units.begin(self._step, self._warm_up.plain(self._step))
        self._direct = self._units.plain and not self._residuals.pending and _is_ours(self._parent)

    # --- on the thread ----------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, unit: Unit) -> None:
        if self._failure is None:
            try:
                begin = time.perf_counter()
                if unit.after is not None:
                    # This thread has streams of its own.
                    device = unit.slices[0].device
                    torch.cuda.set_device(device)
                    torch.cuda.current_stream(device).wait_event(unit.after)
                self._exchange(unit)
                unit.timing(begin, time.perf_counter(), unit.numel)
            except BaseException as error:
                self._fail(error)
        for bucket in unit.ends:
            bucket.future.set_result(bucket.buffer)

    def _answer(self, done: torch.futures.Future[torch.Tensor | None]) -> torch.Tensor:
        if self._failure is not None:
            raise RuntimeError(
                "fusedpg.compress: a step has failed on this rank: "
                f"{type(self._failure).__name__}: {self._failure}. Gradients and memories of this "
                "step are undefined; make a new state, or load a checkpoint in a new process"
            ) from self._failure
        result = done.value()
        if result is None:
            raise RuntimeError(
                "fusedpg.compress: a backward has raised, or another backward has begun with this "
                "state, before all buckets of this one were there: a state is for one DDP module, "
                "make one for each"
            )
        return result

    def _finish(self, sent: Sequence[torch.futures.Future[torch.Tensor]]) -> None:
        # If no unit of the step was compressed, the step has sent all residuals.
        self._residuals.pending &= not self._units.plain
        if self._failure is None:
            try:
                for one in sent:
                    one.wait()
                self._units.finish(partial(_agreement.largest, group=self._group))
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        assert self._lane is not None
        _lane.drop(self._lane)

    def _exchange(self, unit: Unit) -> None:
        slices = unit.slices
        wide = torch.float64 if slices[0].dtype == torch.float64 else torch.float32
        flat = slices[0]
        in_parts = (
            not unit.plain
            and self._hosts is None
            and type(self.communicator).exchange in (Allgather.exchange, Allreduce.exchange)
            and self.compressor.each_parameter
            and flat.dtype == wide
        )
        copied = not in_parts and (len(slices) > 1 or flat.dtype != wide)
        if not in_parts:
            for part, source in zip(unit.parts, unit.sources, strict=True):
                if source is not part:
                    part.copy_(source)
            if copied:
                flat = self._gathered(unit, wide)
        state, kept = self._residuals.of_unit(unit, wide)
        group, world_size = self._group, dist.get_world_size(self._group)
        assert group is not None
        piece = Piece(
            str(unit.index), unit.numel, self._residuals.runs_of(unit), dist.get_rank(group),
            world_size, mixed(self.seed, unit.step), wide, slices[0].device, state, kept=kept,
        )  # fmt: skip
        self._residuals.pending |= not unit.plain
        if unit.index == 0:
            # Before anything is sent whose size or meaning depends on it.
            _check_agreement(self._parts(), group)
        if unit.plain:
            here = 1 if self._hosts is None else self._hosts.count
            self._scale(flat)
            self._residuals.send(flat, self.memory, state, world_size, here)
            _mean(flat, group)
        elif self._hosts is not None:
            self._hosts.exchange(self.communicator, *self._each(), flat, piece)
        else:
            # A compressor of single parameters also takes gradients that lie apart.
            grad: Any = Parts(unit.sources, unit.parts) if in_parts else flat
            self.communicator.exchange(*self._each(), grad, piece, group)
        if copied:
            for part, result in zip(slices, flat.split([*map(torch.numel, slices)]), strict=True):
                part.copy_(result)

    def _each(self) -> tuple[Compressor, Memory]:
        """Compressor and memory for communicators; both may be replaced between steps."""
        if not self.compressor.each_parameter:
            return self.compressor, self.memory
        return EachParameter(self.compressor), EachParametersMemory(self.memory)

    def _gathered(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        """A unit's slices, one after the other, in memory that the next step uses again."""
        total, device = unit.numel, unit.slices[0].device
        known = self._scratch.get(unit.index)
        if known is None or (known.numel(), known.dtype, known.device) != (total, dtype, device):
            known = self._scratch[unit.index] = torch.empty(total, dtype=dtype, device=device)
        for part, place in zip(unit.slices, known.split([*map(torch.numel, unit.slices)])):
            place.copy_(part)
        return known

    def _scale(self, grad: torch.Tensor) -> None:
        """Scales gradients that are sent as they are, as a memory would."""
        factor = self.memory.scale * self.memory.gamma
        # For EFSignSGD's memory it is 1 except for rounding.
        if self.memory.gamma != 1 and not math.isclose(factor, 1):
            grad.mul_(factor)

    # --- what was tried, and checkpoints ----------------------------------------------------------

    def report(self) -> _schedule.Report:
        """Reports what ``schedule="auto"`` has tried; ``print`` it, or ``.plot(path)``.

        Raises:
            ValueError: for another schedule.
        """
        self._wait()
        return self._units.schedule.report()

    def _wait(self) -> None:
        if self._finishing is not None:
            self._finishing.result()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and number of steps, under a key that names the rank.

        Each rank saves its own: in a file, or all of them by ``torch.distributed.checkpoint``.
        The values can be read by name: ``state_dict()["memory"]["residual"]``.
        """
        return _checkpoint.RankStateDict(_checkpoint.place(self._parent), self._values())

    def _values(self) -> dict[str, object]:
        self._wait()
        numbers = {"step": self._step, "epoch": self._warm_up.epoch, "seed": self.seed}
        return numbers | self._residuals.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, object], *, memory: bool = True) -> None:
        """Loads the state of a model with the same parameters: the same names, if both have some,
        else the same order, types and shapes.

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
        self._residuals.load_state_dict(state_dict)
        # Not every rank may have something of each kind until a step has been compressed, which
        # the first one of a layout is.
        self._units.restart()
        if self._failure is None:
            self._lane = None  # the next backward asks again whether all ranks have the same
        self._step, self.seed = int(state_dict["step"]), int(state_dict["seed"])
        self._warm_up.set_epoch(state_dict.get("epoch", 0))  # older checkpoints have none

    def __getstate__(self) -> dict[str, object]:
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


def _mean(grad: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replaces gradients by the mean over ranks."""
    if _is_ours(group):
        dist.all_reduce(grad, dist.ReduceOp.AVG, group=group)  # the same bits, in one pass
    else:
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))


def _can_send_uncompressed(compressor: Compressor, memory: Memory) -> bool:
    """Whether a step without compression is one of the same training: a vote has another
    magnitude, and DGC's memory is the momentum."""
    known = (memories.NoneMemory, memories.ResidualMemory, memories.EFSignSGDMemory,
             memories.PowerSGDMemory)  # fmt: skip
    mean = compressor.average and type(compressor).aggregate is Compressor.aggregate
    return compressor.keeps_magnitude and mean and type(memory) in known


# Attributes that results depend on and that may be a class's or properties.
_OF_CLASSES = ("average", "linear", "tensors_size_are_same", "scale", "beta", "gamma")


def _described(thing: object) -> str:
    """A compressor, memory or communicator: its type, and what it works with. Of the user's classes
    without what is private, which may be a rank's own."""
    ours = type(thing).__module__.startswith("fusedpg.")
    known = {key: getattr(thing, key) for key in _OF_CLASSES if hasattr(thing, key)}
    plain = {
        key.lstrip("_"): value
        for key, value in sorted((known | vars(thing)).items())
        if (value is None or isinstance(value, bool | int | float | str))
        and (ours or not key.startswith("_"))
    }
    arguments = [f"{key}={value!r}" for key, value in plain.items()]
    return f"{type(thing).__qualname__}({', '.join(arguments)})"


def _check_agreement(facts: dict[str, object], group: dist.ProcessGroup) -> None:
    """Raises, on all ranks, if the ranks of a group have not all been given the same.

    Ranks that compress in different ways would read each other's payloads wrongly. It is one small
    operation, so that every step can ask.

    Raises:
        RuntimeError: which names the facts that differ.
    """
    if not _agreement.same(facts, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        theirs = _agreement.by_rank([f"{key} {value!r}" for key, value in facts.items()], group)
        raise RuntimeError(
            "fusedpg.compress: the ranks' states differ in what all must have the same: "
            f"{_agreement.in_words(theirs, rank)}. This is rank {rank} of {size}"
        )
