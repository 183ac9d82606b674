"""Runs the experiments of _first_hour_steps.py one after the other: see gpu_first_hour.sh.

Each has a time limit and goes on after a failure. After each one the results are written, so a
machine that is taken away takes only the experiment under way. A later piece (--from, --only)
adds to the results of the earlier ones. Ends with 0 if nothing failed, 1 if something did, 2 where
there is no GPU.

Without a GPU the runner itself can be tried on the fake one (docs/gpu.md); what needs a real one is
skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _first_hour_steps import STEPS, Step

ROOT = Path(__file__).resolve().parent.parent
TAIL = 40  # lines
PASS, FAIL, SKIP, TIMEOUT = "PASS", "FAIL", "SKIP", "TIMEOUT"
PATIENCE = 10  # seconds that a step has to end when told to
FAKE = os.environ.get("FUSEDPG_TEST_DEVICE") == "cpu"

# In a process of its own: importing torch may fail, and a context takes memory of the GPU.
PROBE = """
import ctypes, json, os, sys
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
path = os.environ.get("FUSEDPG_PROBE_NCCL")
if path:
    try:
        number = ctypes.c_int()
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
        n = number.value
        found["patched nccl"] = f"{n // 10000}.{n // 100 % 100}.{n % 100}"
    except Exception as error:
        found["error"] = repr(error)
