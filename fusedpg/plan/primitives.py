"""Steps from one plan to others, as Aceso's table of primitives has them.

A primitive changes the bottleneck, a stage, with the help of others. What it does to the
bottleneck's time, memory and communication decides when the search tries it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusedpg.plan.model import Array
from fusedpg.plan.space import Candidate, Space, State, packed

__all__ = ["PRIMITIVES", "Primitive", "balance", "finetune", "uniform_state"]

# A border moves so many operators at once.
_SHIFTS = (1, 2, 3, 5, 8, 13, 26, 52, 104)
_BALANCE_ROUNDS = 6
# Partners that give or take devices at once.
_PARTNERS = 2
# Operators of a stage that are tried with another setting.
_FLIPS = 40
# The weight of a MB against milliseconds when settings are chosen by both, as shares of the
# stage's time over its memory.
_MEMORY_WEIGHTS = (0.0, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Primitive:
    """A row of the table; effects on the bottleneck are "+", "-" or "0".

    Args:
        name: as in Aceso.
        time: of its computation.
        memory: of its devices.
        comm: of its communication.
        apply: gives the states that it leads to, from a candidate and the bottleneck.
    """

    name: str
    time: str
    memory: str
    comm: str
    apply: Callable[[Space, Candidate, int], Iterable[State]]


def dominant(state: State, stage: int) -> int:
    """The setting that most of a stage's operators have."""
    return int(np.bincount(state.numbers(stage)).argmax())


def uniform_state(
    micro_batch: int, widths: Iterable[int], counts: Iterable[int], settings: Iterable[int]
) -> State:
    """A state with one setting for all operators of a stage."""
    stages = tuple(packed(np.full(n, setting)) for n, setting in zip(counts, settings))
    return State(micro_batch, tuple(widths), stages)


def _with_counts(state: State, counts: list[int]) -> State:
    """The state with other borders; an operator that moves gets the setting of its neighbour."""
    old = state.counts
    if counts == old:
        return state
    before = np.concatenate([state.numbers(stage) for stage in range(len(old))])
    stages = []
    old_first = new_first = 0
    for was, now in zip(old, counts):
        inside = np.clip(np.arange(new_first, new_first + now), old_first, old_first + was - 1)
        stages.append(packed(before[inside]))
        old_first += was
        new_first += now
    return State(state.micro_batch, state.widths, tuple(stages))


def _moved(state: State, stage: int, partner: int, step: int) -> State:
    """The state whose stage has given operators to a partner; those in between pass them on."""
    counts = state.counts
    counts[stage] -= step
    counts[partner] += step
    return _with_counts(state, counts)


def balance(space: Space, state: State) -> Candidate | None:
    """The state with borders that make all stages take the same time, as far as memory allows.

    The time of a stage is that without recomputation times a factor, which comes from the last
    price and rises where a stage does not fit.
    """
    stages = len(state.widths)
    best = space.candidate(state)
    if stages == 1 or best is None:
        return best
    prefixes = [space.prefix(state.micro_batch, dominant(state, stage)) for stage in range(stages)]
    if not all(np.isfinite(prefix[-1]) for prefix in prefixes):
        return best
    factors = np.ones(stages)
    here = best
    for _ in range(_BALANCE_ROUNDS):
        firsts = list(itertools.accumulate(here.state.counts, initial=0))
        for stage, price in enumerate(here.stages):
            plain = prefixes[stage][firsts[stage + 1]] - prefixes[stage][firsts[stage]]
            if plain > 0:
                factors[stage] = price.time / plain
            if price.memory > space.memory_limit:
                factors[stage] *= 1.05 * price.memory / space.memory_limit
        counts = _equal_times(prefixes, factors)
        moved = _with_counts(here.state, counts)
        if moved == here.state:
            break
        priced = space.candidate(moved)
        if priced is None:
            break
        here = priced
        if here.rank < best.rank:
            best = here
    return best


def _and_evened(space: Space, state: State) -> Iterator[State]:
    """The state, and the one of it whose stages take the same time."""
    yield state
    evened = balance(space, state)
    if evened is not None:
        yield evened.state


