"""Fused optimizers against torch.optim in one process on averaged gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest, distance, flat, randn, same
from checks.optim_script import in_one_process
from harness import Context

SHAPES: tuple[tuple[int, ...], ...] = ((1021,), (7,), (31, 37), (2, 3, 5, 7), (1,))
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SIGNED = ("exp_avg", "momentum_buffer")
ADAM = {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1, "lr": 1e-2}
DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.05},
    "Adam": ADAM,
    "AdamW": ADAM,
    "LAMB": ADAM,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """How some parameters are trained."""

    optimizer: str = "AdamW"
    mode: str = "manual"  # or ddp, overlap
    steps: int = 100
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    dtypes: tuple[str, ...] = ("float32",)  # of the parameters in turn
    layout: str = "contiguous"  # or channels_last, transposed
    lr_tensor: bool = False
    groups: bool = True  # two groups that differ, or one
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # torch's
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)  # of our constructor alone
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)

    def dtype(self, i: int) -> torch.dtype:
        return DTYPES[self.dtypes[i % len(self.dtypes)]]

    def gradient(self, step: int, rank: int, i: int) -> torch.Tensor:
        """The gradient of parameter ``i`` on a rank."""
        numel = torch.Size(self.shapes[i]).numel()
        # Of different sizes on different ranks, so that a forgotten division shows.
        one = randn(i, step, rank, numel=numel).reshape(self.shapes[i]) * (1 + rank)
        return one.to(self.dtype(i))


class Bag(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for i, shape in enumerate(run.shapes):
            numel = torch.Size(shape).numel()
            value = randn(77, i, numel=numel).reshape(shape).to(run.dtype(i))
            if run.layout == "channels_last" and len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            elif run.layout == "transposed" and len(shape) == 2:
                value = value.t().contiguous().t()
            self.weights.append(nn.Parameter(value))

    def forward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        terms = [
            (weight * gradient).sum().double()
            for weight, gradient in zip(self.weights, gradients, strict=True)
            if gradient is not None
        ]
        return torch.stack(terms).sum()


def grouped(run: Run, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """The parameter groups of a run: the second one's hyperparameters differ."""
    options = {**DEFAULTS[run.optimizer], **run.options}
    if not run.groups:
        return [{**options, "params": params}]
    other = dict(options)
    other["lr"] = options["lr"] * 0.3
    other["weight_decay"] = options["weight_decay"] * 0.5
    if "betas" in other:
        other["betas"] = (0.7, 0.9)
    half = len(params) // 2
    groups = [{**options, "params": params[:half]}, {**other, "params": params[half:]}]
    if run.lr_tensor:
        for group in groups:
            group["lr"] = torch.tensor(group["lr"])
    return groups


def fused(run: Run, params: Any, **options: Any) -> Any:
    """The optimizer under test."""
    import fusedpg

    kind = getattr(fusedpg.optim, run.optimizer)
    return kind(params, overlap=run.mode == "overlap", **run.ours, **options)


def unsharded(run: Run, params: Sequence[torch.Tensor]) -> Any:
    """What it is compared with."""
    return in_one_process(run.optimizer, grouped(run, params))


