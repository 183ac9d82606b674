"""Trains a small model under any launcher; says in one line of JSON where, and what came out.

With --checkpoint it saves after every step, as a job that is started again wants it, and goes on
from there. --kill RANK has that rank killed in the middle, the first time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from fusedpg.launch import init_from_environment

STEPS = 12
KILLED_AT = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()
    place = init_from_environment()
    assert place is not None
    dist.init_process_group("fused", timeout=timedelta(seconds=args.timeout))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.Tanh(), torch.nn.Linear(257, 64))
    ddp = DistributedDataParallel(model)
    optimizer = fusedpg.optim.AdamW(ddp.parameters(), lr=1e-2, ddp=ddp)
    begin = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    loss = torch.zeros(())
    for step in range(begin, STEPS):
        if step == KILLED_AT and rank == args.kill and begin == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        if args.checkpoint is not None:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                new = args.checkpoint.with_suffix(".new")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step + 1, **state}, new)
                new.rename(args.checkpoint)
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    info = fusedpg.group_info()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    said = {
        "rank": rank,
        "world_size": size,
        "local_world_size": info["local_world_size"],
        "launcher": place.launcher,
        "transport": info.get("transport", ""),
        "began_at": begin,
        "loss": float(loss),
        "digest": digest.hexdigest(),
    }
    dist.barrier()
    # In one write: ranks share a pipe, and print writes the end of the line by itself.
    os.write(1, f"launched {json.dumps(said)}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
