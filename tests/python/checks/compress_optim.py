"""Fused optimizers whose gradients a communication hook combines: what ranks check."""

import copy
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks import compress as checks
from checks.optim_script import OPTIMIZERS, of_torch
from checks.refused import refused
from fusedpg import compress
from harness import Context


def hook_of(name: str, params: dict[str, Any], schedule: Any) -> tuple[Any, Any]:
    if name == "compress":
        return compress.from_params(checks.fitting(params), schedule=schedule), compress.hook
    if name == "powersgd":
        # Buckets are one: its callbacks' collectives have no order of their own.
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, random_seed=3)
        return state, powerSGD_hook.powerSGD_hook
    if name == "block_sparse":
        return fusedpg.ddp.BlockSparseState(threshold=0.05), fusedpg.ddp.block_sparse_hook
    return dist.group.WORLD, getattr(default_hooks, f"{name}_compress_hook")


def as_with_torchs_optimizer(
    context: Context, optimizer: str, name: str, params: dict[str, Any], schedule: Any,
    hosts: bool = False, carrier: str | None = None,
) -> None:  # fmt: skip
    """The same training: the hook under DDP with torch's optimizer, and under ours.

    Parameters 3 and 4 have an optimizer of torch in both. ``hosts``: a host's ranks share state.
    ``carrier``: the backend of the module's group.
    """
    options: dict[str, Any] = {}
    group = None if carrier is None else dist.new_group(backend=carrier)
    if carrier is not None:
        options["process_group"] = dist.group.WORLD
    if hosts:
        local = fusedpg.group_info()["local_ranks"]
        options["process_group"] = dist.new_group(local, use_local_synchronization=True)
    unused = schedule == "layer"
    torch.manual_seed(3)
    # Not all of them zero: LAMB looks at norms.
    module = checks.Given()
    for p in module.parts:
        nn.init.normal_(p)
    rows: list[list[torch.Tensor]] = [[], []]
    norms: list[list[float]] = [[], []]
    for ours in (False, True):
        mine = copy.deepcopy(module)
        ddp = DistributedDataParallel(
            mine,
            process_group=group,
            bucket_cap_mb=25 if name == "powersgd" else 0.001,
            find_unused_parameters=unused,
            gradient_as_bucket_view=optimizer == "AdamW",
        )
        parts = list(mine.parts)
        others = torch.optim.SGD(parts[3:5], lr=0.1, momentum=0.9)
        some = parts[:3] + parts[5:]
        comm_hook = hook_of(name, params, schedule)
        made: Any
        if ours:
            make = getattr(fusedpg.optim, optimizer)
            made = make(some, **OPTIMIZERS[optimizer], ddp=ddp, comm_hook=comm_hook, **options)
        else:
            ddp.register_comm_hook(*comm_hook)
            made = of_torch(optimizer, some)
        for step in range(6):
            grads: list[Any] = checks.given(step, context.rank)
            if unused and step % 2 and context.rank == 0:
                grads[2] = None
            if step % 3 == 1:
                with ddp.no_sync():
                    ddp(checks.given(90 + step, context.rank)).backward()
            ddp(grads).backward()
            if step in (2, 4):
                # Of torch's part, each rank has all of it.
                total = torch.nn.utils.clip_grad_norm_(some, 0.8, foreach=False)
                norms[ours].append(float(total))
            for one in (made, others):
                one.step()
                one.zero_grad()
            rows[ours] += [p.detach().clone() for p in parts]
        if ours:
            of = [
                dist.get_world_size(made.join_process_group),
                dist.get_rank(made.join_process_group),
            ]
            for p in some:
                length = fusedpg.shard_range(p.numel(), *of)[1]
                assert all(v.numel() == length for v in made.state[p].values() if v.dim())
    torch.testing.assert_close(norms[True], norms[False], rtol=1e-5, atol=1e-6)
    for a, b in zip(rows[True], rows[False], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    checks.alike(rows[True])


def cut_short(context: Context, place: int) -> None:
    """A backward that raises when some buckets of a group of gradients are there, and the rest will
    never be: its caller gets the exception at once. (DDP itself refuses the next forward.)"""
    state = compress.from_params({"compressor": "efsignsgd", "memory": "residual"}, schedule="one")
    module = checks.Given()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.001)
    parts: Any = list(module.parts)
    one: Any = fusedpg.optim.SGD(parts, lr=0.1, ddp=ddp, comm_hook=(state, compress.hook))

    def step(number: int) -> None:
        ddp(checks.given(number, context.rank)).backward()
        one.step()
        one.zero_grad()

    def fails(grad: Any) -> None:
        raise ArithmeticError("of the user's")

    for number in range(3):
        step(number)
    parts[place].register_hook(fails)
    begin = time.monotonic()
    with refused("of the user's", ArithmeticError):
        step(3)
    assert time.monotonic() - begin < 20
    checks.alike([p.detach() for p in parts])


