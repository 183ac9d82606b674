"""Executes plans: pipeline stages of any width, and any degrees for each of their operators."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedpg
from fusedpg import _agreement
from fusedpg.optim import FusedOptimizer
from fusedpg.optim._torch import asked_by_checkpoint
from fusedpg.plan import models
from fusedpg.plan.config import Plan, PlanError, positive_integer
from fusedpg.plan.launched import in_group
from fusedpg.plan.memory import MB, PeakMemory
from fusedpg.plan.operators import Model
from fusedpg.plan.schedule import Action, actions
from fusedpg.plan.stage import Link, Placement, Sent, Stage, Times, groups

OPTIMIZERS: dict[str, Callable[..., FusedOptimizer]] = {
    "adamw": fusedpg.optim.AdamW,
    "adam": fusedpg.optim.Adam,
    "sgd": fusedpg.optim.SGD,
}


@dataclass(frozen=True)
class Result:
    """The result of one iteration.

    Args:
        loss: the mean over all samples of the global batch.
        times: this rank's, of each of its stages.
    """

    loss: float
    times: tuple[Times, ...]


class Trainer:
    """Trains a model as a plan says. Making one is a collective of the default group.

    Every rank is the device of its number. All ranks call `step` with the same batch and take
    their parts of it. The weights begin with values that depend on the seed, and not on the plan.
    Gradients are summed over data-parallel ranks by the optimizers of `fusedpg.optim`, in the
    operation that updates the weights, so the backend is "fused".

    Args:
        plan: for as many devices as there are ranks.
        model: None: the built-in model that the plan names.
        optimizer: "adamw", "adam" or "sgd".
        options: of the optimizer, such as ``lr``.
        dtype: of the weights and of what is computed.
        seed: of the weights and of dropout.

    Raises:
        PlanError: if the plan does not fit the model or the ranks.
    """

    def __init__(
        self,
        plan: Plan,
        model: Model | None = None,
        *,
        optimizer: str = "adamw",
        options: Mapping[str, object] | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.plan = plan
        self.model = models.of_plan(plan) if model is None else model
        rank, world_size = dist.get_rank(), dist.get_world_size()
        plan.check(self.model.names, world_size)
        if optimizer not in OPTIMIZERS:
            raise PlanError(f"no optimizer {optimizer!r}: there are {', '.join(OPTIMIZERS)}")
        self.placement = Placement(self.model, plan)
        process_groups = groups(self.placement.rank_sets())
        links = {
            (route.number, backward): Link(
                route, rank, self.model.values[route.value].dtype or dtype, backward
            )
            for route in self.placement.routes
            for backward in (False, True)
        }
        mine = [i for i in range(plan.num_stages) if rank in plan.devices(i)]
        self.stages = {
            index: Stage(self.placement, index, rank, process_groups, links, dtype, seed)
            for index in mine
        }
        self.actions = actions(plan, mine[0])
        self.optimizers = self._optimizers(process_groups, OPTIMIZERS[optimizer], options or {})
        self._steps = 0

    def _optimizers(
        self,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        kind: Callable[..., FusedOptimizer],
        options: Mapping[str, object],
    ) -> list[FusedOptimizer]:
        """One for each set of data-parallel ranks, in an order that these share."""
        params: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for stage in self.stages.values():
            for module in stage.modules:
                ranks = stage.devices[module.part.tp_rank :: module.part.tp]
                params.setdefault(ranks, []).extend(module.parameters())
        made = [
            kind(found, process_group=process_groups[ranks], reduce="sum", **options)
            for ranks, found in params.items()
            if found
        ]
        for optimizer in made:
            optimizer.register_state_dict_pre_hook(_refuse_checkpoint)
        return made

    def step(self, batch: Mapping[str, Tensor]) -> Result:
        """One iteration over a global batch: gradients of the mean loss, and an optimizer step.

        Args:
            batch: the model's data, with ``plan.global_batch_size`` samples in dimension 0; the
                same on all ranks.
        """
        self._set(training=True)
        loss = self._run(batch, self.actions)
        for optimizer in self.optimizers:
            with self._last.times.add("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        self._steps += 1
        return Result(_everywhere(loss), tuple(stage.times for stage in self.stages.values()))

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The mean loss of a global batch, without dropout, and with nothing changed."""
        self._set(training=False)
        return _everywhere(self._run(batch, [a for a in self.actions if a.kind == "F"]))

    def memory(self, batch: Mapping[str, Tensor]) -> float:
        """MB that this rank needs at most in a step, which this is one of.

        Counted are the weights, the optimizers' state, and all that operations make: activations,
        gradients, messages and what passes. It is what tensors take, whatever an allocator adds.
        """
        with PeakMemory() as counted:
            self.step(batch)
        lasting: list[Tensor] = [p for _, p in self.named_parameters()]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                lasting += [value for value in state.values() if isinstance(value, Tensor)]
        return (sum(t.numel() * t.element_size() for t in lasting) + counted.peak) / MB

    @property
    def _last(self) -> Stage:
        return list(self.stages.values())[-1]

    def _set(self, training: bool) -> None:
        for stage in self.stages.values():
            stage.times, stage.step = Times(), self._steps
            for module in stage.modules:
                module.part.training = training

    def _run(self, batch: Mapping[str, Tensor], order: Sequence[Action]) -> float:
        """This rank's share of the mean loss."""
        plan = self.plan
        for name, value in self.model.data.items():
            wanted = (plan.global_batch_size, *value.shape)
            if name not in batch or batch[name].shape != wanted:
                raise ValueError(f"the batch needs {name!r} of shape {wanted}")
        size, total = plan.micro_batch_size, 0.0
        sent: list[Sent] = []
        for action, following in zip(order, [*order[1:], None]):
            stage, number = self.stages[action.stage], action.micro_batch
            stage.expect(action.kind, number)
            if following is not None:
                self.stages[following.stage].expect(following.kind, following.micro_batch)
            if action.kind == "F":
                begin = number * size
                data = {name: batch[name][begin : begin + size] for name in self.model.data}
                sent += stage.forward(number, data)
                total += self._loss_of(stage)
            elif action.kind == "W":
                stage.weights(number)
            else:
                sent += stage.backward(number, 1.0 / plan.global_batch_size, action.kind)
            sent = [(work, tensor) for work, tensor in sent if not work.is_completed()]
        for work, _ in sent:
            work.wait()
        return total / plan.global_batch_size

    def _loss_of(self, stage: Stage) -> float:
        if stage.loss is None or stage.modules[-1].part.tp_rank:
            return 0.0
        return float(stage.loss.detach().double().sum())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parts of the weights, by ``{number of the operator}.{weight}``."""
        for stage in self.stages.values():
            for i, module in enumerate(stage.modules):
                for name, parameter in module.named_parameters():
                    yield f"{stage.first + i}.{name}", parameter

    def state_dict(self) -> dict[str, Tensor]:
        """The whole weights and buffers, on rank 0; nothing on the others. A collective."""
        mine: dict[str, tuple[int, Tensor]] = {}
        for stage in self.stages.values():
            for i, module in enumerate(stage.modules):
                if module.part.dp_rank:
                    continue
                for name, value in module.state_dict().items():
                    key = f"{stage.first + i}.{name}"
                    mine[key] = (module.part.tp_rank, value.detach().clone())
        everything = [mine] * dist.get_world_size() if not dist.get_rank() else None
        dist.gather_object(mine, everything)
        if everything is None:
            return {}
        parts: dict[str, dict[int, Tensor]] = {}
        for found in everything:
            for key, (tp_rank, value) in found.items():
                parts.setdefault(key, {})[tp_rank] = value
        return {key: self._whole(key, parts[key]) for key in sorted(parts, key=_in_order)}

    def _whole(self, key: str, parts: Mapping[int, Tensor]) -> Tensor:
        number, name = key.split(".", 1)
        op, algo = self.model.operators[int(number)], self.placement.degrees(int(number))[2]
        weight = op.weights(algo).get(name)
        if weight is None or weight.split is None:
            return parts[0]
        return torch.cat([parts[t] for t in sorted(parts)], weight.split)


def _refuse_checkpoint(optimizer: torch.optim.Optimizer) -> None:
    if asked_by_checkpoint():
        raise RuntimeError(
            "an optimizer of a plan's Trainer numbers the parameters of this rank's stages, and "
            "torch.distributed.checkpoint would take those of other stages for the same: save "
            "local_state_dict() of each of trainer.optimizers in a file of each rank"
        )


def _in_order(key: str) -> tuple[int, str]:
    number, name = key.split(".", 1)
    return int(number), name


def _everywhere(loss: float) -> float:
    """The sum of all ranks' shares."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


