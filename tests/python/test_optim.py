"""Fused optimizers in manual mode and under DDP, against torch.optim in one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks import optim
from checks.cases import digest, distance, same
from checks.faults import works
from checks.optim import Run, Trainer, fused, grouped, unchanged
from checks.refused import refused
from harness import Context, on_ranks


def _clip(trainer: Trainer, how: str, max_norm: float, order: float) -> torch.Tensor | None:
    if how == "method":
        return trainer.optimizer.clip_grad_norm_(max_norm, order)
    if how == "torch":
        if trainer.ddp is None:
            trainer.optimizer.reduce_gradients()
        return nn.utils.clip_grad_norm_(trainer.net.parameters(), max_norm, order)
    return None  # the constructor's max_grad_norm


SCALING: dict[str, Callable[[Trainer, bool], object]] = {
    "method": lambda trainer, first: trainer.optimizer.clip_grad_norm_(1.0 if first else 0.5),
    "method, then one for all": lambda trainer, first: [
        trainer.optimizer.clip_grad_norm_(norm) for norm in (1.0 if first else 0.5, 1e6)
    ],
    "torch": lambda trainer, first: nn.utils.clip_grad_norm_(trainer.params, 1.0 + first),
    "torch, one by one": lambda trainer, first: nn.utils.clip_grad_norm_(
        trainer.params, 1.0 + first, foreach=False
    ),
    "by hand": lambda trainer, first: trainer.params[1].grad.mul_(2.0 + first),  # type: ignore[union-attr]
    "other operations": lambda trainer, first: (
        trainer.params[1].grad.mul_(2.0) if first else trainer.params[1].grad.div_(2.0)  # type: ignore[union-attr]
    ),
    "others' gradients": lambda trainer, first: trainer.params[first].grad.mul_(2.0),  # type: ignore[union-attr]
}


def _params(trainer: Trainer) -> Any:
    return trainer.net.parameters()


def _again(trainer: Trainer) -> None:
    for param in trainer.params:
        param.grad = None
    trainer.backward(1)


def _other_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 2
    trainer.optimizer.step()


OVERLAP_REFUSES: dict[str, Callable[[Trainer, Any], object]] = {
    "torch clip": lambda trainer, amp: nn.utils.clip_grad_norm_(_params(trainer), 1.0),
    "torch clip, foreach": lambda trainer, amp: nn.utils.clip_grad_norm_(
        _params(trainer), 1.0, foreach=True
    ),
    "clip value": lambda trainer, amp: nn.utils.clip_grad_value_(_params(trainer), 1.0),
    "method": lambda trainer, amp: trainer.optimizer.clip_grad_norm_(1.0),
    "scaler": lambda trainer, amp: amp.step(trainer.optimizer),
    "scaler unscale": lambda trainer, amp: amp.unscale_(trainer.optimizer),
    "isfinite": lambda trainer, amp: [torch.isfinite(p.grad).all() for p in _params(trainer)],
    "norm": lambda trainer, amp: [param.grad.norm() for param in _params(trainer)],
    "second backward": lambda trainer, amp: trainer.backward(1),
    "second backward, gradients dropped": lambda trainer, amp: _again(trainer),
    "rate changed": lambda trainer, amp: _other_rate(trainer),
}


REFUSES = (
    "fuse",
    "differentiable",
    "capturable",
    "complex",
    "gaps",
    "gloo",
    "options",
    "overlap",
    "hook",
    "foreign",
    "twice",
)

pytestmark = pytest.mark.fused_only

NAMES = ("SGD", "Adam", "AdamW", "LAMB")
MODES = ("manual", "ddp", "overlap")
NOT_OVERLAP = ("manual", "ddp")
WORLDS = (1, 2, 3, harness.slow(4))
VARIANTS = {
    "SGD plain": Run("SGD", options={"momentum": 0, "dampening": 0, "weight_decay": 0}),
    "SGD nesterov": Run("SGD", options={"dampening": 0, "nesterov": True}),
    "SGD maximize": Run("SGD", options={"maximize": True}),
    "Adam amsgrad": Run("Adam", options={"amsgrad": True}),
    "Adam maximize": Run("Adam", options={"maximize": True, "amsgrad": True}),
    "Adam decoupled": Run("Adam", options={"decoupled_weight_decay": True}),
    "AdamW amsgrad": Run("AdamW", options={"amsgrad": True}),
    "AdamW maximize": Run("AdamW", options={"maximize": True}),
    "AdamW tensor lr": Run("AdamW", lr_tensor=True),
    "AdamW sum": Run("AdamW", ours={"reduce": "sum"}),
    "LAMB trust_clip": Run("LAMB", options={"trust_clip": True}),
    "LAMB no decay": Run("LAMB", options={"weight_decay": 0.0}),
    "LAMB always_adapt": Run("LAMB", options={"weight_decay": 0.0, "always_adapt": True}),
    "LAMB maximize": Run("LAMB", options={"maximize": True}),
    "LAMB tensor lr": Run("LAMB", lr_tensor=True),
}
LAYOUTS = ("channels_last", "transposed")


def in_mode(run: Run, mode: str) -> Run:
    return dataclasses.replace(run, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_parity(workers: harness.Workers, name: str, mode: str) -> None:
    workers.agree(optim.parity, Run(name, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_parity_in_double(pair: harness.Workers, name: str, mode: str) -> None:
    pair.agree(optim.parity, Run(name, mode, dtypes=("float64",)), 1e-12)


IN_TURN = tuple(MODES[i % len(MODES)] for i in range(len(VARIANTS)))


@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        (variant, mode) if mode == turn else harness.slow(variant, mode)
        for variant, turn in zip(VARIANTS, IN_TURN, strict=True)
        for mode in MODES
    ],
)
def test_variants(trio: harness.Workers, variant: str, mode: str) -> None:
    trio.agree(optim.parity, in_mode(VARIANTS[variant], mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_shared_parameters(workers: harness.Workers, name: str, mode: str) -> None:
    run = Run(name, mode, steps=30, ours={"share_parameters": True})
    workers.agree(optim.parity, run)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(trio: harness.Workers, layout: str, mode: str) -> None:
    for share in (False, True):
        run = Run(mode=mode, layout=layout, steps=30, ours={"share_parameters": share})
        trio.agree(optim.parity, run)


@pytest.mark.parametrize("mode", MODES)
def test_bucket_views(trio: harness.Workers, mode: str) -> None:
    for layout in ("contiguous", *LAYOUTS):
        run = Run(mode=mode, steps=10, layout=layout, ddp={"gradient_as_bucket_view": True})
        trio.agree(optim.parity, run)


@pytest.mark.parametrize("mode", MODES)
def test_slices_without_elements(workers: harness.Workers, mode: str) -> None:
    shapes = ((5,), (33,), (64,), (97,), (1,), (0,), (127,), ())
    for name in NAMES:
        workers.agree(optim.parity, Run(name, mode, steps=10, shapes=shapes))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_mixed_types(trio: harness.Workers, name: str, mode: str) -> None:
    dtypes = ("float32", "float64", "float32", "float64", "float32")
    trio.agree(optim.parity, Run(name, mode, dtypes=dtypes, steps=20))
    # bfloat16 beside them, with state in bfloat16 as torch's.
    dtypes = ("float32", "bfloat16", "float64", "bfloat16", "float32")
    run = Run(name, mode, dtypes=dtypes, steps=5, options={"eps": 1e-4} if "A" in name else {})
    trio.agree(optim.parity, run, 2e-2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half(pair: harness.Workers, dtype: str, mode: str) -> None:
    # fp16's smallest numbers are no eps: torch's denominators would be zero.
    for name, options in (("SGD", {}), ("AdamW", {"eps": 1e-3}), ("LAMB", {"eps": 1e-3})):
        run = Run(name, mode, dtypes=(dtype,), steps=10, options=options)
        pair.agree(optim.parity, run, 2e-2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_half_with_master_weights(
    workers: harness.Workers, name: str, dtype: str, mode: str
) -> None:
    shapes = ((1021,), (31, 37), (2, 3, 5, 7))
    ours = {"master_dtype": torch.float32}
    run = Run(name, mode, dtypes=(dtype,), steps=20, shapes=shapes, ours=ours)
    workers.agree(optim.half_with_master, run)


@pytest.mark.parametrize("mode", MODES)
def test_master_weights_without_elements(workers: harness.Workers, mode: str) -> None:
    ours = {"master_dtype": torch.float32}
    run = Run(mode=mode, dtypes=("bfloat16",), steps=5, ours=ours)
    workers.agree(optim.half_with_master, run)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_the_oracle_sees_a_wrong_lamb(context: Context, mode: str) -> None:
    """Which is the formula with a second division by the update's norm."""
    run = Run("LAMB", mode, steps=20)
    trainer = Trainer(context, run)
    trainer.oracle.divide_again = True
    for step in range(run.steps):
        trainer.both(step)
    with pytest.raises(AssertionError):
        trainer.agree(state=False)
    for a, b in zip(trainer.params, trainer.twin.parameters(), strict=True):
        assert a.numel() == 1 or distance(a.detach(), b.detach()) > 1e-4


