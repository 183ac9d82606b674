"""A plan: which devices run which operators, and how."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SCHEDULES", "Facts", "Plan", "PlanError", "Prediction"]

Facts = Mapping[str, Any]
"""The keys of a plan's file that describe its model, such as "num_layers"; values are JSON's."""

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")

# Lists of one list for each stage, with one number for each operator.
_EACH_OP = (
    "model_parallel_size_of_each_op",
    "data_parallel_size_of_each_op",
    "recompute_ops",
    "algo_of_each_op",
)
_EACH_STAGE = ("num_ops_in_each_stage", "num_gpus")
_REQUIRED = (
    "model_name",
    "model_size",
    "global_batch_size",
    "micro_batch_size",
    *_EACH_STAGE,
    *_EACH_OP,
)
# Aceso's files repeat these; a plan derives them.
_DERIVED = ("num_stages", "checkpoint_activations", "resharding_stages")
_OURS = ("schedule", "virtual_stages", "predicted")


class PlanError(ValueError):
    """A plan that no devices can run, or a file that is no plan."""


def _agrees(name: str, told: object, derived: Any) -> bool:
    """Whether what a file says of a key that a plan derives is no contradiction."""
    if name == "checkpoint_activations" and isinstance(told, list) and len(told) == len(derived):
        # A stage may have the flag and recompute no operator, as in the plan of Aceso's README.
        return all(flag or not recomputes for flag, recomputes in zip(told, derived))
    return bool(told == derived)


@dataclass(frozen=True)
class Prediction:
    """A cost model's prediction for a plan.

    Args:
        time_ms: an iteration, in milliseconds.
        stage_times_ms: the iteration as each stage would make it alone; the largest is `time_ms`.
        stage_memory_mb: the most that a device of each stage needs, in MB (2**20 bytes).
        cost_model: the model that said so, "fusedpg" or "aceso".
    """

    time_ms: float
    stage_times_ms: tuple[float, ...]
    stage_memory_mb: tuple[float, ...]
    cost_model: str


@dataclass(frozen=True)
class Plan:
    """A plan in the fields of Aceso's files, and ours.

    A stage is a run of consecutive operators on a set of devices of its own. Devices are
    numbered from 0, in the order of stages. Inside of a stage every operator has a
    tensor-parallel degree `tp` and a data-parallel degree `dp`, with ``tp * dp`` the stage's
    devices; device ``d * tp + t`` of the stage holds part `t` of the operator's weights and
    part `d` of the micro-batch.

    With ``virtual_stages = v > 1`` the devices hold `v` stages each: stage `s` runs on the
    devices of stage ``s % (num_stages // v)``, and only the first ``num_stages // v`` count
    for `num_devices`.

    Args:
        model_name: such as "gpt".
        model_size: such as "1_3B".
        global_batch_size: samples of an iteration.
        micro_batch_size: samples of a micro-batch, in all of the data-parallel parts together.
        num_gpus: the devices of each stage.
        num_ops_in_each_stage: how many operators each stage runs.
        model_parallel_size_of_each_op: `tp`, of each operator of each stage.
        data_parallel_size_of_each_op: `dp`, likewise.
        recompute_ops: 1 where the forward pass is done again for the backward pass.
        algo_of_each_op: how weights are split: 0 the usual way of the operator, 1 the other way.
        schedule: one of `SCHEDULES`.
        virtual_stages: stages of one device.
        model: the other keys of the file, which describe the model (such as "num_layers").
        predicted: what the search expected.
    """

    model_name: str
    model_size: str
    global_batch_size: int
    micro_batch_size: int
    num_gpus: tuple[int, ...]
    num_ops_in_each_stage: tuple[int, ...]
    model_parallel_size_of_each_op: tuple[tuple[int, ...], ...]
    data_parallel_size_of_each_op: tuple[tuple[int, ...], ...]
    recompute_ops: tuple[tuple[int, ...], ...]
    algo_of_each_op: tuple[tuple[int, ...], ...]
    schedule: str = "1f1b"
    virtual_stages: int = 1
    model: Facts = field(default_factory=dict)
    predicted: Prediction | None = None

    @property
    def num_stages(self) -> int:
        return len(self.num_ops_in_each_stage)

    @property
    def num_ops(self) -> int:
        return sum(self.num_ops_in_each_stage)

    @property
    def num_devices(self) -> int:
        """The devices of all stages, each counted once."""
        return sum(self.num_gpus[: self.num_stages // max(self.virtual_stages, 1)])

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @property
    def checkpoint_activations(self) -> tuple[bool, ...]:
        """For each stage: True if it recomputes anything."""
        return tuple(any(flags) for flags in self.recompute_ops)

    @property
    def resharding_stages(self) -> tuple[bool, ...]:
        """For each stage: True if its operators differ in `tp`, `dp` or `algo`."""
        columns = (
            self.model_parallel_size_of_each_op,
            self.data_parallel_size_of_each_op,
            self.algo_of_each_op,
        )
        return tuple(any(len(set(column)) > 1 for column in stage) for stage in zip(*columns))

    def first_op(self, stage: int) -> int:
        """The index in the model of a stage's first operator."""
        return sum(self.num_ops_in_each_stage[:stage])

    def first_device(self, stage: int) -> int:
        """The number of a stage's first device."""
        return sum(self.num_gpus[: stage % (self.num_stages // self.virtual_stages)])

    def devices(self, stage: int) -> range:
        """The numbers of a stage's devices."""
        first = self.first_device(stage)
        return range(first, first + self.num_gpus[stage])

    def problems(
        self, operators: Sequence[str] | None = None, devices: int | None = None
    ) -> list[str]:
        """Sentences that say why this plan cannot be run; none if it is right.

        Args:
            operators: the names of the model's operators, if they are known.
            devices: how many devices there are, if that is known.
        """
        found = list(self._wrong_shape())
        if found:  # what follows would index out of range
            return found
        for stage in range(self.num_stages):
            found += self._wrong_stage(stage)
        if self.global_batch_size % self.micro_batch_size:
            found.append(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        found += self._wrong_schedule()
        if operators is not None and len(operators) != self.num_ops:
            found.append(f"the plan has {self.num_ops} operators, the model {len(operators)}")
        if devices is not None and devices != self.num_devices:
            found.append(f"the plan is for {self.num_devices} devices, not {devices}")
        return found

    def check(self, operators: Sequence[str] | None = None, devices: int | None = None) -> Plan:
        """This plan, if `problems` finds none.

        Raises:
            PlanError: with all that is wrong.
        """
        found = self.problems(operators, devices)
        if found:
            raise PlanError("; ".join(found))
        return self

    def _wrong_shape(self) -> list[str]:
        found = []
        for name in ("global_batch_size", "micro_batch_size", "virtual_stages"):
            value = getattr(self, name)
            if not _is_count(value):
                found.append(f"{name} is {value!r}, not a positive integer")
        if not self.num_stages:
            return [*found, "a plan needs a stage"]
        for name in _EACH_STAGE:
            values = getattr(self, name)
            if not all(_is_count(value) for value in values):
                found.append(f"{name} is {list(values)}, not of positive integers")
        for name in ("num_gpus", *_EACH_OP):
            stages = len(getattr(self, name))
            if stages != self.num_stages:
                found.append(
                    f"{name} is for {stages} stages, num_ops_in_each_stage for {self.num_stages}"
                )
        if found:
            return found
        for name in _EACH_OP:
            for stage, values in enumerate(getattr(self, name)):
                if len(values) != self.num_ops_in_each_stage[stage]:
                    found.append(
                        f"{name} has {len(values)} numbers for stage {stage}, which has "
                        f"{self.num_ops_in_each_stage[stage]} operators"
                    )
        return found

    def _wrong_stage(self, stage: int) -> list[str]:
        # A message for each kind of fault, of the first operator that has it.
        found: dict[str, str] = {}
        columns = zip(*(getattr(self, name)[stage] for name in _EACH_OP))
        for op, (tp, dp, recompute, algo) in enumerate(columns):
            where = f"operator {op} of stage {stage}"
            if not (_is_count(tp) and _is_count(dp)):
                found.setdefault("degree", f"{where} has tp {tp!r} and dp {dp!r}")
                continue
            if tp * dp != self.num_gpus[stage]:
                found.setdefault(
                    "product",
                    f"{where} has tp {tp} * dp {dp} = {tp * dp}, on {self.num_gpus[stage]} devices",
                )
            if self.micro_batch_size % dp:
                found.setdefault(
                    "batch",
                    f"{where} divides a micro-batch of {self.micro_batch_size} by dp {dp}",
                )
            if recompute not in (0, 1):
                found.setdefault("recompute", f"{where} has recompute {recompute!r}, not 0 or 1")
            if algo not in (0, 1):
                found.setdefault("algo", f"{where} has algo {algo!r}, not 0 or 1")
        return list(found.values())

    def _wrong_schedule(self) -> list[str]:
        if self.schedule not in SCHEDULES:
            return [f"schedule {self.schedule!r} is none of {', '.join(SCHEDULES)}"]
        virtual = self.virtual_stages
        if self.schedule in ("1f1b", "gpipe") and virtual > 1:
            return [f"schedule {self.schedule} has one stage a device, not {virtual}"]
        if self.schedule == "interleaved" and virtual == 1:
            return ["schedule interleaved needs virtual_stages of 2 or more"]
        if self.num_stages % virtual:
            return [f"{self.num_stages} stages are not a multiple of virtual_stages {virtual}"]
        period = self.num_stages // virtual
        return [
            f"stage {stage} has {width} devices, stage {stage % period} on the same devices has "
            f"{self.num_gpus[stage % period]}"
            for stage, width in enumerate(self.num_gpus)
            if width != self.num_gpus[stage % period]
        ][:1]

    def to_json(self) -> dict[str, object]:
        """The plan as in a file: Aceso's keys, and `schedule`, `virtual_stages`, `predicted`."""
        result: dict[str, object] = {
            "model_name": self.model_name,
            "model_size": self.model_size,
            **self.model,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "num_stages": self.num_stages,
            "num_gpus": list(self.num_gpus),
            "checkpoint_activations": list(self.checkpoint_activations),
            "resharding_stages": list(self.resharding_stages),
            "num_ops_in_each_stage": list(self.num_ops_in_each_stage),
        }
        result |= {name: [list(stage) for stage in getattr(self, name)] for name in _EACH_OP}
        result |= {"schedule": self.schedule, "virtual_stages": self.virtual_stages}
        if self.predicted is not None:
            result["predicted"] = dataclasses.asdict(self.predicted)
        return result

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """The plan of a file's contents, checked.

        Raises:
            PlanError: if a key is missing, or what the plan says is impossible or contradicts
                itself.
        """
        if not isinstance(data, dict):
            raise PlanError(f"a plan is an object, not {type(data).__name__}")
        missing = [name for name in _REQUIRED if name not in data]
        if missing:
            raise PlanError(f"the plan lacks {', '.join(missing)}")
        try:
            values: dict[str, Any] = {name: data[name] for name in _REQUIRED[:4]}
            values |= {name: tuple(data[name]) for name in _EACH_STAGE}
            values |= {name: tuple(tuple(stage) for stage in data[name]) for name in _EACH_OP}
            values |= {name: data[name] for name in ("schedule", "virtual_stages") if name in data}
            if data.get("predicted") is not None:
                said: dict[str, Any] = {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in data["predicted"].items()
                }
                values["predicted"] = Prediction(**said)
        except TypeError as error:
            raise PlanError(f"the plan has a value of the wrong kind: {error}") from error
        known = {*_REQUIRED, *_DERIVED, *_OURS}
        model = {name: value for name, value in data.items() if name not in known}
        plan = cls(model=model, **values).check()
        for name in _DERIVED:
            derived = getattr(plan, name)
            derived = list(derived) if isinstance(derived, tuple) else derived
            if name in data and not _agrees(name, data[name], derived):
                raise PlanError(f"{name} is {data[name]}, but by the other keys {derived}")
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a JSON file, ours or Aceso's.

        Raises:
            PlanError: with the file's name, if it is not JSON or not a plan that can be run.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except ValueError as error:  # PlanError and what json raises
            raise PlanError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, which Aceso's programs read, too."""
        Path(path).write_text(json.dumps(self.to_json(), indent=4) + "\n")


def positive_integer(text: str) -> int:
    """A positive integer of the command line."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def positive_number(text: str) -> float:
    """A positive number of the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
