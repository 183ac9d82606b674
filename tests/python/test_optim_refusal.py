"""What one rank alone finds wrong with a call of a fused optimizer: all ranks raise, at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.faults import works
from checks.optim_script import in_mode
from fusedpg.functional import _backend
from fusedpg.optim import _torch
from harness import Context, on_ranks

BUCKETS: dict[str, Any] = {"bucket_cap_mb": 1e-4}
SOON = 3.0  # seconds, on a busy machine; the group's timeout is 120


class Training:
    def __init__(self, mode: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
        self.net, self.optimizer = in_mode(mode, self.model, ddp=BUCKETS, lr=0.01, **options)
        self.weight = self.model[2].weight
        self.norm: Any = 0.1
        self.keeper = 0
        self.more: dict[str, Any] = {"params": [nn.Parameter(torch.ones(3))], "lr": 0.02}
        self.hook: Any = None

    def backward(self) -> None:
        self.net(torch.ones(2, 3, 4, 4)).square().sum().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


def raises(x: Any) -> Any:
    raise ArithmeticError("of the user's own")


def sparse(t: Training) -> None:
    t.weight.grad = None
    t.weight.grad = torch.ones(5, 16).to_sparse()


def other_memory_format(t: Training) -> None:
    weight = t.model[0].weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def lost_state(t: Training) -> None:
    del t.optimizer.state[t.weight]["exp_avg"]


def turned_on(t: Training) -> None:
    t.optimizer.param_groups[0]["amsgrad"] = True


def by_hand(t: Training) -> None:
    t.optimizer.reduce_gradients()
    t.weight.grad = torch.ones(5, 16)


def unreduced(t: Training) -> None:
    with t.net.no_sync():
        t.backward()


def replaced(t: Training) -> None:
    t.weight.grad = torch.ones(5, 16)


def detached(t: Training) -> None:
    t.optimizer.zero_grad()
    t.optimizer.detach()


def in_backward(t: Training) -> None:
    # When buckets have been reduced. Before, nothing of ours knows of this backward.
    t.hook = t.model[0].weight.register_hook(raises)


def dropped(t: Training) -> None:
    t.weight.grad = None


def taken_out(t: Training) -> None:
    t.optimizer.param_groups[0]["params"].pop()


def shared(t: Training) -> None:
    with torch.no_grad():
        t.weight.add_(0)


def closure(t: Training) -> None:
    step = t.optimizer.step
    t.optimizer.step = lambda: step(lambda: raises(0))  # type: ignore[method-assign]


def no_norm(t: Training) -> None:
    t.norm = None


def negative(t: Training) -> None:
    t.more["lr"] = -1.0


def listed_twice(t: Training) -> None:
    t.more["params"] = [t.weight]


def no_such_rank(t: Training) -> None:
    t.keeper = 99


def nothing(t: Training) -> None:
    """On the other ranks."""


# Mode, what is wrong on a rank after backward, what all ranks call then, what the others are told.
CASES: list[tuple[str, Callable[[Training], None], str, str]] = [
    ("manual", sparse, "step", "sparse"),
    ("manual", other_memory_format, "step", "memory format"),
    ("manual", lost_state, "step", "has no exp_avg"),
    ("manual", closure, "step", "of the user's own"),
    ("manual", shared, "shared step", "written in place"),
    ("manual", taken_out, "step", "params|elements|tensors"),
    ("manual", by_hand, "clip", "put in by hand"),
    ("manual", detached, "step", "detached"),
    ("manual", no_norm, "own clip", "NoneType"),
    ("manual", negative, "add group", "lr|learning rate"),
    ("manual", listed_twice, "add group", "more than one parameter group"),
    ("manual", lost_state, "full_state_dict", "different parameters"),
    ("manual", no_such_rank, "consolidate", "must be a rank"),
    ("sharded", no_such_rank, "consolidate", "must be a rank"),
    ("sharded", unreduced, "step", "never reduced"),
    ("sharded", unreduced, "clip", "never reduced"),
    ("sharded", other_memory_format, "step", "memory format"),
    ("sharded", lost_state, "step", "has no exp_avg"),
    ("sharded", turned_on, "step", "amsgrad"),
    ("sharded", detached, "step", "detached"),
    ("sharded", in_backward, "backward", "a backward has raised"),
    ("sharded", closure, "step", "of the user's own"),
    ("overlap", in_backward, "backward", "a backward has raised"),
    # These find it in step(), which is local, and the others in their next backward.
    ("overlap", dropped, "step, zero, backward", "was dropped between backward"),
    ("overlap", replaced, "step, zero, backward", "never reduced"),
    ("overlap", turned_on, "step, zero, backward", "amsgrad"),
]


def begin_anew(t: Training) -> None:
    """The way out of a backward that has raised: torch's DDP refuses another forward."""
    if t.hook is not None:
        t.hook.remove()
    with contextlib.suppress(RuntimeError):  # with overlap, it says that gradients are gone
        t.optimizer.step()
    t.optimizer.zero_grad()
    t.optimizer.detach()
    t.net = DistributedDataParallel(t.model, **BUCKETS)
    t.optimizer.attach(t.net)
    t.step()


