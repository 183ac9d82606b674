"""What ranks do while something goes wrong in the middle of an optimizer's step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest, randn, same
from checks.faults import mark, refusal, rejoin, works
from checks.fused_ops import BF16, FP32, FP64, Model, Run, parity
from checks.optim_state import fused
from harness import Context

WIDTH = 257
MODES = ("manual", "ddp", "overlap")


class Trainer:
    """A model and its optimizer in one of the modes."""

    def __init__(self, context: Context, mode: str, kind: str = "adamw", **options: Any) -> None:
        torch.manual_seed(0)
        self.context, self.mode = context, mode
        self.module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.ddp: Any = None
        if mode != "manual":
            # Several buckets.
            self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=0.3)
        self.optimizer = fused(
            self.module, kind, ddp=self.ddp, overlap=mode == "overlap", **options
        )

    def backward(self, step: int, factor: float = 1.0) -> None:
        x = randn(step, self.context.rank, numel=2 * WIDTH).view(2, WIDTH)
        model = self.module if self.ddp is None else self.ddp
        (model(x).square().mean() * factor).backward()

    def step(self, number: int, factor: float = 1.0) -> None:
        self.backward(number, factor)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        return digest([param.detach() for param in self.module.parameters()])


def train_until_failure(
    context: Context, mode: str, victim: int, where: str
) -> tuple[str, float, float]:
    """Trains until a peer is gone; the error, when it came, and when the last step began.

    The victim kills itself at ``where``: in its backward, before its step; "outside" leaves it to
    the parent.
    """
    trainer = Trainer(context, mode)

    def die(*_: Any) -> None:
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    count = 0
    if context.rank == victim and where == "backward":
        trainer.module[1].register_full_backward_hook(die)
    elif context.rank == victim and where == "step":
        trainer.optimizer.register_step_pre_hook(die)
    begin = time.monotonic()
    try:
        while True:
            begin = time.monotonic()
            trainer.step(count)
            count += 1
            if count == 3:
                mark(context, "running")
    except RuntimeError as error:
        return str(error), time.monotonic(), begin


def train_anew(context: Context, survivors: list[int], mode: str) -> str:
    """The old group says no at once; a new one with a new optimizer works."""
    refusal(lambda: Trainer(context, mode).step(0))
    with contextlib.suppress(dist.DistBackendError):
        dist.destroy_process_group()
    rejoin(context, f"anew {mode}", survivors)
    works()
    trainer = Trainer(context, mode)
    for step in range(5):
        trainer.step(step)
    return trainer.digest()


def other_lr(context: Context, mode: str, what: str) -> None:
    """One rank has other hyperparameters; raises, and replicas have not drifted apart. Once it has
    the same again, the optimizer goes on as if nothing had been."""
    trainer, undisturbed = Trainer(context, mode), Trainer(context, mode)
    trainer.step(0)
    before = trainer.digest()
    group, states = trainer.optimizer.param_groups[0], trainer.optimizer.state.values()
    kept = dict(group)
    if context.rank == 0:
        if what == "lr":
            group["lr"] *= 2
        elif what == "weight_decay":
            group["weight_decay"] *= 2
        elif what == "betas":
            group["betas"] = (0.8, 0.9)
        else:
            for state in states:
                state["step"] += 1
    try:
        trainer.step(1)
    finally:
        assert trainer.digest() == before, "some parameters have moved"
        trainer.optimizer.zero_grad()
        group.update(kept)
        for state in states if context.rank == 0 and what == "step" else ():
            state["step"] -= 1
        trainer.step(1)
        undisturbed.step(0)
        undisturbed.step(1)
        assert trainer.digest() == undisturbed.digest(), "an error has left its traces"


def train_again(context: Context, mode: str) -> str:
    """The group is still usable, with a new optimizer."""
    works()
    trainer = Trainer(context, mode)
    for step in range(3):
        trainer.step(step)
    return trainer.digest()


def late(context: Context, mode: str, sleeper: int, seconds: float) -> None:
    """A rank that misses the timeout of its group once."""
    trainer = Trainer(context, mode)
    trainer.step(0)
    if context.rank == sleeper:
        time.sleep(seconds)
    begin = time.monotonic()
    try:
        trainer.step(1)
    except RuntimeError as error:
        assert context.rank == sleeper or time.monotonic() - begin < seconds + 1
        assert "fused:" in str(error), error
    else:
        raise AssertionError("an absent rank was not missed")


# --- the functional steps ---------------------------------------------------------


def first_state(model: Model) -> list[torch.Tensor]:
    return next(iter(model.states.values()))


def no_params(model: Model) -> None:
    model.params, model.grads, model.steps = [], [], []
    model.states = {name: [] for name in model.states}


def masters(model: Model, count: int) -> None:
    model.masters = [torch.zeros(length) for _, length in model.ranges[:count]]


def longer(model: Model, state: list[torch.Tensor], i: int) -> None:
    state[i] = torch.zeros(model.ranges[i][1] + 1)


def put(tensors: list[torch.Tensor], i: int, tensor: torch.Tensor) -> None:
    tensors[i] = tensor


# What is wrong: of the model, which a function makes so, or an argument; and a word of the error.
WRONG: dict[str, tuple[Callable[[Model], object] | dict[str, Any], str]] = {
    "no params": (no_params, "params"),
    "fewer grads": (lambda m: m.grads.pop(), "grads"),
    "more params": (lambda m: m.params.append(torch.zeros(3)), "grads"),
    "fewer states": (lambda m: first_state(m).pop(), "state"),
    "fewer steps": (lambda m: m.steps.pop(), "state_steps"),
    "fewer masters": (lambda m: masters(m, 1), "master_params"),
    "master of float32": (lambda m: masters(m, 2), "master_params"),
    "grad shape": (lambda m: put(m.grads, 1, torch.zeros(3, 64)), "grads[1]"),
    "grad dtype": (lambda m: put(m.grads, 0, m.grads[0].double()), "grads[0]"),
    "param dtype": (
        lambda m: put(m.params, 0, torch.zeros(1021, dtype=torch.int32)),
        "params[0]",
    ),
    "state length": (lambda m: longer(m, first_state(m), 1), "state"),
    "state dtype": (lambda m: put(first_state(m), 0, first_state(m)[0].half()), "state"),
    "state gaps": (
        lambda m: put(first_state(m), 0, torch.zeros(2 * m.ranges[0][1])[::2]),
        "state",
    ),
    "step dtype": (lambda m: put(m.steps, 0, torch.tensor(0)), "state_steps[0]"),
    "double param": (lambda m: put(m.params, 0, m.params[0].double()), "grads[0]"),
    "gaps": (lambda m: put(m.params, 0, torch.zeros(2042)[::2]), "params[0]"),
    "reduce": ({"reduce": "max"}, "reduce"),
    "beta1": ({"beta1": 1.0}, "beta"),
    "beta2": ({"beta2": -0.1}, "beta"),
    "negative weight": ({"weight": -1.0}, "weight"),
    "infinite weight": ({"weight": float("inf")}, "weight"),
    "weight of a sum": ({"weight": 1.0, "reduce": "sum"}, "weight"),
    "grad_scale": ({"grad_scale": torch.tensor([1.0, 2.0])}, "grad_scale"),
    "found_inf": ({"found_inf": torch.tensor(0)}, "found_inf"),
}
OF_ADAM: dict[str, tuple[Callable[[Model], object] | dict[str, Any], str]] = {
    "fewer second moments": (lambda m: m.states["exp_avg_sq"].pop(), "exp_avg_sqs"),
    "second moment length": (lambda m: longer(m, m.states["exp_avg_sq"], 0), "exp_avg_sqs"),
    "no maxima": ({"amsgrad": True}, "max_exp_avg_sqs"),
}


def wrong(context: Context, op: str, what: str) -> tuple[str, str]:
    """A call with one wrong argument; class and text of the exception."""
    model = Model(context, Run(op, shapes=((1021,), (64, 3))))
    model.set_gradients(0)
    mistake = (WRONG | OF_ADAM)[what][0]
    override = mistake if isinstance(mistake, dict) else {}
    if not isinstance(mistake, dict):
        mistake(model)
    kept = [one.clone() for one in model.state()]
    answers = []
    for async_op in (False, True):
        try:
            model.step(async_op=async_op, **override)
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
        else:
            raise AssertionError(f"{what}: accepted")
    for now, old in zip(model.state(), kept, strict=True):
        assert same(now, old), "a refused call changed something"
    works()
    assert answers[0][0] == answers[1][0], answers
    return answers[0]


# Hyperparameters besides lr, and values that no run has.
OTHER_HYPERS: dict[str, float] = {
    **dict.fromkeys(("weight_decay", "momentum", "dampening", "beta1", "beta2", "eps"), 0.5),
    **dict.fromkeys(("nesterov", "maximize", "trust_clip", "always_adapt"), True),
}
# What rank 0 has otherwise than the others: options of its run ...
OTHER_RUNS: dict[str, dict[str, Any]] = {
    "sizes": {"shapes": ((1021,), (65, 3))},
    "dtype": {"dtypes": (FP64,)},
    "gradient dtype": {"grad_dtypes": (BF16,)},
    "layout": {"layout": "transposed"},
    "masters": {"master": True},
    "state dtype": {"half_state": True},
}
# ... or an argument.
OTHER_ARGUMENTS: dict[str, Any] = {
    **OTHER_HYPERS,
    "lr": 0.5,
    "is_first_step": False,
    "weight": 2.0,
    "reduce": "sum",
    "grad_scale": torch.tensor(2.0),
}


def disagree(context: Context, op: str, what: str, async_op: bool) -> None:
    """Rank 0 passes something else than the others; raises, and nothing has moved."""
    odd = context.rank == 0
    halves = (BF16,) if what in ("masters", "state dtype") else (FP32,)
    shapes = ((3,),) * 4100 if what == "a late tensor" else ((1021,), (64, 3))
    run = Run(op, shapes=shapes, dtypes=halves)
    override: dict[str, Any] = {}
    if odd:
        run = dataclasses.replace(run, **OTHER_RUNS.get(what, {}))
    model = Model(context, run)
    model.set_gradients(0)
    if odd and what in OTHER_ARGUMENTS:
        override[what] = OTHER_ARGUMENTS[what]
    elif odd and what == "lr tensor":
        override["lr"] = torch.tensor(0.5)
    elif odd and what == "step":
        model.steps[1] += 1
    elif odd and what == "a late tensor" and model.steps:
        model.steps[-1] += 1
    elif odd and what == "a late tensor":
        override["lr"] = 0.5
    elif odd and what == "fewer tensors":
        for one in filter(None, model.lists()):
            one.pop()
    kept = [one.clone() for one in model.state()]
    try:
        model.step(async_op=async_op, **override)
    finally:
        for now, old in zip(model.state(), kept, strict=True):
            assert same(now, old), "a refused call changed something"


def usable(context: Context, op: str) -> str:
    """Steps work after a refusal."""
    works()
    return parity(context, Run(op, steps=2))
