"""Generated CUDA code: compiled to PTX by the real compiler, and executed on the fake GPU.

No GPU runs it here: what a kernel computes is seen with the C++ compiler in place of NVRTC's, what
NVRTC makes of it is read in its PTX.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedpg
import harness
from checks import compiled, cuda_programs
from checks.cuda_programs import CLOSE, EXACT, FUSED, TYPES
from fusedpg import fusion
from fusedpg.fusion import codegen_cuda, nvrtc
from fusedpg.fusion.compile import CompileError
from fuzz.functions import run_cases

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]

ARCHITECTURES = (80, 90)
ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)", re.S)
# What contracts, flushes or approximates: no exact program may hold one.
INEXACT = re.compile(r"\b(fma|mad)\.\w*\.?f(32|64)\b|\.ftz\b|\.approx\b|\.full\b")


@functools.cache
def compiler() -> str:
    """How a source becomes PTX here: by NVRTC, or by nvcc."""
    try:
        nvrtc.library(os.environ.get("FUSEDPG_NVRTC_LIB", ""))
        return "nvrtc"
    except CompileError:
        if shutil.which("nvcc") is None:
            pytest.skip("neither NVRTC (nvidia-cuda-nvrtc) nor nvcc")
        return "nvcc"


def ptx(text: str, architecture: int) -> str:
    if compiler() == "nvrtc":
        return nvrtc.library("").ptx(text, architecture).decode()
    with tempfile.TemporaryDirectory() as place:
        source, made = Path(place) / "program.cu", Path(place) / "program.ptx"
        source.write_text(text)
        line = ["nvcc", "-ptx", f"--gpu-architecture=compute_{architecture}", *nvrtc.OPTIONS]
        line += [str(source), "-o", str(made)]
        ended = subprocess.run(line, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return made.read_text()


def source_of(run: Any, *arguments: Any, **numbers: Any) -> codegen_cuda.Source:
    return cuda_programs.text_of(run.schedule(*arguments, world_size=2, **numbers).program)


def check_ptx(
    source: codegen_cuda.Source, exact: bool, architectures: tuple[int, ...] = (80,)
) -> None:
    for architecture in architectures:
        text = ptx(source.text, architecture)
        [(name, listed)] = ENTRY.findall(text)
        assert name == codegen_cuda.ENTRY
        kinds = re.findall(r"\.param \.(?:align \d+ )?(\w+)", listed)
        # As many words of eight bytes as the engine passes.
        assert len(kinds) == codegen_cuda.parameters(source)
        assert set(kinds) <= {"u64", "b64", "s64", "f64"}, listed
        assert f".target sm_{architecture}" in text
        if exact:
            found = INEXACT.search(text)
            assert found is None, f"{found}\n{source.text}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_ptx_of_every_operation(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 8, dtype=dtype)
    for op in EXACT.values():
        check_ptx(source_of(cuda_programs.fused(op), x, x), exact=True)
    for name, op in CLOSE.items():
        check_ptx(source_of(cuda_programs.fused(op), x), exact=name in ("sqrt", "power", "rsqrt"))


def everything(
    g: fusion.Partial, row: Any, column: Any, one: Any, m: fusion.Shard, lr: float, seed: int
) -> Any:
    x = fusion.all_reduce(g, "mean")
    m = 0.9 * m + lr * x
    y = fusion.dropout(x * row + column * one, 0.1, seed)
    return y, y - m, m


def test_ptx_of_operands() -> None:
    for dtype in TYPES:
        x = torch.zeros(6, 8, dtype=dtype)
        given = (x, x[0], x[:, :1].contiguous(), x[0, 0], torch.zeros(32, dtype=dtype), 0.1, 3)
        run = fusedpg.fuse(everything).scheduled(*FUSED)
        source = source_of(run, *given)
        check_ptx(source, exact=True, architectures=ARCHITECTURES)
        shown = run.generated(*given, world_size=2, device="cuda")
        assert shown == source.text and "test_fusion_cuda.py:" in shown and "__global__" in shown
        assert "__global__" not in run.generated(*given, world_size=2)


def test_divisions_and_roots_are_rounded() -> None:
    x = torch.zeros(4, 8)
    text = ptx(source_of(cuda_programs.fused(EXACT["div"]), x, x).text, 80)
    assert "div.rn.f32" in text
    assert "sqrt.rn.f32" in ptx(source_of(cuda_programs.fused(CLOSE["sqrt"]), x).text, 80)


@pytest.fixture
def library() -> nvrtc.Nvrtc:
    if compiler() != "nvrtc":
        pytest.skip("no NVRTC")
    return nvrtc.library("")


def test_errors_of_nvrtc(library: nvrtc.Nvrtc) -> None:
    with pytest.raises(CompileError, match=r"(?s)nvrtcCompileProgram.*program.cu.*unknown"):
        library.ptx("__global__ void f() { unknown(1); }", 80)
    with pytest.raises(CompileError, match=r"no GPU of capability 1\.0"):
        library.architecture(10)
    assert library.architecture(90) == 90
    with pytest.raises(CompileError, match="FUSEDPG_NVRTC_LIB=/nowhere"):
        nvrtc.library("/nowhere/libnvrtc.so")


def test_cache(library: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDPG_CACHE_DIR", str(tmp_path))
    x = torch.zeros(64)
    text = source_of(cuda_programs.fused(EXACT["add"]), x, x).text
    made = nvrtc.ptx(text, "add", 90)
    [file] = tmp_path.glob("fusion/*.ptx")
    assert file.with_suffix(".cu").read_text() == text and b".visible .entry" in made

    def refuse(*_: Any) -> bytes:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc.Nvrtc, "ptx", refuse)
        assert nvrtc.ptx("// of another line of the user's" + text, "add", 90) == made
    # Another architecture is another file; a damaged one is made again.
    nvrtc.ptx(text, "add", 80)
    assert len(list(tmp_path.glob("fusion/*.ptx"))) == 2
    file.write_bytes(file.read_bytes()[:-40])
    assert nvrtc.ptx(text, "add", 90) == made


# --- on the fake GPU ------------------------------------------------------------------------------


def gpus(size: int) -> harness.Workers:
    options = harness.fake_gpu()
    library = options["env"]["FUSEDPG_CUDA_LIB"]
    return harness.pool(size, **harness.fake_gpu(FUSEDPG_NVRTC_LIB=library))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_exact_operations(dtype: torch.dtype) -> None:
    for name in EXACT:
        gpus(2).run(cuda_programs.exact, dtype, name)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_transcendental_operations(dtype: torch.dtype) -> None:
    for name in CLOSE:
        gpus(2).run(cuda_programs.close, dtype, name)


@pytest.mark.parametrize("size", [harness.slow(1), 2, harness.slow(3)])
def test_reductions_and_operands(size: int) -> None:
    gpus(size).run(cuda_programs.reductions)


@pytest.mark.parametrize("size", [1, 2, harness.slow(3)])
def test_chunks(size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gpus(size).run(cuda_programs.chunks, 70_001, dtype, 1 << 14)
    # NCCL works in the tensors themselves.
    gpus(size).run(cuda_programs.chunks, 96 * 1024 * 6, torch.float32, 4 << 20)


def test_random_programs() -> None:
    assert run_cases(lambda: gpus(2), compiled.random_program, 4) > 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_many_random_programs(world_size: int) -> None:
    assert run_cases(lambda: gpus(world_size), compiled.random_program, 40) > 15


def test_without_nvrtc_on_one_rank() -> None:
    told = gpus(2).run(cuda_programs.without_nvrtc)
    [missing] = [text for text in told[1] if "operation by operation" in text and "NVRTC" in text]
    assert "/nowhere/libnvrtc.so" in missing


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("numbers", "numbers that the program takes"),
        ("programs", "the programs differ"),
        ("first", "for the first time"),
    ],
)
def test_disagreement(kind: str, field: str) -> None:
    library = harness.fake_gpu()["env"]["FUSEDPG_CUDA_LIB"]
    options = harness.fake_gpu(FUSEDPG_NVRTC_LIB=library)
    with harness.Workers(2, timeout=30, **options) as workers:
        for error in workers.errors(cuda_programs.disagree, kind):
            assert error.kind == "DistBackendError", error.trace
            assert "fused_program" in error.text and field in error.text, error.text


@pytest.fixture
def streams() -> harness.Workers:
    options = harness.fake_gpu()
    env = options["env"] | {"FUSEDPG_NVRTC_LIB": options["env"]["FUSEDPG_CUDA_LIB"]}
    # Its tensors are on a GPU as torch sees it.
    return harness.pool(1, **options | {"env": env, "options": {"cuda_chunk_bytes": 1 << 10}})


def test_graphs(streams: harness.Workers) -> None:
    streams.run(cuda_programs.captured)
