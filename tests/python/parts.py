"""Two parts of the tests, and what each capability's tests did.

``--part quick`` is what `make test` runs: of each test function one set of parameters, the first
with two ranks if any has two; no file of REST and no function that is marked ``long``.
``--part rest`` is what that leaves out. Without the option there are both.
"""

from __future__ import annotations

import collections
import dataclasses
from fnmatch import fnmatch

import pytest

# Files of which nothing is quick.
REST = [
    "test_random.py",  # minutes of random programs, cases and faults
    "test_chaos.py",
    "test_compress_random.py",
    "test_compress_golden.py",
    "test_golden.py",
    "test_fusion_random.py",
    "test_c10d_suite.py",  # PyTorch's own tests
    "test_frameworks.py",  # `make test-frameworks` installs them
    "test_cuda_fake.py",  # a library of its own
    "test_fusion_cuda*.py",
    "test_one_gpu.py",
    "test_nccl_patch.py",
    "test_simt_mutants.py",
    "test_fusion_coconet.py",  # a compiler's run for each case
    "test_fusion_sums.py",
    "test_fusion_lists.py",
    "test_fusion_rank_agreement.py",
    "test_fusion_torch_modes.py",
    "test_fusion_tune.py",
    "test_fusion_rows.py",
]

# What a row of the summary is called, and whose files are in it: the first that fits.
CAPABILITIES = {
    "collectives, send and recv": [
        "test_collectives.py",
        "test_all_reduce_op.py",
        "test_async_op.py",
        "test_p2p.py",
        "test_numerics.py",
        "test_calls.py",
        "test_agreement.py",
        "test_random.py",
        "test_golden.py",
        "test_c10d_suite.py",
    ],
    "DDP": ["test_ddp.py", "test_detach.py", "test_comm_hook_random.py"],
    "fused optimizers": ["test_optim*.py", "test_dcp.py"],
    "fused operators": ["test_fused_ops.py"],
    "fused functions": ["test_fusion*.py", "test_private.py"],
    "Python frames of a call": ["test_walks.py"],
    "tensor parallel": ["test_tensor_parallel*.py", "test_sequence_parallel.py"],
    "compression": ["test_compress*.py", "test_quantized.py"],
    "plans": ["test_plan*.py"],
    "jobs, aggregators": ["test_aggreg*.py"],
    "zeros, sparse tensors": ["test_sparse.py"],
    "several hosts": ["test_hosts*.py", "test_host_*.py", "test_fused_hosts.py"],
    "Horovod's API": ["test_hvd*.py"],
    "failures and the end": [
        "test_faults.py",
        "test_exit.py",
        "test_fork.py",
        "test_again.py",
        "test_chaos.py",
        "test_signals.py",
        "test_limits.py",
    ],
    "torch's other parallelism": ["test_parallel.py", "test_frameworks.py"],
    'serving "gloo"': ["test_serve*.py"],
    "start, package, examples": [
        "test_launch.py",
        "test_mpi_launch.py",
        "test_package.py",
        "test_wheel*.py",
        "test_doctor*.py",
        "test_observability.py",
        "test_examples.py",
    ],
    "CUDA engine on a fake GPU": [
        "test_cuda_fake.py",
        "test_delegate.py",
        "test_one_gpu.py",
        "test_nccl_patch.py",
    ],
    "GPU": ["test_gpu_*.py"],
    "the project itself": [
        "test_benchmarks.py",
        "test_docs.py",
        "test_parts.py",
        "test_workflows.py",
        "test_source_checks.py",
        "test_*mutants.py",
    ],
}


def fits(file: str, patterns: list[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def capability(file: str) -> str:
    """The row of a test file; its own name if CAPABILITIES has none."""
    return next((name for name, of in CAPABILITIES.items() if fits(file, of)), file)


def has_two_ranks(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and (
        callspec.params.get("world_size") == 2 or "world2" in callspec.id
    )


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """One set of parameters of each test function."""
    functions = collections.defaultdict(list)
    for item in items:
        left_out = any(item.get_closest_marker(mark) for mark in ("long", "slow"))
        if not left_out and not fits(item.path.name, REST):
            functions[item.nodeid.partition("[")[0]].append(item)
    return {next(filter(has_two_ranks, sets), sets[0]) for sets in functions.values()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["quick", "rest"], help="one of the two parts (parts.py)")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves in `items` those of the part that was asked for."""
    part = config.getoption("--part")
    if part is not None:
        chosen = quick(items)
        left_out = [item for item in items if (item in chosen) != (part == "quick")]
        items[:] = [item for item in items if (item in chosen) == (part == "quick")]
        config.hook.pytest_deselected(items=left_out)


@dataclasses.dataclass
class Row:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table by capability, and each reason for skipping once."""
    rows: dict[str, Row] = collections.defaultdict(Row)
    reasons: collections.Counter[str] = collections.Counter()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            row = rows[capability(report.nodeid.partition("::")[0].rpartition("/")[2])]
            row.seconds += report.duration
            if outcome == "passed":
                row.passed += 1
            elif outcome in ("failed", "error"):
                row.failed += 1
            elif outcome == "skipped":
                row.skipped += 1
                if isinstance(report.longrepr, tuple):
                    reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    order = {name: place for place, name in enumerate(CAPABILITIES)}
    write = terminalreporter.write_line
    terminalreporter.section("by capability")
    write(f"{'':28}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}")
    for name in sorted(rows, key=lambda name: order.get(name, len(order))):
        row = rows[name]
        line = f"{name:28}{row.passed:>8}{row.failed:>8}{row.skipped:>8}{row.seconds:>9.1f}"
        write(line, red=row.failed > 0)
    for reason, count in reasons.most_common():
        write(f"skipped {count}: {reason}")
