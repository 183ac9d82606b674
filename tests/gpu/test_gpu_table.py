"""The kernels' arguments as ctypes see them, against the compiler. Needs no GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from gpu_checks import table

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "c++")
TYPES = {
    table.TensorInfo: "cuda::TensorInfo",
    table.Piece: "cuda::Piece",
    table.Tile: "cuda::Tile",
    table.Chunk: "cuda::Chunk",
    table.Hyper: "kernels::Hyper",
    table.TensorScalars: "cuda::TensorScalars",
    table.ProposeArgs: "cuda::ProposeArgs",
    table.PrepareArgs: "cuda::PrepareArgs",
    table.PackArgs: "cuda::PackArgs",
    table.UnpackArgs: "cuda::UnpackArgs",
    table.UpdateArgs: "cuda::UpdateArgs",
    table.MomentsArgs: "cuda::MomentsArgs",
    table.AddSumsArgs: "cuda::AddSumsArgs",
    table.TrustArgs: "cuda::TrustArgs",
    table.DirectArgs: "cuda::DirectArgs",
    table.TensorBlocks: "cuda::TensorBlocks",
    table.FindBlocksArgs: "cuda::FindBlocksArgs",
    table.ListBlocksArgs: "cuda::ListBlocksArgs",
    table.MoveBlocksArgs: "cuda::MoveBlocksArgs",
    table.DirectCounts: "cuda::DirectCounts",
    table.DirectSumArgs: "cuda::DirectSumArgs",
    table.CudaApi: "cuda::CudaApi",
}
NAMED = {
    "kTile": ("cuda::kTile", table.TILE),
    "kAgreeBytes": ("cuda::kAgreeBytes", table.AGREE_BYTES),
    "kShardAlignment": ("kShardAlignment", table.SHARD_ALIGNMENT),
    "kSgd": ("int(kernels::Formula::kSgd)", table.SGD),
    "kAdam": ("int(kernels::Formula::kAdam)", table.ADAM),
    "kLamb": ("int(kernels::Formula::kLamb)", table.LAMB),
    **{
        name: (f"int(DType::{name})", table.DTYPES[dtype])
        for name, dtype in (
            ("kFloat16", torch.float16),
            ("kBFloat16", torch.bfloat16),
            ("kFloat32", torch.float32),
            ("kFloat64", torch.float64),
        )
    },
}


def described() -> dict[str, int]:
    """What the Python side says."""
    facts = {name: value for name, (_, value) in NAMED.items()}
    for kind, name in TYPES.items():
        facts[name] = ctypes.sizeof(kind)
        facts |= {f"{name}.{field[0]}": getattr(kind, field[0]).offset for field in kind._fields_}
    return facts


@pytest.mark.anywhere
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no compiler {COMPILER}")
def test_structures_are_the_compilers(tmp_path: Path) -> None:
    facts = described()
    lines = [f'say("{name}", {text});' for name, (text, _) in NAMED.items()]
    for name in facts:
        kind, _, field = name.partition(".")
        if "::" in kind:
            text = f"offsetof({kind}, {field})" if field else f"sizeof({kind})"
            lines.append(f'say("{name}", {text});')
    source = tmp_path / "facts.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n"
        '#include "base/ownership.hpp"\n#include "cuda/cuda_api.hpp"\n'
        "using namespace fusedpg;\n"
        'void say(const char* name, long long v) { std::printf("%s %lld\\n", name, v); }\n'
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )
    program = tmp_path / "facts"
    # offsetof of a class with a base is fine everywhere, only not promised.
    flags = ["-std=c++20", "-Wno-invalid-offsetof", f"-I{ROOT / 'csrc'}"]
    subprocess.run([COMPILER, *flags, "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    compiled = {name: int(value) for name, value in map(str.split, said.splitlines())}
    assert compiled == facts