print(json.dumps(found))
"""


@dataclasses.dataclass
class Row:
    """What came out of a step."""

    step: str
    settles: str
    status: str
    seconds: float = 0.0
    note: str = ""
    command: str = ""
    tail: list[str] = dataclasses.field(default_factory=list)
    piece: int = 0  # of which run


def output_of(*command: str, env: Mapping[str, str] | None = None) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr).strip()


def environment(patched: str | None) -> dict[str, Any]:
    """What a result is worth nothing without."""
    env = os.environ | ({"FUSEDPG_PROBE_NCCL": patched} if patched else {})
    said = output_of(sys.executable, "-c", PROBE, env=env)
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
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("FUSEDPG_", "NCCL_", "TORCH_NCCL_", "CUDA_"))
        },
    }


def version(text: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(text)))


def lacks(step: Step, found: Mapping[str, Any], patched: str | None) -> str:
    """Why a step cannot run here; empty if it can."""
    real = int(found.get("gpus", 0))
    for need in step.needs:
        if need == "gpu" and real == 0:
            return "needs a real GPU"
        if need == "2 gpus" and real < 2:
            return f"needs two GPUs, {real} found"
        if need == "2 machines":
            return "by hand, on both machines: " + " ".join(command_of(step, "python"))
        if need == "patched nccl" and not patched:
            return "no --patched-nccl (patches/nccl/README.md)"
        if need == "compute-sanitizer" and not found.get(need):
            return "compute-sanitizer is not on PATH"
        if need.startswith("nccl ") and version(found.get("nccl", "0")) < version(need):
            return f"needs {need}, torch has {found.get('nccl')}"
    return ""


def command_of(step: Step, python: str = sys.executable) -> list[str]:
    return [word.replace("{python}", python) for word in step.command]


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


def run(step: Step, seconds: float, log: Path, env: Mapping[str, str]) -> Row:
    command = command_of(step)
    row = Row(step.name, step.settles, PASS, command=" ".join(command))
    begin = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(env) | step.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
        except BaseException:  # the runner is told to stop
            end(process)
            raise
    row.seconds = round(time.monotonic() - begin, 1)
    lines = log.read_text(errors="replace").splitlines()
    row.tail = lines[-TAIL:]
    if code is None:
        by = "its limit" if seconds >= step.limit else "what was left of the budget"
        row.status, row.note = TIMEOUT, f"ended after {seconds:.0f} s, {by}"
    else:
        row.status, row.note = judge(code, lines)
    return row


# --- results ---------------------------------------------------------------------------------


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def what_ran(found: Mapping[str, Any]) -> str:
    if FAKE:
        return "fake GPU"
    names = ("device", "torch", "nccl", "patched nccl", "commit")
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name))


def markdown(pieces: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """The table, then what a reader of a failure needs."""
    lines = ["| step | what | status | s | note |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.step} | {cell(row.settles)} | {row.status} | {row.seconds:.0f} "
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


def table(steps: Sequence[Step], statuses: Mapping[str, str] | None = None) -> str:
    """The table of docs/gpu.md."""
    lines = ["| step | what | expected | a failure would mean | status |", "|---|---|---|---|---|"]
    lines += [
        "| "
        + " | ".join(
            cell(text)
            for text in (
                f"`{step.name}`",
                step.settles,
                step.expect,
                step.failure,
                (statuses or {}).get(step.name, "NOT RUN"),
            )
        )
        + " |"
        for step in steps
    ]
    return "\n".join(lines) + "\n"


class Results:
    """results.json and results.md in a folder; rows of earlier pieces stay until run again."""

    def __init__(self, folder: Path, steps: Sequence[Step], piece: Mapping[str, Any]) -> None:
        self._folder = folder
        self._order = [step.name for step in steps]
        self._rows: dict[str, Row] = {}
        self._pieces: list[Mapping[str, Any]] = []
        path = folder / "results.json"
        if path.exists():
            kept = json.loads(path.read_text())
            self._pieces = kept["pieces"]
            self._rows = {row["step"]: Row(**row) for row in kept["steps"]}
        self._pieces.append(piece)

    def add(self, row: Row) -> None:
        before = self._rows.get(row.step)
        # What has run says more than that it was not tried again.
        if row.status == SKIP and not row.command and before is not None and before.command:
            return
        row.piece = len(self._pieces) - 1
        self._rows[row.step] = row
        self.write()

    def write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        known = [self._rows[name] for name in self._order if name in self._rows]
        rows = known + [row for name, row in self._rows.items() if name not in self._order]
        text = {
            "results.json": json.dumps(
                {"pieces": self._pieces, "steps": [dataclasses.asdict(row) for row in rows]},
                indent=1,
            )
            + "\n",
            "results.md": markdown(self._pieces, rows),
        }
        for name, content in text.items():
            half = self._folder / f"{name}.half"
            half.write_text(content)
            half.replace(self._folder / name)


def choose(steps: Sequence[Step], first: str | None, only: str | None) -> list[Step]:
    names = [step.name for step in steps]
    wanted = only.split(",") if only else names
    for name in [*wanted, *([first] if first else [])]:
        if name not in names:
            raise SystemExit(f"no step {name!r}: {', '.join(names)}")
    begin = names.index(first) if first else 0
    return [step for step in steps[begin:] if step.name in wanted]


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_first_hour.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for all of it (60)")
    parser.add_argument("--from", dest="first", metavar="STEP", help="begin with this one")
    parser.add_argument("--only", metavar="STEP,...", help="these alone")
    parser.add_argument("--patched-nccl", metavar="PATH", help="libnccl.so.2 with patches/nccl")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu_first_hour")
    parser.add_argument("--list", action="store_true", help="the steps, in order")
    parser.add_argument("--table", action="store_true", help="the table of docs/gpu.md")
    args = parser.parse_args(arguments)
    chosen = choose(steps, args.first, args.only)
    if args.table:
        print(table(steps), end="")
        return 0
    if args.list:
        for step in chosen:
            needs = f"  [{', '.join(step.needs)}]" if step.needs else ""
            print(f"{step.name:16} {step.limit:4} s  {step.settles}{needs}")
        return 0
    begun = time.monotonic()
    deadline = begun + 60 * args.minutes
    found = environment(args.patched_nccl)
    if not FAKE and not found.get("gpus"):
        print(f"no GPU: {found.get('error') or 'torch finds no CUDA device'}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    results = Results(
        args.out, steps, {"begun": when, "minutes": args.minutes, "environment": found}
    )
    results.write()
    print(f"{what_ran(found)}; {args.minutes:g} minutes; results in {args.out}", flush=True)
    failed = False
    for number, step in enumerate(chosen, 1):
        left = deadline - time.monotonic()
        why = lacks(step, found, args.patched_nccl)
        if not why and left < min(step.least, step.limit):
            why = f"{max(left, 0):.0f} s of the budget left: --from {step.name}"
        if why:
            row = Row(step.name, step.settles, SKIP, note=why)
        else:
            print(f"[{number}/{len(chosen)}] {step.name}: {step.settles}", flush=True)
            env = dict(os.environ)
            if args.patched_nccl and "patched nccl" in step.needs:
                env |= {"FUSEDPG_NCCL_LIB": args.patched_nccl}
                if FAKE:
                    env["FUSEDPG_FAKE_PATCHED"] = "1"
            row = run(step, min(step.limit, left), args.out / f"{step.name}.log", env)
        failed = failed or row.status in (FAIL, TIMEOUT)
        results.add(row)
        print(f"  {row.status:7} {step.name:16} {row.seconds:6.1f} s  {row.note}", flush=True)
    print(f"{time.monotonic() - begun:.0f} s; {args.out / 'results.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
