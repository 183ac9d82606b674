"""Runs PyTorch's DistributedTest on a backend and sums it up.

python tests/python/c10d_suite/run.py                 everything Gloo passes, some minutes
python tests/python/c10d_suite/run.py --backend gloo --serve
                                                      on Gloo's name, served by fusedpg
python tests/python/c10d_suite/run.py --hosts 2+1     the same with ranks that take themselves to be
                                                      on two hosts

Which tests run depends on the backend's name: under the gate "gloo" those that
torch runs on Gloo, under "mpi" also those it keeps for MPI, which Gloo passes too.
Ends with 0 if nothing failed but what stands in known.txt with its reason.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Part:
    """The tests at one world size."""

    world_size: int
    gate: str
    small: bool
    tests: str


PARTS = (
    Part(2, "gloo", False, "gloo-w2.txt"),
    Part(3, "gloo", False, "gloo-w4-gloo-gate.txt"),
    Part(3, "mpi", True, "gloo-w4-mpi-gate.txt"),
    Part(4, "gloo", False, "gloo-w4-gloo-gate.txt"),
    Part(4, "mpi", True, "gloo-w4-mpi-gate.txt"),
)


def known() -> dict[str, str]:
    """Tests that cannot pass on a backend of another name, and why."""
    lines = (HERE / "known.txt").read_text().splitlines()
    pairs = (line.split(None, 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def outcomes(report: Path) -> Iterator[tuple[str, str, str]]:
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        outcome, text = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, text = "failed", (child.text or child.get("message") or "").strip()
            elif child.tag == "skipped":
                outcome, text = "skipped", child.get("message") or ""
        yield str(case.get("name")), outcome, text


def run(part: Part, backend: str, hosts: list[str], quick: bool, timeout: float) -> list[str]:
    """Runs one part; the names of the tests that failed without being known."""
    names = (HERE / part.tests).read_text().split()
    if quick:
        spread = (HERE / "spread.txt").read_text().split()
        names = [name for name in names if name in spread]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fusedpg-c10d-") as scratch:
        report = Path(scratch) / "report.xml"
        tests = Path(scratch) / "tests.txt"
        tests.write_text("\n".join(names))
        env = {
            **os.environ,
            "C10D_SUITE_BACKEND": backend,
            "C10D_SUITE_GATE": part.gate,
            "C10D_SUITE_SMALL": str(int(part.small)),
            "C10D_SUITE_SELECT": str(tests),
            "C10D_SUITE_HOSTS": ",".join(hosts),
            "WORLD_SIZE": str(part.world_size),
            "TEMP_DIR": scratch,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short"]
        command += ["--confcutdir", str(HERE), "--rootdir", str(HERE), "-c", os.devnull]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(HERE / "suite.py")]
        process = subprocess.Popen(
            command,
            env=env,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=timeout)[0]
        finally:
            if process.poll() is None:
                # Its ranks too, which are in its session.
                os.killpg(process.pid, 9)
                process.wait()
        if not report.exists():
            print(output[-5000:])
            raise SystemExit(f"world size {part.world_size}: no report")
        results = list(outcomes(report))
    reasons = known() if backend != "gloo" else {}
    failed = {name: text for name, outcome, text in results if outcome == "failed"}
    count = collections.Counter(outcome for _, outcome, _ in results)
    print(
        f"world size {part.world_size}, gate {part.gate}: {count['passed']} passed, "
        f"{count['failed']} failed, "
        f"{count['skipped']} skipped in {time.monotonic() - begin:.0f} s"
    )
    for name, outcome, text in results:
        if outcome == "skipped":
            print(f"  skipped {name}: {text}")
    for name, text in failed.items():
        if name in reasons:
            print(f"  known   {name}: {reasons[name]}")
        else:
            print(f"  FAILED  {name}\n{text[-3000:]}")
    return [name for name in failed if name not in reasons] + [
        name for name, outcome, _ in results if outcome == "skipped"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="fused")
    parser.add_argument(
        "--serve", action="store_true", help="with --backend gloo: as fusedpg serves it"
    )
    parser.add_argument("--world-size", type=int, choices=[2, 3, 4], help="2 and 4 unless given")
    parser.add_argument("--hosts", default="", help='ranks on each host, such as "2+1"')
    parser.add_argument("--quick", action="store_true", help="only those in spread.txt")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds per world size")
    arguments = parser.parse_args()
    if arguments.serve:
        os.environ["FUSEDPG_SERVE_GLOO"] = "1"
    if importlib.util.find_spec("expecttest") is None:
        raise SystemExit("torch's suite needs expecttest: pip install expecttest")
    counts = [int(count) for count in arguments.hosts.split("+") if count]
    hosts = [f"host{i}" for i, count in enumerate(counts) for _ in range(count)]
    sizes = [arguments.world_size] if arguments.world_size else [2, 4]
    bad = []
    for part in PARTS:
        if part.world_size in ([len(hosts)] if hosts else sizes):
            bad += run(part, arguments.backend, hosts, arguments.quick, arguments.timeout)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
