"""Where parts of the optimizers meet; each of these gave wrong numbers once, without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.refused import refused
from harness import Context

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2)).double()


class Pair:
    """The same model twice: with a fused optimizer, and with torch's."""

    def __init__(
        self,
        context: Context,
        kind: str,
        *,
        view: bool,
        ddp: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        groups: int = 2,
        **options: Any,
    ) -> None:
        self.rank = context.rank
        self.nets = [net(), net()]
        # Several buckets.
        wrap = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.0001, **(ddp or {})}
        self.ddps = [DistributedDataParallel(n, **wrap) for n in self.nets]
        some = [
            [
                {"params": list(n.parameters())[:3]},
                {"params": list(n.parameters())[3:], "lr": 0.001},
            ][:groups]
            for n in self.nets
        ]
        self.optimizers: list[Any] = [
            getattr(fusedpg.optim, kind)(some[0], ddp=self.ddps[0], **(own or {}), **options),
            getattr(torch.optim, kind)(some[1], **options),
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


def gradients_of_other_strides(context: Context, view: bool) -> None:
    """``p.grad`` that lies in memory in another order than its parameter."""
    pair = Pair(context, "SGD", view=view, lr=0.01)
    for step in range(STEPS):

        def act(module: Any, ddp: Any, optimizer: Any, step: int = step) -> None:
            optimizer.zero_grad()
            for param in module.parameters():
                param.grad = (
                    torch.ones(param.shape[::-1], dtype=param.dtype).mT
                    if (param.dim() == 2)
                    else torch.ones_like(param)
                )
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


# --- optimizers that leave, parameters that are taken out --------------------------------


def trained(pair: Pair, ddp: Any, optimizer: Any, number: int) -> None:
    pair.loss(ddp, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def detached_before_backward(
    context: Context, overlap: bool, options: dict[str, Any], again: bool, by_name: bool
) -> None:
    """``detach()`` between a forward and its backward, which DDP reduces all the same."""
    pair = Pair(context, "SGD", view=False, ddp=options, own={"overlap": overlap}, lr=0.1)

    def act(module: Any, ddp: Any, optimizer: Any) -> None:
        for number in range(4):
            trained(pair, ddp, optimizer, number)
        for number in range(4, 7):
            loss = pair.loss(ddp.forward if by_name else ddp, number)
            if module is pair.nets[0]:
                optimizer.detach()
            if again:
                with torch.no_grad():
                    pair.loss(ddp, 90)
            plain = torch.optim.SGD(optimizer.param_groups)
            loss.backward()
            plain.step()
            plain.zero_grad()
            trained(pair, ddp, plain, 10 + number)
            if module is pair.nets[0]:
                optimizer.attach(ddp)
            trained(pair, ddp, optimizer, 20 + number)

    pair.each(act)
    pair.compare()


def group_while_detached(context: Context) -> None:
    """Such a group is not one of manual mode."""
    pair = Pair(context, "AdamW", view=False, groups=1, lr=0.1)

    def act(module: Any, ddp: Any, optimizer: Any) -> None:
        trained(pair, ddp, optimizer, 0)
        module.zero_grad()
        ours = module is pair.nets[0]
        if ours:
            optimizer.detach()
        optimizer.add_param_group({"params": list(module.parameters())[3:], "lr": 0.01})
        pair.loss(ddp, 1).backward()
        for param in module.parameters():
            assert type(param.grad) is torch.Tensor
        module.zero_grad()
        if ours:
            optimizer.attach(ddp)
        for number in range(2, 5):
            trained(pair, ddp, optimizer, number)
            module.zero_grad()

    pair.each(act)
    pair.compare()


def taken_out(context: Context, overlap: bool, options: dict[str, Any]) -> None:
    """Parameters that are in no group have a gradient as DDP's, and come back."""
    pair = Pair(context, "AdamW", view=False, ddp=options, own={"overlap": overlap}, lr=0.1)
    for number in range(8):

        def act(module: Any, ddp: Any, optimizer: Any, number: int = number) -> None:
            groups = optimizer.param_groups
            params = list(module.parameters())
            if number == 1:
                groups[0]["params"].pop()
                groups[1]["params"].pop(0)
            if number == 4:
                groups[1]["params"].append(params[2])
            pair.loss(ddp, number).backward()
            if number in (1, 2, 3):
                assert type(params[2].grad) is torch.Tensor
            other = torch.optim.SGD([params[3]], lr=0.1)
            if number in (2, 5):
                nn.utils.clip_grad_norm_([params[3]], 0.01)
                other.step()
            optimizer.step()
            module.zero_grad()
            if number == 6:
                # To another optimizer of the same module, and its group with it.
                moved = optimizer.param_groups.pop()["params"]
                fused = module is pair.nets[0]
                second = (
                    fusedpg.optim.SGD(moved, lr=0.1, ddp=ddp, overlap=not overlap)
                    if fused
                    else torch.optim.SGD(moved, lr=0.1)
                )
                for later in range(30, 33):
                    pair.loss(ddp, later).backward()
                    second.step()
                    optimizer.step()
                    module.zero_grad()

        pair.each(act)
        pair.compare()


def taken_out_and_not_zeroed(context: Context, overlap: bool) -> None:
    """What was reduced for the optimizer cannot go on as a gradient of DDP's."""
    pair = Pair(context, "SGD", view=False, own={"overlap": overlap}, lr=0.1)
    ddp, optimizer = pair.ddps[0], pair.optimizers[0]
    pair.loss(ddp, 0).backward()
    optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    optimizer.zero_grad()
    with refused("zero_grad"):
        pair.loss(ddp, 1).backward()


def edited_after_backward(context: Context, how: str) -> None:
    """``overlap=True``: groups and state are edited when the step has been made already."""
    pair = Pair(context, "AdamW", view=False, own={"overlap": True}, lr=0.1)
    ddp, optimizer = pair.ddps[0], pair.optimizers[0]
    trained(pair, ddp, optimizer, 0)
    pair.loss(ddp, 1).backward()
    if how == "group":
        optimizer.param_groups.pop()
    elif how == "parameter":
        optimizer.param_groups[0]["params"].pop()
    else:
        optimizer.state.clear()
    with refused("between backward and step"):
        optimizer.step()
    for param in pair.nets[0].parameters():
        param.grad = None
    trained(pair, ddp, optimizer, 2)


# --- loading ----------------------------------------------------------------------------


def loaded_after_backward(context: Context, how: str) -> None:
    """``overlap=True``: state is loaded when it has been used already, or after a failure."""
    pair = Pair(context, "AdamW", view=False, own={"overlap": True}, lr=0.1)
    ddp, optimizer = pair.ddps[0], pair.optimizers[0]
    trained(pair, ddp, optimizer, 0)
    state = optimizer.full_state_dict(rank0_only=False)
    loss = pair.loss(ddp, 1)
    if how == "backward raises":
        # On all ranks, when the last layers' bucket has been begun.
        handle = pair.nets[0][0].weight.register_hook(fail)
        with refused("a hook of the user"):
            loss.backward()
        handle.remove()
        assert optimizer._mode.updated
    else:
        loss.backward()
        with refused("call step"):
            optimizer.load_state_dict(state)
        if how == "step raises":
            optimizer.param_groups[0]["lr"] = 0.5
            with refused("lr of parameter group 0"):
                optimizer.step()
        else:
            optimizer.step()
    optimizer.load_state_dict(state)
    assert not optimizer._mode.updated and not optimizer._mode.applied
    again = optimizer.full_state_dict(rank0_only=False)
    assert same(state["state"], again["state"])
    if how == "backward raises":
        return  # DDP itself is in the middle of a pass for ever
    optimizer.zero_grad()
    trained(pair, ddp, optimizer, 3)


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("a hook of the user")


def same(a: dict[int, Any], b: dict[int, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[number][key], b[number][key]) for number in a for key in a[number]
    )