@pytest.mark.parametrize("mode", MODES)
@on_ranks(*WORLDS)
def test_trust_ratio_is_that_of_whole_tensors(context: Context, mode: str) -> None:
    """The first step's length is lr * |x|, whatever the gradient is, and 0-norms count as 1."""
    run = Run("LAMB", mode, options={"weight_decay": 0.0, "always_adapt": True}, groups=False)
    trainer = Trainer(context, run)
    with torch.no_grad():
        trainer.params[1].zero_()
    before = [param.detach().clone() for param in trainer.params]
    trainer.backward(0, 1000.0)
    trainer.optimizer.step()
    for i, (param, old) in enumerate(zip(trainer.params, before, strict=True)):
        moved = float((param.detach() - old).double().norm())
        want = 1e-2 * (float(old.double().norm()) if i != 1 else 7**0.5)
        assert abs(moved - want) <= 1e-5 * want, i


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(3)
def test_runs_are_identical(context: Context, name: str, mode: str) -> None:
    """Their parameters, and this rank's state."""
    digests = set()
    for _ in range(2):
        trainer = Trainer(context, Run(name, mode))
        for step in range(20):
            trainer.both(step)
        digests.add(digest(trainer.state()))
    assert len(digests) == 1


# --- groups, schedulers, closures ---------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_one_cycle(pair: harness.Workers, name: str, mode: str) -> None:
    pair.agree(optim.scheduled, Run(name, mode, steps=12))