def _equal_times(prefixes: list[Array], factors: Array) -> list[int]:
    """Borders at which the slowest stage is as fast as can be."""
    stages, ops = len(prefixes), len(prefixes[0]) - 1

    def cut(most: float) -> list[int]:
        """The ends of stages that take at most `most`, as far as they go."""
        ends, first = [], 0
        for stage in range(stages):
            prefix = prefixes[stage]
            allowed = prefix[first] + most / factors[stage]
            end = int(np.searchsorted(prefix, allowed, side="right")) - 1
            # Every stage has an operator.
            first = min(max(end, first + 1), ops - (stages - 1 - stage))
            ends.append(first)
        return ends

    low, high = 0.0, float(max(prefix[-1] * factor for prefix, factor in zip(prefixes, factors)))
    for _ in range(40):
        middle = (low + high) / 2
        if cut(middle)[-1] >= ops:
            high = middle
        else:
            low = middle
    ends = cut(high)
    ends[-1] = ops
    return [end - first for first, end in zip([0, *ends], ends)]


def _moves(space: Space, candidate: Candidate, stage: int) -> Iterator[State]:
    """dec_op: the bottleneck gives operators to stages on either side."""
    state = candidate.state
    counts = state.counts
    for step in _SHIFTS:
        if step >= counts[stage]:
            break
        for partner in (stage - 1, stage + 1):
            if 0 <= partner < len(counts):
                yield _moved(state, stage, partner, step)
    # Farther: all stages in between pass as many on.
    others = (other for other in range(len(counts)) if other != stage)
    order = sorted(others, key=candidate.loads.__getitem__)
    for partner in order[:2]:
        if abs(partner - stage) > 1:
            for step in _SHIFTS[:4]:
                if step < counts[stage]:
                    yield _moved(state, stage, partner, step)
    evened = balance(space, state)
    if evened is not None:
        yield evened.state


def _resized(
    space: Space, candidate: Candidate, changes: dict[int, int], fixed: dict[int, int]
) -> Iterator[State]:
    """States whose stages have other widths, each with the best of its settings.

    Args:
        space: the plans.
        candidate: where it starts.
        changes: the new widths of stages.
        fixed: settings that some of them must have.
    """
    state = candidate.state
    widths = tuple(changes.get(stage, width) for stage, width in enumerate(state.widths))
    settings = list(state.settings)
    for stage, width in changes.items():
        if stage in fixed:
            options = [fixed[stage]]
        else:
            options = space.settings(state.micro_batch, width).tolist()
        chosen = best_setting(space, state.micro_batch, widths, settings, stage, options)
        if chosen is None:
            return
        settings[stage] = chosen
    changed = State(state.micro_batch, widths, tuple(settings))
    yield from _and_evened(space, changed)


