"""What all recipes train: a tiny model on data that do not depend on the number of ranks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BATCH = 12  # of all ranks together


PERIOD = 4  # batches, then they come again: not all frameworks skip those that are done
LR = 0.02


class Samples(torch.utils.data.Dataset):
    """Endless enough for a run that somebody kills."""

    def __len__(self) -> int:
        return 20000 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(index % (PERIOD * BATCH))
        x = torch.randn(8, generator=random)
        return {"x": x, "y": torch.stack([x[:4].sum().sin(), x[4:].prod()])}


class Model(torch.nn.Module):
    """One parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 33)
        self.last = torch.nn.Linear(33, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x).tanh()) - y).square().mean()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """No decay of biases, as usual."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-at", type=int, help="a checkpoint after so many steps")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
    parser.add_argument("--resume", action="store_true", help="begin with the checkpoint")
    parser.add_argument("--overlap", action="store_true", help="update during backward")
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO, with DeepSpeed")
    parser.add_argument("--ranks", type=int, default=2, help="with Ray, which starts them itself")
    parser.add_argument("--replica", type=int, default=0, help="with torchft")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after a step")
    parser.add_argument("--losses", type=Path, help="a line of JSON for every step")
    return parser.parse_args()


class Losses:
    """Notes the loss of every step, the mean over all ranks."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def note(self, step: int, loss: torch.Tensor) -> None:
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        if int(os.environ.get("RANK", "0")) == 0 and self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "loss": float(mean)}) + "\n")
