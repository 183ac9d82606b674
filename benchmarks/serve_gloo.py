"""What frameworks gain when fusedpg serves "gloo": FUSEDPG_SERVE_GLOO=1 and no other change.

    python benchmarks/serve_gloo.py [--only ddp,fsdp2] [--rounds 3] [--json results.json]
    python benchmarks/serve_gloo.py steps [--only ddp,fsdp2] [--rounds 25]

Each program of _served_programs.py runs on two ranks, in turn on Gloo and served. "steps" are the
seconds of its steps without the first two. "imports" are those that it takes to load modules of
torch and of the framework, after `import torch`: most of the program, on both arms. "the rest" is
all but them, from `import torch` to the end: groups are created in it. All are medians of the
rounds. The numbers that rank 0 notes, losses most of all, must be the same to within 1e-5.

**steps** takes steps of torch's own programs on two groups of the same ranks, in turn, in one
process a rank: Gloo's, and one that was asked for as "gloo" while fusedpg served it. Both see the
same load of the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import _harness as harness
import _served_programs as programs
from _harness import Context, Row
from _served_programs import PROGRAMS

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "_served_programs.py"
ARMS = ("gloo", "served")
TOLERANCE = 1e-5
ROUNDS = 3


@dataclass
class Rounds:
    """One program's rounds."""

    program: str
    steps: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    whole: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    imports: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    failed: dict[str, str] = field(default_factory=dict)
    difference: float = 0.0

    def median(self, what: dict[str, list[float]], arm: str) -> float:
        return statistics.median(what[arm] or [math.nan])

    def rest(self) -> dict[str, list[float]]:
        """Seconds of the programs without imports."""
        return {arm: [w - i for w, i in zip(self.whole[arm], self.imports[arm])] for arm in ARMS}


