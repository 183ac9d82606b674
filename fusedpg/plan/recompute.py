"""Chooses the operators to recompute, so that a stage fits into memory in the least time.

Recomputing the operators ``i..j`` costs their forward pass and saves the activations of
``i..j - 1``. A segment ends where a layer begins, so layers can be decided alone: each has a
frontier of (saved memory, time), and a stage takes the cheapest steps along its layers'
frontiers. The largest segment is held at once, which a cap on segments bounds.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from fusedpg.plan.model import Array

__all__ = ["Recomputation"]

# Points of a frontier that are kept. Layers of GPT have about 60 without this bound.
_MOST_POINTS = 64
# Caps that are tried, as shares of a layer's activations.
_CAPS = (math.inf, 0.6, 0.3, 0.15)


class Point(NamedTuple):
    """A way to recompute a layer.

    Args:
        saved: MB of a micro-batch that are not kept.
        time: milliseconds of a micro-batch.
        segment: MB of the largest segment.
        flags: the recomputed operators, as bits.
    """

    saved: float
    time: float
    segment: float
    flags: int


class Step(NamedTuple):
    """A step along the convex part of a layer's frontier."""

    slope: float
    to: Point
    saved: float
    time: float


def _pareto(points: list[Point]) -> list[Point]:
    """The points that no other one beats, by rising `saved`."""
    points.sort(key=lambda point: (-point.saved, point.time, point.segment))
    kept: list[Point] = []
    for point in points:
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    kept.reverse()
    if len(kept) > _MOST_POINTS:
        places = np.linspace(0, len(kept) - 1, _MOST_POINTS).round().astype(int)
        kept = [kept[place] for place in places]
    return kept


def frontier(
    activations: list[float], times: list[float], allowed: list[bool], cap: float
) -> list[Point]:
    """The best ways to recompute the operators of one layer.

    Args:
        activations: MB of each operator.
        times: milliseconds of each operator's forward pass.
        allowed: which may be recomputed.
        cap: MB that no segment may exceed.
    """
    ops = len(activations)
    # gap[k]: ways for the operators before k that do not recompute k - 1
    nothing = Point(0.0, 0.0, 0.0, 0)
    gap: list[list[Point]] = [[nothing]]
    best = [nothing]
    for end in range(1, ops + 1):
        ways = list(best)
        gap.append(best)
        saved = 0.0
        time = times[end - 1]
        flags = 1 << (end - 1)
        if allowed[end - 1]:
            for start in range(end - 2, -1, -1):
                saved += activations[start]
                time += times[start]
                flags |= 1 << start
                if not allowed[start] or saved > cap:
                    break
                ways += [
                    Point(
                        way.saved + saved,
                        way.time + time,
                        max(way.segment, saved),
                        way.flags | flags,
                    )
                    for way in gap[start]
                ]
        best = _pareto(ways)
    return best


def steps_of(points: list[Point]) -> list[Step]:
    """The convex part of a frontier, as steps with rising slopes."""
    steps: list[Step] = []
    here = points[0]
    while True:
        better = [point for point in points if point.saved > here.saved]
        if not better:
            return steps
        slopes = [(point.time - here.time) / (point.saved - here.saved) for point in better]
        lowest = min(slopes)
        # The farthest of equal slopes.
        there = [point for point, slope in zip(better, slopes) if slope <= lowest * (1 + 1e-12)][-1]
        steps.append(Step(lowest, there, there.saved - here.saved, there.time - here.time))
        here = there