def best_setting(
    space: Space,
    micro_batch: int,
    widths: tuple[int, ...],
    settings: list[bytes],
    stage: int,
    options: Iterable[int],
) -> bytes | None:
    """The setting, of some, with which all operators of a stage fit in the least time."""
    first = sum(len(one) // 2 for one in settings[:stage])
    count = len(settings[stage]) // 2
    best: tuple[float, float, bytes] | None = None
    for option in options:
        trial = list(settings)
        trial[stage] = packed(np.full(count, option))
        try:
            price, _ = space.stage(State(micro_batch, widths, tuple(trial)), stage, first)
        except LookupError:
            continue
        share = (price.exposed + price.optimizer) * micro_batch / space.global_batch
        rank = (max(0.0, price.memory - space.memory_limit), price.time + share, trial[stage])
        if best is None or rank < best:
            best = rank
    return None if best is None else best[2]


def _devices(
    direction: int, degree: int, space: Space, candidate: Candidate, stage: int
) -> Iterator[State]:
    """inc_dp, dec_dp, inc_tp and dec_tp: devices move between the bottleneck and partners.

    Args:
        direction: 1 if the bottleneck gets devices, -1 if it gives some.
        degree: 0 if its tp changes, 1 if its dp does.
    """
    state = candidate.state
    tables = space.model.tables(state.micro_batch)
    here = tables.settings[dominant(state, stage)]
    others = [one for one in range(len(state.widths)) if one != stage]
    if not others:
        return
    found: dict[int, list[int]] = {}
    for setting, there in enumerate(tables.settings):
        grows = (there[degree] - here[degree]) * direction > 0
        if grows and there[1 - degree] == here[1 - degree] and there[2] == here[2]:
            found.setdefault(there[0] * there[1], []).append(setting)
    nearest = sorted(found, key=lambda width: abs(width - state.widths[stage]))
    for width in nearest[:2]:
        for partners in _partners(space, candidate, others, width - state.widths[stage]):
            for setting in found[width]:
                yield from _resized(space, candidate, {stage: width, **partners}, {stage: setting})


def _partners(
    space: Space, candidate: Candidate, others: list[int], wanted: int
) -> list[dict[int, int]]:
    """New widths of partners that give `wanted` devices, or take them if it is negative.

    The first are those that can best spare them, or need them most.
    """
    state = candidate.state
    legal = set(space.model.tables(state.micro_batch).width.tolist())
    order = sorted(others, key=lambda one: candidate.stages[one].time * state.widths[one])
    if wanted < 0:
        order.reverse()
    found = [
        {one: state.widths[one] - wanted} for one in order if state.widths[one] - wanted in legal
    ]
    if not found:
        for pair in itertools.combinations(order, _PARTNERS):
            for part in range(1, abs(wanted)):
                gives = part if wanted > 0 else -part
                widths = {
                    pair[0]: state.widths[pair[0]] - gives,
                    pair[1]: state.widths[pair[1]] - wanted + gives,
                }
                if all(width in legal for width in widths.values()):
                    found.append(widths)
                    break
    return found[:3]


def _micro_batch(direction: int, space: Space, candidate: Candidate, stage: int) -> Iterator[State]:
    """inc_mbs and dec_mbs: the next size, with the best settings of every stage."""
    state = candidate.state
    place = space.micro_batches.index(state.micro_batch) + direction
    if not 0 <= place < len(space.micro_batches):
        return
    micro_batch = space.micro_batches[place]
    changed = with_micro_batch(space, state, micro_batch)
    if changed is not None:
        yield from _and_evened(space, changed)


def with_micro_batch(space: Space, state: State, micro_batch: int) -> State | None:
    """The state with another micro-batch size, and the best settings for it."""
    settings = [packed(np.zeros(count)) for count in state.counts]
    for stage, width in enumerate(state.widths):
        options = space.settings(micro_batch, width).tolist()
        chosen = best_setting(space, micro_batch, state.widths, settings, stage, options)
        if chosen is None:
            return None
        settings[stage] = chosen
    return State(micro_batch, state.widths, tuple(settings))


def _exchange(degree: int, space: Space, candidate: Candidate, stage: int) -> Iterator[State]:
    """inc_tp_dec_dp and inc_dp_dec_tp: the bottleneck splits otherwise on the same devices."""
    state = candidate.state
    tables = space.model.tables(state.micro_batch)
    here = tables.settings[dominant(state, stage)]
    width = state.widths[stage]
    for setting in space.settings(state.micro_batch, width).tolist():
        if tables.settings[setting][degree] > here[degree]:
            yield from _resized(space, candidate, {stage: width}, {stage: setting})


PRIMITIVES = (
    Primitive("dec_op", "-", "-", "0", _moves),
    Primitive("inc_dp", "-", "-", "+", partial(_devices, 1, 1)),
    Primitive("dec_dp", "+", "+", "-", partial(_devices, -1, 1)),
    Primitive("inc_tp", "-", "-", "+", partial(_devices, 1, 0)),
    Primitive("dec_tp", "+", "+", "-", partial(_devices, -1, 0)),
    Primitive("inc_mbs", "-", "+", "0", partial(_micro_batch, 1)),
    Primitive("dec_mbs", "+", "-", "0", partial(_micro_batch, -1)),
    Primitive("inc_tp_dec_dp", "+", "-", "+", partial(_exchange, 0)),
    Primitive("inc_dp_dec_tp", "-", "+", "-", partial(_exchange, 1)),
)


def _paths(space: Space, candidate: Candidate, stage: int) -> Iterator[bytes]:
    """Settings of a stage's operators, each the best path through them at some price of memory."""
    state = candidate.state
    model = space.model
    first = sum(state.counts[:stage])
    ops = state.counts[stage]
    options = space.settings(state.micro_batch, state.widths[stage])
    if len(options) < 2:
        return
    place = space.place(state.widths, stage)
    tables = model.tables(state.micro_batch, place.nodes)
    kind = model.kind[first : first + ops]
    grid = np.ix_(options, kind)
    times = (tables.forward[grid] + tables.backward[grid]).T
    operators = model.database.operators
    copies = 2 + operators.memory_main_params + operators.memory_optimizer
    behind = len(state.widths) - 1 - stage
    in_flight = model.in_flight(behind, space.global_batch // state.micro_batch, "1f1b")
    held = (tables.weights[grid] * copies + tables.activations[grid] * in_flight).T
    pairs = model.pair[first : first + ops - 1]
    both = tables.reshard_forward + tables.reshard_backward
    between = both[np.ix_(np.unique(pairs), options, options)]
    row = {pair: i for i, pair in enumerate(np.unique(pairs).tolist())}
    price = candidate.stages[stage]
    scale = price.time / max(price.memory, 1.0)
    full = price.memory > 0.9 * space.memory_limit or bool(
        np.frombuffer(candidate.flags[stage], np.uint8).any()
    )
    for weight in _MEMORY_WEIGHTS if full else _MEMORY_WEIGHTS[:1]:
        costs = times + weight * scale * held
        total = costs[0]
        came = np.zeros((ops, len(options)), dtype=np.int64)
        for op in range(1, ops):
            ways = total[:, None] + between[row[int(pairs[op - 1])]]
            came[op] = ways.argmin(axis=0)
            total = ways.min(axis=0) + costs[op]
        if not np.isfinite(total).any():
            return
        path = np.empty(ops, dtype=np.int64)
        path[-1] = int(total.argmin())
        for op in range(ops - 1, 0, -1):
            path[op - 1] = came[op, path[op]]
        yield packed(options[path])


def _flips(space: Space, state: State, stage: int) -> Iterator[bytes]:
    """Settings of a stage with another one for an operator, for those before it, or behind it."""
    numbers = state.numbers(stage)
    ops = len(numbers)
    places = np.unique(np.linspace(0, ops - 1, min(ops, _FLIPS)).round().astype(int)).tolist()
    for option in space.settings(state.micro_batch, state.widths[stage]).tolist():
        for place in places:
            if numbers[place] == option:
                continue
            for part in (slice(place, place + 1), slice(place, ops), slice(0, place + 1)):
                changed = numbers.copy()
                changed[part] = option
                yield packed(changed)


def finetune(
    space: Space, candidate: Candidate, rounds: int, late: Callable[[], bool] = lambda: False
) -> Candidate:
    """The best plan near a candidate: other settings of single operators, other borders.

    Args:
        space: the plans.
        candidate: where it starts.
        rounds: how often it may improve.
        late: whether time is up.
    """
    best = candidate
    for _ in range(rounds):
        before = best
        for stage in range(len(best.state.widths)):
            near = _paths(space, best, stage)
            if best.state.counts[stage] <= _FLIPS or stage == _slowest(space, best):
                near = itertools.chain(near, _flips(space, best.state, stage))
            for path in near:
                if late():
                    return best
                settings = (*best.state.settings[:stage], path, *best.state.settings[stage + 1 :])
                best = _better(
                    space, best, State(best.state.micro_batch, best.state.widths, settings)
                )
        while True:
            here = best
            slowest = _slowest(space, here)
            for moved in _shifted(here.state, slowest):
                if late():
                    return best
                best = _better(space, best, moved)
            if best is here:
                break
        for changed in _resampled(space, best.state):
            best = _better(space, best, changed)
        if best is before:
            break
    return best


def _resampled(space: Space, state: State) -> Iterator[State]:
    """The same degrees with the next smaller and the next larger micro-batch size."""
    settings = space.model.tables(state.micro_batch).settings
    place = space.micro_batches.index(state.micro_batch)
    for micro_batch in space.micro_batches[max(place - 1, 0) : place + 2]:
        index = space.model.tables(micro_batch).index
        stages = [
            [index.get(settings[i], -1) for i in state.numbers(stage)]
            for stage in range(len(state.widths))
        ]
        if min(map(min, stages)) >= 0:
            yield State(micro_batch, state.widths, tuple(packed(np.array(s)) for s in stages))


def _slowest(space: Space, candidate: Candidate) -> int:
    """The stage to relieve: one that does not fit, else the one that takes longest."""
    stages = candidate.stages
    limit = space.memory_limit
    return max(range(len(stages)), key=lambda i: (stages[i].memory > limit, stages[i].time))


def _shifted(state: State, stage: int) -> Iterator[State]:
    """The stage's borders, and the neighbours' beyond them, moved by a few operators."""
    counts = state.counts
    for step in _SHIFTS[:6]:
        if step >= counts[stage]:
            return
        for direction in (-1, 1):
            partner = stage + direction
            while 0 <= partner < len(counts):
                yield _moved(state, stage, partner, step)
                partner += direction


def _better(space: Space, best: Candidate, state: State) -> Candidate:
    if state == best.state:
        return best
    candidate = space.candidate(state)
    return candidate if candidate is not None and candidate.rank < best.rank else best