def start(program: str, arm: str, scratch: Path, ranks: int) -> tuple[list[list[str]], list[dict]]:
    """The processes of one run: command lines and what their environment has more."""
    line = [str(SCRIPT), program, str(scratch)]
    common = {
        "OMP_NUM_THREADS": "1",
        "FUSEDPG_SERVE_GLOO": "1" if arm == "served" else "0",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(HERE.parent / "build" / "torch_extensions"),
    }
    if program == "detail":
        common["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    if program == "ray_collective":
        return [[sys.executable, *line]], [common]
    if program == "elastic":
        run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [[sys.executable, "-m", *run, "--max-restarts=1", *line]], [common]
    if program == "accelerate":
        # On the CPU it starts one process, which is a rank where the environment says so.
        options = ["--cpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
        line = ["-m", "accelerate.commands.launch", *options, *line]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start.store = store  # type: ignore[attr-defined]  # it lives as long as the processes
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
    }
    own = [{**common, **world, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
    return [[sys.executable, *line]] * ranks, own


def last_words(log: Path, most: int) -> str:
    """The end of a log, without the paths of this machine."""
    text = log.read_text()
    for folder in (HERE.parent, sys.prefix, sys.base_prefix):
        text = text.replace(f"{folder}/", "")
    return text[-most:]


def run(program: str, arm: str, ranks: int, limit: float) -> dict[str, Any] | str:
    """What rank 0 has noted, or how it failed."""
    with tempfile.TemporaryDirectory(prefix="fusedpg-serve-") as folder:
        scratch = Path(folder)
        log = scratch / "log"
        with log.open("w") as file:
            processes = [
                subprocess.Popen(line, env={**os.environ, **env}, stdout=file, stderr=file)
                for line, env in zip(*start(program, arm, scratch, ranks))
            ]
        try:
            codes = [process.wait(limit) for process in processes]
        except subprocess.TimeoutExpired:
            return f"no end within {limit:.0f} s\n{last_words(log, 2000)}"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes) or not (scratch / "note.json").exists():
            return f"exit codes {codes}\n{last_words(log, 3000)}"
        note = json.loads((scratch / "note.json").read_text())
        kinds = {"served": "ProcessGroupFused", "gloo": "ProcessGroupGloo"}
        # Their groups are not torch's default one.
        known = {"torchft": "none", "ray_collective": "none"}
        if note["kind"] != known.get(program, kinds[arm]):
            return f"it ran on {note['kind']}"
        if "is Gloo's on all its ranks" in log.read_text():
            return "a group was not served"
        return note


def measure(row: Rounds, rounds: int, ranks: int, limit: float) -> None:
    """Adds rounds to a row."""
    program = row.program
    row.failed.clear()
    numbers: dict[str, list[float]] = {}
    for i in range(rounds):
        for arm in ARMS if i % 2 == 0 else ARMS[::-1]:
            note = run(program, arm, ranks, limit)
            if isinstance(note, str):
                row.failed[arm] = note
                print(f"{program} on {arm}: {note}", file=sys.stderr)
                continue
            row.steps[arm].append(note["seconds"])
            row.whole[arm].append(note["whole"])
            row.imports[arm].append(note["imports"])
            numbers[arm] = note["numbers"]
    if len(numbers) == 2:
        a, b = numbers.values()
        if len(a) != len(b) or not a:
            row.difference = math.inf
        else:
            found = max(abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b))
            row.difference = max(row.difference, found)


def load(path: Path) -> list[Rounds]:
    rows = {row["program"]: Rounds(**row) for row in json.loads(path.read_text())["rows"]}
    return [rows[program] for program in PROGRAMS if program in rows]


def agreement(row: Rounds) -> str:
    return "the same" if row.difference <= TOLERANCE else "differ"


def table(rows: list[Rounds]) -> str:
    lines = []
    for row in rows:
        cells = [PROGRAMS[row.program].title]
        for what in (row.steps, row.rest(), row.imports):
            gloo, ours = (row.median(what, arm) for arm in ARMS)
            cells += ["" if math.isnan(x) else f"{x:.2f} s" for x in (gloo, ours)]
            cells.append("" if math.isnan(gloo / ours) else f"{gloo / ours:.2f}")
        failed = ", ".join(f"fails on {arm}" for arm in row.failed)
        lines.append([*cells[:-1], failed or agreement(row)])
    parts = ("steps: Gloo", "served", "times", "the rest: Gloo", "served", "times")
    return harness.markdown(["program", *parts, "imports: Gloo", "served", "numbers"], lines)


def summary(rows: list[Rounds]) -> str:
    """The documents' table: if programs run with the same numbers, and the gain of their steps."""
    lines = []
    for row in rows:
        runs = ["fails" if arm in row.failed else "runs" for arm in ARMS]
        # Fewer rounds say little.
        known = not row.failed and all(len(row.steps[arm]) >= ROUNDS for arm in ARMS)
        gloo, ours = (row.median(row.steps, arm) for arm in ARMS)
        gain = f"{gloo / ours:.2f}" if known else ""
        numbers = "" if row.failed else agreement(row)
        lines.append([PROGRAMS[row.program].title, *runs, numbers, gain])
    return harness.markdown(["program", "on Gloo", "served", "numbers", "steps, times Gloo"], lines)


# ---------------------------------------------------------------------------------------------
# Steps


def messages(group: Any, kib: int, times: int) -> Callable[[int], None]:
    """From rank 0 to the last one and back."""
    tensor, rank, last = torch.zeros(kib << 8), dist.get_rank(), dist.get_world_size() - 1

    def step(i: int) -> None:
        for _ in range(times):
            if rank == 0:
                dist.send(tensor, last, group=group)
                dist.recv(tensor, last, group=group)
            elif rank == last:
                dist.recv(tensor, 0, group=group)
                dist.send(tensor, 0, group=group)
        dist.barrier(group=group)

    return step


def tensor_parallel(group: Any) -> Callable[[int], object]:
    # DTensor keeps what it has planned by the mesh, and meshes of the same ranks without names are
    # equal: then the steps of both arms would run on one group.
    names = (f"tp_{group.group_name}",)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=names)
    return programs.tensor_parallel_steps(mesh)


def checkpoints(group: Any, scratch: Path) -> Callable[[int], None]:
    import torch.distributed.checkpoint as checkpoint

    state = {"model": programs.model().state_dict()}

    def step(i: int) -> None:
        place = scratch / f"{group.group_name}-{i}"
        checkpoint.async_save(state, checkpoint_id=place, process_group=group).result()

    return step


