"""Unchanged DistributedDataParallel, compared with the same run on Gloo.

No postponed annotations here: DDP inspects those of its hooks.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest
from harness import Context


class Net(nn.Module):
    """Convolution and linear layers, one of which may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(4 * 36, 37)
        self.out = nn.Linear(37, 10)
        self.extra = nn.Linear(37, 10)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        y = torch.relu(self.conv(x)).flatten(1)
        y = torch.relu(self.hidden(y))
        return self.out(y) + self.extra(y) if extra else self.out(y)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(context: Context, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + context.rank)
    x = torch.randn(8, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 10, (8,), generator=generator)


Result = tuple[list[float], list[torch.Tensor]]


def train(
    context: Context,
    group: Any,
    *,
    steps: int = 6,
    accumulate: int = 1,
    extra: Callable[[int], bool] = lambda step: True,
    hook: Callable[[DistributedDataParallel], None] | None = None,
    channels_last: bool = False,
    observe: Callable[[DistributedDataParallel, int], None] | None = None,
    bucket_cap_mb: float = 0.01,
    **options: Any,
) -> Result:
    """Losses and final parameters of a short run."""
    module: nn.Module = net()
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=bucket_cap_mb, **options
    )
    if hook is not None:
        hook(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, target = batch(context, step * accumulate + part)
            last = part == accumulate - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(x, extra(step)), target)
                loss.backward()
        if observe is not None:
            observe(ddp, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, [param.detach().clone() for param in module.parameters()]


def agree(context: Context, mine: Result, theirs: Result, tolerance: float = 1e-5) -> str:
    """Both runs gave the same; the digest of ours."""
    torch.testing.assert_close(mine[0], theirs[0], rtol=tolerance, atol=tolerance)
    for a, b in zip(mine[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return digest(mine[1])


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "extra": lambda step: step % 2 == 0},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "accumulate": {"accumulate": 3},
    "accumulate view": {"accumulate": 3, "gradient_as_bucket_view": True},
    "channels_last": {"channels_last": True},
    "channels_last view": {"channels_last": True, "gradient_as_bucket_view": True},
    "no first broadcast": {"init_sync": False},
}


def variant(context: Context, name: str) -> str:
    """A variant of DDP on both backends."""
    options = VARIANTS[name]
    return agree(
        context, train(context, None, **options), train(context, context.oracle, **options)
    )


def buckets_in_arena(context: Context) -> None:
    """The buckets DDP reduces lie in the arena, before and after the rebuild."""
    import os

    import fusedpg

    assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"
    seen = []

    def observe(ddp: DistributedDataParallel, step: int) -> None:
        assert all(fusedpg.in_arena(param.grad) for param in ddp.parameters()), step
        seen.append(step)

    train(context, None, gradient_as_bucket_view=True, observe=observe)
    assert seen == list(range(6))

    buffers = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffers.append(fusedpg.in_arena(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / context.world_size)

    train(context, None, hook=lambda ddp: ddp.register_comm_hook(None, hook))
    assert len(buffers) > 6
    assert all(buffers)


def gradients_outlive(context: Context) -> None:
    """Gradients in the arena stay valid after DDP and its group have gone."""
    import gc

    group = dist.new_group()
    module = net()
    ddp = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
    x, target = batch(context, 0)
    nn.functional.cross_entropy(ddp(x), target).backward()
    kept = [param.grad for param in module.parameters()]
    copies = [grad.clone() for grad in kept if grad is not None]
    del ddp, module
    dist.destroy_process_group(group)
    gc.collect()
    for grad, copy_ in zip(kept, copies, strict=True):
        assert grad is not None
        assert torch.equal(grad, copy_)
        grad.mul_(2)
        assert torch.equal(grad, copy_ * 2)


def join(context: Context) -> str:
    """Ranks with different numbers of batches."""

    def run(group: Any) -> Result:
        module = net()
        ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        losses = []
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(3 + 2 * context.rank):
                x, target = batch(context, step)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(x), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, [param.detach().clone() for param in module.parameters()]

    return agree(context, run(None), run(context.oracle))


def _hook(name: str, group: Any) -> Callable[[DistributedDataParallel], None]:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
    )

    def register(ddp: DistributedDataParallel) -> None:
        if name == "allreduce":
            ddp.register_comm_hook(group, default_hooks.allreduce_hook)
        elif name == "fp16":
            ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        elif name == "bf16":
            # DDP refuses this hook by its name where there is no NCCL.
            def compress(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                return default_hooks.bf16_compress_hook(state, bucket)

            ddp.register_comm_hook(group, compress)
        elif name == "powerSGD":
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=2, start_powerSGD_iter=2
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "fp16 powerSGD":
            state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
            wrapped = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
            ddp.register_comm_hook(state, wrapped)
        elif name.startswith("post_localSGD"):
            sub = group
            if name == "post_localSGD":
                sub = dist.new_group([dist.get_rank()], backend=dist.get_backend(group))
            localsgd = post_localSGD_hook.PostLocalSGDState(group, sub, start_localSGD_iter=3)
            ddp.register_comm_hook(localsgd, post_localSGD_hook.post_localSGD_hook)
        elif name == "builtin":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        elif name == "builtin fp16":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            raise AssertionError(name)

    return register


# torch's quantization hooks raise an IndexError on Gloo, and here: they expect NCCL's futures.
HOOKS = (
    "allreduce",
    "fp16",
    "bf16",
    "powerSGD",
    "fp16 powerSGD",
    "post_localSGD",
    "post_localSGD of all",
    "builtin",
    "builtin fp16",
)


def comm_hook(context: Context, name: str) -> str:
    """An upstream communication hook on both backends."""
    world = dist.group.WORLD

    # PowerSGD starts collectives in callbacks: with several buckets their order
    # is not the same on all ranks unless a CUDA stream makes it so.
    cap = 25 if "powerSGD" in name else 0.01

    def run(group: Any) -> Result:
        return train(context, group, steps=8, hook=_hook(name, group), bucket_cap_mb=cap)

    # Half-precision hooks round once here and once per hop in Gloo's ring.
    tolerance = 2e-2 if "16" in name else 1e-4
    mine, theirs = run(world), run(context.oracle)
    if name == "post_localSGD":
        # Ranks are on their own after the warm-up: no common digest.
        agree(context, mine, theirs, tolerance)
        return ""
    return agree(context, mine, theirs, tolerance)


def zero_redundancy(context: Context) -> str:
    """ZeroRedundancyOptimizer, with and without the overlapping hook."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(group: Any, **options: Any) -> Result:
        module = net()
        ddp = DistributedDataParallel(module, process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=group,
            lr=1e-2,
            **options,
        )
        losses = []
        for step in range(4):
            x, target = batch(context, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.consolidate_state_dict(to=0)
        if context.rank == 0:
            assert copy.deepcopy(optimizer.state_dict())["state"]
        return losses, [param.detach().clone() for param in module.parameters()]

    world = dist.group.WORLD
    run(world, parameters_as_bucket_view=True)
    return agree(context, run(world), run(context.oracle))
