"""Where parts of the fused optimizers meet, and what is done for many parameters at once.

Each case gave wrong numbers once, without an error.
"""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.cases import same
from checks.optim_script import WIDTH, Net, Script, Setup
from checks.refused import refused
from fusedpg._registration import load_extension
from fusedpg.optim import _gradients, _modes
from harness import Context, on_ranks

OVERLAP = Setup("AdamW", "overlap")


@on_ranks(1, 2)
def test_masters_into_float32(context: Context) -> None:
    """State with masters changes no parameters of a model that has none."""
    half = Net().to(torch.bfloat16)
    ddp = DistributedDataParallel(half)
    masters = fusedpg.optim.AdamW(half.parameters(), ddp=ddp, lr=0.01, master_dtype=torch.float32)
    ddp(torch.ones(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
    masters.step()
    whole = masters.full_state_dict(rank0_only=False)
    model = Net()
    optimizer = fusedpg.optim.AdamW(model.parameters(), lr=0.01, master_dtype=torch.float32)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.load_state_dict(whole)
    assert all(map(torch.equal, model.parameters(), before))


@on_ranks(1, 2)
def test_blank_state(context: Context) -> None:
    """State that was made for a checkpoint, of a parameter without a step, is not given away."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    ddp = DistributedDataParallel(Net())
    optimizer = fusedpg.optim.SGD(ddp.parameters(), ddp=ddp, lr=0.1, momentum=0.9, dampening=0.5)
    get_optimizer_state_dict(ddp, optimizer)
    assert optimizer.local_state_dict()["state"] == {}
    assert optimizer.state_dict()["state"] == {}
    dist.barrier()


@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@on_ranks(2)
def test_parameters_taken_out_with_gradients(context: Context, mode: str) -> None:
    """What was reduced for the optimizer cannot go on as a gradient of DDP's."""
    s = Script(context, Setup(mode=mode), True)
    s.backward(s.net(s.x()))
    s.step(zero=False)
    s.opt.param_groups[0]["params"].pop()
    s.opt.zero_grad()
    with refused("zero_grad"):
        s.backward(s.net(s.x()))


@pytest.mark.parametrize("how", ["group", "parameter", "state"])
@on_ranks(2)
def test_edited_after_backward(context: Context, how: str) -> None:
    """``overlap=True``: groups and state are edited when the step has been made already."""
    s = Script(context, OVERLAP, True)
    s.in_groups()
    s.train(1)
    s.backward(s.net(s.x()))
    if how == "group":
        s.opt.param_groups.pop()
    elif how == "parameter":
        s.opt.param_groups[0]["params"].pop()
    else:
        s.opt.state.clear()
    with refused("between backward and step"):
        s.opt.step()
    s.module.zero_grad()
    s.train(1)


@pytest.mark.parametrize("how", ["", "step raises", "backward raises"])
@on_ranks(2)
def test_loaded_after_backward(context: Context, how: str) -> None:
    """``overlap=True``: state is loaded when it has been used already, or after a failure."""
    s = Script(context, OVERLAP, True)
    s.train(1)
    state = s.opt.full_state_dict(rank0_only=False)
    y = s.net(s.x())
    if how == "backward raises":
        # On all ranks, when the last layers' bucket has been begun.
        s.params[0].register_hook(lambda _: 1 // 0)
        with refused("zero", ZeroDivisionError):
            s.backward(y)
        assert s.opt._mode.updated
    else:
        s.backward(y)
        with refused("call step"):
            s.opt.load_state_dict(state)
        if how == "step raises":
            s.opt.param_groups[0]["lr"] = 0.5
            with refused("lr of parameter group 0"):
                s.opt.step()
        else:
            s.opt.step()
    s.opt.load_state_dict(state)
    assert not s.opt._mode.updated and not s.opt._mode.applied
    again = s.opt.full_state_dict(rank0_only=False)
    torch.testing.assert_close(again["state"], state["state"], rtol=0, atol=0)
    if how == "backward raises":
        return  # DDP itself is in the middle of a pass for ever
    s.opt.zero_grad()
    s.train(1)


@on_ranks(1, 2)
def test_clipped_at_once(context: Context) -> None:
    """torch's clipping asks once for all norms and multiplies all gradients at once."""
    s = Script(context, Setup(), True)
    handled: list[Any] = []
    original = _gradients.ShardedGrad.__torch_dispatch__

    def count(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handled.append(func)
        return original(func, types, args, kwargs)

    for _ in range(4):
        s.backward(s.net(s.x()))
        handled.clear()
        with mock.patch.object(_gradients.ShardedGrad, "__torch_dispatch__", classmethod(count)):
            nn.utils.clip_grad_norm_(s.params, 0.01)
        assert len(handled) == 2, handled
        s.step()


_SHAPES = [(), (1,), (7,), (64,), (65,), (3, 5), (0, 4), (130,), (2, 3, 4, 5), (8, 40)]


def _random_module(generator: torch.Generator, kinds: list[torch.dtype]) -> list[nn.Parameter]:
    def number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    params = []
    for _ in range(2 + number(8)):
        shape = _SHAPES[number(len(_SHAPES))]
        data = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 4 and number(2):
            data = data.to(memory_format=torch.channels_last)
        params.append(nn.Parameter(data.to(kinds[number(len(kinds))])))
    return params


def _steps_of(context: Context, seed: int, general: bool) -> tuple[list[torch.Tensor], int]:
    """What clipping and steps of manual mode give, of a random model, and how often the reduction
    was done for all parameters at once."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [[torch.float32], [torch.float64], [torch.bfloat16], [torch.float32, torch.float64]]
    params = _random_module(generator, kinds[seed % 4])
    clips = seed % 3 == 2
    optimizer = fusedpg.optim.AdamW(
        params, lr=0.1, reduce="mean" if seed % 2 else "sum", max_grad_norm=0.1 if clips else None
    )
    if seed % 6 == 1:
        optimizer.set_local_batch_size(float(1 + 2 * context.rank))
    own = torch.Generator().manual_seed(1000 * seed + context.rank)
    found: list[torch.Tensor] = []
    at_once = 0
    original = _modes._start_all, _modes._unreduced

    def count(*args: Any) -> None:
        nonlocal at_once
        at_once += 1
        original[0](*args)

    _modes._start_all = count
    if general:
        _modes._unreduced = lambda optimizer: None
    try:
        for step in range(5):
            optimizer.zero_grad()
            left = None
            if step == 3:
                left = params[seed % len(params)]  # no rank but the first has its gradient
            for _ in range(1 + (step == 2)):
                loss = torch.zeros((), dtype=torch.float64)
                for param in params:
                    x = torch.randn(param.shape, generator=own, dtype=torch.float64).to(param.dtype)
                    if param is not left or context.rank == 0:
                        loss = loss + (param * x).sum().double() + param.square().sum().double()
                loss.backward()
            if step == 3:
                optimizer.reduce_gradients()
            if step % 2:
                found.append(optimizer.clip_grad_norm_(0.5, (2.0, float("inf"))[seed % 2]))
            elif step:
                found.append(nn.utils.clip_grad_norm_(params, 0.5))
            if step == 4:  # of what was reduced, and of a further backward
                sum(param.double().sum() for param in params).backward()
                found.append(optimizer.clip_grad_norm_(0.25))
            for param in params:
                if isinstance(param.grad, _gradients.ShardedGrad) and param.grad.is_reduced():
                    found.append(param.grad.local().clone())
            optimizer.step()
            found += [param.detach().clone() for param in params]
    finally:
        _modes._start_all, _modes._unreduced = original
    return found, at_once


@on_ranks(1, 2)
def test_gradients_again_clipped(context: Context) -> None:
    """With a DDP, too, also where ``step()`` clips and so asks for the norms of all gradients."""
    for clips_itself in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(5, 3))
        options = {"max_grad_norm": 0.5} if clips_itself else {}
        optimizer = fusedpg.optim.SGD(ddp.parameters(), lr=0.0, ddp=ddp, **options)
        for step in range(6):
            optimizer.zero_grad()
            ddp(torch.full((2, 5), 1.0 + step + context.rank)).sum().backward()
            # The buckets are made anew in the second pass.
            if step > 2:
                assert all(hasattr(p.grad, "seen") for p in ddp.parameters()), clips_itself
            for p in ddp.parameters():
                p.grad.seen = True  # type: ignore[union-attr]
            if not clips_itself:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
    dist.barrier()


@on_ranks(1, 2)
def test_groups_of_several_kinds(context: Context) -> None:
    """Types, rates and momenta that differ, beside torch.optim; and what detach() leaves."""
    types = [torch.float64, torch.float32, torch.float32, torch.float64]
    numbers = [{"lr": 0.1}, {"lr": 0.2}, *({"lr": lr, "momentum": 0.9} for lr in (0.3, 0.4))]

    def made(optimizer: Any) -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in types]
        groups = [{"params": [p], **own} for p, own in zip(params, numbers, strict=True)]
        return params, optimizer(groups, lr=1.0)

    (params, optimizer), (twins, oracle) = made(fusedpg.optim.SGD), made(torch.optim.SGD)
    for step in range(3):
        for p, twin in zip(params, twins, strict=True):
            p.grad = None
            (p * (1.0 + step + context.rank)).sum().backward()
            twin.grad = torch.full_like(twin, 0.5 + step + context.world_size / 2)
        optimizer.step()
        oracle.step()
        for p, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(p, twin)
    for p in params:
        p.grad = None
        (p * (1.0 + context.rank)).sum().backward()
    optimizer.detach()
    for p in params:
        assert type(p.grad) is torch.Tensor and p.grad.tolist() == [1.0 + context.rank] * 5
    dist.barrier()


@on_ranks(1, 2)
def test_gradients_that_are_kept(context: Context) -> None:
    """With a DDP, by a list or as the gradient of another parameter: they say that they are old."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(5, 3))
    params = list(ddp.parameters())
    others = [nn.Parameter(torch.zeros_like(p)) for p in params]
    optimizer = fusedpg.optim.SGD(params, lr=0.0, ddp=ddp)

    def backward(factor: float) -> list[Any]:
        optimizer.zero_grad()
        ddp(torch.full((2, 5), factor + context.rank)).sum().backward()
        return [p.grad for p in params]

    for step in range(4):
        backward(1.0 + step)
    kept = backward(5.0)
    assert all(now is not before for now, before in zip(backward(6.0), kept, strict=True))
    for grad in kept:
        with refused("no longer in the p.grad"):
            grad.norm()
    for other, p in zip(others, params, strict=True):
        other.grad = p.grad
    backward(7.0)
    for p, other in zip(params, others, strict=True):
        assert p.grad is not other.grad
        with refused("no longer in the p.grad"):
            other.grad.norm()
    dist.barrier()


@on_ranks(1, 2)
def test_gradients_again(context: Context) -> None:
    """Manual mode: the object in ``p.grad`` serves again, unless somebody has kept it."""
    param = nn.Parameter(torch.ones(70, dtype=torch.float64))
    optimizers = [fusedpg.optim.SGD([param], lr=0.0)]
    rank, size = context.rank, context.world_size
    mean = (size - 1) / 2

    def backward(factor: float) -> Any:
        optimizers[0].zero_grad()
        (param * (factor + rank)).sum().backward()
        return param.grad

    def norm(factor: float) -> float:
        return float((factor + mean) * 70**0.5)

    kept = backward(1.0)
    assert backward(2.0) is not kept
    assert kept.unreduced()[0] == 1 + rank
    number = id(param.grad)
    for factor in (3.0, 4.0):
        backward(factor)
        assert id(param.grad) == number
        assert param.grad is not None
        assert abs(float(param.grad.norm()) - norm(factor)) < 1e-12
        assert abs(float(optimizers[0].clip_grad_norm_(1e9)) - norm(factor)) < 1e-12
        optimizers[0].step()
    # Reduced, and then a further backward.
    backward(5.0)
    optimizers[0].reduce_gradients()
    (param * (1.0 + rank)).sum().backward()
    assert abs(float(optimizers[0].clip_grad_norm_(1e9)) - norm(5.0) - norm(1.0)) < 1e-12
    # Nobody makes one for an optimizer that is gone.
    del kept
    optimizers.clear()
    gc.collect()
    param.grad = None
    param.sum().backward()
    assert type(param.grad) is torch.Tensor
    dist.barrier()


@on_ranks(1, 2, 3)
def test_reduced_at_once(context: Context) -> None:
    """Manual mode reduces all gradients by a few calls, to the bits that it gives one by one."""
    for seed in range(16):
        quick, at_once = _steps_of(context, seed, general=False)
        general, never = _steps_of(context, seed, general=True)
        assert never == 0
        # In four of the steps, or with max_grad_norm in all five; but not with two dtypes.
        assert at_once >= 3 or seed % 4 == 3, (seed, at_once)
        assert len(quick) == len(general)
        for a, b in zip(quick, general, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert same(a, b), seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.3, 1e-40, 1e38, 1e300, -0.0, float("inf"), float("nan")])
def test_scaled_as_by_torch(dtype: torch.dtype, factor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (0, 1, 31, 1000)]
    ours = [
        (t * 10.0 ** torch.randint(-40, 38, t.shape, generator=generator)).to(dtype) for t in wide
    ]
    expected = [t.clone() for t in ours]
    before = [t._version for t in ours]
    scaled = load_extension().scale_slices(ours, factor)
    assert scaled == (dtype.itemsize >= 4)
    assert [t._version - v for t, v in zip(ours, before, strict=True)] == [int(scaled)] * len(ours)
    if scaled:
        torch._foreach_mul_(expected, factor)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        bits = [t.masked_fill(t.isnan(), 0).view(torch.uint8) for t in (mine, theirs)]
        assert torch.equal(*bits)


def test_not_scaled_past_autograd() -> None:
    scale = load_extension().scale_slices
    plain, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    for other in (leaf, torch.ones(3, 2)[:, 0], torch.ones(3, dtype=torch.int64)):
        assert not scale([plain, other], 2.0)
        assert plain.eq(1).all() and plain._version == 0
    with torch.no_grad():
        assert scale([leaf], 2.0)
