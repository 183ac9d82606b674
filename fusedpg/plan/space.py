"""The plans that a search looks at, and their prices, each computed once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fusedpg.plan.config import Plan
from fusedpg.plan.database import MissingRow
from fusedpg.plan.model import Array, CostModel, Place, StagePrice
from fusedpg.plan.recompute import Recomputation

__all__ = ["Candidate", "Space", "State"]

# Operators of a layer whose recomputation is decided as one; the frontier of more takes long.
_LONGEST_LAYER = 32


@dataclass(frozen=True)
class State:
    """A plan but for recomputation, which follows from the rest.

    Args:
        micro_batch: samples of a micro-batch.
        widths: the devices of each stage.
        settings: of each stage, the number of each operator's (tp, dp, algo) in the tables of the
            micro-batch size; two bytes each.
    """

    micro_batch: int
    widths: tuple[int, ...]
    settings: tuple[bytes, ...]

    @property
    def counts(self) -> list[int]:
        """The number of operators of each stage."""
        return [len(setting) // 2 for setting in self.settings]

    def numbers(self, stage: int) -> Array:
        """The settings of a stage's operators."""
        return np.frombuffer(self.settings[stage], dtype=np.uint16).astype(np.int64)


def packed(numbers: Array) -> bytes:
    return numbers.astype(np.uint16).tobytes()


def _layers(model: CostModel) -> tuple[Array, Array]:
    """The layers whose recomputation is decided alone, and the operators that may be recomputed.

    They are the model's layers. Longer runs are cut where their first operator that comes again
    does; operators at such cuts are not recomputed, so that no segment goes across.
    """
    starts = model.is_start.copy()
    starts[0] = True
    may = model.may_recompute.copy()
    borders = [*np.flatnonzero(starts).tolist(), model.num_ops]
    for first, end in itertools.pairwise(borders):
        if end - first <= _LONGEST_LAYER:
            continue
        kinds = model.kind[first:end].tolist()
        again = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        cuts = [first + i for i, kind in enumerate(kinds) if kind == again]
        for before, behind in itertools.pairwise([first, *cuts, end]):
            cuts += range(before + _LONGEST_LAYER, behind, _LONGEST_LAYER)
        inner = [cut for cut in cuts if cut > first]
        starts[inner] = True
        may[inner] = False
    return starts, may


@dataclass(frozen=True)
class Candidate:
    """A state with its price."""

    state: State
    stages: tuple[StagePrice, ...]
    flags: tuple[bytes, ...]
    time: float  # milliseconds of an iteration
    memory: float  # MB of the device that needs most
    overrun: float  # MB beyond the limit

    @property
    def loads(self) -> list[float]:
        """MB of each stage if one does not fit, else milliseconds."""
        return [stage.memory if self.overrun > 0 else stage.time for stage in self.stages]

    @property
    def rank(self) -> tuple[float, float]:
        """The smaller, the better: plans that fit by time, others by how far they do not."""
        return (self.overrun, self.time)


# Stages of so few operators are looked at more closely for what to recompute.
_FEW_OPERATORS = 8


