"""Time the CUDA kernels and the fused step on one GPU.

    python benchmarks/gpu.py --check-bars
    python benchmarks/gpu.py --parts kernels --kernel-sizes 64M,1G

Three parts. **kernels**: pack, unpack and AdamW of libfusedpg_cuda.so alone, also with the sum of
the bf16 gradients of 2 and 8 ranks, against a copy of as many bytes on the same device in the same
run (bar: at least 90% of its bandwidth) and against torch's fused AdamW (bar: faster).
**one_rank**: unscale, clip, AdamW and the write-back of bf16 parameters in a group of one rank,
against a copy of as many bytes (bar: at least 90% of its bandwidth), eager torch (bar: 0.7 of its
time), torch's fused calls, and torch.compile. **step**:
`fused_adamw_` at two ranks that share the device, against NCCL's all-reduce followed by torch's
AdamW(fused=True), and against reduce-scatter, our update or torch's, and all-gather as three
calls; where LD_PRELOAD names a patched NCCL (patches/nccl/README.md), also in its ring.

Results are compared before anything is timed, and the program ends non-zero where they differ.
Without a GPU it ends with 2.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import _gpu_kernels as kernels
import _gpu_one_rank as one_rank
import _gpu_steps as steps
import _harness as harness
from _gpu_table import library, load
from collectives import case_title

PARTS = ("kernels", "one_rank", "step")


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def facts() -> dict[str, Any]:
    """What a result is worth nothing without."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudart_of_kernels": load().runtime_version,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def problem() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    path = library()
    if not Path(path).exists():
        return f"{path} is missing; install fusedpg where nvcc is on PATH"
    return None


def main() -> int:
    parser = harness.Parser(__doc__, backends="fused,nccl", sizes="1M,16M,64M,256M", rounds=21)
    parser.names("--parts", PARTS)
    parser.add_argument(
        "--kernel-sizes",
        type=harness.parse_sizes,
        default="1M,16M,64M,256M,1G",
        help="bytes of the parameters",
    )
    parser.add_argument(
        "--one-rank-sizes",
        type=harness.parse_sizes,
        default="2M,200M,2000M",
        help="bytes of the bf16 parameters",
    )
    parser.add_argument("--no-lists", dest="lists", action="store_false", help="flat tensors only")
    args = parser.parse_args()
    if len(args.parts) > 1 and (args.json or args.plot):
        parser.error("--json and --plot name the files of one part: choose it with --parts")
    reason = problem()
    if reason is not None:
        print(f"benchmarks/gpu.py needs a GPU: {reason}", file=sys.stderr)
        return 2
    if "kernels" in args.parts:
        alone = copy.copy(args)
        alone.sizes, alone.world_size, alone.backends = args.kernel_sizes, 1, ["torch"]
        harness.finish("gpu_kernels", kernels.run(alone), alone, bars=kernels.bars(), facts=facts())
    if "one_rank" in args.parts:
        alone = copy.copy(args)
        alone.sizes, alone.world_size, alone.backends = args.one_rank_sizes, 1, ["torch"]
        rows, bars = one_rank.run(alone), one_rank.bars()
        harness.finish("gpu_one_rank", rows, alone, bars=bars, facts=facts())
    if "step" in args.parts:
        cases = [(case, size) for case in steps.TYPES for size in args.sizes]
        rows = harness.run(steps.measure, args, cases, title=case_title)
        harness.finish("gpu_step", rows, args, bars=steps.bars(), facts=facts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
