"""What one GPU can show, in four stages: see one_gpu.sh.

A stage is one command of less than nine minutes, and no step takes more than 100 seconds: a hang
costs no more than that. The cheapest and most decisive steps come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

USUAL, MOST = 60, 100  # seconds of a step


@dataclass(frozen=True)
class Step:
    stage: int
    name: str
    settles: str
    command: tuple[str, ...]
    expect: str
    failure: str  # what one would mean
    # What it needs beside fusedpg: "gpu" (a real one), "compute-sanitizer", "mps".
    needs: tuple[str, ...] = ()
    limit: int = USUAL  # seconds
    env: dict[str, str] = field(default_factory=dict)
    # Part of the build: skipped where state.tar.gz holds one. Goes on in the background when its
    # time is up, and the next step of the same command waits for it.
    build: bool = False
    # A timing: no other step runs beside it.
    alone: bool = False


PYTHON = "{python}"
# A name a line, so that a hang shows where; a broken GPU need not fail every test.
PYTEST = (PYTHON, "-m", "pytest", "-v", "--tb=short", "--maxfail=3", "-p", "no:cacheprovider")


def tests(*files: str, k: str = "") -> tuple[str, ...]:
    return (*PYTEST, *(f"tests/gpu/test_gpu_{file}" for file in files), *(("-k", k) if k else ()))


def bench(part: str, *arguments: str) -> tuple[str, ...]:
    where = ("--json", "build/one_gpu/logs/{name}.json")
    return (PYTHON, "benchmarks/gpu.py", "--parts", part, *where, *arguments)


def sanitizer(stage: int, tool: str, what: str, failure: str) -> Step:
    # Not the calls of the driver that fail: cuda-python asks for functions that it may lack.
    options = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return Step(
        stage,
        f"{tool}-{what.partition('-')[0]}",
        f"compute-sanitizer {tool}, {what}",
        (
            "compute-sanitizer",
            *("--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *options),
            *(PYTHON, "tests/gpu/kernel_driver.py", what),
        ),
        "no error",
        failure,
        ("gpu", "compute-sanitizer"),
        env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


CONFIGURE = (
    *("cmake", "-S", ".", "-B", "build/cmake", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
    *("-DFUSEDPG_PYTHON={python}", "-DFUSEDPG_MODULE_DIR={root}/fusedpg"),
    *("-DFUSEDPG_CUDA=ON", "-DFUSEDPG_CUDA_ARCHITECTURES={architecture}-real"),
    "-DFUSEDPG_ABSOLUTE_RPATH=ON",
)
COMPILE = ("cmake", "--build", "build/cmake", "--target", "_C", "fusedpg_cuda", "fusedpg_gpu_table")
FIRST_OF_RANKS = tests(
    "fused.py::test_ranks_share_the_device", "fused.py::test_parity", k="world2-plain"
)
# The server of CUDA's Multi-Process Service lives as long as the step.
MPS = (
    "bash",
    "-c",
    "export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d); "
    "nvidia-cuda-mps-control -d; "
    "trap 'echo quit | nvidia-cuda-mps-control' EXIT; "
    '"$@"',
    "mps",
)

STEPS: Sequence[Step] = (
    Step(
        1,
        "configure",
        "the build's configuration, without a network",
        CONFIGURE,
        "finds torch and nvcc",
        "nothing below means anything",
        ("gpu",),
        build=True,
    ),
    *(
        Step(
            1,
            f"compile-{part}",
            "the extension, kernels of this GPU alone, launches of single kernels",
            COMPILE,
            "ends in one of these minutes",
            "a compiler that the project was never built with",
            ("gpu",),
            build=True,
        )
        for part in range(1, 5)
    ),
    Step(
        1,
        "package",
        "the package on this machine",
        (PYTHON, "-m", "fusedpg"),
        "`cuda` says: kernels built, torch built for CUDA, 1 GPU found",
        "nothing below means anything",
        limit=30,
    ),
    Step(
        1,
        "kernels",
        "kernels against torch.optim; pack, unpack, agreement",
        tests("kernels.py::test_kernels"),
        "passes",
        "a kernel that is right on the CPU and wrong on a GPU: PTX of `ptx.hpp`, launch bounds, "
        "contraction. Stop here and mend it",
    ),
    Step(
        1,
        "one-rank-steps",
        "fused steps of one rank",
        tests("fused.py", k="world1"),
        "passes",
        "streams, events or launches of the engine: no peer is in it yet",
    ),
    Step(
        1,
        "one-rank-rest",
        "collectives and `fusedpg.optim` of one rank",
        tests("collectives.py", "optim.py", k="world1"),
        "passes",
        "how the route passes tensors on, or the order among streams",
    ),
    Step(
        1,
        "one-rank-programs",
        "fused functions as kernels of NVRTC",
        tests("programs.py", k="world1"),
        "passes",
        "no kernel: what the log says of NVRTC or the driver; of one operation: its text in "
        "`fusion/generated/program.cuh`",
    ),
    sanitizer(
        1,
        "memcheck",
        "kernels",
        "a step beyond an allocation, which the CPU's run did not have: vectors at tails",
    ),
    Step(
        2,
        "two-ranks-first",
        "fused steps of two ranks, plain",
        FIRST_OF_RANKS,
        "passes",
        "hangs: NCCL refuses two ranks of one GPU (is NCCL_HOSTID honoured?); wrong: chunks, "
        "events between our streams and NCCL's",
    ),
    Step(
        2,
        "two-ranks",
        "fused steps against torch.optim, every type and option, 2 ranks",
        tests("fused.py::test_parity", k="world2"),
        "passes",
        "of one type: its rounding on the wire; of one option: its kernel's arguments",
    ),
    Step(
        2,
        "streams",
        "streams, arguments freed at once, random order among collectives",
        tests("streams.py", k="not graph and not capture and not three_ranks"),
        "passes; the call returns in a third of the kernels' time",
        "`host_does_not_wait`: something in the engine blocks; `freed_at_once`: memory reused "
        "under a kernel; a hang: order of communicators",
        ("gpu",),
    ),
    Step(
        2,
        "graphs",
        "CUDA graphs of two ranks",
        tests("streams.py", k="test_graph or test_capture"),
        "passes",
        "a call that capture forbids, or a number baked in that a replay should read",
        ("gpu",),
    ),
    Step(
        2,
        "faults",
        "mismatch, killed and absent peer, abort, too little memory",
        tests("faults.py"),
        "passes; errors within 13 s of the fault",
        "a hang: ncclCommAbort waits for a kernel that should have ended at its deadline",
    ),
    Step(
        2,
        "collectives",
        "ordinary collectives, every type, 2 ranks",
        tests("collectives.py", k="world2"),
        "passes",
        "where it fails with `nccl` as the backend too, it is torch's; else our passing on",
    ),
    Step(
        2,
        "optimizers",
        "`fusedpg.optim` with DDP; masters, GradScaler, clipping",
        tests("optim.py", k="AdamW or scaler"),
        "passes",
        "the bridge takes gradients before their kernels have run: order among streams",
    ),
    Step(
        2,
        "four-ranks",
        "fused steps of four ranks, plain",
        tests("fused.py::test_parity", k="world4-plain"),
        "passes",
        "of 4 ranks alone: NCCL's order of additions",
    ),
    Step(
        2,
        "mps",
        "two ranks, plain, whose kernels run side by side (Multi-Process Service)",
        (*MPS, *FIRST_OF_RANKS),
        "passes",
        "without MPS alone it passes: kernels of two ranks that overlap",
        ("gpu", "mps"),
    ),
    Step(
        3,
        "direct-at-once",
        "direct kernels of two ranks in one process, which meet at their barriers",
        tests("kernels.py::test_direct_kernels_of_two_ranks", k="at-once"),
        "passes",
        "a hang: the kernels are not resident together, or signals do not arrive (`barrier.cuh`); "
        "wrong: release and acquire of parameters",
        ("gpu",),
    ),
    sanitizer(3, "memcheck", "direct-in-turn", "an address beyond a rank's mapping"),
    sanitizer(3, "racecheck", "direct-in-turn", "a missing __syncthreads around `Peers`"),
    sanitizer(3, "synccheck", "direct-in-turn", "threads that leave before a barrier of the block"),
    sanitizer(
        3, "racecheck", "kernels", "a missing __syncthreads that the fibers' orders did not show"
    ),
    sanitizer(3, "synccheck", "kernels", "threads that leave before a barrier of the block"),
    Step(
        4,
        "bench-kernels",
        "pack, unpack, AdamW against a copy and `torch._fused_adamw_`",
        bench("kernels", "--kernel-sizes", "64M,256M", "--rounds", "11"),
        "90% of a copy's bandwidth, AdamW faster than torch's",
        "not a wrong number: registers, occupancy, vectors (`ptxas -v`)",
        ("gpu",),
        limit=MOST,
        alone=True,
    ),
    *(
        Step(
            4,
            name,
            f"a step of one rank, {what}, against eager torch, its fused calls, and torch.compile",
            bench("one_rank", "--one-rank-sizes", sizes, "--rounds", "5", *more),
            "90% of a copy's bandwidth; at 1e8 elements 0.7 of eager torch's time",
            "small: launches of propose, upload, prepare and update; large: as `bench-kernels`",
            ("gpu",),
            limit=MOST,
            alone=True,
        )
        for name, what, sizes, more in (
            ("bench-one-rank", "1e6 and 1e8 elements", "2M,200M", ("--no-lists",)),
            ("bench-one-rank-large", "1e9 elements, and 400 tensors of as many", "2000M", ()),
        )
    ),
    Step(
        4,
        "bench-step",
        "a step of two ranks against all-reduce + AdamW(fused=True), and reduce-scatter + "
        "AdamW(fused=True) + all-gather",
        bench("step", "--sizes", "16M,64M", "--rounds", "7"),
        "faster than both on the same wire",
        "compare with three calls in a row: the pipeline's events, or the chunk's size",
        ("gpu",),
        alone=True,
    ),
    Step(
        4,
        "bench-step-mps",
        "the same with kernels side by side (Multi-Process Service)",
        (*MPS, *bench("step", "--sizes", "16M,64M", "--rounds", "7")),
        "faster than both on the same wire",
        "as above",
        ("gpu", "mps"),
        alone=True,
    ),
)
