"""Subject: sequences of what users do with an optimizer, here and with torch.optim.

The oracle is an optimizer of torch's in each process, on the mean of all ranks' gradients.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import harness
from checks.cases import distance, randn
from checks.optim_script import Lamb
from checks.refused import refused
from fuzz.core import Choices, Entry, Pair, Tape, draw_tape
from harness import Context

SHAPES = ((67,), (5, 13), (), (3, 0), (2, 3, 7), (33,), (1,))
FIRST = 4  # parameters in the optimizer at the beginning


class Model(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for i, shape in enumerate(SHAPES):
            value = randn(11, i, numel=torch.Size(shape).numel()).double().reshape(shape)
            self.weights.append(nn.Parameter(value))

    def forward(self, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
        return sum(((self.weights[i] * g).sum() for i, g in gradients.items()), zero * 1)


@dataclasses.dataclass(frozen=True)
class Program:
    """An optimizer, how it is used, and the choices of what is done with it."""

    kind: str
    mode: str
    tape: Tape


KINDS = ("SGD", "Adam", "AdamW", "LAMB")
MODES = ("manual", "ddp", "overlap")
WHERE = tuple(f"{size}, {kind}, {mode}" for size in (2, 1, 3) for kind in KINDS for mode in MODES)
EXAMPLES = 7


def workers(where: str) -> harness.Workers:
    return harness.pool(int(where[0]))


def draw(choose: Choices, where: str) -> Program:
    _, kind, mode = where.split(", ")
    return Program(kind, mode, draw_tape(choose, 20, 250))


class Run:
    """One sequence: the same on all ranks."""

    def __init__(self, context: Context, program: Program) -> None:
        import fusedpg

        self.context, self.kind, self.mode = context, program.kind, program.mode
        self.draw = program.tape.choices()
        self.log: list[str] = []
        self.number = 0
        self.mine, self.twin = Model(), Model()
        self.ddp: Any = None
        if self.mode != "manual":
            self.ddp = DistributedDataParallel(
                self.mine,
                find_unused_parameters=True,
                gradient_as_bucket_view=self.draw.random() < 0.5,
                bucket_cap_mb=0.001,
            )
        self.added = FIRST
        self.options = self.hyperparameters()
        ours = list(self.mine.weights)[:FIRST]
        theirs = list(self.twin.weights)[:FIRST]
        overlap = self.mode == "overlap"
        self.fused: Any = getattr(fusedpg.optim, self.kind)(
            ours, ddp=self.ddp, overlap=overlap, **self.options
        )
        # torch has no LAMB.
        of_torch = getattr(torch.optim, self.kind, Lamb)
        self.torch: Any = of_torch(theirs, **self.options)
        self.both = (self.fused, self.torch)
        self.saved: list[dict[str, Any]] = []

    def hyperparameters(self) -> dict[str, Any]:
        draw = self.draw
        options: dict[str, Any] = {
            "lr": draw.choice([0.0, 0.01, 0.1]),
            "weight_decay": draw.choice([0.0, 0.1]),
            "maximize": draw.random() < 0.2,
        }
        if self.kind == "SGD":
            options["momentum"] = draw.choice([0.0, 0.5, 0.9])
            options["dampening"] = draw.choice([0.0, 0.3])
            options["nesterov"] = bool(
                options["momentum"] and not options["dampening"] and draw.random() < 0.5
            )
        else:
            options["betas"] = (draw.choice([0.0, 0.9]), draw.choice([0.5, 0.99]))
            options["eps"] = draw.choice([1e-8, 1e-3])
        return options

    # --- what may happen ------------------------------------------------------------

    def gradient(self, rank: int, i: int) -> torch.Tensor:
        numel = torch.Size(SHAPES[i]).numel()
        return randn(12, rank, i, self.number, numel=numel).double().reshape(SHAPES[i])

    def step(self) -> None:
        """Some parameters have gradients on some ranks."""
        self.number += 1
        size, rank = self.context.world_size, self.context.rank
        live = [i for i in range(self.added) if self.twin.weights[i].requires_grad]
        if not live:
            return
        # Without any, DDP has no backward on that rank, and the others wait for it.
        used = [
            {i for i in live if self.draw.random() < 0.7} or {self.draw.choice(live)}
            for _ in range(size)
        ]
        if self.draw.random() < 0.5:
            used = [set(live)] * size
        how = self.draw.choice(["hand", "backward"]) if self.mode == "manual" else "backward"
        self.log.append(f"step {how} {used}")
        mine = {i: self.gradient(rank, i) for i in used[rank]}
        early = False
        if how == "hand":
            for model in (self.mine, self.twin):
                model.zero_grad()
            for i, grad in mine.items():
                self.mine.weights[i].grad = grad
        else:
            early = self.refused((self.ddp or self.mine)(mine).backward)
        for i in set().union(*used):
            parts = [self.gradient(other, i) for other in range(size) if i in used[other]]
            mean = torch.stack(parts).sum(0) / size
            kept = self.twin.weights[i].grad
            self.twin.weights[i].grad = mean if kept is None else kept + mean
        if early:  # with overlap=True that is the step
            assert self.mode == "overlap"
            assert self.refused(self.torch.step)
            raise Refused
        if self.mode != "overlap" and self.draw.random() < 0.3:
            self.clip()
        looked = self.values()
        self.stepping()
        if self.mode == "overlap":
            assert all(map(torch.equal, looked, self.values())), "step() has changed parameters"
        if self.draw.random() < 0.15:
            self.again()
        # Gradients of zero make a step of parameters that the next backward does not use.
        after = "none" if self.mode == "overlap" else self.draw.choice(["none", "zeros", "keep"])
        self.log.append(after)
        if after != "keep":
            for optimizer in self.both:
                optimizer.zero_grad(set_to_none=after == "none")
        for model in (self.mine, self.twin):
            for param in list(model.weights)[self.added :]:
                param.grad = None

    def values(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.mine.weights]

    def again(self) -> None:
        """A second step with the same gradients, which overlap=True has no more."""
        self.log.append("again")
        if self.mode != "overlap":
            self.stepping()
        elif any(weight.grad is not None for weight in self.mine.weights[: self.added]):
            with refused("applied by an earlier backward"):
                self.fused.step()

    def copy(self) -> None:
        """Of the module, whose copy knows nothing of the optimizer."""
        if self.ddp is None:
            return
        self.log.append("copy")
        copied = copy.deepcopy(self.ddp)
        assert not any("fused" in name for name in vars(copied)), vars(copied).keys()
        for mine, other in zip(self.mine.weights, copied.module.weights, strict=True):
            assert other.grad is None and torch.equal(mine, other)

    def clip(self) -> None:
        self.log.append("clip")
        want = nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5)
        if self.mode == "manual":
            self.fused.reduce_gradients()
        found = (
            self.fused.clip_grad_norm_(0.5)
            if self.draw.random() < 0.5
            else nn.utils.clip_grad_norm_(self.mine.parameters(), 0.5)
        )
        assert abs(float(found) - float(want)) <= 1e-9 * (1 + float(want)), (found, want)

    def stepping(self) -> None:
        """Both step, or both raise."""
        refused = [self.refused(optimizer.step) for optimizer in self.both]
        assert refused[0] == refused[1], refused
        if refused[0]:
            raise Refused

    def refused(self, act: Callable[[], Any]) -> bool:
        try:
            act()
        except (KeyError, RuntimeError) as error:
            assert "max_exp_avg_sq" in str(error), error
            return True
        return False

    def freeze(self) -> None:
        i = self.draw.randrange(len(SHAPES))  # or of one that a group brings later
        on = not self.twin.weights[i].requires_grad
        self.log.append(f"requires_grad {i} {on}")
        for model in (self.mine, self.twin):
            model.weights[i].requires_grad_(on)

    def option(self) -> None:
        number = self.draw.randrange(len(self.torch.param_groups))
        changes = self.hyperparameters()
        if "Adam" in self.kind and self.draw.random() < 0.2:
            changes["amsgrad"] = not self.torch.param_groups[number]["amsgrad"]
        self.log.append(f"group {number} {changes}")
        for optimizer in self.both:
            optimizer.param_groups[number].update(changes)

    def group(self) -> None:
        if self.added == len(SHAPES):
            return
        options = self.hyperparameters()
        more = min(self.draw.choice([1, 2]), len(SHAPES) - self.added)
        self.log.append(f"add {more} {options}")
        for optimizer, model in zip(self.both, (self.mine, self.twin), strict=True):
            params = list(model.weights)[self.added : self.added + more]
            optimizer.add_param_group({"params": params, **options})
        self.added += more

    def move(self) -> None:
        """A parameter goes to another group, by hand."""
        groups = self.torch.param_groups
        if len(groups) < 2:
            return
        source, target = self.draw.sample(range(len(groups)), 2)
        if len(groups[source]["params"]) < 2:
            return
        self.log.append(f"move {source} {target}")
        for optimizer in self.both:
            param = optimizer.param_groups[source]["params"].pop()
            optimizer.param_groups[target]["params"].append(param)

    def clear(self) -> None:
        if self.draw.random() < 0.5:
            self.log.append("clear")
            for optimizer in self.both:
                optimizer.state.clear()
            return
        i = self.draw.randrange(self.added)
        self.log.append(f"clear {i}")
        for optimizer, model in zip(self.both, (self.mine, self.twin), strict=True):
            optimizer.state.pop(model.weights[i], None)

    def save(self) -> None:
        self.log.append("save")
        if self.draw.random() < 0.5:
            self.saved.append(copy.deepcopy(self.torch.state_dict()))
        else:
            self.saved.append(self.fused.full_state_dict(rank0_only=False))

    def load(self) -> None:
        shapes = [len(group["params"]) for group in self.torch.param_groups]
        fitting = [
            state
            for state in self.saved
            if [len(group["params"]) for group in state["param_groups"]] == shapes
        ]
        if not fitting:
            return
        state = self.draw.choice(fitting)
        number = {id(p): i for i, p in enumerate(self.twin.weights)}
        order = [number[id(p)] for group in self.torch.param_groups for p in group["params"]]
        if any(
            value.shape not in (torch.Size(SHAPES[order[k]]), torch.Size())
            for k, values in state["state"].items()
            for value in values.values()
            if value is not None
        ):
            return  # groups were rearranged since
        self.log.append("load")
        for optimizer in self.both:
            optimizer.load_state_dict(state)

    def own(self) -> None:
        """This rank's own state dict, of our optimizer alone."""
        self.log.append("own")
        self.fused.load_state_dict(copy.deepcopy(self.fused.local_state_dict()))

    def write(self) -> None:
        i = self.draw.randrange(len(SHAPES))
        self.log.append(f"write {i}")
        with torch.no_grad():
            for model in (self.mine, self.twin):
                model.weights[i].data.mul_(0.5)

    def found(self) -> Iterator[Pair]:
        for i, (mine, want) in enumerate(zip(self.mine.weights, self.twin.weights, strict=True)):
            label = f"{self.log[-1:]}, weight {i}"
            error = distance(mine.detach(), want.detach()) if mine.numel() else 0.0
            yield Pair(Entry(label, error <= 1e-10), Entry(label, True))
            ours, theirs = self.fused.state.get(mine, {}), self.torch.state.get(want, {})
            there = {key for key, value in theirs.items() if value is not None}
            yield Pair(Entry(f"{label}: state", set(ours)), Entry(f"{label}: state", there))

    def run(self) -> Iterator[Pair]:
        actions: dict[Callable[[], None], int] = {
            self.step: 8,
            self.freeze: 2,
            self.option: 3,
            self.group: 1,
            self.move: 1,
            self.clear: 1,
            self.save: 2,
            self.load: 2,
            self.own: 1,
            self.write: 1,
            self.copy: 1,
        }
        while self.draw.left > 0:
            self.draw.weighted(actions)()
            yield from self.found()


class Refused(Exception):
    """Both optimizers have refused a step: torch has updated some groups by then."""


def run(program: Program, context: Context) -> Iterator[Pair]:
    both = Run(context, program)
    try:
        yield from both.run()
    except Refused:
        pass
    except Exception as error:
        raise AssertionError("\n".join([repr(error), *both.log[-40:]])) from error
