"""Builds a wheel for each supported torch, and tries each one in an environment of its own.

    python tools/wheels.py                   # from 2.11 to the newest that pip would install
    python tools/wheels.py --torch 2.13 2.14

A wheel runs with one minor release of torch, which its version names (0.1.0+pt213) and its metadata
asks for. It is built beside that torch in one fresh environment under build/wheels. In another one
pip installs the wheel alone, choosing a torch by the metadata, and examples/quickstart.py trains on
two ranks. A CUDA build of torch takes about 5 GB in each, so both go again (--keep keeps them).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (2, 11)


def minor_release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def pip(python: Path | str, *arguments: str) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]


def finds(torch: tuple[int, int]) -> bool:
    """Whether pip would install such a torch here."""
    wanted = "torch=={}.{}.*".format(*torch)
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", wanted)
    done = subprocess.run(pip(sys.executable, "install", *options), capture_output=True, text=True)
    if done.returncode != 0 and not any(
        known in done.stderr for known in ("No matching distribution", "ResolutionImpossible")
    ):
        sys.exit(f"pip could not look for {wanted}:\n{done.stderr}")
    return done.returncode == 0


def supported() -> list[tuple[int, int]]:
    """Minor releases from the oldest on, up to the first that pip does not find."""
    found = []
    torch = OLDEST
    while finds(torch):
        found.append(torch)
        torch = torch[0], torch[1] + 1
    return found


def run(command: list[str], **env: str) -> None:
    print("+", " ".join(command), flush=True)
    # Not in the checkout: `import fusedpg` must find what was installed.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    subprocess.run(command, env=variables, cwd=ROOT / "build", check=True)


def environment(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    return folder / "bin/python"


def build(torch: tuple[int, int], work: Path) -> Path:
    python = environment(work / "build")
    build_requirements = str(ROOT / "requirements/build.txt")
    run(pip(python, "install", "torch=={}.{}.*".format(*torch), "-r", build_requirements))
    made = work / "made"
    shutil.rmtree(made, ignore_errors=True)
    # setuptools would put files of an earlier wheel into this one.
    for left in [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")]:
        shutil.rmtree(left)
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(made), str(ROOT)]
    run([str(python), *command], FUSEDPG_BUILD_DIR=str(work / "cmake"))
    (wheel,) = made.glob("*.whl")
    if "+pt{}{}-".format(*torch) not in wheel.name:
        sys.exit(f"{wheel.name} does not name its torch")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    return Path(shutil.copy2(wheel, dist))


def smoke_test(wheel: Path, work: Path) -> None:
    python = environment(work / "clean")
    run(pip(python, "install", str(wheel)))
    run(pip(python, "check"))
    run([str(python), "-m", "fusedpg"])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([str(python), *launcher, str(ROOT / "examples/quickstart.py")])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", type=minor_release, help="minor releases, as 2.13")
    parser.add_argument("--keep", action="store_true", help="the environments")
    args = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    wheels = []
    for torch in args.torch or supported():
        work = ROOT / "build/wheels/pt{}{}".format(*torch)
        wheel = build(torch, work)
        if not args.keep:
            shutil.rmtree(work / "build")
        smoke_test(wheel, work)
        if not args.keep:
            shutil.rmtree(work / "clean")
        wheels.append(wheel)
    print("built and tried:", *(wheel.name for wheel in wheels), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
