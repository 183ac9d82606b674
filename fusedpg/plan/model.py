"""The cost model: the time and memory of a plan, by a database's measurements.

A stage is priced from arrays over its operators, so that `price` and the search use the same code.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fusedpg.plan.catalogue import Layout, layout
from fusedpg.plan.config import Plan, PlanError, Prediction
from fusedpg.plan.contention import Work, played
from fusedpg.plan.database import COLUMNS, Database, MissingRow

__all__ = ["CostModel", "Price", "StagePrice"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Place:
    """The place of a stage.

    Args:
        first_device: its first device.
        width: how many it has.
        nodes: how many machines they are on.
        receives: how many of its devices on one machine, which share its link, take messages of
            the stage before from other machines; None without a stage before.
        sends: the same of the stage behind, whose gradients they take.
    """

    first_device: int
    width: int
    nodes: int
    receives: int | None
    sends: int | None


@dataclass(frozen=True)
class StagePrice:
    """The cost of a stage. Times are milliseconds of one micro-batch, but for the last three."""

    forward: float
    backward: float
    recompute: float
    receive: float  # the message that the forward pass needs
    send: float  # the gradient of what it sends, that the backward pass needs
    reshard_forward: float
    reshard_backward: float
    weights: float  # MB, with copies in higher precision
    gradients: float
    optimizer_state: float
    activations: float  # of the micro-batches in flight, but for one
    peak: float  # of that one
    reserved: float  # what passes
    reduction: float = 0.0  # of gradients over data-parallel devices, once an iteration
    exposed: float = 0.0  # the part of it that the backward pass does not hide
    optimizer: float = 0.0  # the optimizer's step
    idle_forward: float = 0.0  # in which a device waits, though it is in its pass
    idle_backward: float = 0.0
    messaging: float = 0.0  # of a core, for the messages of a pass
    fullest: int = 0  # the operator that runs when memory is fullest
    place: Place = Place(0, 1, 1, None, None)

    @property
    def forward_pass(self) -> float:
        return self.forward + self.reshard_forward

    @property
    def backward_pass(self) -> float:
        return self.backward + self.recompute + self.reshard_backward

    @property
    def reshard(self) -> float:
        return self.reshard_forward + self.reshard_backward

    @property
    def time(self) -> float:
        return self.forward_pass + self.backward_pass + self.receive + self.send

    @property
    def memory(self) -> float:
        state = self.weights + self.gradients + self.optimizer_state
        return state + self.activations + self.peak + self.reserved


@dataclass(frozen=True)
class Price:
    """The cost of a plan.

    Args:
        time_ms: of an iteration.
        stage_times_ms: of each stage; the largest is `time_ms`.
        stages: what each is made of.
        notes: what the database does not say, and was left out.
        cost_model: the name of the model.
    """

    time_ms: float
    stage_times_ms: tuple[float, ...]
    stages: tuple[StagePrice, ...]
    notes: tuple[str, ...]
    cost_model: str

    @property
    def memory_mb(self) -> float:
        """The memory of the device that needs most."""
        return max(stage.memory for stage in self.stages)

    def prediction(self) -> Prediction:
        memory = tuple(stage.memory for stage in self.stages)
        return Prediction(self.time_ms, self.stage_times_ms, memory, self.cost_model)


@dataclass(frozen=True)
class Recomputed:
    """Recomputation in a stage.

    Args:
        dropped: whose activations are not kept.
        segments: MB that are made again at once where each operator is, while its backward pass
            runs.
        handed: MB that are kept behind each operator instead of what was dropped, for those
            that use it.
    """

    dropped: Array
    segments: Array
    handed: Array


class Moment(NamedTuple):
    """MB at the time when a stage needs most.

    Args:
        held: activations of the micro-batch that is computed.
        reserved: what passes.
        gradients: of the weights.
        operator: which of the stage runs.
    """

    held: float
    reserved: float
    gradients: float
    operator: int

    @property
    def total(self) -> float:
        return self.held + self.reserved + self.gradients


class StageOps(NamedTuple):
    """The operators of a stage.

    Args:
        tables: of the micro-batch size and the stage's machines.
        first: the index in the model of the first one.
        settings: of each, its number in the tables.
        cells: the index of each in a flattened table.
        weights: MB of each.
        place: of the stage.
        received: MB of the message that the forward pass needs.
        sent: MB of the message behind the stage.
    """

    tables: Tables
    first: int
    settings: Array
    cells: Array
    weights: Array
    place: Place
    received: float
    sent: float

    @property
    def ends(self) -> tuple[tuple[int | None, float], tuple[int | None, float]]:
        """For the messages before and behind: the devices of a machine that have them, and MB."""
        return (self.place.receives, self.received), (self.place.sends, self.sent)


class Tables:
    """The measurements for one micro-batch size, as arrays over settings and kinds of operators.

    A setting is a (tp, dp, algo). A kind is a name; an operator of the sequence has one.
    """

    def __init__(self, model: CostModel, micro_batch: int, nodes: int) -> None:
        database = model.database
        self.micro_batch = micro_batch
        self.settings = model.settings(micro_batch)
        self.index = {setting: i for i, setting in enumerate(self.settings)}
        self.tp = np.array([tp for tp, _, _ in self.settings], dtype=np.int64)
        self.dp = np.array([dp for _, dp, _ in self.settings], dtype=np.int64)
        self.algo = np.array([algo for _, _, algo in self.settings], dtype=np.int64)
        self.width = self.tp * self.dp
        kinds = model.kinds
        self.missing: dict[tuple[int, ...], MissingRow] = {}
        values = np.full((len(COLUMNS), len(self.settings), len(kinds)), math.inf)
        for setting, (tp, dp, algo) in enumerate(self.settings):
            for kind, name in enumerate(kinds):
                try:
                    values[:, setting, kind] = database.row(name, micro_batch // dp, tp, algo)
                except MissingRow as error:
                    self.missing[setting, kind] = error
        (forward, backward, self.input, self.output) = values[:4]
        self.forward, self.backward = forward / 1000, backward / 1000  # us to ms
        self.weights, self.activations, self.reserved_forward, self.reserved_backward = values[4:8]
        self.optimizer = values[8] / 1000
        self.busy, self.saved_inputs, self.saved_outputs = values[9:]
        factors = database.operators.shared_activations
        self.activations = self.activations * np.array([factors.get(name, 1) for name in kinds])
        # The gain of a device-millisecond if all operators ran at their best.
        with np.errstate(invalid="ignore"):
            busy = (self.forward + self.backward) * self.width[:, None]
        self.ideal = np.min(busy, axis=0) if len(self.settings) else np.zeros(len(kinds))
        shape = (len(model.pairs), len(self.settings), len(self.settings))
        self.reshard_forward = np.zeros(shape)
        self.reshard_backward = np.zeros(shape)
        # MB that stay until the backward pass in the second layout, and not in the first.
        self.reshard_held = np.zeros(shape)
        self.missing_reshard: dict[tuple[int, ...], MissingRow] = {}
        self._fill_reshards(model, nodes)

    def _fill_reshards(self, model: CostModel, nodes: int) -> None:
        layouts = model.database.operators.layouts
        by_width: dict[int, list[int]] = {}
        for setting, width in enumerate(self.width.tolist()):
            by_width.setdefault(width, []).append(setting)
        for pair, (before, after) in enumerate(model.pairs):
            names = model.kinds[before], model.kinds[after]
            if names[0] not in layouts or names[1] not in layouts:
                continue
            for one in range(len(self.settings)):
                for other in by_width[int(self.width[one])]:
                    tp, dp, algo = self.settings[one]
                    source = layout(layouts[names[0]][algo][1], tp, dp)
                    tp, dp, algo = self.settings[other]
                    target = layout(layouts[names[1]][algo][0], tp, dp)
                    if source is None or target is None or source == target:
                        continue
                    size = self.input[other, after]
                    if not math.isfinite(size):
                        continue  # the operator itself is missing
                    place = (pair, one, other)
                    # With the same dp devices of one tensor-parallel group exchange parts, which
                    # are on one machine.
                    across = 1 if self.dp[one] == dp else nodes
                    try:
                        cost = model.reshard(source, target, size, across)
                    except MissingRow as error:
                        self.missing_reshard[place] = error
                        cost = (math.inf, math.inf)
                    self.reshard_forward[place], self.reshard_backward[place] = cost
                    held = self.saved_inputs[other, after] - self.saved_outputs[one, before]
                    self.reshard_held[place] = held


# A step of resharding: the collective forwards, that backwards, and the devices of each.
# None means that nothing is sent, because each device cuts its part out of what it has.
Step = tuple[str | None, str | None, int]


def resharding_steps(source: Layout, target: Layout) -> list[Step]:
    """Collectives that turn one layout into another, whatever their degrees."""
    gathers, splits = [], []
    for one, other in zip(source.dims, target.dims):
        common = one if other % one == 0 else other if one % other == 0 else 1
        gathers += [one // common] if one > common else []
        splits += [other // common] if other > common else []
    if len(gathers) == 1 and gathers == splits and source.replicas == target.replicas:
        return [("all_to_all", "all_to_all", gathers[0])]
    return [("all_gather", None, n) for n in gathers] + [(None, "all_gather", n) for n in splits]


class CostModel:
    """Prices plans.

    It adds to Aceso's formulas (`fusedpg.plan.aceso`) the reduction of gradients over data-parallel
    devices with the part that the backward pass hides, the optimizer's step, the right link for
    every pair of stages, sizes between the database's rows, and memory of all operators of a stage.

    Args:
        database: the measurements.
        num_devices: how many devices there are.
        devices_per_node: how many are on one machine; all by default.
    """

    name = "fusedpg"

    def __init__(
        self, database: Database, num_devices: int, devices_per_node: int | None = None
    ) -> None:
        self.database = database
        self.num_devices = num_devices
        self.devices_per_node = devices_per_node or num_devices
        operators = database.operators
        self.kinds = tuple(dict.fromkeys(operators.sequence))
        number = {name: kind for kind, name in enumerate(self.kinds)}
        self.kind = np.array([number[name] for name in operators.sequence], dtype=np.int64)
        steps = list(zip(self.kind[:-1].tolist(), self.kind[1:].tolist()))
        self.pairs = tuple(dict.fromkeys(steps))
        place = {pair: i for i, pair in enumerate(self.pairs)}
        # pair[i] is of the operators i and i + 1
        self.pair = np.array([place[step] for step in steps], dtype=np.int64)
        starts = operators.layer_starts
        self.is_start = np.array([name in starts for name in operators.sequence])
        never = operators.never_recomputed
        self.may_recompute = np.array([name not in never for name in operators.sequence])
        self.notes: dict[str, None] = {}  # an ordered set
        self._tables: dict[tuple[int, int], Tables] = {}

    @property
    def num_ops(self) -> int:
        return len(self.kind)

    def tables(self, micro_batch: int, nodes: int = 1) -> Tables:
        """The measurements for a micro-batch size, for stages on so many machines."""
        key = (micro_batch, nodes)
        if key not in self._tables:
            self._tables[key] = Tables(self, micro_batch, nodes)
        return self._tables[key]

    def settings(self, micro_batch: int) -> list[tuple[int, int, int]]:
        """The (tp, dp, algo) that divide a micro-batch and have measurements."""
        found = []
        database = self.database
        for tp in database.tensor_parallel:
            for dp in range(1, self.num_devices // tp + 1):
                if micro_batch % dp == 0 and self.measured(micro_batch // dp):
                    found += [(tp, dp, algo) for algo in database.algos]
        return found

    def micro_batch_sizes(self) -> list[int]:
        """Micro-batch sizes, over all data-parallel devices together, that are worth a try."""
        degrees = {1 << power for power in range(self.num_devices.bit_length())}
        degrees |= {self.num_devices}
        measured = self.database.micro_batch_sizes
        return sorted({samples * dp for samples in measured for dp in degrees})

    def measured(self, samples: int) -> bool:
        """True if operators may be priced for this many samples of a device."""
        sizes = self.database.micro_batch_sizes
        return sizes[0] <= samples <= sizes[-1]

    def place(self, widths: Sequence[int], stage: int) -> Place:
        """The place of a stage, if stages have these widths."""
        first = sum(widths[:stage])
        per_node = self.devices_per_node
        last = first + widths[stage] - 1
        nodes = last // per_node - first // per_node + 1
        receives = self._crossing(widths, stage - 1, 1) if stage else None
        sends = self._crossing(widths, stage, 0) if stage < len(widths) - 1 else None
        return Place(first, widths[stage], nodes, receives, sends)

    def _crossing(self, widths: Sequence[int], stage: int, end: int) -> int:
        """The most devices of a machine that have messages between `stage` and the next.

        Args:
            end: 0: of those of `stage`, 1: of those of the next.
        """
        first = sum(widths[:stage])
        here, there = widths[stage], widths[stage + 1]
        per_node = self.devices_per_node
        crossing: set[int] = set()
        for receiver in range(there):
            device = first + here + receiver
            low = receiver * here // there
            high = max(((receiver + 1) * here - 1) // there, low)
            for sender in (first + low, first + high):
                if sender // per_node != device // per_node:
                    crossing.add((sender, device)[end])
        return max(collections.Counter(one // per_node for one in crossing).values(), default=0)

    def stage(
        self,
        tables: Tables,
        first: int,
        settings: Array,
        flags: Array | None,
        in_flight: int,
        place: Place,
        all_in_flight: bool = False,
    ) -> StagePrice:
        """The price of a stage.

        Args:
            tables: of the micro-batch size, and of `place.nodes`.
            first: the index of the stage's first operator.
            settings: the setting of each of its operators.
            flags: which are recomputed; None means none.
            in_flight: micro-batches whose activations are held at once.
            place: where the stage is.
            all_in_flight: whether these are all micro-batches of an iteration.

        Raises:
            MissingRow: if the database does not say what it costs.
        """
        ops = len(settings)
        if place.nodes > 1:
            self.check_place(tables, settings, place)
        kind = self.kind[first : first + ops]
        at = settings * len(self.kinds) + kind
        inputs, outputs = float(tables.input.take(at[0])), float(tables.output.take(at[-1]))
        weights = tables.weights.take(at)
        of_stage = StageOps(tables, first, settings, at, weights, place, inputs, outputs)
        forward = tables.forward.take(at)
        fwd, bwd = float(forward.sum()), float(tables.backward.take(at).sum())
        if not math.isfinite(fwd + bwd):
            _raise_missing(tables.missing, settings, kind)
        reshard_forward = reshard_backward = 0.0
        if ops > 1:
            edges = (self.pair[first : first + ops - 1], settings[:-1], settings[1:])
            reshard_forward = float(tables.reshard_forward[edges].sum())
            reshard_backward = float(tables.reshard_backward[edges].sum())
            if not math.isfinite(reshard_forward + reshard_backward):
                _raise_missing(tables.missing_reshard, *edges)
        activations = tables.activations.take(at)
        if ops > 1:
            activations[1:] += tables.reshard_held[edges]
        total = inputs + float(activations.sum())
        recompute = 0.0
        again = None
        if flags is not None and flags.any():
            recompute = float(forward[flags].sum())
            again = self.recomputed(first, activations, tables.output.take(at), flags)
            total += float(again.handed.sum()) - float(activations[again.dropped].sum())
        moment = self.moment(of_stage, activations, again, all_in_flight, not all_in_flight)
        others = in_flight - 1
        if all_in_flight and in_flight > 1:
            # The first backward pass finds no gradients, and the second one micro-batch less.
            second = self.moment(of_stage, activations, again, False, False)
            if second.total > total + moment.total:
                moment, others = second, in_flight - 2
        all_weights = float(weights.sum())
        operators = self.database.operators
        receive, send = self.messages(of_stage)
        price = StagePrice(
            forward=fwd,
            backward=bwd,
            recompute=recompute,
            receive=receive,
            send=send,
            reshard_forward=reshard_forward,
            reshard_backward=reshard_backward,
            weights=all_weights * (1 + operators.memory_main_params),
            gradients=moment.gradients,
            optimizer_state=operators.memory_optimizer
            * (
                float((weights / tables.dp[settings]).sum())
                if operators.optimizer_divides
                else all_weights
            ),
            activations=total * others,
            peak=inputs + moment.held,
            reserved=moment.reserved,
            fullest=moment.operator,
            place=place,
        )
        return self.with_iteration(price, of_stage)

    def recomputed(
        self, first: int, activations: Array, outputs: Array, flags: Array
    ) -> Recomputed:
        """The activations that recomputation drops, and those that it makes again at once."""
        ops = len(flags)
        both = flags[:-1] & flags[1:]
        start_follows = self.is_start[first + 1 : first + ops]
        amounts = np.where(both, activations[:-1], 0.0)
        dropped = np.append(both & ~start_follows, False)
        if ops < 2:
            return Recomputed(dropped, np.zeros(ops), np.zeros(ops))
        ends = ~both | self.segment_ends(first, start_follows)
        sums = np.diff(np.cumsum(amounts)[ends], prepend=0.0)
        segment = np.concatenate([[0], np.cumsum(ends)])
        if both[-1]:  # the last operator ends the segment before it
            segment[-1] -= 1
        handed = self.handed(activations, outputs, np.append(False, dropped[:-1]) & ~dropped)
        return Recomputed(dropped, np.append(sums, 0.0)[segment], handed)

    def check_place(self, tables: Tables, settings: Array, place: Place) -> None:
        """Raises `MissingRow` if operators were not measured on devices of several machines."""
        per_node = self.devices_per_node
        for tp in np.unique(tables.tp[settings]).tolist():
            for first in range(place.first_device, place.first_device + place.width, tp):
                if first // per_node != (first + tp - 1) // per_node:
                    raise MissingRow(
                        f"{self.database.folder}: no measurements of tp {tp} between machines "
                        f"(devices {first} to {first + tp - 1}, {per_node} a machine)"
                    )

    def reshard(
        self, source: Layout, target: Layout, size: float, nodes: int
    ) -> tuple[float, float]:
        """Milliseconds to change a layout, forwards and backwards; `size` in MB."""

        def time(collective: str | None, devices: int) -> float:
            if collective is None:
                return 0.0
            return self.database.collective(collective, devices, min(nodes, devices))(size)

        steps = resharding_steps(source, target)
        return (
            sum(time(forward, devices) for forward, _, devices in steps),
            sum(time(backward, devices) for _, backward, devices in steps),
        )

    def segment_ends(self, first: int, start_follows: Array) -> Array:
        """Behind which operators a segment of recomputed ones ends, whatever is recomputed."""
        ends = start_follows.copy()
        ends[-1] = True
        return ends

    def handed(self, activations: Array, outputs: Array, ends: Array) -> Array:
        """MB that the last operators of recomputed segments keep besides their activations."""
        # An operator's activations include what it gives, but not what passes by it.
        return np.where(ends, np.maximum(outputs - activations, 0.0), 0.0)

    def messages(self, ops: StageOps) -> tuple[float, float]:
        """Milliseconds of a stage's messages from the stage before and to the stage behind."""

        def time(crossing: int | None, size: float) -> float:
            if crossing is None:
                return 0.0
            # The devices of a machine share its link.
            return self.database.message(crossing > 0)(size * max(crossing, 1))

        receive, send = (time(*end) for end in ops.ends)
        return receive, send

    def moment(
        self,
        ops: StageOps,
        activations: Array,
        again: Recomputed | None,
        first_backward: bool,
        forward_follows: bool,
    ) -> Moment:
        """The moment of a pass over a micro-batch that needs most memory.

        Args:
            ops: the stage's operators.
            activations: MB of each.
            again: of what is recomputed.
            first_backward: whether its backward pass is the first of the iteration.
            forward_follows: whether the forward pass over another micro-batch comes after it.
        """
        # When an operator runs, forwards or backwards, those behind it hold nothing; when it is
        # made again, its segment is whole.
        tables, weights = ops.tables, ops.weights
        reserved = tables.reserved_forward, tables.reserved_backward
        passing = np.maximum(*(table.take(ops.cells) for table in reserved))
        held = np.cumsum(activations)
        if again is not None:
            kept = np.where(again.dropped, 0.0, activations) + again.handed
            held = np.cumsum(kept) + again.segments
        gradients = np.full(len(weights), weights.sum())
        if first_backward:
            # They come one after the other, and are there when the next micro-batch's turn is.
            gradients -= np.cumsum(weights)
        # The gradients of what the stage gave, and the next message, which may be there already:
        # the gradients of another micro-batch, or the values of one.
        passing += ops.sent + (max(ops.sent, ops.received) if forward_follows else ops.sent)
        most = int((held + passing + gradients).argmax())
        found = Moment(float(held[most]), float(passing[most]), float(gradients[most]), most)
        # In the end there are all gradients, and nothing else.
        end = Moment(0.0, 0.0, float(weights.sum()), 0)
        return max(found, end, key=lambda moment: moment.total)

    def with_iteration(self, price: StagePrice, ops: StageOps) -> StagePrice:
        """The price with what happens once an iteration."""
        tables, at = ops.tables, ops.cells
        stepped = self.database.has_steps
        if not self.database.has_optimizer:
            self.notes["the optimizer's step is left out: no column optimizer-step"] = None
        reduction = 0.0
        # Gradients of operators with the same degrees are reduced by the same devices.
        amounts = np.bincount(ops.settings, weights=ops.weights, minlength=len(tables.settings))
        sizes: dict[tuple[int, int], float] = {}
        for setting in np.flatnonzero(amounts).tolist():
            tp, dp, _ = tables.settings[setting]
            if dp > 1:
                sizes[tp, dp] = sizes.get((tp, dp), 0.0) + float(amounts[setting])
        for (tp, dp), size in sizes.items():
            nodes = self._nodes_of(ops.place, tp, dp)
            name = "adamw" if stepped else "all_reduce"
            reduction += self.database.collective(name, dp, nodes)(size)
        share = 1.0 - tables.busy.take(at)
        idle_forward = float((tables.forward.take(at) * share).sum())
        idle_backward = float((tables.backward.take(at) * share).sum())
        if price.forward:
            idle_backward += price.recompute * idle_forward / price.forward
        times = tables.optimizer.take(at)
        # A measured step of data-parallel devices has both.
        optimizer = float(times[tables.dp[ops.settings] == 1].sum() if stepped else times.sum())
        hidden = min(self.database.overlap * reduction, price.backward)
        messaging = 0.0  # which both passes do alike
        for crossing, size in ops.ends:
            if crossing is not None and (curve := self.database.message_end(crossing > 0)):
                messaging += curve(size)
        return dataclasses.replace(
            price,
            reduction=reduction,
            exposed=reduction - hidden,
            optimizer=optimizer,
            idle_forward=idle_forward,
            idle_backward=idle_backward,
            messaging=messaging,
        )

    def _nodes_of(self, place: Place, tp: int, dp: int) -> int:
        """The most machines that the data-parallel groups of an operator are on."""
        if place.nodes == 1:
            return 1
        per_node = self.devices_per_node
        return max(
            len({(place.first_device + part + tp * d) // per_node for d in range(dp)})
            for part in range(tp)
        )

    def iteration(
        self, stages: Sequence[StagePrice], micro_batches: int, schedule: str = "1f1b"
    ) -> float:
        """Milliseconds of an iteration."""
        shared = self.database.shared_cores
        if shared is not None:
            return played([_work(stage) for stage in stages], micro_batches, shared, schedule)
        times = [stage.time for stage in stages]
        # Gradients of a stage are whole when its last backward pass ends, which is earlier than
        # the first stage's by the backward passes before it.
        tail = later = 0.0
        for stage in stages:
            tail = max(tail, stage.exposed + stage.optimizer - later)
            later += stage.backward
        return max(times) * (micro_batches - 1) + sum(times) + tail

    def in_flight(self, stages_behind: int, micro_batches: int, schedule: str) -> int:
        """Micro-batches whose activations a stage holds at once."""
        return micro_batches if schedule == "gpipe" else min(stages_behind + 1, micro_batches)

    def price(self, plan: Plan) -> Price:
        """The time and memory of a plan.

        Raises:
            PlanError: if the plan is not for this model and these devices, or has a schedule
                that the model does not price.
            MissingRow: if the database lacks what the plan needs.
        """
        plan.check(operators=self.database.operators.sequence, devices=self.num_devices)
        if plan.schedule not in ("1f1b", "gpipe"):
            raise PlanError(f"the cost model prices schedules 1f1b and gpipe, not {plan.schedule}")
        stages = []
        for stage in range(plan.num_stages):
            place = self.place(plan.num_gpus, stage)
            tables = self.tables(plan.micro_batch_size, place.nodes)
            settings = self._settings_of(plan, stage, tables)
            flags = np.array(plan.recompute_ops[stage], dtype=bool)
            behind = plan.num_stages - 1 - stage
            in_flight = self.in_flight(behind, plan.num_micro_batches, plan.schedule)
            first = plan.first_op(stage)
            whole = plan.num_micro_batches <= in_flight
            stages.append(self.stage(tables, first, settings, flags, in_flight, place, whole))
        return self.whole(stages, plan.num_micro_batches, plan.schedule)

    def whole(
        self, stages: Sequence[StagePrice], micro_batches: int, schedule: str = "1f1b"
    ) -> Price:
        """The price of a plan, by those of its stages."""
        time = self.iteration(stages, micro_batches, schedule)
        slowest = max(stage.time for stage in stages)
        times = tuple(time - (slowest - one.time) * (micro_batches - 1) for one in stages)
        return Price(time, times, tuple(stages), tuple(self.notes), self.name)

    def _settings_of(self, plan: Plan, stage: int, tables: Tables) -> Array:
        found = []
        columns = (
            plan.model_parallel_size_of_each_op[stage],
            plan.data_parallel_size_of_each_op[stage],
            plan.algo_of_each_op[stage],
        )
        for op, (tp, dp, algo) in enumerate(zip(*columns)):
            if (tp, dp, algo) not in tables.index:
                name = self.database.operators.sequence[plan.first_op(stage) + op]
                self.database.row(name, plan.micro_batch_size // dp, tp, algo)
                raise MissingRow(
                    f"{self.database.folder}: {self.name} has no price of tp {tp}, dp {dp}, "
                    f"algo {algo} for a micro-batch of {plan.micro_batch_size}"
                )
            found.append(tables.index[tp, dp, algo])
        return np.array(found, dtype=np.int64)


def _raise_missing(missing: Mapping[tuple[int, ...], MissingRow], *indices: Array) -> None:
    for key in zip(*(index.tolist() for index in indices)):
        if key in missing:
            raise missing[key]


def _work(price: StagePrice) -> Work:
    place = price.place
    # Between machines devices wait for the link, and not for cores.
    on_cores, waits = (price.exposed, 0.0) if place.nodes == 1 else (0.0, price.exposed)
    forward = price.forward_pass + price.messaging
    backward = price.backward_pass + price.messaging
    return Work(
        place.first_device,
        place.width,
        forward,
        backward,
        price.receive,
        price.send,
        price.optimizer + on_cores,
        waits,
        forward_busy=1.0 - price.idle_forward / forward if forward else 1.0,
        backward_busy=1.0 - price.idle_backward / backward if backward else 1.0,
    )
