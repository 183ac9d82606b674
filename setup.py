"""Builds the engine and fusedpg._C with CMake and Ninja, and says which torches they run with.

Everything else is in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "fusedpg/__init__.py").read_text())[1]
MIN_TORCH = (2, 11)
MIN_CMAKE = (3, 22)
CUDA_LIBRARY = "libfusedpg_cuda.so"


def find_cmake() -> str:
    """The system's CMake when it is new enough, else the one of the `cmake` wheel."""
    beside_python = Path(sys.executable).parent / "cmake"
    candidates = [os.environ.get("CMAKE"), shutil.which("cmake"), str(beside_python)]
    for candidate in candidates:
        if not candidate or not shutil.which(candidate):
            continue
        result = subprocess.run(
            [candidate, "--version"], capture_output=True, text=True, check=False
        )
        found = re.search(r"version (\d+)\.(\d+)", result.stdout)
        if found and tuple(map(int, found.groups())) >= MIN_CMAKE:
            return candidate
    raise SystemExit("fusedpg needs CMake >= 3.22: pip install -r requirements/build.txt")


def find_ninja() -> str:
    beside_python = Path(sys.executable).parent / "ninja"
    for candidate in (os.environ.get("NINJA"), shutil.which("ninja"), str(beside_python)):
        if candidate and shutil.which(candidate):
            return candidate
    raise SystemExit("fusedpg needs Ninja: pip install -r requirements/build.txt")


def runs(code: str, *args: str) -> bool:
    """Whether the code runs in a fresh Python whose torch does not load our plugin."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([sys.executable, "-c", code, *args], env=env, check=False).returncode == 0


NO_TORCH = (
    "fusedpg is built against the torch of this environment and none is installed.\n"
    "Install torch >= 2.11 first, then: pip install --no-build-isolation ."
)


def torch_paths() -> list[str]:
    """Folders with a torch each, of different minor releases; none: this environment's torch."""
    return [path for path in os.environ.get("FUSEDPG_TORCH_PATHS", "").split(":") if path]


def torch_releases() -> list[tuple[int, int]]:
    """The minor releases of torch that the package is built for, in order."""
    found = []
    for path in torch_paths() or [None]:
        where = {} if path is None else {"path": [path]}
        distribution = next(iter(importlib.metadata.distributions(name="torch", **where)), None)
        if distribution is None:
            raise SystemExit(
                NO_TORCH if path is None else f"FUSEDPG_TORCH_PATHS: no torch in {path}"
            )
        major, minor = (int(part) for part in distribution.version.split(".")[:2])
        if (major, minor) < MIN_TORCH:
            raise SystemExit(
                "fusedpg needs torch >= {}.{}, and this is {}".format(
                    *MIN_TORCH, distribution.version
                )
            )
        found.append((major, minor))
    return sorted(found)


def wanted_torch() -> str:
    """What the metadata ask of pip.

    Sources do with any supported torch; what is built, with the releases it was built for.
    """
    if not {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv):
        return "torch>={}.{}".format(*MIN_TORCH)
    releases = torch_releases()
    (first_major, first), (major, last) = releases[0], releases[-1]
    wanted = [f"torch>={first_major}.{first}", f"<{major}.{last + 1}"]
    for before, after in itertools.pairwise(releases):
        if before[0] == after[0]:
            wanted += [f"!={before[0]}.{minor}.*" for minor in range(before[1] + 1, after[1])]
    return ",".join(wanted)


LOAD_MODULE = """
import importlib.util, sys, torch.distributed
importlib.util.module_from_spec(importlib.util.spec_from_file_location("fusedpg._C", sys.argv[1]))
"""


def check_module(path: Path) -> None:
    """A module linked with a symbol missing would break every `import torch` from now on."""
    if not runs(LOAD_MODULE, str(path)):
        raise SystemExit(f"the module that was built cannot be loaded: {path}")


def built_files(folder: Path) -> list[Path]:
    """What a build leaves, relative to its folder: the engine, a module a torch, the kernels."""
    found = [*folder.glob("*.so"), *folder.glob("pt*_*/_C*.so"), folder / "_build_info.py"]
    return [path.relative_to(folder) for path in found if path.exists()]


class CMakeBuild(build_ext):
    """One CMake build for everything native; the build folder is kept and reused."""

    def build_extension(self, ext: Extension) -> None:
        releases = torch_releases()
        cmake = find_cmake()
        build_dir = Path(os.environ.get("FUSEDPG_BUILD_DIR", ROOT / "build" / "cmake"))
        built = build_dir / "fusedpg"
        build_dir.mkdir(parents=True, exist_ok=True)
        editable = self.editable_mode or bool(os.environ.get("FUSEDPG_ABSOLUTE_RPATH"))
        build_type = os.environ.get("CMAKE_BUILD_TYPE", "Release")
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={find_ninja()}",
            f"-DCMAKE_BUILD_TYPE={build_type}",
            f"-DFUSEDPG_VERSION={VERSION}",
            f"-DFUSEDPG_PYTHON={sys.executable}",
            f"-DFUSEDPG_TORCH_PATHS={';'.join(torch_paths())}",
            f"-DFUSEDPG_ABSOLUTE_RPATH={'ON' if editable else 'OFF'}",
            f"-DFUSEDPG_MODULE_DIR={built}",
            "-DFUSEDPG_BUILD_PYTHON=ON",
            "-DFUSEDPG_BUILD_TESTS=OFF",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        # A module of an earlier build, for a torch that is not asked for now, must not be shipped.
        wanted = {"pt{}_{}".format(*release) for release in releases}
        for folder in built.glob("pt*_*"):
            if folder.name not in wanted:
                shutil.rmtree(folder)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--parallel", jobs], check=True)
        if not torch_paths():
            check_module(next(built.glob(f"{next(iter(wanted))}/_C*.so")))

        folder = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        for target in {folder, ROOT / "fusedpg"} if self.editable_mode else {folder}:
            for old in built_files(target):
                (target / old).unlink()
            for file in built_files(built):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                # A new file, never a rewrite: a process may have the old one mapped.
                shutil.copy2(built / file, target / file)

    # The files lie where they belong when build_extension() returns.
    def copy_extensions_to_source(self) -> None:
        pass

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "fusedpg"
        return [str(folder / file) for file in built_files(folder)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    version=VERSION,
    install_requires=[wanted_torch(), "numpy"],
    ext_modules=[Extension("fusedpg._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
