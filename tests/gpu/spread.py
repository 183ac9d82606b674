"""Fused steps against torch.optim for ranks that torchrun has spread over GPUs or machines.

    torchrun --standalone --nproc-per-node 2 tests/gpu/spread.py

Says which path the steps took. Needs nothing of the tests' processes, which share GPU 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import fusedpg

COUNTS = (1, 33, 4099, 65_536, 300_007)
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-3}
STEPS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


def noise(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def check(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> str:
    """The path that steps on tensors in the arena, if there is one, took."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def empty(count: int) -> torch.Tensor:
        return fusedpg.empty(count, dtype=dtype, device=device, group=group)

    def gradient(step: int, r: int, i: int) -> torch.Tensor:
        return noise(1000 * step + 10 * r + i, COUNTS[i], dtype)

    params = [empty(count).copy_(noise(7 + i, count, dtype)) for i, count in enumerate(COUNTS)]
    grads = [empty(count) for count in COUNTS]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [fusedpg.shard_range(count, size, rank)[1] for count in COUNTS]
    states = [[torch.zeros(n, dtype=wide, device=device) for n in parts] for _ in range(2)]
    steps = [torch.zeros((), device=device) for _ in COUNTS]
    masters = []
    if dtype != wide:
        slices = (fusedpg.shard_range(count, size, rank) for count in COUNTS)
        masters = [p[o : o + n].to(wide) for p, (o, n) in zip(params, slices)]
    twins = [noise(7 + i, count, dtype).to(wide) for i, count in enumerate(COUNTS)]
    options = {"lr": HYPER["lr"], "betas": (HYPER["beta1"], HYPER["beta2"])}
    oracle = torch.optim.AdamW(
        [twin.requires_grad_() for twin in twins],
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
        **options,
    )
    for step in range(STEPS):
        for i, (grad, twin) in enumerate(zip(grads, twins)):
            grad.copy_(gradient(step, rank, i))
            twin.grad = sum(gradient(step, r, i).to(wide) for r in range(size)) / size
        fusedpg.fused_adamw_(
            params,
            grads,
            states[0],
            states[1],
            [],
            steps,
            master_params=masters,
            amsgrad=False,
            group=group,
            **HYPER,
        )
        oracle.step()
    for param, twin in zip(params, twins):
        want = twin.detach()
        torch.testing.assert_close(
            param.cpu().to(wide), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        # On the host: torch's NCCL refuses ranks that share a GPU.
        held = param.cpu()
        copies = [torch.empty_like(held) for _ in range(size)]
        dist.all_gather(copies, held, group=group)
        assert all(torch.equal(copy, held) for copy in copies), "ranks hold different parameters"
    return str(fusedpg.group_info(group)["cuda_path"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", help="that the steps have to take")
    wanted = parser.parse_args().path
    fake = os.environ.get("FUSEDPG_TEST_DEVICE") == "cpu"
    # Where ranks of one host outnumber its GPUs, they share (NCCL_MULTI_RANK_GPU_ENABLE=1).
    place = 0 if fake else int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    device = torch.device("cpu") if fake else torch.device("cuda", place)
    if not fake:
        torch.cuda.set_device(device)
    options = fusedpg.Options(timeout=timedelta(seconds=120))
    if fake:
        options = fusedpg.Options(timeout=timedelta(seconds=120), _cpu_as_cuda=True)
    dist.init_process_group("fused", pg_options=options)
    group = dist.group.WORLD
    assert group is not None
    for dtype in TOLERANCE:
        path = check(group, device, dtype)
        if dist.get_rank() == 0:
            print(f"{dtype}: right, path {path}", flush=True)
        if wanted and path != wanted:
            raise SystemExit(f"took the path {path}, not {wanted}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
