"""How a backward's buckets of DDP become units: the gradients that are compressed at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch

from fusedpg._by_parameter import Order, order_in_bucket
from fusedpg.compress import _schedule
from fusedpg.compress._schedule import Layout


@dataclasses.dataclass
class Bucket:
    """A bucket that DDP waits for."""

    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor | None]


@dataclasses.dataclass
class Unit:
    """Gradients that are compressed at once: slices of buckets, whole parameters."""

    index: int
    step: int
    plain: bool  # sent as they are
    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)
    orders: list[Order] = dataclasses.field(default_factory=list)
    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of parameters
    sources: list[torch.Tensor] = dataclasses.field(default_factory=list)  # where they lie
    slices: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of buckets
    numel: int = 0
    ends: list[Bucket] = dataclasses.field(default_factory=list)  # complete with this unit
    timing: _schedule.Timing = _schedule.untimed
    after: torch.cuda.Event | None = None  # on a GPU: what has been queued before


class Units:
    """Cuts and joins the buckets of one backward after the other, by a schedule.

    A schedule is made for the layout of the backward before. Where DDP's buckets differ from it,
    each of them is a unit.
    """

    plain = False  # the units of this backward are sent as they are
    expected = False  # the buckets so far are those that the schedule was made for

    def __init__(self, schedule: _schedule.Fixed | _schedule.Auto) -> None:
        self.schedule = schedule
        self._forced = False
        self._step = self._position = self._count = 0
        self._splits: frozenset[int] | None = None
        self._layout = Layout()
        self._seen = Layout()
        self._open: Unit | None = None
        self._waiting: list[Bucket] = []  # for the unit that is open

    def begin(self, step: int, forced: bool) -> None:
        """A backward begins.

        Args:
            forced: its gradients are sent as they are, whatever the schedule says.
        """
        self._step, self._forced = step, forced
        self._position = self._count = 0
        self._seen = Layout()
        self._splits = None if forced else self.schedule.begin(self._layout)
        self.plain = forced or self.schedule.plain

    def follow(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[Unit]:
        """A bucket comes. Returns the unit that ends before it because the layout has changed."""
        self._seen.add([p.numel() for p in parameters], (buffer.dtype, buffer.device))
        before = self._splits
        if before is not None and not self._seen.begins(self._layout):
            self._splits = None
        self.expected = self._splits is not None or self._forced
        closes = self._open is not None and before is not self._splits
        return [self._close()] if closes else []

    def skip(self, count: int) -> None:
        """The parameters of a bucket that is no part of a unit."""
        self._position += count

    def add(
        self,
        parameters: list[torch.Tensor],
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
        future: torch.futures.Future[torch.Tensor | None],
    ) -> list[Unit]:
        """Adds a bucket, and returns the units that end in it.

        Args:
            gradients: those that lie elsewhere than in the bucket.
            future: gets the result.
        """
        first, count = self._position, len(parameters)
        self._position += count
        if self._splits is not None:
            cuts = [at - first for at in self._splits if first < at <= self._position]
        elif self.schedule.by_layer and not self._forced:
            cuts = [*range(1, count + 1)]
        else:
            cuts = [count]
        parts = buffer.split([p.numel() for p in parameters])
        orders = [
            # The usual case, without a call.
            None
            if p.is_contiguous() and ((grad := p.grad) is None or grad.is_contiguous())
            else order_in_bucket(p, buffer)
            for p in parameters
        ]
        sources = [
            part if gradient is None else gradient.view(-1)
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        closed, begin = [], 0
        for a, b in pairwise(sorted({0, *cuts, count})):
            unit = self._open
            if unit is None:
                unit = self._open = Unit(self._count, self._step, self.plain)
                self._count += 1
            unit.parameters += parameters[a:b]
            unit.orders += orders[a:b]
            unit.parts += parts[a:b]
            unit.sources += sources[a:b]
            end = begin + sum(map(torch.numel, parts[a:b]))
            unit.slices.append(buffer[begin:end])
            unit.numel += end - begin
            begin = end
            if b == count:
                self._waiting.append(Bucket(buffer, future))
            if b in cuts:
                closed.append(self._close(first + b))
        return closed

    def _close(self, position: int | None = None) -> Unit:
        """Ends the open unit, and with it the buckets that wait for it."""
        unit, self._open = self._open, None
        assert unit is not None
        unit.ends, self._waiting = self._waiting, []
        unit.timing = self.timing(position)
        if unit.slices[0].is_cuda:
            unit.after = torch.cuda.current_stream(unit.slices[0].device).record_event()
        return unit

    def timing(self, position: int | None = None) -> _schedule.Timing:
        """Tells the schedule what a unit takes that ends at a position, or with this bucket."""
        if self._forced:
            return _schedule.untimed
        return self.schedule.timing(self._position if position is None else position)

    def end(self) -> list[Unit]:
        """The backward's last bucket has come. Returns the unit that is still open."""
        closed = [] if self._open is None else [self._close()]
        if self._seen != self._layout:
            self._layout = self._seen
            self.schedule.restart()
        return closed

    def abandon(self) -> None:
        """After a backward that was cut short: the rest of an open unit never comes, and whoever
        waits for its buckets would do so forever."""
        waiting, self._waiting, self._open = self._waiting, [], None
        for bucket in waiting:
            bucket.future.set_result(None)

    def restart(self) -> None:
        """Bucket by bucket in the next backward, and a search begins anew."""
        self._layout = Layout()
        self.schedule.restart()

    def finish(self, agree: _schedule.Agree) -> None:
        """All units of a backward have been sent."""
        if not self._forced:
            self.schedule.finish(agree)
