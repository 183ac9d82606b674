"""The package: version check, options, variables, command line, stubs."""

from __future__ import annotations

import ast
import copy
import ctypes
import datetime
import importlib
import os
import re
import shutil
import subprocess
import tarfile
import types
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet

import fusedpg
import harness
from checks import fused_ops, numerics
from checks.cases import REDUCIBLE, Case, digest, logical, reduce_op, supported
from fusedpg._registration import load_extension
from fuzz import compress_kernels, core
from harness import Context, on_ranks


def kernels(context: Context, isa: str | None, programs: list[compress_kernels.Program]) -> str:
    """One digest of every kernel's results."""
    if isa is not None:
        assert fusedpg.group_info()["isa"] == isa
        assert load_extension().isa() == isa
    results = []
    for dtype in REDUCIBLE:
        for redop in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BXOR", "PREMUL_SUM"):
            if not supported(redop, dtype):
                continue
            case = Case("all_reduce", dtype, 5003, redop=redop, seed=8)
            tensor = logical(case, context.rank)
            dist.all_reduce(tensor, reduce_op(redop))
            results.append(tensor)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        numerics.special(context, dtype, "SUM", 4099)
    run = fused_ops.Run(hyper=(("amsgrad", True),), steps=10)
    for program in programs:
        found = compress_kernels.results(program)
        results += [torch.where(one.isnan(), 0, one) for one in found]
    return digest(results) + fused_ops.parity(context, run)


