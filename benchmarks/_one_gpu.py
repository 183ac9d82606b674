"""Runs a stage of _one_gpu_steps.py, step after step: see one_gpu.sh.

Each step has a time limit, and the stage goes on after a failure. After each one all files are
written, so a machine that is taken away takes only the step under way. Ends with 0 if nothing
failed, 1 if something did, 2 where there is no GPU.

Without a GPU the runner itself can be tried on the fake one (docs/guides/gpu.md); what needs a real
one is skipped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _one_gpu_steps import STEPS, Step

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/one_gpu"
TAIL = 40  # lines
MINUTES = 8.8  # for a stage, and for reading what the machine is
LEAST = 5  # seconds of the budget below which no step begins
# What a build leaves, and what it is made of.
BUILT = (
    "fusedpg/pt*_*/_C*.so",
    "fusedpg/libfusedpg.so",
    "fusedpg/_build_info.py",
    "fusedpg/libfusedpg_cuda.so",
)
BUILT += ("build/cmake/fusedpg_gpu_table.so",)
SOURCES = ("CMakeLists.txt", "cmake/*", "csrc/**/*.*", "benchmarks/gpu_table.cpp")
PASS, FAIL, SKIP, TIMEOUT = "PASS", "FAIL", "SKIP", "TIMEOUT"
GOES_ON = "GOES ON"  # a build, in the next step
PATIENCE = 10  # seconds that a step has to end when told to
FAKE = os.environ.get("FUSEDPG_TEST_DEVICE") == "cpu"

# In a process of its own: importing torch may fail, and a context takes memory of the GPU.
PROBE = """
import json, sys
found = {"python": sys.version.split()[0]}
try:
    import torch
    found["torch"] = torch.__version__
    found["torch cuda"] = torch.version.cuda
    found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found["gpus"]:
        found["device"] = torch.cuda.get_device_name(0)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    found["error"] = repr(error)
print(json.dumps(found))
"""


@dataclasses.dataclass
class Row:
    """What came out of a step."""

    stage: int
    step: str
    settles: str
    status: str
    seconds: float = 0.0
    note: str = ""
    command: str = ""
    tail: list[str] = dataclasses.field(default_factory=list)
    piece: int = 0  # of which run


def output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr).strip()


def environment() -> dict[str, Any]:
    """What a result is worth nothing without."""
    said = output_of(sys.executable, "-c", PROBE)
    try:
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        found = {"error": said[-2000:]}
    query = "--query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current"
    return found | {
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "host": platform.platform(),
        "nvidia-smi": output_of("nvidia-smi", query, "--format=csv,noheader"),
        "topology": output_of("nvidia-smi", "topo", "-m"),
        "nvcc": output_of("nvcc", "--version").splitlines()[-1:],
        "compute-sanitizer": output_of("compute-sanitizer", "--version").splitlines()[-1:],
        "mps": shutil.which("nvidia-cuda-mps-control") or "",
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("FUSEDPG_", "NCCL_", "TORCH_NCCL_", "CUDA_"))
        },
    }


def lacks(step: Step, found: Mapping[str, Any]) -> str:
    """Why a step cannot run here; empty if it can."""
    for need in step.needs:
        if need == "gpu":
            if not found.get("gpus"):
                return "needs a real GPU"
        elif not found.get(need):
            return f"{need} is not on PATH"
    return ""


def no_time(step: Step) -> str:
    return f"no time left: {step.stage} --from {step.name}"


def command_of(step: Step, found: Mapping[str, Any]) -> list[str]:
    words = {
        "python": sys.executable,
        "root": str(ROOT),
        "name": step.name,
        "architecture": str(found.get("capability", "90")).replace(".", ""),
    }
    return [
        re.sub(r"\{(\w+)\}", lambda match: words.get(match[1], match[0]), word)
        for word in step.command
    ]


def judge(code: int, lines: Sequence[str]) -> tuple[str, str]:
    """Status and note of a step that ended by itself."""
    ends = (line for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+", line))
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", next(ends, ""))
    counts = {word: int(n) for n, word in found}
    note = ", ".join(f"{n} {word}" for word, n in counts.items())
    if code != 0:
        return FAIL, note or (f"signal {-code}" if code < 0 else f"exit status {code}")
    if counts and not counts.get("passed"):
        # "SKIPPED [3] tests/gpu/conftest.py:9: needs a real GPU", from -ra.
        reasons = [line for line in lines if line.startswith("SKIPPED [")]
        why = reasons[0].split(": ", 1)[-1] if reasons else "every test was skipped"
        return SKIP, f"{note}: {why}"
    return PASS, note


def end(process: subprocess.Popen[str]) -> None:
    """The step and what it has started: workers leave when the one that started them does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):  # those of the group that outlive it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Builds that go on, and their logs.
_builds: dict[tuple[str, ...], tuple[subprocess.Popen[str], Path]] = {}


