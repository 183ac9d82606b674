"""Compiles generated source with the user's compiler, once a machine.

Libraries are kept under the user's cache directory by a hash of all that they depend on. Processes
that need the same one at a time wait for a lock, which the system releases when its holder dies. A
file ends with the digest of what is before it, and appears under its name when it is whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch

from fusedpg._registration import load_extension
from fusedpg.fusion.codegen import code
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.private import directory

_log = logging.getLogger("fusedpg")
# For compiling, and for waiting for who compiles.
_DEADLINE = 300.0
_DIGEST = 32
_BASE = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
_ISA = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mprefer-vector-width=512",
    "AVX2": "",
}
_lock = threading.Lock()
_functions: dict[str, int] = {}  # by source; 0: it failed
_libraries: list[ctypes.CDLL] = []  # stay loaded


class CompileError(FusionError):
    """Why there is no library."""


@functools.lru_cache
def _compiler(given: str) -> tuple[str, str]:
    """Path and version."""
    for name in [given] if given else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path is None:
            continue
        found = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        if found.returncode == 0:
            return path, found.stdout
    raise CompileError(f"there is no C++ compiler ({given or 'c++, g++, clang++'}); CXX names one")


def _flags(text: str) -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    flags = [*_BASE, "-fno-trapping-math"]
    if capability in _ISA:
        flags += ["-mavx2", "-mfma", "-mf16c", *_ISA[capability].split()]
    if "<ATen/" in text:
        root = Path(torch.__file__).parent
        vector = capability if capability in _ISA else "DEFAULT"
        flags += [f"-DCPU_CAPABILITY={vector}", f"-DCPU_CAPABILITY_{vector}"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        flags += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    return flags


def _whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return (
        len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]
    )


def _run(command: list[str], deadline: float) -> None:
    """The compiler, which is ended with all its processes when the time is over."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CompileError(f"{command[0]} was not ready in {_DEADLINE:.0f} s") from None
        raise
    if process.returncode != 0:
        raise CompileError(f"{command[0]} failed ({process.returncode}):\n{said[-4000:]}")


def _build(path: Path, text: str, command: list[str], name: str, deadline: float) -> None:
    """Under the lock of `path`."""
    for stale in path.parent.glob(f"{path.stem}.*.tmp"):  # of who died
        shutil.rmtree(stale, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent))
    try:
        begun = time.monotonic()
        _log.info("compiling %s, once: %s", name, path)
        source, library = place / "program.cpp", place / "program.so"
        source.write_text(text)
        _run([command[0], str(source), "-o", str(library), *command[1:]], deadline)
        content = library.read_bytes()
        with library.open("ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        source.replace(path.with_suffix(".cpp"))
        library.replace(path)
        _log.info("compiled %s in %.1f s", name, time.monotonic() - begun)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _library(text: str, name: str) -> Path:
    _, cache, given = load_extension()._fusion_settings()
    compiler, version = _compiler(given)
    flags = _flags(text)
    facts = "\n".join([code(text), *flags, torch.__version__, compiler, version])
    path = directory(cache, "fusion") / f"{hashlib.sha256(facts.encode()).hexdigest()[:40]}.so"
    if _whole(path):
        return path
    deadline = time.monotonic() + _DEADLINE
    with path.with_suffix(".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if _whole(path):
                    return path
                if time.monotonic() > deadline:
                    raise CompileError(
                        f"another process compiles {path} for {_DEADLINE:.0f} s"
                    ) from None
                time.sleep(0.02)
        if not _whole(path):
            _build(path, text, [compiler, *flags], name, deadline)
    return path


def function(text: str, name: str) -> int:
    """The address of the function of a source; 0 where it cannot be had, which is logged once."""
    key = code(text)
    with _lock:
        if key not in _functions:
            try:
                library = ctypes.CDLL(str(_library(text, name)))
                _libraries.append(library)
                address = ctypes.cast(library.fusedpg_epilogue_2, ctypes.c_void_p).value
                _functions[key] = address or 0
            except (FusionError, OSError, subprocess.SubprocessError, AttributeError) as error:
                _functions[key] = 0
                _log.warning("%s is not compiled, and runs operation by operation: %s", name, error)
        return _functions[key]
