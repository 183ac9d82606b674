"""The search for plans: against all plans, against the original, and the same every time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import harness
from fusedpg.plan import Plan
from fusedpg.plan.__main__ import COMMANDS
from fusedpg.plan.aceso import AcesoModel
from fusedpg.plan.baseline import (
    TooMany,
    brute_force,
    count_plans,
    dynamic_programming,
    uniform_grid,
)
from fusedpg.plan.database import Database
from fusedpg.plan.model import CostModel
from fusedpg.plan.search import Limits, NoPlanFits, Search, best_plans, search
from fusedpg.plan.space import Space
from plan_toys import ACESO, write_toy

# The result of the authors' searcher on their data, global batch 512, in 61 s of CPU.
ACESO_FOUND_MS = 58760.92


def gpt_space(limit: float = 12000.0, layers: int | None = None) -> Space:
    database = Database(ACESO, "gpt", "1_3B", layers)
    return Space(AcesoModel(database, 4), 512, (1, 2, 4, 8), limit)


def toy_space(folder: Path, devices: int = 3, limit: float = 600.0) -> Space:
    return Space(CostModel(Database(folder, "toy", "s"), devices), 16, (1, 2, 4), limit)


def test_no_worse_than_the_original() -> None:
    """Five trials of four stages are enough; the original's program takes 61 s for its plan."""
    (found,) = search(gpt_space, [4], limits=Limits(steps=5))
    assert found.time <= ACESO_FOUND_MS
    plan = found.plans[0]
    assert plan.check(devices=4).predicted is not None
    price = AcesoModel(Database(ACESO, "gpt", "1_3B"), 4).price(plan)
    assert price.time_ms == pytest.approx(found.time, rel=1e-12) and price.memory_mb <= 12000


# Operators, devices, MB and ways to split of toys; there are at most 3e5 plans of each.
KINDS = [(3, 3, 1e9, 1), (3, 3, 400.0, 1), (4, 2, 500.0, 1), (3, 2, 450.0, 2), (4, 3, 700.0, 1)]
TOYS = [(seed, *KINDS[seed % len(KINDS)]) for seed in range(50)]


@pytest.mark.parametrize("seed, ops, devices, limit, algos", TOYS)
def test_as_good_as_all_plans(
    tmp_path: Path, seed: int, ops: int, devices: int, limit: float, algos: int
) -> None:
    write_toy(tmp_path, seed, ops, algos=algos)
    every = brute_force(toy_space(tmp_path, devices, limit))
    stages = range(1, devices + 1)
    make = functools.partial(toy_space, tmp_path, devices, limit)
    found = search(make, [one for one in stages if one <= ops], limits=Limits(steps=20))
    if every is None:
        with pytest.raises(NoPlanFits, match=r"the smallest needs|could be priced"):
            best_plans(found, 1, limit)
        return
    assert every.predicted is not None
    (best,) = best_plans(found, 1, limit)
    assert best.predicted is not None
    assert every.predicted.time_ms * (1 - 1e-9) <= best.predicted.time_ms
    assert best.predicted.time_ms <= 1.01 * every.predicted.time_ms
    model = make().model
    for plan in (every, best):
        price = model.price(dataclasses.replace(plan, predicted=None))
        assert price.prediction().time_ms == pytest.approx(plan.predicted.time_ms)
        assert price.memory_mb <= limit


def test_many_layers() -> None:
    """Much faster than the uniform grid, under the same model."""
    database = Database(ACESO, "gpt", "1_3B", 200)

    def make() -> Space:
        return Space(CostModel(database, 16), 512, (1, 2, 4, 8), 20000.0)

    (found,) = search(make, [16], limits=Limits(steps=1))
    uniform = uniform_grid(make())[0]
    assert uniform.predicted is not None
    assert 1.1 * found.time <= uniform.predicted.time_ms


