"""Builds fusedpg._C with CMake and Ninja, and ties what was built to its torch.

Everything else is in pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
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
    "fusedpg is built against the torch of this environment and none can be imported.\n"
    "Install torch >= 2.11 first, then: pip install --no-build-isolation ."
)


def check_torch() -> None:
    if not runs("import torch"):
        raise SystemExit(NO_TORCH)


def version_and_torch() -> tuple[str, str]:
    """The version of the package, and which torch it needs.

    Sources do with any supported torch. What is built runs with one minor release, so its version
    names that one and its metadata keep pip from installing it beside another.
    """
    oldest = "torch>={}.{}".format(*MIN_TORCH)
    if not {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv):
        return VERSION, oldest
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(NO_TORCH) from None
    major, minor = (int(part) for part in installed.split(".")[:2])
    if (major, minor) < MIN_TORCH:
        raise SystemExit(f"fusedpg needs {oldest}, and torch {installed} is installed")
    return f"{VERSION}+pt{major}{minor}", f"torch>={major}.{minor},<{major}.{minor + 1}"


LOAD_MODULE = """
import importlib.util, sys, torch.distributed
importlib.util.module_from_spec(importlib.util.spec_from_file_location("fusedpg._C", sys.argv[1]))
"""


def check_module(path: Path) -> None:
    """A module linked with a symbol missing would break every `import torch` from now on."""
    if not runs(LOAD_MODULE, str(path)):
        raise SystemExit(f"the module that was built cannot be loaded: {path.name}")


def replace_library(source: Path, target: Path) -> None:
    """A new file, never a rewrite: a process may have the old one mapped."""
    target.unlink(missing_ok=True)
    if source.exists():
        shutil.copy2(source, target)


class CMakeBuild(build_ext):
    """One CMake build for the one extension; the build folder is kept and reused."""

    def build_extension(self, ext: Extension) -> None:
        check_torch()
        cmake = find_cmake()
        build_dir = Path(os.environ.get("FUSEDPG_BUILD_DIR", ROOT / "build" / "cmake"))
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
            f"-DFUSEDPG_ABSOLUTE_RPATH={'ON' if editable else 'OFF'}",
            f"-DFUSEDPG_MODULE_DIR={build_dir / 'fusedpg'}",
            "-DFUSEDPG_BUILD_PYTHON=ON",
            "-DFUSEDPG_BUILD_TESTS=OFF",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--parallel", jobs], check=True)

        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        built = build_dir / "fusedpg" / module.name
        check_module(built)
        targets = [module.parent]
        if self.editable_mode:
            targets.append(ROOT / "fusedpg")
        for target in targets:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build_dir / "fusedpg" / "_build_info.py", target)
            # Where none was built, one of an earlier build goes.
            replace_library(build_dir / "fusedpg" / CUDA_LIBRARY, target / CUDA_LIBRARY)
        replace_library(built, module)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            name = Path(self.get_ext_filename(ext.name)).name
            (ROOT / "fusedpg" / name).unlink(missing_ok=True)
        super().copy_extensions_to_source()


version, torch = version_and_torch()
setup(
    version=version,
    install_requires=[torch, "numpy"],
    ext_modules=[Extension("fusedpg._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