class Trainer:
    """A run on the fused backend, beside the oracle's run on averaged gradients."""

    def __init__(self, context: Context, run: Run) -> None:
        self.context, self.run = context, run
        self.bag = Bag(run)
        self.twin = copy.deepcopy(self.bag)
        self.net: nn.Module = self.bag
        wrapped = None
        if run.mode != "manual":
            options = {"bucket_cap_mb": 0.004, **run.ddp}
            self.net = wrapped = DistributedDataParallel(self.bag, **options)
        self.ddp: Any = wrapped
        self.params = list(self.bag.parameters())
        self.optimizer = fused(run, grouped(run, list(self.params)), ddp=wrapped)
        self.oracle = unsharded(run, list(self.twin.parameters()))

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        rank = self.context.rank
        return [self.run.gradient(step, rank, i) for i in range(len(self.run.shapes))]

    def backward(self, step: int, factor: float = 1.0) -> None:
        (self.net(self.gradients(step)) * factor).backward()

    def averaged(self, step: int, i: int) -> torch.Tensor:
        """What the oracle sees: the mean over ranks, rounded once."""
        size = self.context.world_size
        parts = [self.run.gradient(step, rank, i).double() for rank in range(size)]
        total = torch.stack(parts).sum(0)
        return total if self.run.ours.get("reduce") == "sum" else total / size

    def prepare(self, *steps: int, used: Iterable[int] | None = None) -> None:
        """The oracle's gradients: the sum of those of some steps."""
        chosen = range(len(self.params)) if used is None else used
        for i, param in enumerate(self.twin.parameters()):
            param.grad = None
            if i in chosen:
                param.grad = sum(self.averaged(step, i) for step in steps).to(param.dtype)  # type: ignore[union-attr]

    def both(self, step: int) -> None:
        """A step here and in the oracle."""
        self.optimizer.zero_grad()
        self.backward(step)
        looked = [param.detach().clone() for param in self.params]
        self.optimizer.step()
        if self.run.mode == "overlap":
            # Backward has updated them, whatever stream it was on.
            unchanged([param.detach() for param in self.params], looked)
        self.prepare(step)
        self.oracle.step()

    def agree(self, tolerance: float = 1e-6, state: bool = True) -> str:
        """Parameters and state are the oracle's; the digest of the parameters."""
        for i, (mine, want) in enumerate(zip(self.params, self.twin.parameters(), strict=True)):
            # A tolerance that a caller asks for has float32 factors in it (clipping, scaling).
            exact = mine.dtype == torch.float64 and tolerance == 1e-6
            close = 1e-12 if exact else tolerance
            assert distance(mine.detach().double(), want.detach().double()) <= close, i
            if state:
                self._agree_in_state(i, mine, want, 4 * close)
        return digest(self.params)

    def _agree_in_state(
        self, i: int, mine: torch.Tensor, want: torch.Tensor, tolerance: float
    ) -> None:
        theirs = self.oracle.state.get(want, {})
        ours = self.optimizer.state.get(mine, {})
        held = {key for key, value in theirs.items() if value is not None}
        assert ours.keys() - {"master_param"} == held, (i, ours.keys(), held)
        if "step" in theirs:
            assert float(ours["step"]) == float(theirs["step"]), i
        offset, length = self.optimizer._context.shard(mine)
        for key, value in theirs.items():
            if key == "step" or value is None:
                continue
            whole = torch.empty_strided(mine.shape, mine.stride(), dtype=torch.float64)
            whole.copy_(value)
            shard = flat(whole)[offset : offset + length]
            assert ours[key].shape == shard.shape, (i, key)
            # One number may be the rest of a cancellation.
            size = max(float(shard.norm()), 1.0 if key in SIGNED else 0.0)
            error = float((ours[key].double() - shard).norm())
            assert error <= tolerance * size, (i, key, error, float(shard.norm()))

    def state(self) -> list[torch.Tensor]:
        """Copies of the parameters and of this rank's state."""
        slices = [
            value
            for param in self.params
            for value in self.optimizer.state.get(param, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        return [one.detach().clone() for one in [*self.params, *slices]]


def unchanged(now: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    assert all(same(a, b) for a, b in zip(now, before, strict=True))


def parity(context: Context, run: Run, tolerance: float = 1e-6) -> str:
    """A run against the oracle's."""
    trainer = Trainer(context, run)
    for step in range(run.steps):
        trainer.both(step)
    return trainer.agree(tolerance)


def half_with_master(context: Context, run: Run) -> str:
    """Half parameters with float32 masters: a float32 run, rounded."""
    trainer = Trainer(context, run)
    trainer.twin = trainer.twin.float()
    twins = list(trainer.twin.parameters())
    trainer.oracle = unsharded(run, twins)
    for step in range(run.steps):
        trainer.both(step)
    # DDP's buckets hold the mean rounded to half; the manual mode never rounds it.
    tolerance = 1e-6 if run.mode == "manual" or context.world_size == 1 else 1e-3
    for param, want in zip(trainer.params, twins, strict=True):
        offset, length = trainer.optimizer._context.shard(param)
        master = trainer.optimizer.state[param]["master_param"]
        assert master.dtype == torch.float32
        whole = torch.empty_strided(param.shape, param.stride()).copy_(want.detach())
        if length:
            assert distance(master, flat(whole)[offset : offset + length]) <= tolerance
            mine = flat(param.detach())[offset : offset + length]
            assert same(mine, master.to(param.dtype)), "not the rounded master"
        assert distance(param.detach().float(), want.detach()) <= 4e-3
    return digest(trainer.params)


def scheduled(context: Context, run: Run) -> str:
    """OneCycleLR moves lr and momentum; what it sets is used by the next update."""
    trainer = Trainer(context, run)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(one, [0.05, 0.02], run.steps + 1)
        for one in (trainer.optimizer, trainer.oracle)
    ]
    rates = set()
    for step in range(run.steps):
        trainer.both(step)
        for schedule in schedules:
            schedule.step()
        rates.add(float(trainer.optimizer.param_groups[0]["lr"]))
    assert len(rates) == run.steps
    return trainer.agree()