@pytest.mark.parametrize("mode", MODES)
def test_one_cycle_with_a_tensor(pair: harness.Workers, mode: str) -> None:
    pair.agree(optim.scheduled, Run("AdamW", mode, steps=12, lr_tensor=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@on_ranks(2)
def test_a_group_added_later(context: Context, name: str, mode: str) -> str:
    """Parameters that join the optimizer after some steps."""
    run = Run(name, mode, steps=8)
    trainer = Trainer(context, run)
    trainer.optimizer = None
    if run.mode != "manual":
        bag = copy.deepcopy(trainer.bag)
        trainer.net = trainer.ddp = DistributedDataParallel(bag, bucket_cap_mb=0.004)
        trainer.bag, trainer.params = bag, list(bag.parameters())
    elif context.rank:
        with torch.no_grad():
            trainer.params[-1].fill_(float(context.rank))  # the first rank's value wins
    first, last = grouped(run, list(trainer.params))
    trainer.optimizer = fused(run, [first], ddp=trainer.ddp)
    twins = grouped(run, list(trainer.twin.parameters()))
    trainer.oracle = getattr(torch.optim, run.optimizer)(twins[:1], foreach=False)
    for step in range(run.steps):
        if step == 3:
            trainer.net.zero_grad()
            trainer.optimizer.add_param_group(last)
            trainer.oracle.add_param_group(twins[1])
        trainer.net.zero_grad()
        trainer.both(step)
    return trainer.agree()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_closure_is_called_once(context: Context, mode: str) -> None:
    """A closure is called once, with gradients enabled, and its loss is returned."""
    trainer = Trainer(context, Run(mode=mode, steps=2))
    calls: list[int] = []

    def evaluate() -> torch.Tensor:
        assert torch.is_grad_enabled()
        calls.append(len(calls))
        trainer.optimizer.zero_grad()
        loss: torch.Tensor = trainer.net(trainer.gradients(calls[-1]))
        loss.backward()
        return loss

    for step in range(2):
        with torch.no_grad():
            loss = trainer.optimizer.step(evaluate)
        assert loss.dim() == 0
        assert loss.requires_grad
        trainer.prepare(step)
        trainer.oracle.step()
    assert calls == [0, 1]
    trainer.agree()


@pytest.mark.parametrize("alone", [False, True], ids=["all", "rank 0"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
@on_ranks(2)
def test_state_dict_of_a_fresh_optimizer(
    context: Context, name: str, mode: str, alone: bool
) -> None:
    """get_optimizer_state_dict() on a fresh optimizer: no collective, no moved weight."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    trainer = Trainer(context, Run(name, mode))
    before = [param.detach().clone() for param in trainer.params]
    if not alone or context.rank == 0:
        found = get_optimizer_state_dict(trainer.net, trainer.optimizer)
        assert len(found["param_groups"]) == 2
    unchanged([param.detach() for param in trainer.params], before)
    dist.barrier()
    for step in range(3):
        trainer.both(step)
    trainer.agree()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
@on_ranks(3)
def test_unused_parameters(context: Context, name: str, mode: str) -> str:
    """One parameter that no rank uses, and one that only the first rank does."""
    run = Run(name, mode, steps=6, ddp={"find_unused_parameters": True})
    trainer = Trainer(context, run)
    nobody, some = 2, 3
    before = trainer.params[nobody].detach().clone()
    size = context.world_size
    for step in range(run.steps):
        trainer.optimizer.zero_grad()
        gradients = trainer.gradients(step)
        gradients[nobody] = None
        if context.rank:
            gradients[some] = None
        trainer.net(gradients).backward()
        # With overlap nobody has waited yet, and a guard stands in every gradient's place.
        assert run.mode == "overlap" or trainer.params[nobody].grad is None
        trainer.optimizer.step()
        trainer.prepare(step, used=[i for i in range(len(trainer.params)) if i != nobody])
        list(trainer.twin.parameters())[some].grad = run.gradient(step, 0, some) / size
        trainer.oracle.step()
        assert trainer.params[nobody].grad is None
    assert same(trainer.params[nobody].detach(), before)
    assert trainer.params[nobody] not in trainer.optimizer.state
    trainer.agree()
    # Used at last: momentum starts here, and so do bias corrections.
    trainer.both(run.steps)
    return trainer.agree()


def clipped(context: Context, run: Run, how: str, max_norm: float, order: float = 2.0) -> str:
    """Clipping by the norm over all ranks, the same as in one process."""
    if how == "constructor":
        run = dataclasses.replace(run, ours={**run.ours, "max_grad_norm": max_norm})
    trainer = Trainer(context, run)
    for step in range(run.steps):
        trainer.optimizer.zero_grad()
        trainer.backward(step)
        mine = _clip(trainer, how, max_norm, order)
        trainer.prepare(step)
        want = nn.utils.clip_grad_norm_(trainer.twin.parameters(), max_norm, order)
        assert want > 2.0, "the test clips in some of its cases alone"
        if mine is not None:
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=0)
        trainer.optimizer.step()
        trainer.oracle.step()
    return trainer.agree(3e-6)


# --- clipping, GradScaler, accumulation ---------------------------------------------


@pytest.mark.parametrize("how", ["method", "torch", "constructor"])
@pytest.mark.parametrize("mode", NOT_OVERLAP)
def test_clipping(workers: harness.Workers, mode: str, how: str) -> None:
    for max_norm in (2.0, 1e6):
        run = Run("SGD", mode, steps=5)
        workers.agree(clipped, run, how, max_norm)


def scaled_differently(context: Context, mode: str, how: str) -> None:
    """Parameters would be updated by slices of different scales."""
    trainer = Trainer(context, Run("SGD", mode))
    before = [param.detach().clone() for param in trainer.params]

    def backward() -> None:
        trainer.optimizer.zero_grad()
        trainer.backward(0)
        trainer.optimizer.clip_grad_norm_(1e6)  # in manual mode gradients are reduced by it

    backward()
    SCALING[how](trainer, context.rank == 0)
    with refused("which gradients were", dist.DistBackendError):
        trainer.optimizer.step()
    unchanged([param.detach() for param in trainer.params], before)
    works()
    # What has multiplied gradients that are gone does not matter.
    for norm in (None, 1.0):
        trainer.optimizer.zero_grad()
        trainer.backward(0)
        if norm is not None:
            trainer.optimizer.clip_grad_norm_(norm)
        trainer.optimizer.step()


@pytest.mark.parametrize("mode", NOT_OVERLAP)
def test_ranks_that_scale_differently(trio: harness.Workers, mode: str) -> None:
    for how in SCALING:
        trio.run(scaled_differently, mode, how)


def test_hosts_that_clip_differently() -> None:
    workers = harness.pool_of_hosts("two")
    workers.run(scaled_differently, "manual", "method")


@pytest.mark.parametrize("order", [torch.inf, 1.0, 3.0])
@pytest.mark.parametrize("how", ["method", "torch"])
@pytest.mark.parametrize("mode", NOT_OVERLAP)
def test_other_norms(trio: harness.Workers, mode: str, how: str, order: float) -> None:
    run = Run("SGD", mode, steps=3)
    trio.agree(clipped, run, how, 1.5, order)


@on_ranks(3)
def test_reduced_gradients(context: Context) -> None:
    """What may be asked of a reduced gradient, and what is refused."""
    trainer = Trainer(context, Run(mode="ddp"))
    trainer.backward(0)
    trainer.prepare(0)
    for param, twin in zip(trainer.params, trainer.twin.parameters(), strict=True):
        assert param.grad is not None
        assert twin.grad is not None
        assert param.grad.shape == twin.grad.shape
        torch.testing.assert_close(torch.linalg.vector_norm(param.grad), twin.grad.norm())
        torch.testing.assert_close(param.grad.norm(1), twin.grad.norm(1))
    grad: Any = trainer.params[0].grad
    for ask in (torch.isfinite, torch.clone, torch.sum, lambda g: g + 1, lambda g: g[0]):
        with refused("slice"):
            ask(grad)
    with refused("slice"):
        nn.utils.clip_grad_value_(trainer.params, 0.5)
    for param in trainer.params:
        param.grad.mul_(0.5)  # type: ignore[union-attr]
    trainer.optimizer.step()
    for twin in trainer.twin.parameters():
        twin.grad.mul_(0.5)  # type: ignore[union-attr]
    trainer.oracle.step()
    trainer.agree()


@pytest.mark.parametrize("types", [1, 2])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])
@on_ranks(3)
def test_grad_scaler_by_hand(context: Context, unscale: bool, types: int) -> str:
    """Manual mode, gradients put in by hand, infinite ones on one rank: all scalers back off."""
    dtypes = (torch.float32, torch.float64)[:types]
    params = [nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in dtypes]
    optimizer = fusedpg.optim.SGD(params, lr=0.1)
    amp = torch.amp.GradScaler("cpu", init_scale=4.0)
    expected, scale = 1.0, 4.0
    for step in range(6):
        overflow = step in (1, 3, 4)
        amp.scale(torch.ones(()))  # as a loss would
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, scale)
            if overflow and context.rank == step % context.world_size and i == step % types:
                param.grad[7] = torch.inf
        if unscale:
            amp.unscale_(optimizer)
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()
        scale *= 0.5 if overflow else 1.0
        expected -= 0.0 if overflow else 0.1
        assert amp.get_scale() == scale, step
        for param in params:
            torch.testing.assert_close(param.detach(), torch.full_like(param, expected))
    # Backward's gradients are reduced before they are unscaled.
    (amp.scale(sum(param.sum() for param in params))).backward()
    amp.step(optimizer)
    amp.update()
    torch.testing.assert_close(params[0].detach(), torch.full((300,), expected - 0.1))
    return digest(params)


@on_ranks(3)
def test_found_inf_on_one_rank(context: Context) -> None:
    """A script that sets ``found_inf`` on one rank alone is told so, on all ranks."""
    param = nn.Parameter(torch.ones(10))
    optimizer = fusedpg.optim.SGD([param], lr=0.1)
    param.grad = torch.ones(10)
    optimizer.found_inf = torch.tensor(float(context.rank == 0))
    with refused("found_inf"):
        optimizer.step()
    assert bool((param == 1).all())
    del optimizer.found_inf


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@on_ranks(2)
def test_gradients_never_reduced(context: Context, mode: str, before: bool) -> None:
    """step() refuses gradients that were never reduced."""
    trainer = Trainer(context, Run(mode=mode))
    if before:
        trainer.backward(0)
        if mode == "overlap":
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    with trainer.ddp.no_sync():
        trainer.backward(1)
    kept = trainer.state()
    with refused("never reduced"):
        trainer.optimizer.step()
    unchanged(trainer.state(), kept)
    works()


# --- what is refused ------------------------------------------------------------------
@pytest.mark.parametrize("what", OVERLAP_REFUSES)
@on_ranks(2)
def test_overlap_refuses(context: Context, what: str) -> None:
    """What cannot work when parameters change during backward."""
    trainer = Trainer(context, Run(mode="overlap"))
    amp = torch.amp.GradScaler("cpu")
    loss = trainer.net(trainer.gradients(0))
    (amp.scale(loss) if what.startswith("scaler") else loss).backward()
    works()  # behind the updates that are under way
    kept = trainer.state()
    with refused("overlap=False"):
        OVERLAP_REFUSES[what](trainer, amp)
    unchanged(trainer.state(), kept)
    works()


@pytest.mark.parametrize("what", REFUSES)
@on_ranks(2)
def test_refuses(context: Context, what: str) -> None:
    """What no fused optimizer takes."""
    bag = Trainer(context, Run()).bag
    params = list(bag.parameters())
    if what == "fuse":
        with refused("RMSprop", TypeError):
            fusedpg.optim.from_torch(torch.optim.RMSprop([nn.Parameter(torch.zeros(3))]))
    elif what == "differentiable":
        for name in ("SGD", "Adam", "AdamW", "LAMB"):
            with refused("differentiable", ValueError):
                fused(Run(name), params, differentiable=True)
    elif what == "capturable":
        for name in ("Adam", "AdamW", "LAMB"):
            with refused("capturable", ValueError):
                fused(Run(name), params, capturable=True)
    elif what == "complex":
        with refused("complex64", TypeError):
            fused(Run(), [nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    elif what == "gaps":
        with refused("dense", TypeError):
            fused(Run(), [nn.Parameter(torch.zeros(6)[::2])])
    elif what == "gloo":
        with refused("backend", ValueError):
            fused(Run(), params, process_group=context.oracle)
        ddp = DistributedDataParallel(bag, process_group=context.oracle)
        with refused("backend", ValueError):
            fused(Run(), params, ddp=ddp)
    elif what == "options":
        for options in (
            {"reduce": "max"},
            {"max_grad_norm": 0.0},
            {"master_dtype": torch.float64},
        ):
            with refused(next(iter(options)), ValueError):
                fused(Run(), params, **options)
    elif what == "overlap":
        with refused("overlap=False", ValueError):
            Trainer(context, Run(mode="overlap", ours={"max_grad_norm": 1.0}))
    elif what == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp = DistributedDataParallel(bag)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with refused("communication hook"):
            fused(Run(), params, ddp=ddp)
    elif what == "foreign":
        ddp = DistributedDataParallel(nn.Linear(3, 3))
        with refused("does not belong", ValueError):
            fused(Run(), params, ddp=ddp)
    elif what == "twice":
        ddp = DistributedDataParallel(bag)
        kept = fused(Run(), params, ddp=ddp)
        with refused("two optimizers", ValueError):
            fused(Run(), params, ddp=ddp)
        del kept
    else:
        raise AssertionError(what)
    works()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_sparse_gradients(context: Context, mode: str) -> None:
    """Sparse gradients raise on every rank."""
    module = nn.Embedding(50, 4, sparse=True)
    net: Any = DistributedDataParallel(module) if mode != "manual" else module
    ddp = net if mode != "manual" else None
    optimizer = fused(Run("SGD", mode), module.parameters(), lr=0.1, ddp=ddp)
    before = module.weight.detach().clone()
    with refused("sparse"):
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert same(module.weight.detach(), before)
    works()


@pytest.mark.parametrize("early", [False, True], ids=["after backward", "before"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_shared_parameters_are_guarded(context: Context, mode: str, early: bool) -> str:
    """Shared parameters: one copy, and writes outside step() raise unless announced."""
    run = Run(mode=mode, ours={"share_parameters": True})
    trainer = Trainer(context, run)
    trainer.both(0)
    trainer.optimizer.zero_grad()
    if not early:
        trainer.backward(1)
    torch.distributed.barrier()  # a rank that is still computing must not see the write
    with torch.no_grad():
        trainer.params[0].mul_(1.0)
    with refused("outside step()"):
        if early:
            trainer.backward(1)
        trainer.optimizer.step()
    works()

    trainer = Trainer(context, run)
    trainer.both(0)
    with trainer.optimizer.writing_parameters():
        if context.rank == 0:
            with torch.no_grad():
                trainer.params[0].fill_(2.0)
    with torch.no_grad():
        next(trainer.twin.parameters()).fill_(2.0)
    assert bool((trainer.params[0] == 2.0).all()), "the parameters are not shared"
    trainer.both(1)
    trainer.agree()
    return digest(trainer.params)
