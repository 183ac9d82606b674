"""Run Horovod's own example programs for torch on fusedpg.hvd, with data that is made here.

    git clone https://github.com/horovod/horovod
    python tools/horovod_examples.py horovod

The programs are those of the checkout, unchanged. Packages in a temporary folder serve fusedpg.hvd
as `horovod`, and as `torchvision` a small model and images of ten patterns with noise. Each program
must end without an error; those that learn the images must recognize most of a test set.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from horovod_tests import folder

VISION = {
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": """
def Compose(parts): pass
def ToTensor(): pass
def Normalize(mean, deviation): pass
""",
    "torchvision/datasets.py": """
import torch

def MNIST(folder, train, download=False, transform=None):
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    made = torch.Generator().manual_seed(2 + train)
    labels = torch.randint(10, (2560 if train else 500,), generator=made)
    noise = torch.randn(len(labels), 1, 28, 28, generator=made)
    return torch.utils.data.TensorDataset(patterns[labels] + noise / 2, labels)
""",
    "torchvision/models.py": """
from torch import nn

def small():
    pooled = nn.Sequential(nn.Conv2d(3, 8, 7, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    return nn.Sequential(pooled, nn.Flatten(), nn.BatchNorm1d(128), nn.Linear(128, 1000))
""",
}
MNIST = ["--epochs", "2", "--batch-size", "32", "--lr", "0.05", "--no-cuda"]
BENCHMARK = ["--model", "small", "--batch-size", "4", "--num-iters", "3", "--no-cuda"]
LEAST_ACCURACY = 80.0
"""Of the images in percent; a program that does not learn gets about 10."""
LIMIT = 300.0
"""Seconds after which a program is killed."""


def programs(checkout: Path) -> dict[str, list[str]]:
    """Command lines by name."""
    plain, elastic = checkout / "examples/pytorch", checkout / "examples/elastic/pytorch"
    mnist, benchmark = str(plain / "pytorch_mnist.py"), "pytorch_synthetic_benchmark"
    python = [sys.executable, "-u"]
    ranks = [sys.executable, "-m", "fusedpg.hvd.run", "-np", "2"]
    return {
        "mnist": [*ranks, *python, mnist, *MNIST],
        "mnist, fp16": [*ranks, *python, mnist, *MNIST, "--fp16-allreduce"],
        "mnist, Adasum": [*ranks, *python, mnist, *MNIST, "--use-adasum"],
        "mnist by horovod.run": [*python, mnist, *MNIST, "--num-proc", "2"],
        "benchmark": [*ranks, *python, str(plain / f"{benchmark}.py"), *BENCHMARK],
        "mnist, elastic": [
            *[*ranks, "--min-np", "1", *python],
            *[str(elastic / "pytorch_mnist_elastic.py"), *MNIST],
        ],
        "benchmark, elastic": [
            *[*ranks, "--min-np", "1", *python],
            *[str(elastic / f"{benchmark}_elastic.py"), *BENCHMARK],
        ],
    }


def problem(name: str, code: int, text: str) -> str:
    """What is wrong with a program's end; empty if nothing."""
    if code:
        return f"ended with {code}"
    if "benchmark" in name:
        return "" if re.search(r"Total img/sec on 2 CPU\(s\): \d", text) else "no result"
    found = [float(number) for number in re.findall(r"Accuracy: ([\d.]+)%", text)]
    if not found or found[-1] < LEAST_ACCURACY:
        return f"accuracy in percent: {found}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of Horovod")
    parser.add_argument("--backend", default="fused")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as root:
        folder(args.checkout, Path(root), VISION)
        paths = [root, str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "FUSEDPG_HVD_BACKEND": args.backend,
            "OMP_NUM_THREADS": "1",
            "HOME": root,  # programs lock a file there
        }
        for name, command in programs(args.checkout.resolve()).items():
            done = subprocess.run(
                command,
                env=env,
                cwd=root,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
            )
            wrong = problem(name, done.returncode, done.stdout)
            print(f"{name}: {wrong or 'passed'}", flush=True)
            if wrong:
                failed = True
                print(done.stdout)
    return failed


if __name__ == "__main__":
    sys.exit(main())
