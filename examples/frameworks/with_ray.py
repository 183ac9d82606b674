"""Ray Train: python examples/frameworks/with_ray.py --ranks 2"""

import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from _task import BATCH, LR, Losses, Model, Samples, arguments, groups
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def worker(config: dict[str, Any]) -> None:
    import fusedpg

    args = config["args"]
    losses = Losses(args.losses)
    ranks = dist.get_world_size()
    model = prepare_model(Model(), parallel_strategy_kwargs={"find_unused_parameters": False})
    ddp = model if isinstance(model, DistributedDataParallel) else None  # no DDP on one rank
    optimizer = fusedpg.optim.AdamW(groups(model), lr=LR, ddp=ddp, overlap=args.overlap)
    data = Samples()
    data = DataLoader(data, BATCH // ranks, sampler=DistributedSampler(data, shuffle=False))

    first = 0
    if args.resume:
        state = torch.load(args.checkpoint, weights_only=True)
        first = state["step"]
        (ddp.module if ddp else model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    for step, batch in zip(range(first, args.steps), data):
        loss = model(**batch)
        losses.note(step, loss)
        loss.backward()
        if not args.overlap:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == args.save_at:
            whole = optimizer.full_state_dict()  # on all ranks
            if dist.get_rank() == 0:
                weights = (ddp.module if ddp else model).state_dict()
                state = {"step": step + 1, "model": weights, "optimizer": whole}
                torch.save(state, args.checkpoint)
    train.report({"loss": loss.item()})


if __name__ == "__main__":
    args = arguments()
    ray.init(num_cpus=args.ranks + 1, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            worker,
            train_loop_config={"args": args},
            scaling_config=train.ScalingConfig(num_workers=args.ranks),
            torch_config=TorchConfig(backend="fused"),
            run_config=train.RunConfig(storage_path=str(Path(storage).resolve())),
        ).fit()
