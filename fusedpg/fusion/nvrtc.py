"""Compiles generated CUDA source with NVRTC, once a machine, and loads it into the driver.

NVRTC is a library that compiles in the calling process and needs no GPU. It is loaded by ctypes:
torch's CUDA builds bring it as a wheel, which can be had without them, too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fusedpg import _fork
from fusedpg._registration import load_extension
from fusedpg.fusion import compile
from fusedpg.fusion.codegen import Source
from fusedpg.fusion.codegen_cuda import ENTRY, parameters
from fusedpg.fusion.errors import FusionError

_log = logging.getLogger("fusedpg")
# Each operation rounds as the CPU's does: nothing is contracted, flushed or approximated.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_MAJORS = (13, 12)
_lock = _fork.lock()
# By source and device. Programs hold them, and groups that have run them.
_kernels: weakref.WeakValueDictionary[tuple[str, int], object] = weakref.WeakValueDictionary()
_failed: set[tuple[str, int]] = set()


class Nvrtc:
    """A library, and what of it is used."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Which the library asks for by name, and finds if it is loaded.
        for built_in in Path(path).parent.glob("libnvrtc-builtins.so*") if "/" in path else ():
            ctypes.CDLL(str(built_in))
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            said = self._library.nvrtcGetErrorString(result).decode()
            raise compile.CompileError(f"{name} of {self.path} failed: {said}")

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def architecture(self, device: int) -> int:
        """The newest that a device of this one understands."""
        known = [number for number in self._architectures() if number <= device]
        if not known:
            raise compile.CompileError(f"{self.path} knows no GPU of capability {device / 10:.1f}")
        return max(known)

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, content)
        return content.value

    def ptx(self, text: str, architecture: int) -> bytes:
        """Compiles a source.

        Raises:
            CompileError: with what the compiler says.
        """
        program = ctypes.c_void_p()
        given = ctypes.byref(program), text.encode(), b"program.cu", 0, None, None
        self._call("nvrtcCreateProgram", *given)
        try:
            flags = [f"--gpu-architecture=compute_{architecture}", *OPTIONS]
            options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            try:
                self._call("nvrtcCompileProgram", program, len(flags), options)
            except compile.CompileError as error:
                said = self._text(program, "ProgramLog").decode(errors="replace")
                raise compile.CompileError(f"{error}\n{said[-4000:]}") from None
            return self._text(program, "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def _candidates() -> Iterator[str]:
    """Of the CUDA that torch was built with first: a newer one may make what its driver refuses."""
    torchs = getattr(torch.version, "cuda", None)
    first = int(torchs.split(".")[0]) if torchs else _MAJORS[0]
    for major in sorted(_MAJORS, key=lambda number: number != first):
        for package in ("nvidia.cuda_nvrtc", f"nvidia.cu{major}"):
            try:
                found = importlib.util.find_spec(package)
            except ModuleNotFoundError:
                continue
            for folder in found.submodule_search_locations or () if found else ():
                path = Path(folder) / "lib" / f"libnvrtc.so.{major}"
                if path.exists():
                    yield str(path)
        yield f"libnvrtc.so.{major}"


@functools.lru_cache
def library(given: str) -> Nvrtc:
    """NVRTC.

    Raises:
        CompileError: where there is none.
    """
    for path in [given] if given else _candidates():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError) as error:
            if given:
                raise compile.CompileError(f"FUSEDPG_NVRTC_LIB={given}: {error}") from None
    raise compile.CompileError(
        "there is no NVRTC: install nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc for CUDA 13, or "
        "set FUSEDPG_NVRTC_LIB to a libnvrtc.so"
    )


def ptx(text: str, name: str, device: int) -> bytes:
    """PTX of a source for a GPU of a compute capability (90 for 9.0), from the cache or made."""
    nvrtc = library(load_extension()._fusion_settings()[3])
    architecture = nvrtc.architecture(device)

    def make(source: Path, result: Path, deadline: float) -> None:
        result.write_bytes(nvrtc.ptx(source.read_text(), architecture))

    facts = [nvrtc.path, str(nvrtc.version), str(architecture), *OPTIONS]
    return compile.compiled(facts, text, (".cu", ".ptx"), make, name, lambda _, made: made)


def kernel(source: Source, name: str, backend: Any, tensor: torch.Tensor) -> Any:
    """What `fused_program_` takes for a source on a tensor's GPU; 0, logged once, without one.

    It is unloaded with the last who holds it.
    """
    key = source.code, tensor.get_device()
    with _lock:
        loaded = _kernels.get(key)
        if loaded is not None:
            return loaded
        if key in _failed:
            return 0
        try:
            image = ptx(source.text, name, backend.program_architecture(tensor))
            given = image.decode(), ENTRY, parameters(source), tensor
            _kernels[key] = loaded = backend.load_program(*given)
            return loaded
        except (FusionError, OSError, RuntimeError) as error:
            _failed.add(key)
            _log.warning("%s is not compiled, and runs operation by operation: %s", name, error)
            return 0
