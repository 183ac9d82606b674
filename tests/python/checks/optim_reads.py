"""Reads of gradients, writes to parameters, precision, and tensors without values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.cases import distance, randn, same
from checks.optim_torch import parameters
from checks.refused import refused
from harness import Context


def _reads() -> dict[str, Callable[[Any], Any]]:
    """What would be zeros, garbage or a crash if it went past the guard."""
    import fusedpg

    def buffer() -> torch.Tensor:
        return torch.full((6, 5), 7.0)

    sgd = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "is_first_step": False,
    }
    return {
        "copy_": lambda g: buffer().copy_(g),
        "copy_ of data": lambda g: buffer().copy_(g.data),
        "copy_ of detached": lambda g: buffer().copy_(g.detach()),
        "foreach_copy_": lambda g: torch._foreach_copy_([buffer()], [g]),
        "setitem": lambda g: buffer().__setitem__(slice(None), g),
        "clone": torch.clone,
        "times": lambda g: g * 2,
        "add_": lambda g: buffer().add_(g),
        "add_ to it": lambda g: g.add_(1.0),
        "lerp_": lambda g: buffer().lerp_(g, 0.5),
        "out": lambda g: torch.mul(g, 2, out=buffer()),
        "norm out": lambda g: torch.linalg.vector_norm(g, out=torch.zeros(())),
        "norm keepdim": lambda g: torch.linalg.vector_norm(g, keepdim=True),
        "norm of rows": lambda g: g.norm(dim=0),
        "least": lambda g: g.norm(-float("inf")),
        "norm of order -1": lambda g: g.norm(-1),
        "foreach_norm, mixed": lambda g: torch._foreach_norm([buffer(), g]),
        "sum": torch.sum,
        "item": lambda g: g[0, 0].item(),
        "numpy": lambda g: g.numpy(),
        "asarray": lambda g: __import__("numpy").asarray(g),
        "tolist": lambda g: g.tolist(),
        "dlpack": lambda g: __import__("numpy").from_dlpack(g),
        "set_": lambda g: torch.empty(0).set_(g),
        "view": lambda g: g.view(-1),
        "isfinite": torch.isfinite,
        "equal": lambda g: torch.equal(g, buffer()),
        "double": lambda g: g.double(),
        "cat": lambda g: torch.cat([g, buffer()]),
        "autograd": lambda g: (nn.Parameter(buffer()) * g).sum(),
        "pickle": pickle.dumps,
        "save": lambda g: torch.save({"g": g}, io.BytesIO()),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "share": lambda g: g.share_memory_(),
        "all_reduce": dist.all_reduce,
        "all_gather_object": lambda g: pickle.dumps([g]),
        "sparse_all_reduce": fusedpg.sparse_all_reduce,
        "fused_sgd_": lambda g: fusedpg.fused_sgd_([buffer()], [g], [], **sgd),
        "fused_sgd_ async": lambda g: fusedpg.fused_sgd_([buffer()], [g], [], async_op=True, **sgd),
        "_fused_sgd_": lambda g: torch._fused_sgd_([buffer()], [g], [], maximize=False, **sgd),
        "new parameter": lambda g: nn.Parameter(g).sum(),
        "unflattened": lambda g: nn.utils.parameters_to_vector([g]),
    }


def reads(context: Context, mode: str) -> None:
    """Nothing can be read from a gradient of which a rank holds a slice, or nothing."""
    import fusedpg

    model = nn.Linear(5, 6)
    ddp = DistributedDataParallel(model) if mode != "manual" else None
    optimizer = fusedpg.optim.AdamW(model.parameters(), ddp=ddp, overlap=mode == "overlap")
    (ddp or model)(torch.ones(2, 5)).sum().backward()
    wrong = []
    for name, read in _reads().items():
        try:
            read(model.weight.grad)
        except (RuntimeError, ValueError):
            continue
        wrong.append(name)
    assert not wrong, wrong
    optimizer.step()
    dist.barrier()


def mixed_norms(context: Context) -> None:
    """Manual mode: a plain gradient put in by hand is local, those of backward are not."""
    import fusedpg

    params = parameters()
    optimizer = fusedpg.optim.SGD(params, lr=0.1)
    torch.stack([param.sum() for param in params]).sum().backward()
    params[1].grad = torch.ones_like(params[1]) * (1 + context.rank)
    with refused("reduce_gradients"):
        nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.reduce_gradients()
    numel = [param.numel() for param in params]
    mean = (1 + context.world_size) / 2
    want = (numel[0] + numel[2] + numel[1] * mean**2) ** 0.5
    found = nn.utils.clip_grad_norm_(params, 1.0)
    assert abs(float(found) - want) < 1e-4 * want


def added_by_hand(context: Context) -> None:
    """Manual mode: what is added to a gradient before it is reduced counts as this rank's."""
    import fusedpg

    param = nn.Parameter(torch.ones(5))
    optimizer = fusedpg.optim.SGD([param], lr=1.0)
    (param * 2).sum().backward()
    param.grad.add_(torch.full((5,), float(context.rank)))  # type: ignore[union-attr]
    optimizer.step()
    mean = 2 + (context.world_size - 1) / 2
    assert torch.allclose(param.detach(), torch.full((5,), 1 - mean))
    optimizer.zero_grad()
    (param * 2).sum().backward()
    optimizer.reduce_gradients()
    with refused("add_"):
        param.grad.add_(torch.ones(5))  # type: ignore[union-attr]