def call(t: Training, what: str) -> None:
    if what == "full_state_dict":
        t.optimizer.full_state_dict()
        return
    for one in what.replace("shared ", "").split(", "):
        {
            "step": lambda: t.optimizer.step(),
            "zero": lambda: t.optimizer.zero_grad(),
            "clip": t.clip,
            "own clip": lambda: t.optimizer.clip_grad_norm_(t.norm),
            "add group": lambda: t.optimizer.add_param_group(t.more),
            "consolidate": lambda: t.optimizer.consolidate_state_dict(to=t.keeper),
            "backward": t.backward,
        }[one]()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], case[1].__name__]))
@on_ranks(2, 3)
def test_all_ranks_raise(context: Context, case: Any) -> None:
    mode, wrong, what, text = case
    t = Training(mode, share_parameters="shared" in what)
    t.step()
    t.optimizer.zero_grad()
    if what != "backward":
        t.backward()
    bad = context.rank == context.world_size - 1
    with contextlib.suppress(RuntimeError) if wrong is detached else contextlib.nullcontext():
        if wrong is by_hand and not bad:
            t.optimizer.reduce_gradients()
        (wrong if bad else nothing)(t)
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises((RuntimeError, ValueError, ArithmeticError, TypeError)) as raised:
        call(t, what)
    assert time.monotonic() - begin < SOON
    if not bad:
        assert raised.match(text)
        if what != "full_state_dict":
            assert raised.match(rf"rank {context.world_size - 1}")
    # The group goes on.
    if wrong is in_backward:
        begin_anew(t)
    works()


WRONG: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"max_grad_norm": -1.0},
    {"reduce": "max"},
    {"overlap": True, "max_grad_norm": 1.0},
    {"comm_hook": "none"},
    {"master_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
@on_ranks(2)
def test_constructor(context: Context, wrong: Any) -> None:
    """One rank's arguments are wrong; also one that tries again, as all do."""
    model = nn.Linear(3, 2)
    for ddp in (None, DistributedDataParallel(nn.Linear(3, 2))):
        params = (model if ddp is None else ddp).parameters()
        begin = time.monotonic()
        with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
            fusedpg.optim.SGD(params, **{"lr": 0.1, **(wrong if context.rank else {})}, ddp=ddp)
        assert time.monotonic() - begin < SOON
        assert context.rank or raised.match("rank 1 refused to take part")
        module = model if ddp is None else ddp
        fusedpg.optim.SGD(module.parameters(), lr=0.1, ddp=ddp)
        dist.barrier()


@pytest.mark.parametrize("mode", ["manual", "sharded"])
@on_ranks(2)
def test_the_same_error_everywhere_leaves_nothing_behind(context: Context, mode: str) -> None:
    """All ranks refuse, and training goes on with the same bits."""

    def run(disturbed: bool) -> list[torch.Tensor]:
        t = Training(mode)
        for _ in range(3):
            t.step()
            if disturbed:
                with pytest.raises(ArithmeticError):
                    t.optimizer.step(lambda: raises(0))
        return [p.detach().clone() for p in t.model.parameters()]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_a_rank_without_any_gradient_and_grad_scaler(context: Context) -> None:
    """torch's scaler has nothing to look at there."""
    t = Training("manual")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if context.rank:
        t.backward()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 has no gradient that GradScaler could look at"):
        scaler.step(t.optimizer)
    assert time.monotonic() - begin < SOON


@on_ranks(2)
def test_a_parameter_of_one_rank_alone(context: Context) -> None:
    """Where the optimizer is made parameters are broadcast."""
    begin = time.monotonic()
    params = [nn.Parameter(torch.ones(3))]
    if context.rank:
        params = [nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    with pytest.raises((TypeError, RuntimeError), match="float32, float64, bfloat16, float16"):
        fusedpg.optim.SGD(params, lr=0.1)
    assert time.monotonic() - begin < SOON


@on_ranks(2)
def test_under_join(context: Context) -> None:
    """A rank that has joined hears of it, too."""
    t = Training("sharded")
    with (
        pytest.raises((RuntimeError, ArithmeticError), match="of the user's own"),
        Join([t.net, t.optimizer]),
    ):
        for _ in range(2 + context.rank):
            t.step()
        if context.rank:
            t.optimizer.zero_grad()
            t.backward()
            begin = time.monotonic()
            t.optimizer.step(lambda: raises(0))
    assert not context.rank or time.monotonic() - begin < SOON


@on_ranks(2)
def test_a_step_without_errors_tells_nothing(context: Context) -> None:
    for mode in ("manual", "overlap", "sharded"):
        t = Training(mode)
        group = _backend(None)
        for _ in range(3):
            t.step()
            now = group._get_sequence_number_for_group()
            t.step()
        buckets = 0 if mode == "manual" else len(_torch.buckets(t.net))
        operations = group._get_sequence_number_for_group() - now
        assert operations == buckets + (mode != "overlap"), mode
