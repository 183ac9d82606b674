"""patches/nccl: what apply.py does to a tree, and that its files compile.

`nccl_tree` has the anchors and declarations that it needs, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
APPLY = ROOT / "patches/nccl/apply.py"
PLACES = {
    "src/include/device.h": "ncclDevSumPostDiv",
    "src/enqueue.cc": "nstepsPerLoop,",
    "src/device/generate.py": '"FuncSumPostDiv"',
    "src/device/reduce_scatter.h": '"primitives.h"',
}


def contents(tree: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }


def apply(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(APPLY), str(tree), *options], capture_output=True, text=True
    )


def refused(tree: Path, *options: str) -> str:
    before = contents(tree)
    done = apply(tree, *options)
    assert done.returncode == 1, done.stdout
    assert contents(tree) == before
    return done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests/python/nccl_tree", tmp_path / "nccl"))


def test_partial_build() -> None:
    """What README.md says of ONLY_FUNCS matches functions, as generate.py does it."""
    text = (ROOT / "patches/nccl/README.md").read_text()
    [only] = re.findall(r'^ONLY_FUNCS="(.*)"$', text, re.MULTILINE)
    pattern = only.replace("*", "[^ ]*") + "$"
    for built in (
        "SendRecv",
        "AllGather RING LL128",
        "ReduceScatter Sum f16 RING LL",
        "ReduceScatter FusedpgUpdate bf16 RING SIMPLE",
        "AllReduce Sum f64 TREE LL",
        "AllReduce PreMulSum f32 RING LL",
        "AllReduce MinMax u8 RING SIMPLE",
    ):
        assert re.match(pattern, built), built
    for left_out in ("Broadcast RING LL", "AllReduce MinMax f32 RING LL", "Reduce Sum f32 RING LL"):
        assert not re.match(pattern, left_out), left_out


def test_applies_and_reverts(tree: Path) -> None:
    before = contents(tree)
    assert "not applied, and fits" in apply(tree, "--check").stdout
    assert contents(tree) == before
    assert apply(tree).returncode == 0
    after = contents(tree)
    assert {name for name in before if after[name] != before[name]} == set(PLACES)
    added = set(after) - set(before)
    assert {
        "src/device/fusedpg_update.h",
        "src/include/fusedpg_ring.h",
        "src/include/fusedpg/cuda/kernels/ranges.hpp",
        "src/misc/fusedpg_update.cc",
    } <= added
    # Again: nothing changes.
    assert "0 files changed" in apply(tree).stdout
    assert "applied" in apply(tree, "--check").stdout
    assert contents(tree) == after
    assert apply(tree, "--revert").returncode == 0
    assert contents(tree) == before
    assert not (tree / "src/include/fusedpg").exists()
    assert "0 files changed" in apply(tree, "--revert").stdout


def test_spacing_does_not_matter(tree: Path) -> None:
    path = tree / "src/include/device.h"
    path.write_text(path.read_text().replace("ncclDevSumPostDiv, ", "ncclDevSumPostDiv ,\n\t"))
    before = contents(tree)
    assert apply(tree).returncode == 0
    assert "ncclDevFusedpgUpdate, ncclNumDevRedOps" in path.read_text()
    assert apply(tree, "--revert").returncode == 0
    assert contents(tree) == before


@pytest.mark.parametrize("file", PLACES)
def test_missing_anchor(tree: Path, file: str) -> None:
    path = tree / file
    path.write_text(path.read_text().replace(PLACES[file], "other"))
    message = refused(tree)
    assert file in message
    assert "occurs 0 times" in message
    assert refused(tree, "--check") == message


@pytest.mark.parametrize("file", PLACES)
def test_doubled_anchor(tree: Path, file: str) -> None:
    path = tree / file
    path.write_text(path.read_text() * 2)
    assert "occurs 2 times" in refused(tree)


def test_other_versions(tree: Path) -> None:
    path = tree / "makefiles/version.mk"
    path.write_text(path.read_text().replace("7", "99"))
    message = refused(tree)
    assert "NCCL 2.30.99" in message
    assert "2.30.7" in message
    assert apply(tree, "--allow-unverified").returncode == 0


def test_not_nccl(tmp_path: Path) -> None:
    assert "is this a source tree of NCCL?" in refused(tmp_path)


def test_applied_in_part(tree: Path) -> None:
    before = contents(tree)
    assert apply(tree).returncode == 0
    name = "src/include/device.h"
    (tree / name).write_bytes(before[name])
    assert "in part (not in src/include/device.h)" in refused(tree)
    assert apply(tree, "--revert").returncode == 0
    assert contents(tree) == before


def test_another_version_of_the_patch(tree: Path) -> None:
    path = tree / "src/enqueue.cc"
    path.write_text(path.read_text().replace("int pattern", "int FusedpgOld; int pattern"))
    for options in ((), ("--revert",), ("--check",)):
        assert "another version of this patch" in refused(tree, *options)


def test_file_of_the_same_name(tree: Path) -> None:
    path = tree / "src/misc/fusedpg_update.cc"
    path.parent.mkdir(exist_ok=True)
    path.write_text("// somebody else's\n")
    assert "exists already" in refused(tree)


def test_hooks_of_the_host(tree: Path, tmp_path: Path) -> None:
    """What is inserted into enqueue.cc decides as it should."""
    assert apply(tree).returncode == 0
    program = tmp_path / "check"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-DOUR_OPERATION=ncclDevFusedpgUpdate",
            str(tree / "src/check.cc"),
            "-o",
            str(program),
        ],
        check=True,
    )
    assert subprocess.run([str(program)]).returncode == 0


def test_generated_functions(tree: Path) -> None:
    def rows() -> set[tuple[str, ...]]:
        program = str(tree / "src/device/generate.py")
        out = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
        return {tuple(row) for row in json.loads(out.stdout)}

    before = rows()
    assert apply(tree).returncode == 0
    assert rows() - before == {
        ("ReduceScatter", "FuncFusedpgUpdate", ty, "RING") for ty in ("f16", "bf16", "f32")
    }
    assert before < rows()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.timeout(300)
def test_device_code_compiles(tree: Path, tmp_path: Path) -> None:
    """As NCCL compiles it, up to PTX: the assembler takes half of the time, finds nothing more."""
    assert apply(tree).returncode == 0
    ptx = tmp_path / "ring.ptx"
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-ptx", "--expt-extended-lambda", "-fmad=false"]
    command += [f"-I{tree / 'src/include'}", f"-I{tree / 'src/device'}"]
    command += [str(tree / "src/device/instantiate.cu"), "-o", str(ptx)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    code = ptx.read_text()
    assert code.count(".visible .entry") == 9
    assert "update_part" in code, "the update was optimised away"