def begin(step: Step, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | step.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


# Of the steps that run side by side.
_running: set[subprocess.Popen[str]] = set()


def run(step: Step, limit: float, deadline: float, logs: Path, found: Mapping[str, Any]) -> Row:
    left = deadline - time.monotonic()
    seconds = min(limit, left)
    if left < LEAST:
        return Row(step.stage, step.name, step.settles, SKIP, note=no_time(step))
    command = command_of(step, found)
    row = Row(step.stage, step.name, step.settles, PASS, command=" ".join(command))
    log = logs / f"{step.name}.log"
    begun = time.monotonic()
    if step.command in _builds:
        process, log = _builds.pop(step.command)
    else:
        process = begin(step, command, log)
    _running.add(process)
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
        if step.build:
            _builds[step.command] = process, log
        else:
            end(process)
    except BaseException:  # the runner is told to stop
        end(process)
        raise
    finally:
        _running.discard(process)
    row.seconds = round(time.monotonic() - begun, 1)
    lines = log.read_text(errors="replace").splitlines()
    row.tail = lines[-TAIL:]
    if code is None:
        by = "its limit" if seconds >= limit else "what was left of the budget"
        row.status, row.note = TIMEOUT, f"ended after {seconds:.0f} s, {by}"
        if step.build:
            row.status, row.note = GOES_ON, "waited for by the next step"
    else:
        row.status, row.note = judge(code, lines)
    return row


# --- results ---------------------------------------------------------------------------------


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def what_ran(found: Mapping[str, Any]) -> str:
    if FAKE:
        return "fake GPU"
    names = ("device", "torch", "nccl", "commit")
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name))


