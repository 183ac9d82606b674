"""Tries a package of dist/ as a user would: a fresh environment, an empty folder.

    python tools/try_wheel.py 2.12.1              # or make try-wheel TORCH=2.12.1
    python tools/try_wheel.py 2.12.1 --sdist      # pip builds the sources beside that torch
    python tools/try_wheel.py 2.12.1 --unknown    # as if the wheel were older than that torch

pip installs this torch with all that it depends on, and the package. Then run: `python -m fusedpg
check`; examples/quickstart.py; a plain DDP training on Gloo, on "fused", and on "gloo" with
FUSEDPG_SERVE_GLOO=1, which must agree in every loss. With --unknown the extension for this torch is
taken out of the installed wheel: the error must have a command, and that command must work in the
unpacked sdist. A CUDA build of torch takes about 5 GB, so the environment goes again. --keep keeps
it, and the next --keep installs only the package anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 5400  # seconds for one command; the longest builds the package for every torch
# Of the checkout, or of whoever builds there: a user has none of them.
NOT_A_USERS = ("PYTHONPATH", "FUSEDPG_TORCH_PATHS", "FUSEDPG_BUILD_DIR")


def pip(python: Path | str, *arguments: str) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]


def run(command: list[str], cwd: Path, **env: str) -> None:
    print("+", *command, flush=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    subprocess.run(command, env=variables, cwd=cwd, check=True, timeout=LIMIT)


def environment(folder: Path) -> Path:
    """The Python of a fresh environment."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    return folder / "bin/python"


def packages() -> tuple[Path, Path]:
    """The wheel for this Python, and the sdist."""
    tag = "cp{}{}".format(*sys.version_info[:2])
    version = re.search(r'__version__ = "(.+)"', (ROOT / "fusedpg/__init__.py").read_text())[1]
    wheels = list((ROOT / "dist").glob(f"fusedpg-{version}-{tag}-*.whl"))
    sdist = ROOT / f"dist/fusedpg-{version}.tar.gz"
    if len(wheels) != 1 or not sdist.exists():
        sys.exit(f"dist/ needs one wheel of {version} for {tag} and an sdist: make wheels")
    return wheels[0], sdist


class Clean:
    """An environment with a torch and a package, and an empty folder to run programs in."""

    def __init__(
        self, torch: str, package: Path, folder: Path, *options: str, again: bool = False
    ) -> None:
        self.python = folder / "environment/bin/python"
        self.empty = folder / "empty"
        shutil.rmtree(self.empty, ignore_errors=True)
        self.empty.mkdir(parents=True)
        if again and self.python.exists():
            self.pip("uninstall", "--yes", "fusedpg")
        else:
            environment(folder / "environment")
        self.pip("install", f"torch=={torch}")
        if options:
            self.pip("install", "-r", str(ROOT / "requirements/build.txt"))
        self.pip("install", *options, str(package))
        self.pip("check")

    def pip(self, *arguments: str) -> None:
        run(pip(self.python, *arguments), self.empty)

    def ranks(self, program: str, *arguments: str, **env: str) -> None:
        """Two ranks of a copy of the program: no fusedpg lies beside it."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        with tempfile.TemporaryDirectory() as folder:
            script = shutil.copy2(ROOT / program, folder)
            run([str(self.python), *launcher, str(script), *arguments], self.empty, **env)

    def train(self, backend: str, **env: str) -> tuple[str, str, list[float]]:
        """Class and name of the group, and the losses."""
        result = self.empty / "result.json"
        self.ranks("tools/try_ddp.py", backend, str(result), **env)
        found = json.loads(result.read_text())
        result.unlink()
        return found["class"], found["backend"], found["losses"]

    def try_it(self) -> None:
        run([str(self.python), "-m", "fusedpg"], self.empty)
        run([str(self.python), "-m", "fusedpg", "check"], self.empty)
        self.ranks("examples/quickstart.py")
        *gloo, wanted = self.train("gloo", FUSEDPG_SERVE_GLOO="0")
        *fused, ours = self.train("fused")
        *served, theirs = self.train("gloo", FUSEDPG_SERVE_GLOO="1")
        groups = [gloo, fused, served]
        if groups != [
            ["ProcessGroupGloo", "gloo"],
            ["ProcessGroupFused", "fused"],
            ["ProcessGroupFused", "gloo"],
        ]:
            sys.exit(f"these groups were made: {groups}")
        for losses in (ours, theirs):
            if not all(map(math.isclose, losses, wanted)) or len(losses) != len(wanted):
                sys.exit(f"losses on Gloo:\n{wanted}\nand on fusedpg:\n{losses}")
        if not wanted[-1] < 0.5 * wanted[0]:
            sys.exit(f"nothing was learned: {wanted}")

    def lose_extension(self) -> None:
        """The installed wheel is now one that was built before this torch appeared."""
        program = "import fusedpg, torch; print(fusedpg.__path__[0], torch.__version__)"
        asked = subprocess.run(
            [str(self.python), "-c", program], cwd=self.empty, capture_output=True, check=True
        )
        package, torch = asked.stdout.decode().split()
        shutil.rmtree(Path(package) / "pt{}_{}".format(*torch.split(".")[:2]))

    def advice(self) -> str:
        """The command in the error of a torch that the package was not built for."""
        program = (
            "import torch.distributed as dist\n"
            "dist.init_process_group('fused', store=dist.HashStore(), rank=0, world_size=1)\n"
        )
        done = subprocess.run(
            [str(self.python), "-c", program], cwd=self.empty, capture_output=True, text=True
        )
        print(done.stderr, flush=True)
        found = re.search(r"^ImportError: .* in a checkout of fusedpg: (.+)", done.stderr, re.M)
        if done.returncode == 0 or found is None:
            sys.exit("there is no error that says how to build it")
        return found[1]


def try_unknown(clean: Clean, sdist: Path, folder: Path) -> None:
    clean.lose_extension()
    command = clean.advice()
    sources = folder / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        # The first releases of Python 3.10 and 3.11 have no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(sources)
    (checkout,) = sources.iterdir()
    # As in a shell where the environment is active.
    path = f"{clean.python.parent}:{os.environ['PATH']}"
    run(["bash", "-euc", command], checkout, PATH=path, VIRTUAL_ENV=str(clean.python.parent.parent))
    clean.try_it()


def main() -> int:
    for name in NOT_A_USERS:
        os.environ.pop(name, None)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("torch", help="as pip knows it: 2.12.1 or 2.12.*")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sdist", action="store_true", help="build the sources there")
    kind.add_argument("--unknown", action="store_true", help="take this torch's extension away")
    parser.add_argument(
        "--keep", action="store_true", help="the environment, and use the one that was kept"
    )
    args = parser.parse_args()
    wheel, sdist = packages()
    folder = ROOT / "build/try" / args.torch.replace("*", "x")
    if args.sdist:
        Clean(args.torch, sdist, folder, "--no-build-isolation", again=args.keep).try_it()
    else:
        clean = Clean(args.torch, wheel, folder, again=args.keep)
        if args.unknown:
            try_unknown(clean, sdist, folder)
        else:
            clean.try_it()
    if not args.keep:
        shutil.rmtree(folder)
    print(f"tried with torch {args.torch}: {sdist.name if args.sdist else wheel.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