def test_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    write_toy(tmp_path, 3, 6)
    make = functools.partial(toy_space, tmp_path, 4)

    def answers(workers: int, seed: int) -> list[object]:
        found = search(make, [1, 2, 3, 4], seed, Limits(steps=12), top=2, workers=workers)
        return [
            (one.plans, one.priced, [dataclasses.replace(step, seconds=0) for step in one.steps])
            for one in found
        ]

    one = answers(1, 5)
    assert one == answers(3, 5)
    assert one != answers(1, 6), "the seed decides where restarts begin"


def test_every_step_says_why(tmp_path: Path) -> None:
    write_toy(tmp_path, 3, 6)
    (found,) = search(functools.partial(toy_space, tmp_path, 4), [2], limits=Limits(steps=10))
    assert found.steps[0].kind == "start" and all(step.why for step in found.steps)
    better = [step for step in found.steps if step.better]
    times = [step.after for step in better]
    assert times == sorted(times, reverse=True)
    assert min(times) == pytest.approx(found.time)


def test_time_budget() -> None:
    """A search without an end of its own ends when time is up, with what it has."""
    (found,) = search(gpt_space, [4], limits=Limits(steps=10**6, seconds=1.0))
    assert found.plans and 0 < len(found.steps) < 10**6


def test_interrupted(tmp_path: Path) -> None:
    """A search that is told to stop ends with all of its processes, and does not go on."""
    words = f"search --database {ACESO} --model-name gpt --model-size 1_3B --devices 4 --quiet"
    words += f" --memory-limit 12000 --global-batch 512 --stages 2 3 4 --steps {10**6} --workers 2"
    words += f" --output {tmp_path}/plan.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "fusedpg.plan", *words.split()],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while len(children.read_text().split()) < 2:
            assert time.monotonic() < deadline, "no workers"
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]  # its pipe closes when the last process ends
        assert process.returncode == 130, said
        assert said.strip() == "python -m fusedpg.plan search: interrupted"
        assert not (tmp_path / "plan.json").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_nothing_fits() -> None:
    found = search(functools.partial(gpt_space, 2000.0), [2], limits=Limits(steps=2))
    with pytest.raises(NoPlanFits, match=r"into 2,000 MB a device: of [\d,]+ plans the smallest"):
        best_plans(found, 1, 2000.0)


def test_what_is_not_measured_is_left_out_and_named(tmp_path: Path) -> None:
    write_toy(tmp_path, 3)
    (tmp_path / "prim_toy_s_all_reduce_2gpus.csv").unlink()
    (found,) = search(functools.partial(toy_space, tmp_path, 2), [1], limits=Limits(steps=5))
    assert any("prim_toy_s_all_reduce_2gpus.csv" in reason for reason in found.left_out)
    for plan in found.plans:
        assert set(plan.data_parallel_size_of_each_op[0]) == {1}


def test_recomputation_is_the_least_that_fits() -> None:
    """A lower limit recomputes more, and what is recomputed fits."""
    times = []
    for limit in (1e6, 14000, 12000, 10000):
        space = gpt_space(limit)
        searcher = Search(space, 4, 0, Limits())
        candidate = searcher._even(1, (1, 1, 1, 1))
        assert candidate is not None and candidate.overrun == 0
        times.append(sum(stage.recompute for stage in candidate.stages))
    assert times[0] == 0 and times == sorted(times)


def test_baselines(tmp_path: Path) -> None:
    space = gpt_space()
    uniform = uniform_grid(space)
    assert uniform and len({len(set(plan.num_gpus)) for plan in uniform}) == 1
    assert all(plan.num_ops_in_each_stage[0] % 13 == 1 for plan in uniform if plan.num_stages > 1)
    write_toy(tmp_path, 1, 5)
    toy = toy_space(tmp_path, 2, 1e9)
    borders, grid = dynamic_programming(toy), uniform_grid(toy)[0]
    assert borders is not None and borders.predicted is not None and grid.predicted is not None
    assert borders.predicted.time_ms <= grid.predicted.time_ms
    with pytest.raises(TooMany, match="more than 10"):
        brute_force(toy, 10)