def markdown(pieces: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """The table, then what a reader of a failure needs."""
    lines = ["| stage | step | what | status | s | note |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.stage} | {row.step} | {cell(row.settles)} | {row.status} | {row.seconds:.0f} "
        f"| {cell(row.note)} |"
        for row in rows
    ]
    lines += ["", *(f"Run {n}: {what_ran(one['environment'])}" for n, one in enumerate(pieces))]
    known = {step.name: step for step in STEPS}
    for row in rows:
        if row.status in (FAIL, TIMEOUT):
            lines += ["", f"## {row.step}: {row.status}", "", f"    {row.command}", ""]
            if row.step in known:
                lines += [f"Expected: {known[row.step].expect}.", ""]
                lines += [f"It may mean: {known[row.step].failure}.", ""]
            lines += ["```", *(line.replace("```", "'''") for line in row.tail), "```"]
    return "\n".join(lines) + "\n"


def table(steps: Sequence[Step]) -> str:
    """The table of docs/guides/gpu.md."""
    lines = [
        "| stage | step | what | expected | a failure would mean | status |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {step.stage} | `{step.name}` | "
        + " | ".join(map(cell, (step.settles, step.expect, step.failure)))
        + " | NOT RUN |"
        for step in steps
    ]
    return "\n".join(lines) + "\n"


def digest(found: Mapping[str, Any]) -> str:
    """Of what a build is made of."""
    text = hashlib.sha256()
    for name in ("torch", "python", "capability"):
        text.update(str(found.get(name)).encode())
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                text.update(str(path.relative_to(ROOT)).encode())
                text.update(path.read_bytes())
    return text.hexdigest()


class Results:
    """results.json, results.md, logs.tar.gz and state.tar.gz in a folder.

    Rows of earlier stages come from the state and stay until they are run again.
    """

    def __init__(self, folder: Path, state: Path, found: Mapping[str, Any]) -> None:
        self._folder = folder
        self._order = [step.name for step in STEPS]
        self._rows: dict[str, Row] = {}
        self._pieces: list[Mapping[str, Any]] = []
        self._digest = digest(found)
        self.built = False
        self.logs = WORK / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        folder.mkdir(parents=True, exist_ok=True)
        if state.exists():
            self._load(state)
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        self._pieces.append({"begun": when, "environment": found})

    def _load(self, state: Path) -> None:
        with tarfile.open(state) as archive:
            # The first releases of Python 3.10 and 3.11 have no filters.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            member = archive.extractfile("results.json")
            assert member is not None
            kept = json.loads(member.read())
            self._pieces = kept["pieces"]
            self._rows = {row["step"]: Row(**row) for row in kept["steps"]}
            if kept["build"] == self._digest:
                for name in archive.getnames():
                    if name != "results.json":
                        archive.extract(name, ROOT)
                self.built = True

    def add(self, row: Row) -> None:
        before = self._rows.get(row.step)
        # What has run says more than that it was not tried again.
        if row.status != SKIP or row.command or before is None or not before.command:
            row.piece = len(self._pieces) - 1
            self._rows[row.step] = row
        self.write()

    def write(self) -> None:
        known = [self._rows[name] for name in self._order if name in self._rows]
        rows = known + [row for name, row in self._rows.items() if name not in self._order]
        results = {
            "build": self._digest if self.built else "",
            "pieces": self._pieces,
            "steps": [dataclasses.asdict(row) for row in rows],
        }
        for name, content in {
            "results.json": json.dumps(results, indent=1) + "\n",
            "results.md": markdown(self._pieces, rows),
        }.items():
            half = WORK / f"{name}.half"
            half.write_text(content)
            shutil.move(half, self._folder / name)
        self._pack("logs.tar.gz", {path.name: path for path in sorted(self.logs.iterdir())})
        state = {"results.json": self._folder / "results.json"}
        if self.built:
            for pattern in BUILT:
                state |= {str(path.relative_to(ROOT)): path for path in ROOT.glob(pattern)}
        self._pack("state.tar.gz", state)
        # For the next stage on this machine.
        if self._folder != WORK:
            shutil.copy(self._folder / "state.tar.gz", WORK / "state.tar.gz")

    def _pack(self, name: str, files: Mapping[str, Path]) -> None:
        half = WORK / f"{name}.half"
        with tarfile.open(half, "w:gz") as archive:
            for inside, path in files.items():
                archive.add(path, inside)
        shutil.move(half, self._folder / name)


def choose(steps: Sequence[Step], first: str | None, only: str | None) -> list[Step]:
    names = [step.name for step in steps]
    wanted = only.split(",") if only else names
    for name in [*wanted, *([first] if first else [])]:
        if name not in names:
            raise SystemExit(f"no step {name!r}: {', '.join(names)}")
    begin = names.index(first) if first else 0
    return [step for step in steps[begin:] if step.name in wanted]


def stages_of(text: str) -> list[int]:
    """Of "2" or "1,2,3"."""
    chosen = [int(part) for part in text.split(",")]
    if not {step.stage for step in STEPS}.issuperset(chosen):
        raise ValueError(text)
    return chosen


def run_all(
    steps: Sequence[Step], jobs: int, deadline: float, results: Results, found: Mapping[str, Any]
) -> bool:
    """Whether nothing failed. Builds come first and timings last, each by itself."""
    number = 0
    good = True

    def start(step: Step) -> Row:
        nonlocal number
        number += 1
        print(f"[{number}/{len(steps)}] {step.name}: {step.settles}", flush=True)
        # They share a GPU.
        limit = step.limit * (1 if step.build or step.alone or jobs == 1 else 2)
        return run(step, limit, deadline, results.logs, found)

    def note(row: Row) -> None:
        nonlocal good
        good = good and row.status not in (FAIL, TIMEOUT)
        results.add(row)
        print(f"  {row.status:7} {row.step:18} {row.seconds:5.1f} s  {row.note}", flush=True)

    def runnable(step: Step) -> bool:
        why = lacks(step, found) or ("built already" if step.build and results.built else "")
        if why:
            note(Row(step.stage, step.name, step.settles, SKIP, note=why))
        return not why

    for step in (step for step in steps if step.build):
        if runnable(step):
            row = start(step)
            results.built = results.built or (
                row.status == PASS and all(any(ROOT.glob(one)) for one in BUILT)
            )
            note(row)
            if row.status == FAIL:
                print("\n".join(row.tail), flush=True)
                return False
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        beside = [step for step in steps if not (step.build or step.alone) if runnable(step)]
        try:
            started = [pool.submit(start, one) for one in beside]
            for done in concurrent.futures.as_completed(started):
                note(done.result())
        except BaseException:  # the runner is told to stop
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                end(process)
            raise
    for step in (step for step in steps if step.alone):
        if runnable(step):
            note(start(step))
    return good


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/one_gpu.sh", description=__doc__)
    parser.add_argument("stages", type=stages_of, metavar="STAGE,...", help="1 to 4")
    parser.add_argument("folder", type=Path, nargs="?", help="for the results, where $OUT is unset")
    parser.add_argument("--state", type=Path, default=WORK / "state.tar.gz", help="of other stages")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it ({MINUTES})")
    parser.add_argument("--jobs", type=int, default=1, help="steps side by side, without timings")
    parser.add_argument("--from", dest="first", metavar="STEP", help="begin with this one")
    parser.add_argument("--only", metavar="STEP,...", help="these alone")
    parser.add_argument("--list", action="store_true", help="the stages' steps, in order")
    args = parser.parse_args(arguments)
    chosen = [step for step in steps if step.stage in args.stages]
    chosen = choose(chosen, args.first, args.only)
    if args.list:
        for step in chosen:
            needs = f"  [{', '.join(step.needs)}]" if step.needs else ""
            print(f"{step.name:18} {step.limit:3} s  {step.settles}{needs}")
        return 0
    out = os.environ.get("OUT")
    if not out and args.folder is None:
        parser.error("name a folder for the results, or set OUT")
    begun = time.monotonic()
    deadline = begun + 60 * args.minutes
    found = environment()
    if not FAKE and not found.get("gpus"):
        print(f"no GPU: {found.get('error') or 'torch finds no CUDA device'}", file=sys.stderr)
        return 2
    results = Results(Path(out) if out else args.folder, args.state, found)
    # Later stages build if the state has no build.
    if 1 not in args.stages and not results.built and not FAKE:
        chosen = [step for step in steps if step.build] + chosen
    results.write()
    stages = ", ".join(map(str, args.stages))
    print(f"stage {stages} on {what_ran(found)}", flush=True)
    good = run_all(chosen, args.jobs, deadline, results, found)
    for process, _ in _builds.values():
        end(process)
    print(f"{time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