def says_what_it_cannot(context: Context) -> None:
    state = compress.from_params({"compressor": "topk", "memory": "residual"})
    ddp = DistributedDataParallel(checks.Given(), bucket_cap_mb=0.001)
    parts: Any = list(ddp.module.parts)
    hook = (state, compress.hook)
    make: Any = fusedpg.optim.SGD
    with refused("overlap=False", ValueError):
        make(parts, ddp=ddp, comm_hook=hook, overlap=True)
    with refused('reduce="mean"', ValueError):
        make(parts, ddp=ddp, comm_hook=hook, reduce="sum")
    with refused("(state, hook)", TypeError):
        make(parts, ddp=ddp, comm_hook=state)
    with refused("attach(ddp)"):
        make(parts, comm_hook=hook).step()
    uneven = [0, 1] if context.rank < 2 else [2]
    group = dist.new_group(uneven, use_local_synchronization=True)
    with refused("process groups of one size", ValueError):
        make(parts, ddp=ddp, comm_hook=hook, process_group=group)
    ranks = [context.rank]
    alone = dist.new_group(ranks, backend="fused", use_local_synchronization=True)
    elsewhere = DistributedDataParallel(checks.Given(), process_group=alone)
    with refused("give the state its group", ValueError):
        make(elsewhere.parameters(), ddp=elsewhere, comm_hook=hook)
    assert not elsewhere._comm_hooks
    one = make(parts[:2], ddp=ddp, comm_hook=hook)
    with refused("the same (state, hook)", ValueError):
        make(parts[2:], ddp=ddp)
    two = make(parts[2:], ddp=ddp, comm_hook=hook)
    ddp(checks.given(0, context.rank)).backward()
    one.step()
    two.step()
    ddp.zero_grad()
    one.set_local_batch_size(3)
    with refused("set_local_batch_size"):
        ddp(checks.given(0, context.rank)).backward()


def killed(context: Context) -> float:
    """A rank dies in training: the others raise, and nobody waits for ever."""
    state = compress.from_params({"compressor": "topk", "memory": "residual"})
    ddp = DistributedDataParallel(checks.Given(), bucket_cap_mb=0.001)
    params = ddp.module.parameters()
    optimizer = fusedpg.optim.SGD(params, lr=0.1, ddp=ddp, comm_hook=(state, compress.hook))

    def train() -> None:
        for step in range(3):
            ddp(checks.given(step, context.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with refused(""):
        train()
    return time.monotonic() - begin


def outer_steps(context: Context) -> list[torch.Tensor]:
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1): steps of each rank alone, then
    one of Nesterov's on the mean of what they have changed; ours is one operation."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    options: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    ours = context.backend == "fused"
    make: Any = fusedpg.optim.SGD if ours else torch.optim.SGD
    optimizer = make(outer, **options)
    for step in range(20):
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        inner.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        inner.step()
        if step % 4 != 3:
            continue
        with torch.no_grad():
            for before, p in zip(outer, model.parameters()):
                before.grad = before.detach() - p
                if not ours:
                    dist.all_reduce(before.grad)
                    before.grad /= context.world_size
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for before, p in zip(outer, model.parameters()):
                p.copy_(before)
    checks.alike([p.detach() for p in outer])
    return [p.detach().clone() for p in outer]


def joins(context: Context, ours: bool) -> None:
    """Uneven inputs: a compressor that loses nothing trains as plain DDP does."""
    rows: list[list[torch.Tensor]] = []
    for compressed in (False, True):
        torch.manual_seed(3)
        module = checks.Given()
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.001)
        params = {"compressor": "topk", "memory": "residual", "compress_ratio": 1.0}
        comm_hook = compress.from_params(params, schedule=2), compress.hook
        made: Any
        if compressed and ours:
            made = fusedpg.optim.SGD(
                module.parameters(), lr=0.1, momentum=0.9, ddp=ddp, comm_hook=comm_hook
            )
        else:
            if compressed:
                ddp.register_comm_hook(*comm_hook)
            made = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        joinables = [ddp, made] if compressed and ours else [ddp]
        with Join(joinables):
            for step in range(3 + 2 * context.rank):
                ddp(checks.given(step, context.rank)).backward()
                made.step()
                made.zero_grad()
        rows.append([p.detach().clone() for p in module.parts])
    # Ranks that have joined get the last one's parameters from DDP.
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    checks.alike(rows[1])
