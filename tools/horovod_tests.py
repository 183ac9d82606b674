"""Run Horovod's own tests of its torch API on fusedpg.hvd.

    git clone https://github.com/horovod/horovod
    python tools/horovod_tests.py horovod --ranks 2 --backend fused
    python tools/horovod_tests.py horovod --ranks 3 -k "not prescale"
    python tools/horovod_tests.py horovod --times 20

On 3 ranks no backend passes the tests with `prescale` in their names: they compare sums of three
half-precision numbers with three times the number in single precision, and allow no difference.
Where only some ranks notice it, these leave the test while the others wait for them.

The tests are those of the checkout; nothing else of it is used but a helper for threads. A package
`horovod` in a temporary folder serves fusedpg.hvd under their names. Two things that they take from
old torch are restored: `torch.FatalError`, and the absence of `torch.optim.Muon`, which refuses the
one-dimensional parameters of tests that try every optimizer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

LIMIT = 1800.0
"""Seconds after which ranks that have not ended are killed."""

SERVED = """
import torch

torch.FatalError = RuntimeError
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "hidden"  # tests look for the classes of torch.optim

from fusedpg.hvd import *
"""


def folder(checkout: Path, root: Path, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Fills a folder with the packages that Horovod's programs import, and with ``more`` files."""
    threads = "horovod/runner/util/threads.py"
    for name, text in {
        "horovod/__init__.py": "from fusedpg.hvd.run import run\n",
        "horovod/torch/__init__.py": SERVED,
        "horovod/runner/__init__.py": "",
        "horovod/runner/util/__init__.py": "",
        threads: (checkout / threads).read_text(),
        "mock.py": "from unittest.mock import *\n",
        **more,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def run(checkout: Path, ranks: int, backend: str, which: str) -> int:
    """Runs the tests once, on processes of their own; returns pytest's highest exit code."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tests = checkout.resolve() / "test/parallel/test_torch.py"
    with tempfile.TemporaryDirectory() as root:
        folder(checkout, Path(root))
        paths = [root, str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        shared = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOROVOD_SIZE": str(ranks),
            "HOROVOD_LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "1",
            "FUSEDPG_HVD_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", root]
        command += ["-p", "no:cacheprovider", "--timeout", "120", str(tests), "-k", which]
        logs = [Path(root, f"rank{rank}.log") for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            env = shared | {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
        deadline, codes = time.monotonic() + LIMIT, []
        for process in processes:
            try:
                codes.append(process.wait(max(deadline - time.monotonic(), 0)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        for rank, log in enumerate(logs):
            text = log.read_text()
            print(text if codes[rank] else "", end="")
            print(f"rank {rank}: {(text.splitlines() or [''])[-1]}", flush=True)
    return max(map(abs, codes))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of Horovod")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="fused")
    parser.add_argument("--times", type=int, default=1, help="stop at the first failure")
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    args = parser.parse_args()
    for _ in range(args.times):
        if code := run(args.checkout, args.ranks, args.backend, args.k):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
