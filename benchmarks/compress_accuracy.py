"""What compressors do to the result of training: two small models, trained by each of them.

    python benchmarks/compress_accuracy.py
    python benchmarks/compress_accuracy.py --methods "random-k 1 %,DGC 1 %" --tasks cnn --no-save

A CNN on handwritten digits by SGD with momentum 0.9, at a learning rate of 0.05 and at 0.02
("cnn_slow"), and a character-level transformer, that of
examples/char_transformer.py but smaller, by AdamW; two ranks, several seeds, a fixed number of
steps. The
learning rate is that of uncompressed training, but for votes, whose elements are all of magnitude 1
(`VOTES`). With the memory "dgc", which has the momentum, the CNN's optimizer has none. Figures are
of held-out data: accuracy, and bits per character.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import _harness as harness
from _harness import RESULTS, Context, Row
from fusedpg import compress

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import _common as common
import char_transformer

TASKS = ("cnn", "cnn_slow", "lm")
STEPS = {"cnn": 250, "cnn_slow": 250, "lm": 150}
RATES = {"cnn": 0.05, "cnn_slow": 0.02, "lm": 2e-3}
# Learning rates of votes: what an element moves in a step, by AdamW as without compression.
VOTES = {"cnn": 1e-4, "cnn_slow": 4e-5, "lm": RATES["lm"]}
BATCH, CONTEXT, TEST_BLOCKS = 32, 32, 128

METHODS: dict[str, dict[str, Any]] = {
    "no compression": {},
    "fp16": {"compressor": "fp16"},
    "top-k 1 %": {"compressor": "topk", "memory": "residual", "compress_ratio": 0.01},
    "top-k 1 %, no memory": {"compressor": "topk", "compress_ratio": 0.01},
    "DGC 1 %": {"compressor": "dgc", "memory": "dgc", "compress_ratio": 0.01},
    "random-k 1 %": {"compressor": "randomk", "memory": "residual", "compress_ratio": 0.01},
    "random-k 10 %": {"compressor": "randomk", "memory": "residual", "compress_ratio": 0.1},
    "random-k 30 %": {"compressor": "randomk", "memory": "residual", "compress_ratio": 0.3},
    "random-k 10 %, no memory": {"compressor": "randomk", "compress_ratio": 0.1},
    "EF sign": {"compressor": "efsignsgd", "memory": "residual"},
    "1-bit": {"compressor": "onebit", "memory": "residual"},
    "sign": {"compressor": "signsgd"},
    "signum": {"compressor": "signum"},
    "QSGD 127": {"compressor": "qsgd"},
    "QSGD 4": {"compressor": "qsgd", "quantum_num": 4},
    "TernGrad": {"compressor": "terngrad"},
    "TernGrad, residual": {"compressor": "terngrad", "memory": "residual"},
    "natural": {"compressor": "natural"},
    "PowerSGD 1": {"compressor": "powersgd", "memory": "powersgd"},
    "PowerSGD 4": {"compressor": "powersgd", "memory": "powersgd", "compress_rank": 4},
}


@functools.cache
def data(task: str, seed: int) -> tuple[Any, Any, Any]:
    """Inputs and targets to train on, and what is held out."""
    if task != "lm":
        train, test = common.digits(seed)
        return (*train.tensors, test)
    blocks, test = char_transformer.load_text(CONTEXT, TEST_BLOCKS)
    text = blocks.long()
    return text[:, :-1], text[:, 1:], test


def trained(context: Context, task: str, params: dict[str, Any], seed: int) -> float:
    x, y, test = data(task, seed)
    torch.manual_seed(seed)
    if task != "lm":
        model: nn.Module = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
    else:
        model = char_transformer.CharTransformer(64, 2, CONTEXT)
    ddp = DistributedDataParallel(model)
    if params:
        ddp.register_comm_hook(compress.from_params(params, seed=seed), compress.hook)
    vote = params.get("compressor") in ("signsgd", "signum")
    rate = (VOTES if vote else RATES)[task]
    if task != "lm":
        momentum = 0.0 if params.get("memory") == "dgc" else 0.9
        optimizer: Any = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), rate)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS[task]):
        rows = torch.randint(len(x), (BATCH,), generator=draw)
        mine = rows[context.rank :: context.world_size]
        optimizer.zero_grad()
        outputs, targets = ddp(x[mine]), y[mine]
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
    score = common.correct if task != "lm" else char_transformer.bits
    return common.evaluate(model, test, score)


def measure(context: Context, args: argparse.Namespace, case: tuple[str, str]) -> list[Row]:
    task, name = case
    found = [trained(context, task, METHODS[name], seed) for seed in range(args.seeds)]
    if context.rank == 0:
        print(f"\n{task:4} {name:26} {[round(figure, 3) for figure in found]}", flush=True)
    # Of "lm" bits a character, by seed.
    return [Row.of(task, 0, name, found, more={"accuracy": found})]


def main() -> int:
    parser = harness.Parser(__doc__, backends="fused", rounds=1)
    parser.names("--tasks", TASKS)
    parser.add_argument("--methods", default=",".join(n.replace(", ", "; ") for n in METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    args.methods = [name.replace("; ", ", ") for name in args.methods.split(",")]
    if not set(args.methods) <= set(METHODS):
        parser.error(f"methods are {', '.join(METHODS)}")
    cases = [(task, name) for task in args.tasks for name in args.methods]
    rows = harness.run(measure, args, cases, title=", ".join)
    for task in args.tasks if not args.no_save else ():
        path = RESULTS / f"compress_accuracy_{task}_p{args.world_size}.json"
        found = [row for row in rows if row.case == task]
        harness.save_rows(path, found, args.world_size, unit="held out")
        print(f"saved {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
