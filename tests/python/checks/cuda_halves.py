"""Sums of half gradients on the CUDA engine; CPU tensors stand for device memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from checks.cases import same
from checks.fused_ops import Model, Run
from harness import Context

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COUNTS = (1, 33, 3000, 96 * 1024, 5)  # of some a rank owns nothing
WHOLE = (9 << 16, 100)  # the first is a chunk of its own, which is not packed


def _groups(chunk_bytes: int) -> tuple[Any, Any]:
    """Of the CPU engine, and of the CUDA engine."""
    import fusedpg

    options = fusedpg.Options(_cpu_as_cuda=True, cuda_chunk_bytes=chunk_bytes)
    return dist.new_group(backend="fused"), dist.new_group(backend="fused", pg_options=options)


def _gradients(
    dtype: torch.dtype, counts: tuple[int, ...], rank: int, step: int
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(7 * rank + step)
    return [torch.randn(n, generator=random).to(dtype) for n in counts]


def bits_of_the_cpu(context: Context, op: str, name: str, whole: bool) -> None:
    shapes = tuple((count,) for count in (WHOLE if whole else COUNTS))
    found = []
    for group in _groups(2 << 20 if whole else 1 << 17):
        model = Model(context, Run(op, shapes=shapes, dtypes=(DTYPES[name],), master=True))
        for step in range(2):
            model.set_gradients(step)
            model.step(group=group)
        found.append(model.state())
    for cpu, cuda in zip(*found, strict=True):
        assert same(cpu, cuda)


def slices_have_the_bits_of_the_cpu(context: Context) -> None:
    """What reduce_shards leaves: rounded once."""
    import fusedpg

    size, rank = context.world_size, context.rank
    groups = [group._get_backend(torch.device("cpu")) for group in _groups(1 << 17)]
    for dtype in DTYPES.values():
        for mean in (True, False):
            found = []
            for backend in groups:
                grads = _gradients(dtype, COUNTS, rank, 0)
                backend.reduce_shards_(grads, mean=mean)
                ranges = [fusedpg.shard_range(n, size, rank) for n in COUNTS]
                found.append([g[o : o + n] for g, (o, n) in zip(grads, ranges, strict=True)])
            for cpu, cuda in zip(*found, strict=True):
                assert same(cpu, cuda)


def beyond_the_type(context: Context) -> None:
    """The sum of two is no fp16; the mean is, and nobody has found an infinity."""
    import fusedpg

    offset, length = fusedpg.shard_range(64, context.world_size, context.rank)
    param = torch.ones(64, dtype=torch.float16)
    master, m, v = param[offset : offset + length].float(), torch.zeros(length), torch.zeros(length)
    found = torch.zeros(())
    fusedpg.fused_adamw_(
        [param], [torch.full_like(param, 40_000)], [m], [v], [], [torch.zeros(())],
        lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, master_params=[master],
        grad_scale=torch.tensor(65536.0), found_inf=found,
    )  # fmt: skip
    assert not found
    assert same(m, torch.full((length,), 40_000 / 65536 * (1 - 0.9)))
    assert abs(param.float() - 0.9).max() < 1e-3


def optimizer_beyond_the_type(context: Context, clips: bool) -> None:
    """Gradients that were put in by hand, and looked at by GradScaler before they are reduced."""
    import fusedpg

    param = torch.nn.Parameter(torch.ones(256, dtype=torch.float16))
    optimizer: Any = fusedpg.optim.AdamW(
        [param], lr=0.1, weight_decay=0.0, master_dtype=torch.float32,
        max_grad_norm=1e6 if clips else None,
    )  # fmt: skip
    for step in range(3):
        param.grad = torch.full((256,), 40_000, dtype=torch.float16)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(65536.0), torch.zeros(())
        optimizer.step()
        assert abs(param.float() - (0.9 - 0.1 * step)).max() < 2e-3


def other_settings(context: Context) -> None:
    import fusedpg

    chosen = "fp32" if context.rank == 0 else "wire"
    options = fusedpg.Options(_cpu_as_cuda=True, half_sums=chosen)  # type: ignore[arg-type]
    group = dist.new_group(backend="fused", pg_options=options)
    fusedpg.fused_sgd_(
        [torch.ones(8)], [torch.ones(8)], [], lr=0.1, momentum=0.0, weight_decay=0.0,
        dampening=0.0, nesterov=False, is_first_step=True, group=group,
    )  # fmt: skip
