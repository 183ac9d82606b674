"""Steps of torch's own programs on Gloo and on a served group, in turn, in one process a rank.

python benchmarks/serve_gloo_steps.py [--rounds 25] [--json benchmarks/results/served/steps.json]

Two groups of the same ranks: Gloo's, and one that was asked for as "gloo" while fusedpg served it.
Each round takes one step on each, in changing order; both see the same load of the machine.
benchmarks/serve_gloo.py runs whole programs instead, those of frameworks, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _harness as harness  # before torch: it sets one thread a rank

# isort: split
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import fusedpg
from _served_programs import WIDTH, batch, model

WARM = 3
TITLES = {
    "ddp": "DDP",
    "zero1": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "tensor_parallel": "DTensor tensor parallel",
    "pipeline": "pipeline, 1F1B",
    "dcp": "DCP async_save, thread",
    "messages_1k": "1 KiB there and back, 100 times",
    "messages_64k": "64 KiB there and back, 100 times",
    "messages_1m": "1 MiB there and back, 10 times",
    "messages_16m": "16 MiB there and back",
}
Step = Callable[[int], object]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    def step(i: int) -> None:
        module(batch(i, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def ddp(group: dist.ProcessGroup, scratch: Path) -> Step:
    module = nn.parallel.DistributedDataParallel(model(), process_group=group)
    return train(module, adamw(module), dist.get_rank())


def zero1(group: dist.ProcessGroup, scratch: Path) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
    )
    return train(module, optimizer, dist.get_rank())


def fsdp2(group: dist.ProcessGroup, scratch: Path) -> Step:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    module = model()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module, adamw(module), dist.get_rank())


def tensor_parallel(group: dist.ProcessGroup, scratch: Path) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    # DTensor keeps what it has planned by the mesh, and meshes of the same ranks without names are
    # equal: then the steps of both arms would run on one group.
    names = (f"tp_{group.group_name}",)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=names)
    styles = {str(2 * i): (RowwiseParallel if i % 2 else ColwiseParallel)() for i in range(4)}
    module = parallelize_module(model(), mesh, styles)
    return train(module, adamw(module), 0)


def pipeline(group: dist.ProcessGroup, scratch: Path) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model()
    share = len(whole) // ranks
    part = whole[rank * share : (rank + 1) * share]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    optimizer, target = adamw(part), torch.zeros(16, WIDTH)

    def step(i: int) -> None:
        if rank == 0:
            schedule.step(batch(i, 0))
        else:
            schedule.step(target=target)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier(group=group)

    return step


def dcp(group: dist.ProcessGroup, scratch: Path) -> Step:
    import torch.distributed.checkpoint as checkpoint

    state = {"model": model().state_dict()}

    def step(i: int) -> None:
        place = scratch / f"{group.group_name}-{i}"
        checkpoint.async_save(state, checkpoint_id=place, process_group=group).result()

    return step


def messages(kib: int, times: int) -> Callable[[dist.ProcessGroup, Path], Step]:
    """From rank 0 to the last one and back."""

    def program(group: dist.ProcessGroup, scratch: Path) -> Step:
        tensor, rank, last = torch.zeros(kib << 8), dist.get_rank(), dist.get_world_size() - 1

        def step(i: int) -> None:
            for _ in range(times):
                if rank == 0:
                    dist.send(tensor, last, group=group)
                    dist.recv(tensor, last, group=group)
                elif rank == last:
                    dist.recv(tensor, 0, group=group)
                    dist.send(tensor, 0, group=group)
            dist.barrier(group=group)

        return step

    return program


messages_1k = messages(1, 100)
messages_64k = messages(64, 100)
messages_1m = messages(1 << 10, 10)
messages_16m = messages(16 << 10, 1)


def measure(
    program: str, groups: dict[str, dist.ProcessGroup], rounds: int, scratch: Path
) -> dict[str, list[float]]:
    """Seconds on this rank, by arm, without the first rounds."""
    steps = {arm: globals()[program](group, scratch) for arm, group in groups.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in steps}
    for i in range(rounds + WARM):
        for arm in list(steps) if i % 2 else list(steps)[::-1]:
            dist.barrier()
            calls = fusedpg.group_info(groups["served"])["sequence_number"]
            begin = time.perf_counter()
            steps[arm](i)
            seconds[arm].append(time.perf_counter() - begin)
            calls = fusedpg.group_info(groups["served"])["sequence_number"] - calls
            assert (calls > 0) == (arm == "served"), f"{program} on {arm}: {calls} served calls"
    return {arm: all_of[WARM:] for arm, all_of in seconds.items()}


def load(path: Path) -> dict[str, dict[str, list[float]]]:
    return {row.pop("program"): row for row in json.loads(path.read_text())["rows"]}


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| a step of | Gloo | served | times |", "|---|---|---|---|"]
    for program, seconds in rows.items():
        gloo, served = (statistics.median(seconds[arm]) * 1e3 for arm in ("gloo", "served"))
        cells = [TITLES[program], f"{gloo:.1f} ms", f"{served:.1f} ms", f"{gloo / served:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranks_main(arguments: argparse.Namespace) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.new_group(backend="gloo")}
    fusedpg.serve_gloo()
    groups["served"] = dist.new_group(backend="gloo")
    fusedpg.serve_gloo(False)
    kinds = {arm: type(g._get_backend(torch.device("cpu"))) for arm, g in groups.items()}
    assert kinds == {"gloo": dist.ProcessGroupGloo, "served": fusedpg.ProcessGroupFused}, kinds
    rows = {}
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    for program in arguments.only.split(","):
        rows[program] = measure(program, groups, arguments.rounds, Path(shared[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(shared[0])
        print(table(rows))
        if arguments.json:
            head = {**harness.about(), "ranks": dist.get_world_size()}
            found = [{"program": program, **seconds} for program, seconds in rows.items()]
            harness.write(arguments.json, head, found)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(TITLES), help="programs, with commas")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        ranks_main(arguments)
        return 0
    run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    line = [sys.executable, "-m", *run, __file__, *sys.argv[1:]]
    return subprocess.call(line)


if __name__ == "__main__":
    sys.exit(main())