def test_all_plans_are_counted(tmp_path: Path) -> None:
    """Two operators, two devices: by hand."""
    write_toy(tmp_path, 1, 2, samples=(1,), degrees=(1, 2))
    space = Space(CostModel(Database(tmp_path, "toy", "s"), 2), 4, (1,), 1e9)
    # One stage on both: tp 2, either operator recomputed or not. Two stages: one operator each.
    assert count_plans(space) == 4 + 4
    brute_force(space)
    assert space.priced == 8


def run(*words: object) -> int:
    from fusedpg.plan import __main__ as program

    return program.main([str(word) for word in words])


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_toy(tmp_path, 3, 5)
    output = tmp_path / "plan.json"
    model = ["--database", tmp_path, "--model-name", "toy", "--model-size", "s", "--devices", 4]
    space = [*model, "--global-batch", 16, "--memory-limit", 600]
    assert run("search", *space, "--steps", 10, "--top", 2, "--output", output) == 0
    said = capsys.readouterr().out
    assert "plans priced in" in said and (tmp_path / "plan_2.json").exists()
    plan = Plan.load(output)
    assert plan.predicted is not None and f"{plan.predicted.time_ms:,.2f} ms" in said
    record = json.loads((tmp_path / "plan.search.json").read_text())
    assert [found["stages"] for found in record["found"]] == [1, 2, 3, 4]
    assert run("explain", output, "--database", tmp_path) == 0
    said = capsys.readouterr().out
    assert f"fusedpg: {plan.predicted.time_ms:,.2f} ms" in said
    assert re.search(r"^  trial \d+ \(.*$\n    \w", said, re.M), "why each step was taken"
    for kind in ("uniform", "borders"):
        assert run("baseline", kind, *space, "--output", output) == 0
        Plan.load(output).check(devices=4)
    assert run("baseline", "brute-force", *space, "--most-plans", 100) != 0
    assert "plans, more than 100" in capsys.readouterr().err
    assert run("search", *model, "--global-batch", 16, "--memory-limit", 1, "--output", output) != 0
    assert "no plan fits into 1 MB a device" in capsys.readouterr().err
    assert run("search", *space, "--devices-per-node", 3, "--output", output) != 0
    assert "not a multiple of --devices-per-node 3" in capsys.readouterr().err


def test_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's commands print what it says."""
    text = (harness.ROOT / "docs/guides/plan.md").read_text()
    command = r"python -m fusedpg\.plan (search|explain|baseline) "
    pairs, block = [], None
    for kind, body in re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M):
        if kind == "sh":
            block = body if re.match(command, body) else None
        elif kind == "text" and block is not None:
            pairs.append((block, body))
    assert len(pairs) >= 3
    monkeypatch.chdir(tmp_path)
    for block, output in pairs:
        block = block.replace("\\\n", " ").replace("tests/python/data/aceso", str(ACESO))
        words = shlex.split(block)[3:]
        assert run(*words) == 0
        said = capsys.readouterr().out
        assert output.strip() in said, said


def test_help_says_what_is_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("search", "--help")
    said = " ".join(capsys.readouterr().out.split())
    for flag, usual in {
        "cost-model": "fusedpg",
        "steps": 100,
        "hops": 7,
        "seed": 0,
        "top": 1,
    }.items():
        assert f"(default: {usual})" in said.partition(f" --{flag} ")[2].partition(" --")[0], flag
    assert "no limit by default" in said and "None" not in said


@pytest.mark.parametrize(
    "words",
    ["--devices 0", "--devices -1", "--memory-limit 0", "--memory-limit nan", "--global-batch 0",
     "--top 0", "--steps 0", "--time-budget -1", "--workers 0", "--micro-batches 1 0"],
)  # fmt: skip
def test_numbers_that_are_none(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--database", "x", "--model-name", "x", "--model-size", "x", "--output", "x"]
    given += ["--devices", "2", "--memory-limit", "9", "--global-batch", "2"]
    with pytest.raises(SystemExit, match="2"):
        run("search", *given, *words.split())
    flag, *_, number = words.split()
    assert f"argument {flag}: '{number}' is no positive" in capsys.readouterr().err


def test_commands_are_there() -> None:
    import importlib

    for module, _ in COMMANDS.values():
        assert callable(importlib.import_module(module).main)