class Recomputation:
    """Chooses operators to recompute; remembers the frontiers of layers."""

    def __init__(self) -> None:
        self._frontiers: dict[tuple[bytes, float], tuple[list[Point], list[Step]]] = {}
        self._masks: dict[tuple[int, int], Array] = {}

    def choose(
        self,
        activations: Array,
        times: Array,
        allowed: Array,
        starts: Array,
        in_flight: int,
        excess: float,
    ) -> Array:
        """The operators of a stage to recompute.

        Args:
            activations: MB of each operator.
            times: milliseconds of each operator's forward pass.
            allowed: which may be recomputed.
            starts: which are the first of a layer.
            in_flight: micro-batches whose activations are held at once.
            excess: MB to save, beyond what the largest segment takes again.

        Returns:
            A flag for each operator: the cheapest choice found that saves `excess`, or else the
            one that saves most.
        """
        borders = [0, *(np.flatnonzero(starts[1:]) + 1).tolist(), len(times)]
        spans = list(itertools.pairwise(borders))
        # Layers with the same numbers are of one kind.
        rows = np.stack([activations, times, allowed], axis=1)
        text, size = rows.tobytes(), rows.itemsize * 3
        layers: dict[bytes, list[int]] = {}
        for place, (first, end) in enumerate(spans):
            layers.setdefault(text[first * size : end * size], []).append(place)
        largest = float(np.add.reduceat(activations, borders[:-1]).max())
        best: tuple[float, float, list[Point]] | None = None
        for share in _CAPS:
            if best is not None and max(point.segment for point in best[2]) <= largest * share:
                continue  # the cap changes nothing
            found = self._fill(layers, spans, rows, in_flight, excess, largest * share)
            if best is None or (max(found[0], 0.0), found[1]) < (max(best[0], 0.0), best[1]):
                best = found
        assert best is not None
        return np.concatenate(
            [self._mask(point.flags, end - first) for (first, end), point in zip(spans, best[2])]
        )

    def _mask(self, flags: int, ops: int) -> Array:
        key = (flags, ops)
        if key not in self._masks:
            self._masks[key] = np.array([flags >> op & 1 for op in range(ops)], dtype=bool)
        return self._masks[key]

    def _fill(
        self,
        layers: dict[bytes, list[int]],
        spans: list[tuple[int, int]],
        rows: Array,
        in_flight: int,
        excess: float,
        cap: float,
    ) -> tuple[float, float, list[Point]]:
        """The rest of `excess`, the time, and a point for each layer, under a cap."""
        kinds = list(layers.values())
        chosen = [Point(0.0, 0.0, 0.0, 0)] * len(spans)
        frontiers: list[list[Point]] = []
        steps: list[tuple[float, int, Step]] = []
        for layer, (text, places) in enumerate(layers.items()):
            key = (text, cap)
            if key not in self._frontiers:
                activations, times, allowed = rows[slice(*spans[places[0]])].T
                points = frontier(
                    activations.tolist(), times.tolist(), allowed.astype(bool).tolist(), cap
                )
                self._frontiers[key] = points, steps_of(points)
            points, along = self._frontiers[key]
            frontiers.append(points)
            steps += [(step.slope, layer, step) for step in along]
        steps.sort()
        saved = time = segment = 0.0
        for _, layer, step in steps:
            places = kinds[layer]
            if excess + segment - in_flight * saved <= 0:
                break
            before = chosen[places[0]]
            lacking = excess + max(segment, step.to.segment) - in_flight * saved
            whole = min(len(places), max(0, int(lacking // (in_flight * step.saved))))
            if whole:
                segment = max(segment, step.to.segment)
                saved += whole * step.saved
                time += whole * step.time
                for place in places[:whole]:
                    chosen[place] = step.to
            lacking = excess + segment - in_flight * saved
            if whole < len(places) and lacking > 0:
                # The last layer need not go all the way.
                enough = [
                    point
                    for point in frontiers[layer]
                    if in_flight * (point.saved - before.saved)
                    >= lacking + max(0.0, point.segment - segment)
                ]
                to = min(enough, key=lambda point: point.time, default=step.to)
                chosen[places[whole]] = to
                saved += to.saved - before.saved
                time += to.time - before.time
                segment = max(segment, to.segment)
                if enough:
                    break
        return excess + segment - in_flight * saved, time, chosen
