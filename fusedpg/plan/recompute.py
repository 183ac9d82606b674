"""Which operators of a stage to recompute, so that it fits into memory in the least time.

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
    layer: int  # the kind of layer
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


def steps_of(layer: int, points: list[Point]) -> list[Step]:
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
        steps.append(Step(lowest, layer, there, there.saved - here.saved, there.time - here.time))
        here = there


class Recomputation:
    """Chooses operators to recompute; remembers the frontiers of layers."""

    def __init__(self) -> None:
        self._frontiers: dict[tuple[bytes, bytes, float], tuple[list[Point], list[Step]]] = {}

    def choose(
        self,
        activations: Array,
        times: Array,
        allowed: Array,
        starts: Array,
        in_flight: int,
        excess: float,
    ) -> Array:
        """Which operators of a stage to recompute.

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
        layers: dict[tuple[bytes, bytes], list[int]] = {}
        for place, (first, end) in enumerate(spans):
            key = (
                activations[first:end].tobytes(),
                times[first:end].tobytes() + allowed[first:end].tobytes(),
            )
            layers.setdefault(key, []).append(place)
        amounts = [float(activations[first:end].sum()) for first, end in spans]
        largest = max(amounts)
        best: tuple[float, float, list[Point]] | None = None
        for share in _CAPS:
            found = self._fill(
                layers, spans, activations, times, allowed, in_flight, excess, largest * share
            )
            if best is None or (max(found[0], 0.0), found[1]) < (max(best[0], 0.0), best[1]):
                best = found
        assert best is not None
        flags = np.zeros(len(times), dtype=bool)
        for (first, _), point in zip(spans, best[2]):
            bits = point.flags
            while bits:
                flags[first + (bits & -bits).bit_length() - 1] = True
                bits &= bits - 1
        return flags

    def _fill(
        self,
        layers: dict[tuple[bytes, bytes], list[int]],
        spans: list[tuple[int, int]],
        activations: Array,
        times: Array,
        allowed: Array,
        in_flight: int,
        excess: float,
        cap: float,
    ) -> tuple[float, float, list[Point]]:
        """What lacks to `excess`, the time, and a point for each layer, under a cap."""
        kinds = list(layers.values())
        chosen = [Point(0.0, 0.0, 0.0, 0)] * len(spans)
        frontiers: list[list[Point]] = []
        steps: list[Step] = []
        for layer, (key, places) in enumerate(layers.items()):
            first, end = spans[places[0]]
            if (known := (*key, cap)) not in self._frontiers:
                points = frontier(
                    activations[first:end].tolist(),
                    times[first:end].tolist(),
                    allowed[first:end].tolist(),
                    cap,
                )
                self._frontiers[known] = points, steps_of(layer, points)
            points, along = self._frontiers[known]
            frontiers.append(points)
            steps += [step._replace(layer=layer) for step in along]
        steps.sort(key=lambda step: step.slope)
        saved = time = segment = 0.0
        for step in steps:
            for place in kinds[step.layer]:
                lacking = excess + max(segment, step.to.segment) - in_flight * saved
                if excess + segment - in_flight * saved <= 0:
                    return 0.0, time, chosen
                before = chosen[place]
                # The last step need not go all the way.
                to = step.to
                if in_flight * step.saved > lacking:
                    enough = [
                        point
                        for point in frontiers[step.layer]
                        if in_flight * (point.saved - before.saved)
                        >= excess + max(segment, point.segment) - in_flight * saved
                    ]
                    to = min(enough, key=lambda point: point.time, default=to)
                chosen[place] = to
                saved += to.saved - before.saved
                time += to.time - before.time
                segment = max(segment, to.segment)
        return excess + segment - in_flight * saved, time, chosen