# --- the command --------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="the plan's file")
    parser.add_argument("--steps", type=positive_integer, default=10, help="default: 10")
    parser.add_argument("--data", type=Path, help=".pt with the model's data; default: random")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=Path, help="a JSON file of times and memory, for report")
    parser.add_argument("--save", type=Path, help="the whole weights, as torch.save writes them")


def batches(
    model: Model, plan: Plan, data: Path | None, dtype: torch.dtype, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Global batches without end: of a file, again and again, or random ones.

    Raises:
        ValueError: if the file has not all of the model's data, or less than a global batch.
    """
    size = plan.global_batch_size
    if data is None:
        step = 0
        while True:
            yield model.random_batch(size, dtype, seed + step)
            step += 1
    found = torch.load(data, weights_only=True)
    if missing := [name for name in model.data if name not in found]:
        raise ValueError(f"{data} has no {', '.join(missing)}")
    samples = min(found[name].shape[0] for name in model.data)
    if samples < size:
        raise ValueError(f"{data} has {samples} samples, a global batch needs {size}")
    while True:
        for begin in range(0, samples - size + 1, size):
            yield {name: found[name][begin : begin + size] for name in model.data}


def main(arguments: argparse.Namespace) -> int:
    plan = Plan.load(arguments.config)
    dtype = getattr(torch, arguments.dtype)
    with in_group():
        model = models.of_plan(plan)
        trainer = Trainer(
            plan,
            model,
            optimizer=arguments.optimizer,
            options={"lr": arguments.lr},
            dtype=dtype,
            seed=arguments.seed,
        )
        first = dist.get_rank() == 0
        source = batches(model, plan, arguments.data, dtype, arguments.seed)
        seconds, times = [], []
        for step in range(arguments.steps):
            batch = next(source)
            dist.barrier()
            begin = time.perf_counter()
            result = trainer.step(batch)
            seconds.append(time.perf_counter() - begin)
            times.append([dataclasses.asdict(each) for each in result.times])
            if first:
                took = f"{seconds[-1] * 1e3:.1f} ms"
                print(f"step {step}: loss {result.loss:.6f}, {took}", file=sys.stderr)
        if arguments.save is not None:
            weights = trainer.state_dict()
            if first:
                torch.save(weights, arguments.save)
        # Measuring memory takes a step, which what was saved shall not have.
        if arguments.measure is not None:
            measured = {
                "rank": dist.get_rank(),
                "stages": list(trainer.stages),
                "times": times,
                "memory_mb": trainer.memory(next(source)),
            }
            everything = _agreement.by_rank(measured)
            if first:
                found = {"plan": plan.to_json(), "seconds": seconds, "ranks": everything}
                arguments.measure.write_text(json.dumps(found) + "\n")
    return 0
