"""Where parts of the optimizers meet; each of these gave wrong numbers once, without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from harness import Context

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2)).double()


class Pair:
    """The same model twice: with a fused optimizer, and with torch's."""

    def __init__(self, context: Context, kind: str, *, view: bool, **options: Any) -> None:
        self.rank = context.rank
        self.nets = [net(), net()]
        self.ddps = [DistributedDataParallel(n, gradient_as_bucket_view=view) for n in self.nets]
        groups = [
            [
                {"params": list(n.parameters())[:3]},
                {"params": list(n.parameters())[3:], "lr": 0.001},
            ]
            for n in self.nets
        ]
        self.optimizers: list[Any] = [
            getattr(fusedpg.optim, kind)(groups[0], ddp=self.ddps[0], **options),
            getattr(torch.optim, kind)(groups[1], **options),
        ]

    def loss(self, module: nn.Module, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + self.rank)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        return module(x).pow(2).sum() * 0.1

    def each(self, act: Callable[[Any, Any, Any], object]) -> None:
        for which in range(2):
            act(self.nets[which], self.ddps[which], self.optimizers[which])

    def compare(self) -> None:
        for a, b in zip(self.nets[0].parameters(), self.nets[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def accumulated_in_a_bucket(context: Context) -> None:
    """``p.grad`` that DDP has moved into a bucket, and a backward under ``no_sync()``."""
    pair = Pair(context, "SGD", view=True, lr=0.01)
    for step in range(STEPS):

        def act(module: Any, ddp: Any, optimizer: Any, step: int = step) -> None:
            optimizer.zero_grad()
            for param in module.parameters():
                param.grad = torch.zeros_like(param)
            with ddp.no_sync():
                pair.loss(ddp, 50 + step).backward()
            pair.loss(ddp, step).backward()
            optimizer.step()

        pair.each(act)
        pair.compare()


def clamp(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-0.01, 0.01)


def hooks_of_users(context: Context, view: bool) -> None:
    """They see the gradient that is reduced, and may change it."""
    pair = Pair(context, "SGD", view=view, lr=0.1)
    for module in pair.nets:
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(clamp)
    for step in range(STEPS):

        def act(_: Any, ddp: Any, optimizer: Any, step: int = step) -> None:
            optimizer.zero_grad()
            pair.loss(ddp, step).backward()
            optimizer.step()

        pair.each(act)
        pair.compare()


def swapped_groups(context: Context) -> None:
    """Parameters change groups, and these keep their lengths."""
    pair = Pair(context, "AdamW", view=False, lr=0.1)
    for step in range(STEPS):

        def act(_: Any, ddp: Any, optimizer: Any, step: int = step) -> None:
            optimizer.zero_grad()
            pair.loss(ddp, step).backward()
            optimizer.step()
            if step == 1:
                one, other = (group["params"] for group in optimizer.param_groups)
                one[0], other[0] = other[0], one[0]

        pair.each(act)
        pair.compare()


def norms_are_fresh(context: Context) -> None:
    """Gradients that are dropped, and slices that are written, after a norm was asked for."""
    pair = Pair(context, "SGD", view=False, lr=0.1)
    for step in range(STEPS):

        def act(module: Any, ddp: Any, optimizer: Any, step: int = step) -> None:
            optimizer.zero_grad()
            pair.loss(ddp, step).backward()
            params = list(module.parameters())
            nn.utils.get_total_norm([p.grad for p in params])
            params[1].grad = None
            grad = params[2].grad
            (grad.local() if hasattr(grad, "local") else grad).mul_(3)
            nn.utils.clip_grad_norm_(params, 0.01)
            optimizer.step()

        pair.each(act)
        pair.compare()


def masters_into_float32(context: Context) -> None:
    """State with masters changes no parameters of a model that has none."""
    half = net().to(torch.bfloat16)
    ddp = DistributedDataParallel(half)
    masters = fusedpg.optim.AdamW(half.parameters(), ddp=ddp, lr=0.01, master_dtype=torch.float32)
    ddp(torch.ones(4, 6, dtype=torch.bfloat16)).sum().backward()
    masters.step()
    whole = masters.full_state_dict(rank0_only=False)
    model = net().float()
    optimizer = fusedpg.optim.AdamW(model.parameters(), lr=0.01, master_dtype=torch.float32)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.load_state_dict(whole)
    assert all(map(torch.equal, model.parameters(), before))


def blank_state(context: Context) -> None:
    """State that was made for a checkpoint, of a parameter without a step, is not given away."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    module = net()
    ddp = DistributedDataParallel(module)
    optimizer = fusedpg.optim.SGD(module.parameters(), ddp=ddp, lr=0.1, momentum=0.9, dampening=0.5)
    get_optimizer_state_dict(ddp, optimizer)
    assert optimizer.local_state_dict()["state"] == {}
    assert optimizer.state_dict()["state"] == {}
    dist.barrier()