pytestmark = pytest.mark.fused_only


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        harness.python("-c", program),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_other_torch_is_refused() -> None:
    """A library built for one torch crashes in another: say so at the first use."""
    done = python(
        "import sys\n"
        "sys.modules.pop('fusedpg', None)\n"
        "import torch\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'fusedpg']:\n"
        "    del sys.modules[name]\n"
        "torch.__version__ = '2.3.1'\n"
        "import fusedpg\n"
        "fusedpg.Options\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "2.3.1" in done.stderr
    # The only way to another build is a checkout: no name on a package index is ours.
    commands = re.findall(r"pip install [^&\n]*", done.stderr)
    assert commands, done.stderr
    for command in commands:
        assert command.split()[-1] in (".", "requirements/build.txt"), command


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_import_waits_for_torch(autoload: str) -> None:
    """The package does not import torch, and has registered its backend when the program does."""
    done = python(
        "import importlib.util, sys\n"
        "import fusedpg\n"
        "assert fusedpg.__version__ and 'torch' not in sys.modules\n"
        "assert importlib.util.find_spec('torch') and 'torch' not in sys.modules\n"
        "import torch.distributed as dist\n"
        "assert dist.Backend.backend_list.count('fused') == 1\n"
        "assert not any('fusedpg' in type(finder).__module__ for finder in sys.meta_path)\n"
        "dist.init_process_group('fused', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD=autoload,
    )
    assert done.returncode == 0, done.stderr


def test_aggregators_need_no_torch() -> None:
    """A machine that only adds up need not even have it."""
    done = python(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from fusedpg.aggregator import Aggregator\n"
        "with Aggregator(udp='127.0.0.1:0', key='0' * 32) as server:\n"
        "    assert server.stats()['jobs'] == server.stats()['udp']['sessions'] == 0\n"
        "for listen, key in (('127.0.0.1', '0' * 32), ('127.0.0.1:0', 'none')):\n"
        "    try:\n"
        "        Aggregator(listen, key=key)\n"
        "    except ValueError as error:\n"
        "        print(error)\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr
    assert '"host:port"' in done.stdout and "32 hexadecimal digits" in done.stdout, done.stdout


def test_torch_that_fails_to_import_may_be_imported_again() -> None:
    done = python(
        "import sys\n"
        "import fusedpg\n"
        "sys.modules['torch._C'] = None\n"
        "try:\n"
        "    import torch\n"
        "except ImportError:\n"
        "    pass\n"
        "assert any('fusedpg' in type(finder).__module__ for finder in sys.meta_path)\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr


def test_public_modules_are_attributes() -> None:
    """Each is imported by its first use; `import *` leaves those alone that need other packages."""
    done = python(
        "import fusedpg\n"
        "names = [name for name in fusedpg.__all__ if getattr(fusedpg, name) is not None]\n"
        "assert fusedpg.plan.Plan and fusedpg.hvd.elastic.State and fusedpg.compress.hook\n"
        "assert {*names, 'ray', 'torchft'} <= set(dir(fusedpg)) and 'ray' not in names\n"
        "from fusedpg import *\n"
        "from fusedpg.hvd import *\n"
        "assert fuse is fusedpg.fuse and allreduce is fusedpg.hvd.allreduce\n"
        "assert {'run', 'install', 'allreduce'} <= set(dir(fusedpg.hvd))\n"
    )
    assert done.returncode == 0, done.stderr
    packages = {p.parent.name for p in Path(fusedpg.__file__).parent.glob("[a-z]*/__init__.py")}
    modules = {p.stem for p in Path(fusedpg.__file__).parent.glob("[a-z]*.py")}
    assert packages | modules <= set(dir(fusedpg))


def test_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    done = python(
        "import ctypes, resource, fusedpg\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    blocks = [libc.malloc(20 << 20) for _ in range(4)]\n"
        "    for block in blocks:\n"
        "        ctypes.memset(block, 1, 20 << 20)\n"
        "    for block in blocks:\n"
        "        libc.free(ctypes.c_void_p(block))\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "given_back = min(faults() for _ in range(5))\n"
        "assert fusedpg.keep_freed_memory()\n"
        "faults()\n"
        "kept = min(faults() for _ in range(5))\n"
        "assert kept < 40 <= given_back, (kept, given_back)\n"  # of 80 MiB, in huge pages at most
    )
    assert done.returncode == 0, done.stderr


def test_another_c_library_has_no_such_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not fusedpg.keep_freed_memory()


@pytest.mark.parametrize("served", ["1", "0"])
def test_command_line(served: str) -> None:
    done = subprocess.run(
        harness.python("-m", "fusedpg"), capture_output=True, text=True, timeout=60,
        env={**os.environ, "FUSEDPG_SERVE_GLOO": served},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert torch.__version__.split("+")[0] in done.stdout
    assert "shared memory" in done.stdout
    assert "usable" not in done.stdout
    gloo = next(line for line in done.stdout.splitlines() if line.startswith("gloo"))
    assert ("served by fusedpg" in gloo) == (served == "1"), gloo


@pytest.mark.parametrize("command", ["info", "check"])
def test_unbuilt_checkout_hides_an_installation(command: str, tmp_path: Path) -> None:
    """`python -m` prefers the current folder: one line says so, and how to get to the other."""
    checkout = tmp_path / "checkout"
    built = shutil.ignore_patterns("*.so", "pt2_*", "__pycache__")
    shutil.copytree(harness.ROOT / "fusedpg", checkout / "fusedpg", ignore=built)
    done = subprocess.run(
        harness.python("-W", "ignore", "-m", "fusedpg", command),
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(fusedpg.__file__).parent.parent)},
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "is not built" in line and f"leave {checkout}" in line, line
    assert line.endswith(f"hides the fusedpg in {Path(fusedpg.__file__).parent.parent}."), line


def test_command_line_does_not_claim_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, torch and GPU are three questions, and each has an answer of its own."""
    from fusedpg import __main__ as command_line

    def said(why_not: str, cuda: str | None, gpus: int, wrong: str = "") -> list[str]:
        def load() -> None:
            if why_not or wrong:
                raise RuntimeError(wrong or "no file")

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        module = types.ModuleType("_C")
        module._load_cuda_kernels = load  # type: ignore[attr-defined]
        return command_line.cuda(module, why_not).split("; ")

    off = "switched off by FUSEDPG_CUDA=OFF"
    assert said(off, None, 0) == [f"kernels not built: {off}", "torch has no CUDA", "no GPU found"]
    assert said("", None, 3) == ["kernels built", "torch has no CUDA", "no GPU found"]
    assert said("", "13.0", 0) == ["kernels built", "torch built for CUDA 13.0", "no GPU found"]
    assert said("", "13.0", 1)[-1] == "1 GPU found"
    assert said("", "13.0", 2)[-1] == "2 GPUs found"
    assert said("", "13.0", 2, wrong="fused: not loaded")[0] == "fused: not loaded"


def test_kernels_lie_beside_the_engine() -> None:
    """Where no variable names them, as in every installation."""
    library = Path(fusedpg.__file__).resolve().with_name("libfusedpg_cuda.so")
    done = python(
        "from fusedpg._registration import load_extension\nload_extension()._load_cuda_kernels()\n",
        FUSEDPG_CUDA_LIB="",
    )
    if library.exists():
        assert done.returncode == 0, done.stderr
    else:
        assert f"{library}: cannot open shared object file" in done.stderr, done.stderr


CONFIGURE = """
cmake_minimum_required(VERSION 3.22)
project(probe LANGUAGES NONE)
set(FUSEDPG_BUILD_PYTHON ON)
set(FUSEDPG_MODULE_DIR "${CMAKE_BINARY_DIR}")
include("%s/cmake/cuda.cmake")
file(WRITE "${CMAKE_BINARY_DIR}/answer" "${cuda_why_not}")
"""


def why_no_kernels(folder: Path, *arguments: str) -> str:
    """What CMake says of the CUDA kernels, with an nvcc that always works."""
    nvcc = folder / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "release 13.0, V13"\n')
    nvcc.chmod(0o755)
    (folder / "CMakeLists.txt").write_text(CONFIGURE % harness.ROOT)
    command = ["cmake", "-S", str(folder), "-B", str(folder / "build"), "-GNinja"]
    command += [f"-DCMAKE_CUDA_COMPILER={nvcc}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "build/answer").read_text()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-DFUSEDPG_ANY_TORCH_CUDA="], "this torch has no CUDA"),
        (["-DFUSEDPG_ANY_TORCH_CUDA=13.0"], ""),
        (["-DFUSEDPG_ANY_TORCH_CUDA=", "-DFUSEDPG_CUDA=ON"], ""),
        (
            ["-DFUSEDPG_ANY_TORCH_CUDA=13.0", "-DFUSEDPG_CUDA=OFF"],
            "switched off by FUSEDPG_CUDA=OFF",
        ),
    ],
)
def test_when_kernels_are_built(tmp_path: Path, arguments: list[str], reason: str) -> None:
    """Minutes of nvcc only for a torch that has CUDA, or on demand."""
    said = why_no_kernels(tmp_path, *arguments)
    assert reason in said
    assert bool(reason) == bool(said)


def test_options_are_values() -> None:
    made = fusedpg.Options(
        timeout=datetime.timedelta(seconds=7), arena_bytes=1 << 26, threads=2, nan_check=True
    )
    for other in (copy.copy(made), copy.deepcopy(made)):
        assert isinstance(other, fusedpg.Options)
        assert other.arena_bytes == 1 << 26
        assert other.threads == 2
        assert other.nan_check is True
        assert other._timeout == datetime.timedelta(seconds=7)
    plain = fusedpg.Options()
    assert plain.arena_bytes is None
    assert plain.threads is None


@pytest.mark.parametrize("keywords", [{"arena_bytes": -1}, {"threads": "many"}, {"colour": "red"}])
def test_wrong_options(keywords: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        fusedpg.Options(**keywords)  # type: ignore[arg-type]


def precedence(context: Context) -> None:
    """Variables set the default group, options a group of their own."""
    info = fusedpg.group_info()
    assert info["threads"] == 1
    assert info["arena_reserved"] >= 64 << 20
    group = dist.new_group(pg_options=fusedpg.Options(threads=2, arena_bytes=512 << 20))
    other = fusedpg.group_info(group)
    assert other["threads"] == 2
    assert other["arena_reserved"] >= 512 << 20
    assert other["arena_reserved"] > info["arena_reserved"]
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == context.world_size).all())


def test_precedence() -> None:
    """Options come before variables."""
    env = {"FUSEDPG_THREADS": "1", "FUSEDPG_ARENA_BYTES": str(64 << 20)}
    with harness.Workers(2, env=env, oracle=False) as workers:
        workers.run(precedence)


@pytest.mark.parametrize(
    ("name", "value"), [("FUSEDPG_THREADS", "lots"), ("FUSEDPG_ARENA_BYTES", "-5")]
)
def test_wrong_variables(name: str, value: str) -> None:
    done = python(
        "import torch.distributed as dist, fusedpg\n"
        "dist.init_process_group('fused', store=dist.HashStore(), rank=0, world_size=1)\n",
        **{name: value},
    )
    assert done.returncode != 0
    assert name in done.stderr


def variable(context: Context, name: str) -> str | None:
    return os.environ.get(name)


def test_comm_memory_variable(pair: harness.Workers) -> None:
    """A user's own setting stays."""
    with harness.Workers(2, env={"DDP_DISABLE_COMM_MEM": "1"}, oracle=False) as workers:
        assert workers.run(variable, "DDP_DISABLE_COMM_MEM") == ["1", "1"]
    assert pair.run(variable, "DDP_DISABLE_COMM_MEM") == ["0", "0"]


def worker_pool(context: Context, threads: int) -> None:
    """All kernels in ranges, against the same references."""
    assert fusedpg.group_info()["threads"] == threads
    for numel in (1, 1000, 70_001, (1 << 20) + 13):
        for memory in ("ordinary", "arena"):
            numerics.all_reduce(context, Case("all_reduce", numel=numel, memory=memory))
    numerics.reduce_scatter(context, Case("reduce_scatter", numel=300_001))
    for memory in ("ordinary", "arena"):
        run = fused_ops.Run(shapes=((300_007,), (33,)), steps=3, memory=memory)
        fused_ops.parity(context, run)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_worker_pool(size: int, threads: int) -> None:
    """Several threads per rank give the same bits as one."""
    with harness.Workers(size, env={"FUSEDPG_THREADS": str(threads)}) as workers:
        workers.run(worker_pool, threads)


@pytest.mark.parametrize("isa", ["scalar", "x86-64-v2", "avx2", "avx512", "neon"])
def test_instruction_sets(isa: str) -> None:
    """Every instruction set this machine has gives the bits of the best one."""
    try:
        workers = harness.Workers(2, env={"FUSEDPG_ISA": isa}, oracle=False)
    except harness.WorkerFailure as failure:
        assert isa in str(failure)
        pytest.skip(f"this machine or build has no {isa}")
    with workers:
        programs = core.drawn("kernels", "70000", 7)
        best = harness.pool(2).run(kernels, None, programs)
        assert workers.run(kernels, isa, programs) == best


def test_stubs_tell_the_truth() -> None:
    """What the stub of the library declares is there, and the other way round."""
    from fusedpg._registration import load_extension

    _C = load_extension()
    stub = Path(fusedpg.__file__).parent / "_C.pyi"
    declared = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            declared.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.add(node.target.id)
    present = {name for name in dir(_C) if not name.startswith("__")} | {"__version__"}
    public = {name for name in declared if not name.startswith("_") or name in present}
    assert public - present == set()
    assert present - declared - {"__version__"} == set()
    assert (Path(fusedpg.__file__).parent / "py.typed").exists()


def test_public_names() -> None:
    """Each is there without another import, and known to type checkers."""
    for name in fusedpg.__all__:
        value = fusedpg.__getattr__(name)  # what an earlier import left here is not asked for it
        assert value is getattr(fusedpg, name), name
    assert {*fusedpg.__all__, "__version__"} <= set(dir(fusedpg))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fusedpg.nothing
    tree = ast.parse(Path(fusedpg.__file__).read_text())
    (typed,) = (
        [alias.name for line in node.body for alias in line.names]
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    assert sorted(typed) == fusedpg.__all__
    path = Path(fusedpg.hvd.__file__).with_name("_api.py")
    aliases = [name for line in ast.parse(path.read_text()).body[1:] for name in line.names]
    assert all(alias.asname == alias.name for alias in aliases)
    assert fusedpg.hvd.__all__ == sorted([*(a.name for a in aliases), "install", "run"])


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [("fusedpg.fusion", "OwnRows", "LocalRowReduction"), ("fusedpg.optim", "fuse", "from_torch")],
)
def test_old_names(module: str, old: str, new: str) -> None:
    """They are the same objects, also by `import *`, and a warning names the line."""
    home = importlib.import_module(module)
    text = rf"{module}\.{old} is now {module}\.{new}; fusedpg 0\.3 drops"
    with pytest.warns(DeprecationWarning, match=text) as warned:
        assert getattr(home, old) is getattr(home, new)
    assert [warning.filename for warning in warned] == [__file__]
    names: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match=text) as warned:
        exec(compile(f"from {module} import *", "a program", "exec"), names)
    assert [warning.filename for warning in warned] == ["a program"]
    assert names[old] is names[new]
    with pytest.warns(DeprecationWarning, match=text) as warned:
        exec(compile(f"from {module} import {old}", "a program", "exec"), {})
    assert [warning.filename for warning in warned] == ["a program"]
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = home.nothing


@on_ranks(2)
def test_other_devices_are_refused(context: Context) -> None:
    """A tensor of a device we were not built for."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match="meta"):
        # torch itself keeps such tensors from the backend: ask it directly.
        backend.allreduce([torch.ones(3, device="meta")])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc, so no CUDA kernels")
def test_cuda_library() -> None:
    """`make build` compiles the kernels where nvcc is; the table works without a GPU."""
    from fusedpg import _build_info

    library = Path(harness.ROOT / "fusedpg" / "libfusedpg_cuda.so")
    if not library.exists() and "switched off" in _build_info.cuda_why_not:
        pytest.skip(_build_info.cuda_why_not)
    assert library.exists(), "see what CMake says of CUDA"
    needed = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    for other in ("libtorch", "libc10", "libnccl", "libcudart", "libpython"):
        assert other not in needed, f"it links {other}"

    class Head(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint32),
            ("bytes", ctypes.c_uint32),
            ("name", ctypes.c_char_p),
        )

    function = ctypes.CDLL(str(library)).fusedpg_cuda_api
    function.restype = ctypes.POINTER(Head)
    head = function().contents
    assert head.name == b"cuda"
    declared = (harness.ROOT / "csrc" / "cuda" / "cuda_api.hpp").read_text()
    version = re.search(r"kCudaApiVersion = (\d+);", declared)
    assert version is not None
    assert head.version == int(version[1]), "the library is not of these sources"
    assert head.bytes % 8 == 0
    # The last functions of the table are those of the direct path.
    words = ctypes.cast(function(), ctypes.POINTER(ctypes.c_uint64))
    assert all(words[word] for word in range(head.bytes // 8)), "a function is missing"


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=harness.ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return set(done.stdout.split("\n")) - {""}


def build_hook(folder: Path, call: str) -> None:
    """A hook of the build backend, as pip and `build` call it: in a process of its own."""
    program = f"from setuptools import build_meta as hooks; hooks.{call}"
    done = subprocess.run(
        harness.python("-c", program), cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sdist_is_complete(tmp_path: Path) -> None:
    """Who has the sdist can build, test and benchmark: it holds what git tracks, and no more."""
    files = tracked()
    # A copy: in the checkout setuptools would add what an earlier sdist listed.
    for name in files:
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(harness.ROOT / name, tmp_path / "copy" / name)
    build_hook(tmp_path / "copy", f"build_sdist({str(tmp_path)!r})")
    (archive,) = tmp_path.glob("*.tar.gz")
    # No torch in its name or metadata: sources do with any.
    assert re.fullmatch(r"fusedpg-[0-9.]+", archive.name.removesuffix(".tar.gz")), archive.name
    with tarfile.open(archive) as opened:
        members = {m.name.partition("/")[2] for m in opened.getmembers() if m.isfile()}
        info = opened.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert info is not None
        assert "Requires-Dist: torch>=2.11\n" in info.read().decode()
    ours = {name for name in files if not name.startswith(".git")}
    made = {name for name in members if name.startswith("fusedpg.egg-info/")}
    assert ours - members == set()
    assert members - made - files - {"PKG-INFO", "setup.cfg"} == set()


def metadata(folder: Path) -> str:
    """What pip would read of the wheel."""
    build_hook(harness.ROOT, f"prepare_metadata_for_build_wheel({str(folder)!r})")
    (found,) = folder.glob("*.dist-info/METADATA")
    return found.read_text()


def wanted_torch(text: str) -> SpecifierSet:
    (wanted,) = re.findall(r"^Requires-Dist: torch([<>!].*)$", text, re.MULTILINE)
    return SpecifierSet(wanted)


def test_wheel_asks_for_its_torch(tmp_path: Path) -> None:
    """pip must not put a build beside a torch that it was not made for."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    text = metadata(tmp_path)
    assert f"\nVersion: {fusedpg.__version__}\n" in text
    wanted = wanted_torch(text)
    assert f"{major}.{minor}.7" in wanted
    assert f"{major}.{minor - 1}.0" not in wanted
    assert f"{major}.{minor + 1}.0" not in wanted


def test_wheel_asks_for_its_torches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wheel for several: any of them, nothing before, after or in between."""
    paths = []
    for release in ("2.14.1", "2.11.0+cu130", "2.12.1"):
        folder = tmp_path / release
        (folder / f"torch-{release}.dist-info").mkdir(parents=True)
        about = f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n"
        (folder / f"torch-{release}.dist-info/METADATA").write_text(about)
        paths.append(str(folder))
    monkeypatch.setenv("FUSEDPG_TORCH_PATHS", ":".join(paths))
    wanted = wanted_torch(metadata(tmp_path))
    assert [f"2.{minor}.1" in wanted for minor in range(10, 16)] == [0, 1, 1, 0, 1, 0]


def test_each_torch_gets_its_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedpg import _registration

    for release in ("2_9", "2_11", "2_14"):
        (tmp_path / f"pt{release}").mkdir()
        (tmp_path / f"pt{release}/_C.cpython-311-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(_registration, "__file__", str(tmp_path / "_registration.py"))
    assert _registration.built_for() == ["2.9", "2.11", "2.14"]
    for running, folder in (("2.14.1+cu130", "pt2_14"), ("2.11.0", "pt2_11")):
        assert _registration.check_torch_version(running) == str(tmp_path / folder)
    for running in ("2.12.0", "2.1.1", "3.14.0", "2.15.0a0+gitabc"):
        with pytest.raises(
            ImportError, match=r"built for torch 2\.9, 2\.11, 2\.14, but torch " + running[:4]
        ):
            _registration.check_torch_version(running)


def release(tag: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = harness.python("tools/release.py", tag, str(folder))
    return subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=60)


def test_release_page(tmp_path: Path) -> None:
    """pip finds the wheel by the page, and refuses one that is not the one that was listed."""
    version = fusedpg.__version__
    wheel = tmp_path / f"fusedpg-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        about = f"Metadata-Version: 2.1\nName: fusedpg\nVersion: {version}\n"
        archive.writestr(f"fusedpg-{version}.dist-info/METADATA", about)
        archive.writestr(
            f"fusedpg-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr(f"fusedpg-{version}.dist-info/RECORD", "")
    done = release(f"v{version}", tmp_path)
    assert done.returncode == 0, done.stderr
    changes = (harness.ROOT / "CHANGELOG.md").read_text()
    notes = (tmp_path / "notes.md").read_text()
    assert notes.startswith("### ")
    assert notes in changes
    assert "\n## " not in notes

    def install() -> subprocess.CompletedProcess[str]:
        page = ["--no-index", "--find-links", str(tmp_path / "index.html")]
        command = [
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-d",
            str(tmp_path / "got"),
            *page,
            "fusedpg",
        ]
        return subprocess.run(harness.python(*command), capture_output=True, text=True, timeout=60)

    assert install().returncode == 0
    assert (tmp_path / "got" / wheel.name).exists()
    shutil.rmtree(tmp_path / "got")
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    refused = install()
    assert refused.returncode != 0
    assert "HASH" in refused.stderr.upper()


def test_release_of_another_version_is_refused(tmp_path: Path) -> None:
    assert "__version__" in release("v0.0.1", tmp_path).stderr
    assert "there is nothing" in release(f"v{fusedpg.__version__}", tmp_path).stderr
    (tmp_path / "fusedpg-0.0.1.tar.gz").touch()
    assert "fusedpg-0.0.1" in release(f"v{fusedpg.__version__}", tmp_path).stderr
