"""Builds one wheel for every supported torch, and tries it beside each of them.

    python tools/wheels.py                   # from 2.11 to the newest that pip would install
    python tools/wheels.py --torch 2.13 2.14

The wheel holds the engine once, and a small extension for each torch, which knows that torch's C++
classes. The torches are unpacked without what they depend on under build/wheels; only their headers
and libraries are needed. Then, for each torch, an environment of its own: pip installs it and the
wheel, `python -m fusedpg` and examples/quickstart.py run. Beside the newest, pip also builds the
sdist. A CUDA build of torch takes about 5 GB, so environments go again (--keep keeps them).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
import zipfile
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


def unpacked(torch: tuple[int, int], work: Path) -> Path:
    """A folder that holds this torch's package, for its headers and libraries."""
    folder = work / "torch{}_{}".format(*torch)
    if not (folder / "torch/version.py").exists():
        wanted = "torch=={}.{}.*".format(*torch)
        run(pip(sys.executable, "install", "--no-deps", "--target", str(folder), wanted))
    return folder


def build(torches: list[tuple[int, int]], work: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, in dist/."""
    python = environment(work / "build")
    run(pip(python, "install", "-r", str(ROOT / "requirements/build.txt")))
    made = work / "made"
    shutil.rmtree(made, ignore_errors=True)
    # setuptools would put files of an earlier wheel into this one.
    for left in [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")]:
        shutil.rmtree(left)
    paths = ":".join(str(unpacked(torch, work)) for torch in torches)
    command = ["-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(made)]
    for kind in ("--sdist", "--wheel"):
        run(
            [str(python), *command, kind, str(ROOT)],
            FUSEDPG_BUILD_DIR=str(work / "cmake"),
            FUSEDPG_TORCH_PATHS=paths,
        )
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    inside = {Path(name).parent.name for name in zipfile.ZipFile(wheel).namelist() if "/_C" in name}
    if not inside >= {"pt{}_{}".format(*torch) for torch in torches}:
        sys.exit(f"{wheel.name} holds only {', '.join(sorted(inside))}")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    return Path(shutil.copy2(wheel, dist)), Path(shutil.copy2(sdist, dist))


def try_it(package: Path, torch: tuple[int, int], work: Path, *options: str) -> None:
    """In an environment that holds this torch, the package and what they depend on."""
    python = environment(work / "clean")
    run(pip(python, "install", "torch=={}.{}.*".format(*torch)))
    if options:
        run(pip(python, "install", "-r", str(ROOT / "requirements/build.txt")))
    run(pip(python, "install", *options, str(package)))
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
    torches = args.torch or supported()
    work = ROOT / "build/wheels"
    wheel, sdist = build(torches, work)
    for torch in torches:
        try_it(wheel, torch, work)
    try_it(sdist, torches[-1], work, "--no-build-isolation")
    if not args.keep:
        for folder in ("build", "clean"):
            shutil.rmtree(work / folder)
    beside = ", ".join("{}.{}".format(*torch) for torch in torches)
    print(f"built and tried beside torch {beside}:\n  {wheel.name}\n  {sdist.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