class Space:
    """The plans for a model on some devices.

    Args:
        model: the cost model.
        global_batch: samples of an iteration.
        micro_batches: micro-batch sizes that may be used.
        memory_limit: MB of a device.
    """

    def __init__(
        self,
        model: CostModel,
        global_batch: int,
        micro_batches: Sequence[int],
        memory_limit: float,
    ) -> None:
        self.model = model
        self.global_batch = global_batch
        self.micro_batches = sorted(one for one in set(micro_batches) if global_batch % one == 0)
        if not self.micro_batches:
            raise ValueError(
                f"no micro-batch size of {sorted(micro_batches)} divides a global batch of "
                f"{global_batch}"
            )
        self.memory_limit = memory_limit
        self.priced = 0  # plans
        self.left_out: dict[str, int] = {}  # plans that could not be priced, by the reason
        self._recomputation = Recomputation()
        self._starts, self._may_recompute = _layers(model)
        self._stages: dict[tuple[object, ...], tuple[StagePrice, bytes] | MissingRow] = {}
        self._remember()

    def _remember(self) -> None:
        """Each of these is computed once."""
        self.place = functools.cache(self.model.place)
        self.settings = functools.cache(self._settings)
        self.prefix = functools.cache(self._prefix)

    def __getstate__(self) -> dict[str, object]:
        # A copy that kept these functions would ask the original.
        cached = ("place", "settings", "prefix")
        return {name: value for name, value in vars(self).items() if name not in cached}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._remember()

    def _settings(self, micro_batch: int, width: int) -> Array:
        """The settings for a stage of so many devices."""
        return np.flatnonzero(self.model.tables(micro_batch).width == width)

    def _prefix(self, micro_batch: int, setting: int) -> Array:
        """Milliseconds of all operators before each, if all have one setting."""
        tables = self.model.tables(micro_batch)
        kind, pair = self.model.kind, self.model.pair
        times = tables.forward[setting, kind] + tables.backward[setting, kind]
        times[1:] += tables.reshard_forward[pair, setting, setting]
        times[1:] += tables.reshard_backward[pair, setting, setting]
        return np.concatenate([[0.0], np.cumsum(times)])

    def stage(self, state: State, stage: int, first: int) -> tuple[StagePrice, bytes]:
        """The price of a stage, and which operators it recomputes.

        Raises:
            MissingRow: if the database does not say.
        """
        settings = state.settings[stage]
        place = self.place(state.widths, stage)
        behind = len(state.widths) - 1 - stage
        in_flight = self.model.in_flight(behind, self.global_batch // state.micro_batch, "1f1b")
        key = (state.micro_batch, first, settings, in_flight, place)
        known = self._stages.get(key)
        if known is None:
            try:
                known = self._price(state.micro_batch, first, settings, in_flight, place)
            except MissingRow as error:
                known = error
            self._stages[key] = known
        if isinstance(known, MissingRow):
            raise known
        return known

    def _price(
        self, micro_batch: int, first: int, packed_settings: bytes, in_flight: int, place: Place
    ) -> tuple[StagePrice, bytes]:
        model = self.model
        tables = model.tables(micro_batch, place.nodes)
        settings = np.frombuffer(packed_settings, dtype=np.uint16).astype(np.int64)
        ops = len(settings)
        whole = self.global_batch // micro_batch <= in_flight
        plain = model.stage(tables, first, settings, None, in_flight, place, whole)
        excess = plain.memory - self.memory_limit
        if excess <= 0 or ops < 2:
            return plain, bytes(ops)
        here = slice(first, first + ops)
        kind = model.kind[here]
        activations = tables.activations[settings, kind]
        times = tables.forward[settings, kind]

        def priced(flags: Array) -> StagePrice:
            return model.stage(tables, first, settings, flags, in_flight, place, whole)

        price, flags = plain, np.zeros(ops, dtype=bool)
        target = excess
        may = self._may_recompute[here]
        for _ in range(4):
            # With one micro-batch at once those behind the fullest moment hold nothing then.
            useful = may if in_flight > 1 else may & (np.arange(ops) <= price.fullest)
            # The saving of a choice leaves out the seams between layers: look again.
            chosen = self._recomputation.choose(
                activations, times, useful, self._starts[here], in_flight, target
            )
            again = priced(chosen)
            if again.memory < price.memory:
                price, flags = again, chosen
            over = again.memory - self.memory_limit
            if over <= 0:
                break
            target += over
        if ops <= _FEW_OPERATORS:
            price, flags = self._refined(priced, price, flags, may)
        return price, flags.astype(np.uint8).tobytes()

    def _refined(
        self, priced: Callable[[Array], StagePrice], price: StagePrice, flags: Array, may: Array
    ) -> tuple[StagePrice, Array]:
        """A better choice of what to recompute, which differs in runs of operators."""

        def rank(price: StagePrice) -> tuple[float, float]:
            return max(0.0, price.memory - self.memory_limit), price.recompute

        ops = len(flags)
        while True:
            best = price, flags
            for first, end in itertools.combinations(range(ops + 1), 2):
                for flag in (True, False):
                    trial = flags.copy()
                    trial[first:end] = flag & may[first:end]
                    again = priced(trial)
                    if rank(again) < rank(best[0]):
                        best = again, trial
            if best[0] is price:
                return best
            price, flags = best

    def candidate(self, state: State) -> Candidate | None:
        """A state with its price; None if the database does not say all of it."""
        self.priced += 1
        stages, flags = [], []
        first = 0
        try:
            for stage, settings in enumerate(state.settings):
                price, recomputed = self.stage(state, stage, first)
                stages.append(price)
                flags.append(recomputed)
                first += len(settings) // 2
        except MissingRow as error:
            self.left_out[str(error)] = self.left_out.get(str(error), 0) + 1
            return None
        time = self.model.iteration(stages, self.global_batch // state.micro_batch)
        memory = [stage.memory for stage in stages]
        overrun = sum(max(0.0, one - self.memory_limit) for one in memory)
        return Candidate(state, tuple(stages), tuple(flags), time, max(memory), overrun)

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, with its prediction."""
        return self.plan_of(candidate.state, candidate.flags, candidate.stages)

    def plan_of(
        self, state: State, flags: Sequence[bytes], stages: Sequence[StagePrice] = ()
    ) -> Plan:
        """The plan of a state, with a prediction if the prices of its stages are given."""
        price = self.model.whole(stages, self.global_batch // state.micro_batch) if stages else None
        settings = self.model.tables(state.micro_batch).settings
        degrees = [[settings[i] for i in state.numbers(s)] for s in range(len(state.widths))]

        def each(part: int) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(op[part] for op in stage) for stage in degrees)

        database = self.model.database
        return Plan(
            model_name=database.model_name,
            model_size=database.model_size,
            global_batch_size=self.global_batch,
            micro_batch_size=state.micro_batch,
            num_gpus=state.widths,
            num_ops_in_each_stage=tuple(state.counts),
            model_parallel_size_of_each_op=each(0),
            data_parallel_size_of_each_op=each(1),
            recompute_ops=tuple(map(tuple, flags)),
            algo_of_each_op=each(2),
            model=database.operators.model,
            predicted=None if price is None else price.prediction(),
        ).check()
