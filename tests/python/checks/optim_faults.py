"""What ranks do while something goes wrong in the middle of an optimizer's step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
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


def wrong(context: Context, op: str, what: str) -> tuple[str, str]:
    """A call with one wrong argument; class and text of the exception."""
    run = Run(op, shapes=((1021,), (64, 3)))
    override: dict[str, Any] = {}
    model = Model(context, run)
    model.set_gradients(0)
    state = next(iter(model.states.values()))
    if what == "no params":
        model.params, model.grads, model.steps = [], [], []
        model.states = {name: [] for name in model.states}
    elif what == "fewer grads":
        model.grads.pop()
    elif what == "more params":
        model.params.append(torch.zeros(3))
    elif what == "fewer states":
        state.pop()
    elif what == "fewer steps":
        model.steps.pop()
    elif what == "fewer masters":
        model.masters = [torch.zeros(model.ranges[0][1])]
    elif what == "master of float32":
        model.masters = [torch.zeros(length) for _, length in model.ranges]
    elif what == "grad shape":
        model.grads[1] = torch.zeros(3, 64)
    elif what == "grad dtype":
        model.grads[0] = model.grads[0].double()
    elif what == "param dtype":
        model.params[0] = torch.zeros(1021, dtype=torch.int32)
    elif what == "state length":
        state[1] = torch.zeros(model.ranges[1][1] + 1)
    elif what == "state dtype":
        state[0] = state[0].half()
    elif what == "state gaps":
        state[0] = torch.zeros(2 * model.ranges[0][1])[::2]
    elif what == "step dtype":
        model.steps[0] = torch.tensor(0, dtype=torch.int64)
    elif what == "fewer second moments":
        model.states["exp_avg_sq"].pop()
    elif what == "second moment length":
        model.states["exp_avg_sq"][0] = torch.zeros(model.ranges[0][1] + 1)
    elif what == "double param":
        model.params[0] = model.params[0].double()
    elif what == "no maxima":
        override["amsgrad"] = True
    elif what == "gaps":
        model.params[0] = torch.zeros(2042)[::2]
    elif what == "reduce":
        override["reduce"] = "max"
    elif what == "beta1":
        override["beta1"] = 1.0
    elif what == "beta2":
        override["beta2"] = -0.1
    elif what == "negative weight":
        override["weight"] = -1.0
    elif what == "infinite weight":
        override["weight"] = float("inf")
    elif what == "weight of a sum":
        override |= {"weight": 1.0, "reduce": "sum"}
    elif what == "grad_scale":
        override["grad_scale"] = torch.tensor([1.0, 2.0])
    elif what == "found_inf":
        override["found_inf"] = torch.tensor(0)
    else:
        raise AssertionError(what)
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


def disagree(context: Context, op: str, what: str, async_op: bool) -> None:
    """Rank 0 passes something else than the others; raises, and nothing has moved."""
    odd = context.rank == 0
    sizes = ((1021,), (65, 3)) if odd and what == "sizes" else ((1021,), (64, 3))
    if what == "a late tensor":
        sizes = ((3,),) * 4100
    dtype = FP64 if odd and what == "dtype" else FP32
    grad_dtype = BF16 if odd and what == "gradient dtype" else dtype
    master = odd and what == "masters"
    run = Run(op, shapes=sizes, dtypes=(dtype,), grad_dtypes=(grad_dtype,))
    if what in ("masters", "state dtype"):
        half = odd and what == "state dtype"
        run = Run(op, shapes=sizes, dtypes=(BF16,), master=master, half_state=half)
    if odd and what == "layout":
        run = dataclasses.replace(run, layout="transposed")
    model = Model(context, run)
    model.set_gradients(0)
    override: dict[str, Any] = {}
    if odd and what == "lr":
        override["lr"] = 0.5
    elif odd and what == "lr tensor":
        override["lr"] = torch.tensor(0.5)
    elif odd and what in OTHER_HYPERS:
        override[what] = OTHER_HYPERS[what]
    elif odd and what == "step":
        model.steps[1] += 1
    elif odd and what == "a late tensor" and model.steps:
        model.steps[-1] += 1
    elif odd and what == "a late tensor":
        override["lr"] = 0.5
    elif odd and what == "is_first_step":
        override["is_first_step"] = False
    elif odd and what == "weight":
        override["weight"] = 2.0
    elif odd and what == "reduce":
        override["reduce"] = "sum"
    elif odd and what == "grad_scale":
        override["grad_scale"] = torch.tensor(2.0)
    elif odd and what == "fewer tensors":
        for one in model.lists():
            if one:
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
