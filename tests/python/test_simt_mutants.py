"""The tests of the GPU's kernels, which run on the CPU, fail where a kernel is wrong.

What `make mutants` has not seen caught yet; the others are in tools/mutants/simt.toml.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FUSEDPG_BUILD_DIR", ROOT / "build/cmake"))
KERNELS = "csrc/cuda/kernels"


class Mutant(NamedTuple):
    what: str
    file: str  # that is changed
    old: str
    new: str
    source: str  # of the kernels that are compiled with it
    test: str


LAST = "  barrier.sync();\n  barrier.leave();\n}\n\ntemplate"
MUTANTS = [
    Mutant(
        "update's tail begins late",
        "updates.hpp",
        "for (; i < n; i += stride) {",
        "for (i += full == 0 ? 0 : stride; i < n; i += stride) {",
        "updates_float.cu",
        "cuda_tiles_update",
    ),
    Mutant(
        "parameters that have not arrived",
        "direct.cu",
        LAST,
        LAST.replace("  barrier.sync();\n", ""),
        "direct.cu",
        "cuda_engine_direct",
    ),
]


@pytest.fixture(scope="module")
def commands() -> list[dict[str, str]]:
    listed = BUILD / "compile_commands.json"
    if not listed.exists() or not (BUILD / "libfusedpg_fake_gpu.so").exists():
        pytest.skip("no build of the C++ tests (make test-cpp)")
    return json.loads(listed.read_text())


def run_tests(library: Path, test: str, tmp: Path) -> subprocess.CompletedProcess[str]:
    # A fuzz ends with the first wrong number.
    env = os.environ | {"FUSEDPG_FAKE_GPU": str(library), "FUSEDPG_FUZZ_SECONDS": "60"}
    line = [BUILD / "fusedpg_cpp_tests", test]
    return subprocess.run(line, env=env, cwd=tmp, capture_output=True, text=True, timeout=120)


def build(commands: list[dict[str, str]], mutant: Mutant, tmp: Path) -> Path:
    """The fake GPU with a kernel of its own."""
    overlay = tmp / "cuda/kernels"
    shutil.copytree(ROOT / KERNELS, overlay)
    text = (overlay / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has changed: mend this mutant"
    (overlay / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    fake = [c for c in commands if "fusedpg_fake_gpu.dir" in c["command"]]
    [own] = [c for c in fake if c["file"].endswith(f"{KERNELS}/{mutant.source}")]
    words = shlex.split(own["command"])
    compiler = words[: next(i for i, word in enumerate(words) if word.startswith("-"))]
    made = str(tmp / "kernel.o")
    line = [str(overlay / mutant.source) if word == own["file"] else word for word in words]
    line[line.index("-o") + 1] = made
    if "-MD" in line:  # no list of headers for the build to believe in
        del line[line.index("-MD") : line.index("-o")]
    line.insert(len(compiler), f"-I{tmp}")
    subprocess.run(line, cwd=own["directory"], check=True, capture_output=True)
    objects = [c["output"] for c in fake if c is not own]
    library = tmp / "libfusedpg_fake_gpu.so"
    engine = BUILD / "fusedpg/libfusedpg.so"
    sanitizers = [word for word in words if word.startswith("-fsanitize")]
    subprocess.run(
        [
            *(compiler[-1], "-shared", *sanitizers, *objects, made, engine),
            *(f"-Wl,-z,nodelete,-Bsymbolic,--gc-sections,-rpath,{engine.parent}", "-lpthread"),
            *("-lrt", "-ldl"),
            *("-o", library),
        ],
        cwd=own["directory"],
        check=True,
        capture_output=True,
    )
    return library


def check(commands: list[dict[str, str]], mutant: Mutant, tmp: Path) -> None:
    ended = run_tests(build(commands, mutant, tmp), mutant.test, tmp)
    # A failed check, or the end that a broken rule makes of the process; not a name of no test.
    caught = "FAILED " in ended.stdout or ended.returncode < 0
    assert caught, f"{mutant.what}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what)
def test_caught(commands: list[dict[str, str]], mutant: Mutant, tmp_path: Path) -> None:
    check(commands, mutant, tmp_path)


@pytest.mark.slow
def test_unchanged(commands: list[dict[str, str]], tmp_path: Path) -> None:
    """A library that is built in the same way, of the same code, passes."""
    line = "int launch_pack("
    same = Mutant("", "moves.cu", line, line, "moves.cu", "cuda_tiles_pack")
    ended = run_tests(build(commands, same, tmp_path), same.test, tmp_path)
    assert ended.returncode == 0, ended.stderr
