"""Builds one wheel for every supported torch, and tries it beside each of them.

    python tools/wheels.py                   # from 2.11 to the newest that pip would install
    python tools/wheels.py --torch 2.13 2.14

The wheel holds the engine once, and a small extension for each torch, which knows that torch's C++
classes. The torches are unpacked without what they depend on under build/wheels; only their headers
and libraries are needed. Then tools/try_wheel.py tries the wheel in an environment for each torch,
and beside the newest the sdist, too. --build-only leaves that out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

from try_wheel import ROOT, Clean, environment, pip, run

OLDEST = (2, 11)


def minor_release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def step(text: str) -> None:
    print(f"== {text}", flush=True)


def size_of(url: str) -> str:
    """Of a download, as its server says; a server may not say it."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return f"{int(answer.headers['Content-Length']) / 1e6:,.0f} MB"
    except (OSError, TypeError, ValueError):
        return "of unknown size"


def finds(torch: tuple[int, int]) -> bool:
    """Whether pip would install such a torch here; says how large that is."""
    wanted = "torch=={}.{}.*".format(*torch)
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", wanted)
    done = subprocess.run(pip(sys.executable, "install", *options), capture_output=True, text=True)
    if done.returncode != 0 and not any(
        known in done.stderr for known in ("No matching distribution", "ResolutionImpossible")
    ):
        sys.exit(f"pip could not look for {wanted}:\n{done.stderr}")
    if done.returncode != 0:
        return False
    (found,) = json.loads(done.stdout)["install"]
    url = found["download_info"]["url"]
    step(f"torch {found['metadata']['version']}: {size_of(url)}, {url.partition('#')[0]}")
    return True


def supported() -> list[tuple[int, int]]:
    """Minor releases from the oldest on, up to the first that pip does not find."""
    step("asking pip which torches there are")
    found = []
    torch = OLDEST
    while finds(torch):
        found.append(torch)
        torch = torch[0], torch[1] + 1
    return found


def unpacked(torch: tuple[int, int], work: Path) -> Path:
    """A folder that holds this torch's package, for its headers and libraries."""
    folder = work / "torch{}_{}".format(*torch)
    if not (folder / "torch/version.py").exists():
        wanted = "torch=={}.{}.*".format(*torch)
        step(f"downloading and unpacking {wanted} without what it depends on")
        run(pip(sys.executable, "install", "--no-deps", "--target", str(folder), wanted), work)
    return folder


def build(torches: list[tuple[int, int]], work: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, in dist/."""
    python = environment(work / "build")
    needed = ["build.txt", *(["nccl.txt"] if shutil.which("nvcc") else [])]
    for name in needed:
        run(pip(python, "install", "-r", str(ROOT / "requirements" / name)), work)
    made = work / "made"
    shutil.rmtree(made, ignore_errors=True)
    # setuptools would put files of an earlier wheel into this one.
    for left in [*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")]:
        shutil.rmtree(left)
    paths = ":".join(str(unpacked(torch, work)) for torch in torches)
    command = ["-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(made)]
    for kind in ("--sdist", "--wheel"):
        step("packing the sources" if kind == "--sdist" else "compiling for each torch: minutes")
        run(
            [str(python), *command, kind, str(ROOT)],
            work,
            FUSEDPG_BUILD_DIR=os.environ.get("FUSEDPG_BUILD_DIR", str(work / "cmake")),
            FUSEDPG_TORCH_PATHS=paths,
        )
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    inside = {Path(name).parent.name for name in zipfile.ZipFile(wheel).namelist() if "/_C" in name}
    if not inside >= {"pt{}_{}".format(*torch) for torch in torches}:
        sys.exit(f"{wheel.name} holds only {', '.join(sorted(inside))}")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    return Path(shutil.copy2(wheel, dist)), Path(shutil.copy2(sdist, dist))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="+", type=minor_release, help="minor releases, as 2.13")
    parser.add_argument("--build-only", action="store_true")
    args = parser.parse_args()
    torches = args.torch or supported()
    work = ROOT / "build/wheels"
    work.mkdir(parents=True, exist_ok=True)
    wheel, sdist = build(torches, work)
    shutil.rmtree(work / "build")
    names = ["{}.{}".format(*torch) for torch in torches]
    if not args.build_only:
        step("trying: each torch is installed with all that it depends on, a CUDA build's 5 GB")
        for name in names:
            step(f"trying the wheel beside torch {name}")
            Clean(f"{name}.*", wheel, work / "clean").try_it()
        step(f"building and trying the sdist beside torch {names[-1]}")
        Clean(f"{names[-1]}.*", sdist, work / "clean", "--no-build-isolation").try_it()
        shutil.rmtree(work / "clean")
    done = "built" if args.build_only else "built and tried"
    print(f"{done} for torch {', '.join(names)}:\n  {wheel.name}\n  {sdist.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
