"""Run Horovod's own tests of its torch API on fusedpg.hvd.

    git clone https://github.com/horovod/horovod
    python tools/horovod_tests.py horovod --ranks 2 --backend fused
    python tools/horovod_tests.py horovod --ranks 3 -k "not prescale"

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
from pathlib import Path

SERVED = """
import torch

torch.FatalError = RuntimeError
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "hidden"  # tests look for the classes of torch.optim

from fusedpg.hvd import *
"""


def folder(checkout: Path, root: Path) -> None:
    """Fills a folder with the packages that the tests import."""
    threads = "horovod/runner/util/threads.py"
    for name, text in {
        "horovod/__init__.py": "",
        "horovod/torch/__init__.py": SERVED,
        "horovod/runner/__init__.py": "",
        "horovod/runner/util/__init__.py": "",
        threads: (checkout / threads).read_text(),
        "mock.py": "from unittest.mock import *\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of Horovod")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="fused")
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    args = parser.parse_args()
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tests = args.checkout.resolve() / "test/parallel/test_torch.py"
    with tempfile.TemporaryDirectory() as root:
        folder(args.checkout, Path(root))
        paths = [root, str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        shared = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOROVOD_SIZE": str(args.ranks),
            "HOROVOD_LOCAL_SIZE": str(args.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "1",
            "FUSEDPG_HVD_BACKEND": args.backend,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", root]
        command += ["-p", "no:cacheprovider", "--timeout", "120", str(tests), "-k", args.k]
        logs = [Path(root, f"rank{rank}.log") for rank in range(args.ranks)]
        ranks = []
        for rank, log in enumerate(logs):
            env = shared | {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
        codes = [process.wait() for process in ranks]
        for rank, log in enumerate(logs):
            text = log.read_text()
            print(text if codes[rank] else "", end="")
            print(f"rank {rank}: {text.splitlines()[-1]}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