# --- precision, writes, devices -----------------------------------------------------


def clip_in_double(context: Context, how: str) -> None:
    """The factor is as exact as the parameters."""
    import fusedpg

    shapes = ((67,), (5, 13))
    mine = [nn.Parameter(param.detach().double()) for param in parameters(shapes)]
    theirs = [nn.Parameter(param.detach().double()) for param in parameters(shapes)]
    model = nn.ParameterList(mine)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = model

        def forward(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.stack([(p * g).sum() for p, g in zip(mine, grads, strict=True)]).sum()

    ddp = DistributedDataParallel(Net())
    options = {"max_grad_norm": 0.7} if how == "constructor" else {}
    optimizer = fusedpg.optim.SGD(mine, lr=1.0, ddp=ddp, **options)
    oracle = torch.optim.SGD(theirs, lr=1.0)
    for step in range(3):
        grads = [randn(4, i, step, numel=p.numel()).double().view_as(p) for i, p in enumerate(mine)]
        optimizer.zero_grad()
        ddp(grads).backward()
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        want = nn.utils.clip_grad_norm_(theirs, 0.7)
        assert want > 0.7
        if how != "constructor":
            found = (
                optimizer.clip_grad_norm_(0.7)
                if how == "method"
                else nn.utils.clip_grad_norm_(mine, 0.7)
            )
            assert found.dtype == torch.float64
            assert abs(float(found - want)) <= 1e-14 * float(want)
        optimizer.step()
        oracle.step()
    for a, b in zip(mine, theirs, strict=True):
        assert distance(a.detach(), b.detach()) <= 1e-14


def masters_see_writes(context: Context, write: str, mode: str) -> None:
    """Whoever writes half parameters between steps is not overwritten by their masters."""
    import fusedpg

    model = nn.Linear(37, 11, bias=False).bfloat16()
    ddp = DistributedDataParallel(model) if mode != "manual" else None
    optimizer = fusedpg.optim.AdamW(
        model.parameters(), lr=0.1, ddp=ddp, overlap=mode == "overlap", master_dtype=torch.float32
    )

    def step(lr: float) -> None:
        optimizer.param_groups[0].update(lr=lr, weight_decay=0.0)
        (ddp or model)(torch.ones(2, 37, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0.1)
    step(0.1)
    kept = optimizer.state[model.weight]["master_param"].clone()
    new = randn(3, 3, numel=37 * 11).view(11, 37).bfloat16()
    with torch.no_grad():
        if write == "copy_":
            model.weight.copy_(new)
        elif write == "data":
            model.weight.data.copy_(new)
        elif write == "set data":
            model.weight.data = new.clone()
        elif write == "one element":
            new = model.weight.detach().clone()
            new[3, 5] = 17.0
            model.weight.data[3, 5] = 17.0
        elif write == "numpy":
            memory = model.weight.detach().view(torch.int16).numpy()
            memory[...] = new.view(torch.int16).numpy()
        else:
            new = model.weight.detach().clone()
    step(0.0)
    assert same(model.weight.detach(), new)
    master = optimizer.state[model.weight]["master_param"]
    offset, length = fusedpg.shard_range(37 * 11, context.world_size, context.rank)
    own = new.flatten()[offset : offset + length]
    assert same(master.bfloat16(), own)
    if write in ("nothing", "one element"):
        # What nobody wrote keeps the bits that half precision has not.
        untouched = own != 17.0
        assert same(master[untouched], kept[untouched])


def meta(context: Context, op: str) -> None:
    """A tensor without values among others is refused, whichever it is."""
    import fusedpg

    def call(param: str, grad: str, state: str, **options: Any) -> Any:
        fused = getattr(fusedpg, op)
        params, grads = [torch.ones(70, device=param)], [torch.ones(70, device=grad)]
        length = fusedpg.shard_range(70, context.world_size, context.rank)[1]
        one = [torch.zeros(length, device=state)]
        if op == "fused_sgd_":
            return fused(
                params,
                grads,
                one,
                weight_decay=0.0,
                momentum=0.9,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                is_first_step=False,
                **options,
            )
        counters = [torch.zeros((), device=state)]
        states: list[Any] = [one, [one[0].clone()]] + ([[]] if op != "fused_lamb_" else [])
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        return fused(params, grads, *states, counters, **numbers, **options)

    for places in (("cpu", "meta", "cpu"), ("meta", "cpu", "cpu"), ("cpu", "cpu", "meta")):
        for options in ({}, {"async_op": True}):
            with refused("meta", ValueError):
                call(*places, **options)
    with refused("meta", ValueError):
        call("meta", "meta", "meta", async_op=True)
    call("meta", "meta", "meta")  # what torch.export asks for
    call("cpu", "cpu", "cpu")
