"""The experiments that settle the rows of docs/gpu.md's table, in the order of the first hour.

The cheapest and most decisive first: whoever has ten minutes of a GPU begins at the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    name: str
    settles: str  # what of docs/gpu.md's table
    command: tuple[str, ...]
    limit: int  # seconds
    expect: str
    failure: str  # what one would mean
    # What it needs beside fusedpg: "gpu" (a real one), "2 gpus", "nccl 2.30.3",
    # "compute-sanitizer", "patched nccl", "2 machines".
    needs: tuple[str, ...] = ()
    least: int = 20  # seconds below which it is not worth beginning
    env: dict[str, str] = field(default_factory=dict)


PYTHON = "{python}"
# A name a line, so that a hang shows where; a broken GPU need not fail every test.
PYTEST = (PYTHON, "-m", "pytest", "-v", "--tb=short", "--maxfail=5", "-p", "no:cacheprovider")


def tests(*files: str, k: str = "") -> tuple[str, ...]:
    return (*PYTEST, *(f"tests/gpu/test_gpu_{file}" for file in files), *(("-k", k) if k else ()))


def bench(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, "benchmarks/gpu.py", "--check-bars", *arguments)


def spread(*where: str, path: str = "") -> tuple[str, ...]:
    wanted = ("--path", path) if path else ()
    return (PYTHON, "-m", "torch.distributed.run", *where, "tests/gpu/spread.py", *wanted)


# Ranks of one host on one GPU, as NCCL has it since 2.30.3.
MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
ARENA = {"FUSEDPG_CUDA_ARENA_BYTES": str(64 << 20)}

STEPS: Sequence[Step] = (
    Step(
        "install",
        "the package on this machine",
        (PYTHON, "-m", "fusedpg"),
        60,
        "`cuda` says: kernels built, torch built for CUDA, 1 GPU found",
        "install again with nvcc on PATH; nothing below means anything",
        least=5,
    ),
    Step(
        "kernels",
        "kernels against torch.optim; pack, unpack, agreement",
        tests("kernels.py::test_kernels"),
        300,
        "passes; some seconds",
        "a kernel that is right on the CPU and wrong on a GPU: PTX of `ptx.hpp`, launch bounds, "
        "contraction. Stop here and mend it",
    ),
    Step(
        "memcheck",
        "compute-sanitizer memcheck",
        tests("kernels.py::test_sanitizer", k="memcheck"),
        400,
        "no error",
        "a step beyond an allocation, which the CPU's run did not have: vectors at tails",
        ("gpu", "compute-sanitizer"),
    ),
    Step(
        "one-rank-steps",
        "fused steps of one rank",
        tests("fused.py", k="world1"),
        300,
        "passes",
        "streams, events or launches of the engine: no peer is in it yet",
    ),
    Step(
        "one-rank-rest",
        "collectives, `fusedpg.optim` and skipping of one rank",
        tests("collectives.py", "optim.py", "sparse.py", k="world1"),
        300,
        "passes",
        "how the route passes tensors on, or the order among streams",
    ),
    Step(
        "two-ranks-first",
        "fused steps of two ranks, plain",
        tests("fused.py::test_ranks_share_the_device", "fused.py::test_parity", k="world2-plain"),
        300,
        "passes",
        "hangs: NCCL refuses two ranks of one GPU (is NCCL_HOSTID honoured?); wrong: chunks, "
        "events between our streams and NCCL's",
    ),
    Step(
        "two-ranks",
        "fused steps against torch.optim, every type and option, 2 ranks",
        tests("fused.py::test_parity", k="world2"),
        600,
        "passes",
        "of one type: its rounding on the wire; of one option: its kernel's arguments",
        least=120,
    ),
    Step(
        "collectives",
        "ordinary collectives, every type, 2 to 4 ranks",
        tests("collectives.py", k="not world1"),
        600,
        "passes",
        "where it fails with `nccl` as the backend too, it is torch's; else our passing on",
        least=90,
    ),
    Step(
        "more-steps",
        "fused steps: chunks, overflow, own options, 3 and 4 ranks; direct path refused",
        tests("fused.py", k="not world1 and not (test_parity and world2)"),
        600,
        "passes; `test_direct_path` skips, as its ranks are hosts of their own",
        "of `several_chunks`: the two buffers in turn; of 3 ranks alone: NCCL's order of additions",
        least=120,
    ),
    Step(
        "optimizers",
        "`fusedpg.optim` with DDP, both modes; GradScaler, clipping, masters, checkpoints",
        tests("optim.py", k="not world1 and not test_training_like_nccl"),
        600,
        "passes",
        "the bridge takes gradients before their kernels have run: order among streams",
        least=120,
    ),
    Step(
        "training",
        "training to the losses of NCCL + `AdamW(fused=True)`",
        tests("optim.py", k="test_training_like_nccl"),
        300,
        "losses within 1e-3, the first three within 1e-5",
        "as above, and no comparison with torch.optim saw it",
    ),
    Step(
        "sparse",
        "all-reduces that skip blocks of zeros, every type, 2 to 4 ranks, DDP, thresholds",
        tests("sparse.py", k="not world1"),
        600,
        "passes; `test_over_arenas` uses no arena",
        "the host's look at the number of blocks between two operations",
        least=60,
    ),
    Step(
        "programs",
        "fused functions as kernels of NVRTC, every operation and type, 1 to 4 ranks",
        tests("programs.py"),
        400,
        "passes",
        "no kernel: what the log says of NVRTC or the driver (PTX newer than the driver?); of one "
        "operation: its text in `fusion/codegen_cuda_text.py`; transcendental ones alone: CUDA's "
        "bounds are wider than the C library's",
        least=60,
    ),
    Step(
        "streams",
        "streams, arguments freed at once, random order among collectives",
        tests("streams.py", k="not graph and not capture"),
        400,
        "passes; the call returns in a third of the kernels' time",
        "`host_does_not_wait`: something in the engine blocks (lazy loading of modules?); "
        "`freed_at_once`: memory reused under a kernel; a hang: order of communicators",
        ("gpu",),
    ),
    Step(
        "graphs",
        "CUDA graphs",
        tests("streams.py", k="graph or capture"),
        400,
        "passes",
        "a call that capture forbids, or a number baked in that a replay should read",
        ("gpu",),
    ),
    Step(
        "faults",
        "mismatch, killed and absent peer, abort, a new group afterwards",
        tests("faults.py"),
        600,
        "passes; errors within 13 s of the fault",
        "a hang: ncclCommAbort waits for a kernel that our watchdog should have told to stop",
        least=90,
    ),
    Step(
        "racecheck",
        "compute-sanitizer racecheck, synccheck",
        tests("kernels.py::test_sanitizer", k="racecheck or synccheck"),
        600,
        "no hazard",
        "a missing __syncthreads that the fibers' orders did not show",
        ("gpu", "compute-sanitizer"),
        least=60,
    ),
    Step(
        "ring-first",
        "the ring of a patched NCCL: Simple, 2 ranks",
        tests("ring.py", k="world2-Simple"),
        400,
        "passes",
        "hangs: the proxies' steps are not those of the ring (`enqueue.cc` hooks); wrong: offsets "
        "of chunks within the block",
        ("patched nccl",),
        least=60,
    ),
    Step(
        "ring",
        "the ring: Simple, LL and LL128, fp32, bf16 and fp16, random sizes, 2 and 3 ranks; "
        "checkpoints to and from the stock path",
        tests("ring.py", k="not world2-Simple"),
        600,
        "passes",
        "of LL or LL128 alone: threads see the chunk before its flags are taken off; of 3 ranks "
        "alone: the middle hop",
        ("patched nccl",),
        least=120,
    ),
    Step(
        "bench-kernels",
        "`benchmarks/gpu.py`, kernels",
        bench("--parts", "kernels"),
        400,
        "90% of a copy's bandwidth, AdamW faster than torch's",
        "not a wrong number: registers, occupancy, vectors (`ptxas -v`)",
        ("gpu",),
        least=60,
    ),
    Step(
        "bench-step",
        "`benchmarks/gpu.py`, step",
        bench("--parts", "step"),
        600,
        "faster than all-reduce + AdamW(fused=True) on the same wire",
        "compare with three calls in a row: the pipeline's events, or the chunk's size",
        ("gpu",),
        least=120,
    ),
    Step(
        "bench-sparse",
        "`benchmarks/gpu.py`, sparse",
        bench("--parts", "sparse"),
        400,
        "faster than NCCL below a density of some 10%",
        "the host's look between two operations costs more than the wire saves",
        ("gpu",),
        least=60,
    ),
    Step(
        "bench-ring",
        "`benchmarks/gpu.py`, step in the ring of a patched NCCL",
        bench("--parts", "step"),
        600,
        "not slower than the stock path",
        "too few channels do the update: raise NCCL_MIN_NCHANNELS and compare",
        ("gpu", "patched nccl"),
        least=120,
    ),
    Step(
        "one-host",
        "ranks of one host on one GPU (`NCCL_MULTI_RANK_GPU_ENABLE=1`), and the direct path there",
        spread("--standalone", "--nproc-per-node=2"),
        300,
        "passes; the path is `direct` where NCCL makes windows of one GPU, else `stock`",
        "refused by NCCL: no such mode here; wrong on `direct`: order of memory between "
        "kernels, which the CPU's fake cannot show",
        ("gpu", "nccl 2.30.3"),
        env=MULTI_RANK | ARENA,
    ),
    Step(
        "two-gpus",
        "more than one GPU, stock path",
        spread("--standalone", "--nproc-per-node=2", path="stock"),
        300,
        "passes on `stock`",
        "devices and streams of a rank that is not on GPU 0",
        ("2 gpus",),
    ),
    Step(
        "direct",
        "direct path between GPUs of an NVLink domain, dense and skipping zeros",
        spread("--standalone", "--nproc-per-node=2", path="direct"),
        300,
        "passes on `direct`",
        "`stock`: no windows (NCCL < 2.28, no NVLink, headers of another minor version); a hang: "
        "signals that do not arrive (`barrier.cuh`); wrong: release and acquire of parameters",
        ("2 gpus",),
        env=ARENA,
    ),
    Step(
        "two-machines",
        "more than one machine",
        spread(
            "--nnodes=2",
            "--nproc-per-node=gpu",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=FIRST:29500",
        ),
        300,
        "passes on `stock`, and on `ring` with a patched NCCL",
        "of the ring alone: network proxies, which shared sockets on `lo` do not tell apart",
        ("2 machines",),
    ),
)
