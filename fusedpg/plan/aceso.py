"""Aceso's cost model, to compare with its program."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusedpg.plan.catalogue import Layout
from fusedpg.plan.config import PlanError
from fusedpg.plan.database import COLUMNS, Database, MissingRow
from fusedpg.plan.model import (
    Array,
    CostModel,
    Moment,
    Place,
    Recomputed,
    StageOps,
    StagePrice,
    Step,
    Tables,
)

__all__ = ["AcesoModel"]


class AcesoModel(CostModel):
    """Aceso's formulas as they are.

    They have no reduction of gradients and no optimizer step, and their faults. A collective's size
    that was not measured costs `UNKNOWN_SIZE_MS`, as there; `notes` says so.
    """

    name = "aceso"
    UNKNOWN_SIZE_MS = 100000.0

    def __init__(
        self, database: Database, num_devices: int, devices_per_node: int | None = None
    ) -> None:
        super().__init__(database, num_devices, devices_per_node)
        operators = database.operators
        shared = operators.shared_activations
        self.is_shared = np.array([name in shared for name in operators.sequence])

    def micro_batch_sizes(self) -> list[int]:
        return list(self.database.micro_batch_sizes)

    def measured(self, samples: int) -> bool:
        return samples in self.database.micro_batch_sizes

    def check_place(self, tables: Tables, settings: Array, place: Place) -> None:
        return  # devices of several machines cost the same

    def reshard(
        self, source: Layout, target: Layout, size: float, nodes: int
    ) -> tuple[float, float]:
        step = _one_collective(source, target)
        if step is None:
            raise MissingRow(f"Aceso's program has no price for {source} to {target}")
        forward, backward, devices = step
        return self._collective(forward, devices, size), self._collective(backward, devices, size)

    def _collective(self, collective: str | None, devices: int, size: float) -> float:
        if collective is None:
            return 0.0
        rows = self.database.collective_rows(collective, devices)
        for text in (f"{size:.0f}", f"{size - 1:.0f}"):
            if text in rows:
                return rows[text]
        self.notes[
            f"{collective} of {size:.0f} MB on {devices} devices was not measured: "
            f"{self.UNKNOWN_SIZE_MS:.0f} ms, as in Aceso"
        ] = None
        return self.UNKNOWN_SIZE_MS

    def segment_ends(self, first: int, start_follows: Array) -> Array:
        ends = super().segment_ends(first, start_follows)
        return ends & ~self.is_shared[first : first + len(ends)]

    def handed(self, activations: Array, outputs: Array, ends: Array) -> Array:
        return np.zeros(len(ends))

    def messages(self, ops: StageOps) -> tuple[float, float]:
        tables, before, behind = ops.tables, ops.settings[0], ops.settings[-1]
        # The size of the output is looked up with the tp of the stage's first operator.
        key = (int(tables.tp[before]), int(tables.dp[behind]), int(tables.algo[behind]))
        kind = self.kind[ops.first + len(ops.settings) - 1]
        if key in tables.index:
            out = float(tables.output[tables.index[key], kind])
        else:
            samples = tables.micro_batch // key[1]
            row = self.database.row(self.kinds[kind], samples, key[0], key[2])
            out = row[COLUMNS.index("output_size")]
        start = ops.place.first_device
        end = start + ops.place.width
        per_node = self.devices_per_node
        into = self._message(ops.received, between_nodes=start > 0 and start % per_node == 0)
        return into, self._message(out, between_nodes=end % per_node == 0)

    def _message(self, size: float, between_nodes: bool) -> float:
        if size <= 0:
            return 0.0
        try:
            points = self.database.bandwidth(between_nodes)
        except MissingRow:
            points = self.database.bandwidth(False)
        index = int(math.log(size, 2))
        if index >= 1:
            index -= 1
        # A negative index is from the end of the list, as there.
        return size / points[min(index, len(points) - 1)][1]

    def moment(
        self,
        ops: StageOps,
        activations: Array,
        again: Recomputed | None,
        first_backward: bool,
        forward_follows: bool,
    ) -> Moment:
        held = float(activations.sum())
        if again is not None:
            held += float(again.segments.max()) - float(activations[again.dropped].sum())
        gradients = reserved = float(ops.weights.sum())
        count = len(ops.cells)
        if count > 1:  # the last operator does not count
            forward = float(ops.tables.reserved_forward.take(ops.cells[:-1]).max())
            backward = float(ops.tables.reserved_backward.take(ops.cells[:-1]).max())
            reserved = max(forward + backward, reserved)
        return Moment(held, reserved, gradients, count)

    def with_iteration(self, price: StagePrice, ops: StageOps) -> StagePrice:
        return price

    def iteration(
        self, stages: Sequence[StagePrice], micro_batches: int, schedule: str = "1f1b"
    ) -> float:
        times = [stage.time for stage in stages]
        return max(times) * (micro_batches - 1) + sum(times)

    def in_flight(self, stages_behind: int, micro_batches: int, schedule: str) -> int:
        if schedule != "1f1b":
            raise PlanError("Aceso's model prices the schedule 1f1b only")
        return stages_behind + 1


def _one_collective(source: Layout, target: Layout) -> Step | None:
    """The collective that turns one layout into another; None if no single one does."""
    grows = [one < other for one, other in zip(source.dims, target.dims)]
    if source.replicas > target.replicas:
        whole = source.replicas % target.replicas == 0
        return (
            (None, "all_gather", source.replicas // target.replicas)
            if any(grows) and whole
            else None
        )
    for one, other in zip(source.dims, target.dims):
        if one > other and one % other == 0:
            if source.replicas < target.replicas:
                return "all_gather", None, one // other
            if any(grows):
                return "all_to_all", "all_to_all", one // other
    return None
