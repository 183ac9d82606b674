"""Compiles generated source with the user's compiler, once a machine.

Libraries are kept under the user's cache directory by a hash of all that they depend on. Processes
that need the same one at a time wait for a lock, which the system releases when its holder dies. A
file ends with the digest of what is before it, and appears under its name when it is whole. All
of it, the compiler's temporary files too, is in directories that `private` has checked.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from fusedpg import _fork
from fusedpg._registration import load_extension
from fusedpg.fusion.codegen import code
from fusedpg.fusion.errors import FusionError
from fusedpg.fusion.private import content, directory

_log = logging.getLogger("fusedpg")
# For compiling, and for waiting for who compiles.
_DEADLINE = 300.0
_DIGEST = 32
# GCC threads jumps through conditions that depend on each other (a rounded value that is a NaN, of
# a maximum that is one), and does not vectorise the loop then, which takes 20 times as long.
_BASE = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"),
    "-fno-thread-jumps",
)
_ISA = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mprefer-vector-width=512",
    "AVX2": "",
}
# The function that each source defines; a library exports it under its digest, so that no library
# is ever taken for that of another source.
_ENTRY = "fusedpg_epilogue_2"
Make = Callable[[Path, Path, float], None]
Made = TypeVar("Made")
_lock = _fork.lock()
# By source; 0: it failed. It is not tried again, as all ranks would have to agree when.
_functions: dict[str, int] = {}
_libraries: list[ctypes.CDLL] = []  # stay loaded


class CompileError(FusionError):
    """Why there is no library."""


@functools.lru_cache
def _compiler(given: str) -> tuple[list[str], str]:
    """The command, as "ccache g++" is one of two words, and the version."""
    for name, *rest in [shlex.split(given)] if given.strip() else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(name)
        if path is None:
            continue
        command = [os.path.abspath(path), *rest]  # it works in another directory
        found = subprocess.run([*command, "--version"], capture_output=True, timeout=60)
        if found.returncode == 0:
            return command, found.stdout.decode(errors="replace")
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


def _whole(path: Path) -> bytes | None:
    """What was made, without the digest behind it; None where it is not whole."""
    found = content(path) or b""
    made = found[:-_DIGEST]
    return made if made and hashlib.sha256(made).digest() == found[-_DIGEST:] else None


def _run(command: list[str], place: Path, deadline: float) -> None:
    """The compiler, in a directory where it leaves its temporary files, too.

    It is ended with all its processes when the time is over.
    """
    process = subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, "TMPDIR": "."},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # compilers speak the user's language
        start_new_session=True,
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


def _build(path: Path, text: str, suffix: str, make: Make, name: str, deadline: float) -> None:
    """Under the lock of `path`."""
    for stale in path.parent.glob(f"{path.stem}.*.tmp"):  # of who died
        shutil.rmtree(stale, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent))
    try:
        begun = time.monotonic()
        _log.info("compiling %s, once: %s", name, path.resolve())
        source, result = place / f"program{suffix}", place / f"program{path.suffix}"
        source.write_text(text)
        make(source, result, deadline)
        made = result.read_bytes()
        with result.open("ab") as file:
            os.fchmod(file.fileno(), 0o700)  # whatever the umask left to others
            file.write(hashlib.sha256(made).digest())
            file.flush()
            os.fsync(file.fileno())
        source.replace(path.with_suffix(suffix))
        result.replace(path)
        _log.info("compiled %s in %.1f s", name, time.monotonic() - begun)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def compiled(
    facts: list[str],
    text: str,
    suffixes: tuple[str, str],
    make: Make,
    name: str,
    use: Callable[[Path, bytes], Made],
) -> Made:
    """What `use` gives of the file that `make` makes of a source; one process makes it, once.

    Args:
        facts: what else the file depends on.
        suffixes: of source and file.
        make: is given the paths of both, and when it must be ready.
        use: is given the path, which is good until it returns, and what was made.
    """
    _, cache, *_ = load_extension()._fusion_settings()
    digest = hashlib.sha256("\n".join([code(text), *facts]).encode()).hexdigest()[:40]
    with directory(cache, "fusion") as place:
        path = place / f"{digest}{suffixes[1]}"
        made = _whole(path)
        if made is None:
            made = _made(path, text, suffixes[0], make, name)
        return use(path, made)


def _made(path: Path, text: str, suffix: str, make: Make, name: str) -> bytes:
    deadline = time.monotonic() + _DEADLINE
    with path.with_suffix(".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                made = _whole(path)
                if made is not None:
                    return made
                if time.monotonic() > deadline:
                    raise CompileError(
                        f"another process compiles {path.resolve()} for {_DEADLINE:.0f} s"
                    ) from None
                time.sleep(0.02)
        try:
            made = _whole(path)
            if made is None:
                _build(path, text, suffix, make, name, deadline)
                made = _whole(path)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile has the file open, too
    if made is None:
        raise CompileError(f"{path.resolve()} was changed while it was made")
    return made


def _library(text: str, name: str) -> int:
    """The address of the function of a source, in a library that stays loaded."""
    _, _, given, _ = load_extension()._fusion_settings()
    compiler, version = _compiler(given)
    flags = _flags(text)
    exported = f"fusedpg_{hashlib.sha256(code(text).encode()).hexdigest()[:40]}"

    def make(source: Path, library: Path, deadline: float) -> None:
        names = [source.name, "-o", library.name, f"-D{_ENTRY}={exported}"]
        _run([*compiler, *names, *flags], source.parent, deadline)

    def load(path: Path, _: bytes) -> int:
        # By a path that no other library has: dlopen gives what it has loaded under the same one.
        library = ctypes.CDLL(str(path))
        _libraries.append(library)
        return ctypes.cast(getattr(library, exported), ctypes.c_void_p).value or 0

    facts = [*flags, torch.__version__, *compiler, version, exported]
    return compiled(facts, text, (".cpp", ".so"), make, name, load)


def function(text: str, name: str) -> int:
    """The address of the function of a source; 0 where it cannot be had, which is logged once."""
    key = code(text)
    with _lock:
        if key not in _functions:
            try:
                _functions[key] = _library(text, name)
            except (FusionError, OSError, subprocess.SubprocessError, AttributeError) as error:
                _functions[key] = 0
                _log.warning("%s is not compiled, and runs operation by operation: %s", name, error)
        return _functions[key]