# By name: the title, and the steps on a group.
STEPS: dict[str, tuple[str, Callable[..., Callable[[int], object]]]] = {
    "ddp": (PROGRAMS["ddp"].title, programs.ddp_steps),
    "zero1": (PROGRAMS["zero1"].title, programs.zero1_steps),
    "fsdp2": (PROGRAMS["fsdp2"].title, programs.fsdp2_steps),
    "tensor_parallel": (PROGRAMS["tensor_parallel"].title, tensor_parallel),
    "pipeline": (PROGRAMS["pipeline"].title, programs.pipeline_steps),
    "dcp": (PROGRAMS["dcp_thread"].title, checkpoints),
    "messages_1k": ("1 KiB there and back, 100 times", partial(messages, kib=1, times=100)),
    "messages_64k": ("64 KiB there and back, 100 times", partial(messages, kib=64, times=100)),
    "messages_1m": ("1 MiB there and back, 10 times", partial(messages, kib=1 << 10, times=10)),
    "messages_16m": ("16 MiB there and back", partial(messages, kib=16 << 10, times=1)),
}
WARM = 3


def groups_of(context: Context) -> dict[str, dist.ProcessGroup]:
    import fusedpg

    logging.disable(logging.WARNING)
    groups = {"gloo": dist.new_group(backend="gloo")}
    fusedpg.serve_gloo()
    groups["served"] = dist.new_group(backend="gloo")
    fusedpg.serve_gloo(False)
    kinds = {arm: type(g._get_backend(torch.device("cpu"))) for arm, g in groups.items()}
    assert kinds == {"gloo": dist.ProcessGroupGloo, "served": fusedpg.ProcessGroupFused}, kinds
    return groups


def measure_steps(context: Context, args: argparse.Namespace, program: str) -> list[Row]:
    import fusedpg

    groups = context.once(groups_of)
    title, make = STEPS[program]
    more = {"scratch": args.scratch} if program == "dcp" else {}
    steps = {arm: make(group, **more) for arm, group in groups.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in steps}
    for i in range(args.rounds + WARM):
        for arm in ARMS if i % 2 else ARMS[::-1]:
            dist.barrier()
            calls = fusedpg.group_info(groups["served"])["sequence_number"]
            begin = time.perf_counter()
            steps[arm](i)
            seconds[arm].append(time.perf_counter() - begin)
            calls = fusedpg.group_info(groups["served"])["sequence_number"] - calls
            assert (calls > 0) == (arm == "served"), f"{program} on {arm}: {calls} calls"
    return [Row.of(title, 0, arm, seconds[arm][WARM:]) for arm in ARMS]


def steps_main(arguments: list[str]) -> int:
    parser = harness.Parser(__doc__, backends="gloo", rounds=25)
    parser.names("--only", STEPS, help="programs, with commas")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        args.scratch = Path(folder)
        rows = harness.run(measure_steps, args, args.only)
    return harness.finish("serve_gloo_steps", rows, args, limit="")


def main() -> int:
    if sys.argv[1:2] == ["steps"]:
        return steps_main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help="programs, with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="rounds are added to those that it holds")
    arguments = parser.parse_args()
    rows = []
    for program in arguments.only.split(","):
        needs = PROGRAMS[program].needs
        if importlib.util.find_spec(needs) is None:
            print(f"{program}: {needs} is not installed", file=sys.stderr)
            continue
        saved = arguments.json and arguments.json.exists()
        earlier = load(arguments.json) if saved else []
        row = next((old for old in earlier if old.program == program), Rounds(program))
        measure(row, arguments.rounds, arguments.ranks, arguments.limit)
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
        if arguments.json:
            # Another process may add other programs meanwhile.
            earlier = load(arguments.json) if arguments.json.exists() else []
            kept = [asdict(old) for old in earlier if old.program != program]
            head = {**harness.about(), "ranks": arguments.ranks}
            harness.write(arguments.json, head, [*kept, asdict(row)])
    print(table(rows))
    return int(any("served" in row.failed or row.difference > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
