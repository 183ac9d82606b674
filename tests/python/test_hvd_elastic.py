"""fusedpg.hvd.elastic under fusedpg-run: ranks are killed, join and leave; numbers stay right."""

from __future__ import annotations

import collections
import importlib.util
import json
import math
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fusedpg.hvd as hvd
from harness import ROOT, Context, on_ranks, slow
from test_hvd_run import FAR, RUN, fake_ssh, finish, launch, marker, start

__all__ = ["marker"]  # a fixture

PROGRAM = Path(__file__).parent / "scripts" / "elastic_train.py"
PLAN = {"epochs": 3, "samples": 48, "batch": 2, "every": 2}


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_train", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Job:
    """An elastic job; the hosts are what a file says."""

    def __init__(self, folder: Path, marker: str, plan: dict[str, Any], *flags: str) -> None:
        self.folder, self.plan = folder, {**PLAN, **plan}
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
        script.chmod(0o755)
        self.flags = flags
        self.environment = {"PLAN": json.dumps(self.plan), "MARKER": marker}

    def hosts(self, text: str) -> None:
        new = self.folder / "hosts.new"
        new.write_text(text)
        new.rename(self.folder / "hosts")

    def start(self) -> None:
        self.process = start(
            *("--elastic-timeout", "100", *self.flags),
            *(sys.executable, str(PROGRAM), str(self.folder)),
            env=self.environment,
        )

    def reached(self, epoch: int) -> None:
        deadline = time.monotonic() + 90  # less than --elastic-timeout
        while not self.folder.joinpath(f"epoch{epoch}").exists():
            assert self.process.poll() is None, finish(self.process)
            assert time.monotonic() < deadline, "the epoch does not begin"
            time.sleep(0.02)

    def finish(self, expected: int = 0) -> tuple[list[dict[str, Any]], str]:
        """The results by rank, and what was written to stderr."""
        code, out, err = finish(self.process)
        assert code == expected, out + err
        results = [json.loads(line.partition(">:")[2]) for line in out.splitlines() if "{" in line]
        return sorted(results, key=lambda result: result["rank"]), err


def run(folder: Path, marker: str, plan: dict[str, Any], *flags: str) -> Any:
    job = Job(folder, marker, plan, *flags)
    job.start()
    return job.finish()


def check(results: list[dict[str, Any]], plan: dict[str, Any], first: int = 0) -> None:
    """All ranks have what one process gets from the committed steps, and no sample is left out."""
    plan = {**PLAN, **plan}
    assert [result["rank"] for result in results] == list(range(len(results)))
    assert all(result["size"] == len(results) for result in results)
    program = load_program()
    data = program.make_data(plan["samples"])
    model, optimizer = program.make_model(first)
    seen: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for epoch, ranks in results[0]["history"]:
        optimizer.zero_grad()
        sum(program.loss_of(model, data, indices) / len(ranks) for indices in ranks).backward()
        optimizer.step()
        for indices in ranks:
            seen[epoch].update(indices)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    momentum = [optimizer.state[p]["momentum_buffer"].flatten() for p in model.parameters()]
    for result in results:
        assert result["history"] == results[0]["history"]
        torch.testing.assert_close(torch.tensor(result["weights"]).double(), expected)
        for mine, reference in zip(result["momentum"], momentum):
            torch.testing.assert_close(torch.tensor(mine).double(), reference)
    assert sorted(seen) == list(range(plan["epochs"]))
    for counts in seen.values():
        assert sorted(counts) == list(range(plan["samples"]))
        # Padding repeats less than one sample a rank, each time that an epoch's rest is divided.
        assert sum(counts.values()) - plan["samples"] < 4 * 4


def sizes(results: list[dict[str, Any]]) -> list[int]:
    """The numbers of ranks of the steps, each as often as it changed."""
    steps = [len(ranks) for _, ranks in results[0]["history"]]
    return [n for place, n in enumerate(steps) if place == 0 or steps[place - 1] != n]


@pytest.mark.long
def test_without_a_fault(tmp_path: Path, marker: str) -> None:
    results, _ = run(tmp_path, marker, {}, "-np", "3", "--min-np", "2")
    check(results, {})
    assert sizes(results) == [3]
    steps = PLAN["epochs"] * math.ceil(PLAN["samples"] / 3 / PLAN["batch"])
    assert len(results[0]["history"]) == steps
    assert all(result["resets"] == [] for result in results)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("step", "victim"), [(11, 0), slow(0, 2), slow(0, 0), slow(11, 2)])
def test_a_killed_rank(tmp_path: Path, marker: str, victim: int, step: int, fused: bool) -> None:
    """Two of three ranks go on from the last commit, also without rank 0, and before a commit."""
    plan = {"kill": {str(victim): step}, "fused": fused}
    results, err = run(tmp_path, marker, plan, "-np", "3", "--min-np", "2")
    assert f"worker {victim} (rank {victim}) on localhost was ended by signal 9" in err
    check(results, plan)
    assert sizes(results) == ([3, 2] if step else [2])
    assert all(result["resets"] == [2] for result in results)
    assert {result["worker"] for result in results} == {0, 1, 2} - {victim}


@pytest.mark.long
def test_two_ranks_are_killed_at_once(tmp_path: Path, marker: str) -> None:
    plan = {"kill": {"1": 9, "2": 9}}
    results, _ = run(tmp_path, marker, plan, "-np", "3", "--min-np", "1")
    check(results, plan)
    assert sizes(results) == [3, 1]


@pytest.mark.long
def test_a_new_rank_takes_the_place_of_a_killed_one(tmp_path: Path, marker: str) -> None:
    """It gets weights, momentum, epoch and history from rank 0."""
    plan = {"kill": {"0": 5}, "wait": {"2": 3}}
    flags = ["-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "0", "1"]
    results, _ = run(tmp_path, marker, plan, *flags)
    check(results, plan)
    assert sizes(results) in ([3, 2, 3], [3, 3])
    assert sorted(result["worker"] for result in results) == [1, 2, 3]
    assert results[0]["worker"] == 1  # not the new one: rank 0 has the state


@pytest.mark.parametrize("fused", [True, False])
def test_hosts_join_and_leave(tmp_path: Path, marker: str, fused: bool) -> None:
    """Slots of the discovery script: 2, then 3, then 2 again; nothing is done twice."""
    plan = {"wait": {"1": 3, "2": 2}, "fused": fused}
    job = Job(tmp_path, marker, plan, "-np", "2", "--min-np", "1", "--max-np", "3")
    job.flags += ("--host-discovery-script", str(tmp_path / "hosts.sh"))
    job.hosts("localhost:2\n")
    job.start()
    job.reached(1)
    job.hosts("localhost:3\n127.0.0.1:4\n")  # more than --max-np
    job.reached(2)
    job.hosts("localhost:2\n")
    results, err = job.finish()
    check(results, plan)
    assert sizes(results) == [2, 3, 2]
    assert "signal" not in err
    samples = sum(len(indices) for _, ranks in results[0]["history"] for indices in ranks)
    assert samples == PLAN["epochs"] * PLAN["samples"]  # 48 is a multiple of 2 and of 3


@pytest.mark.long
def test_ranks_that_start_together_join_together(tmp_path: Path, marker: str) -> None:
    """One that is ready earlier waits for the other: both are one change of the ranks."""
    plan = {"wait": {"1": 4}, "late": {"3": 3}}
    job = Job(tmp_path, marker, plan, "-np", "2", "--min-np", "1", "--max-np", "4")
    job.flags += ("--host-discovery-script", str(tmp_path / "hosts.sh"), "--reset-limit", "1")
    job.hosts("localhost:2\n")
    job.start()
    job.reached(1)
    job.hosts("localhost:4\n")
    results, _ = job.finish()
    check(results, plan)
    assert sizes(results) == [2, 4]


@pytest.mark.long
def test_a_lost_host(tmp_path: Path, marker: str) -> None:
    """Its agent ends, behind ssh, and with it its rank: the others go on without the host."""
    plan = {"epochs": 4, "wait": {"2": 2}}
    job = Job(tmp_path, marker, plan, "-np", "3", "--min-np", "2", "-H", f"localhost:2,{FAR}:1")
    job.environment |= fake_ssh(tmp_path, f"echo $$ > '{tmp_path}/pid'\nexport FAR=1\n{RUN}")
    job.start()
    job.reached(1)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    results, err = job.finish()
    check(results, plan)
    assert f"host {FAR}: its agent has ended" in err
    assert sizes(results) == [3, 2]


@pytest.mark.long
def test_a_rank_that_dies_while_they_meet(tmp_path: Path, marker: str) -> None:
    """Between its place in the second generation and its group: there is a third generation."""
    plan = {"kill": {"2": 5}, "kill_meeting": {"1": 2}}
    results, _ = run(tmp_path, marker, plan, "-np", "4", "--min-np", "2")
    check(results, plan)
    assert sizes(results) == [4, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "flags", "message", "code"),
    [
        ({"kill": {"1": 3}}, "-np 2 --min-np 2", "1 ranks are left, fewer than 2", 137),
        slow({"kill": {"1": 3}}, "-np 3 --min-np 2 --reset-limit 0", "more often than --reset", 1),
        slow({"kill": {"0": 3}, "wait": {"0": 1}}, "-np 1 --min-np 1", "0 ranks are left", 137),
        (
            {"kill": {"0": 3, "1": 3}, "epochs": 1},
            "-np 2 --min-np 1 --blacklist-cooldown-range 0 0",
            "no rank that has the state",
            137,
        ),
        slow(  # whoever else came could not go on
            {"kill": {"0": 3, "1": 3}},
            "-np 2 --min-np 1 --max-np 2 --host-discovery-script",
            "no rank that has the state",
            137,
        ),
    ],
    ids=["too few", "reset limit", "nobody", "no state", "no state, new hosts"],
)
def test_jobs_that_cannot_go_on(
    tmp_path: Path, marker: str, plan: dict[str, Any], flags: str, message: str, code: int
) -> None:
    job = Job(tmp_path, marker, plan, *flags.split())
    if "script" in flags:
        job.flags += (str(tmp_path / "hosts.sh"),)
        job.hosts("localhost:2\n127.0.0.1:1\n")
    job.start()
    _, err = job.finish(expected=code)
    assert f"fusedpg-run: {message}" in err or message in err


@pytest.mark.long
@pytest.mark.parametrize("script", [False, True])
def test_a_program_that_fails_everywhere(tmp_path: Path, marker: str, script: bool) -> None:
    job = Job(tmp_path, marker, {}, "-np", "2", "--min-np", "1")
    if script:
        job.flags += ("--host-discovery-script", str(tmp_path / "hosts.sh"))
        job.hosts("localhost:1\n127.0.0.1:1\n")
    job.environment["PLAN"] = "no JSON"
    job.start()
    _, err = job.finish(expected=1)
    assert "JSONDecodeError" in err and "ranks are left, fewer than 2" in err


STUCK = """
import time
import fusedpg.hvd as hvd

class Nothing(hvd.elastic.State):
    def save(self): ...
    restore = save
    def sync(self):
        if {fruitless}:
            raise hvd.HorovodInternalError("no state for anybody")

@hvd.elastic.run
def train(state):
    if hvd.rank() == 1:
        time.sleep(1000)
    raise hvd.HorovodInternalError("lost")

hvd.init()
train(Nothing())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fruitless", "message"),
    [
        (True, "3 generations in a row did not begin to work"),
        (False, "worker 1 (rank 1) on localhost did not come within 20 s"),
    ],
)
def test_ranks_that_do_not_meet(tmp_path: Path, marker: str, fruitless: bool, message: str) -> None:
    """Neither meeting for ever nor waiting for ever."""
    program = tmp_path / "stuck.py"
    program.write_text(STUCK.format(fruitless=fruitless))
    patience = "100" if fruitless else "20"
    code, _, err = launch(
        *("-np", "2", "--min-np", "2", "--elastic-timeout", patience),
        *(sys.executable, str(program)),
        env={"MARKER": marker},
    )
    assert code == 1, err
    assert f"fusedpg-run: {message}" in err


@pytest.mark.long
def test_the_example(tmp_path: Path, marker: str) -> None:
    """It goes on when a rank is killed, and learns."""
    program = str(ROOT / "examples" / "horovod_elastic.py")
    job = start(
        *("-np", "3", "--min-np", "2", "--output-filename", str(tmp_path)),
        *(sys.executable, program, "--epochs", "40"),
        env={"MARKER": marker},
    )
    log = tmp_path / "rank.2" / "stdout"
    deadline = time.monotonic() + 60
    while not (log.exists() and (told := re.search(r"is process (\d+)", log.read_text()))):
        assert time.monotonic() < deadline and job.poll() is None, finish(job)
        time.sleep(0.02)
    os.kill(int(told[1]), signal.SIGKILL)
    code, out, err = finish(job)
    assert code == 0, err
    accuracy = re.search(r"epoch 40, 2 ranks, accuracy ([\d.]+)%", out)
    assert accuracy is not None and float(accuracy[1]) > 90, out


# --- states and samplers by themselves


@on_ranks(1, 2)
def test_a_commit_copies(context: Context) -> None:
    """Changes in place after a commit are undone."""
    hvd.init()
    try:
        state = hvd.elastic.ObjectState(items=[1], table={"a": [1]}, epoch=0)
        for committed in ([1], [1, 2], [1, 2, 3]):
            for _ in range(2):
                state.items.append(9)
                state.table["a"].append(9)
                state.epoch = 9
                state.restore()
                assert (state.items, state.table, state.epoch) == (
                    committed,
                    {"a": committed},
                    len(committed) - 1,
                )
            state.items.append(len(committed) + 1)
            state.table["a"].append(len(committed) + 1)
            state.epoch += 1
            state.commit()
        state.own = context.rank  # no part of the state
        state.epoch = 100 + context.rank
        state.sync()
        assert (state.epoch, state.own) == (100, context.rank)
        state.epoch = 0
        state.restore()
        assert state.epoch == 100  # sync saves
        with pytest.raises(AttributeError, match="ObjectState has no attribute 'other'"):
            print(state.other)
    finally:
        hvd.shutdown()


@on_ranks(1, 2)
def test_objects_of_torch(context: Context) -> None:
    """Model, optimizer and schedule come back as they were, and from rank 0, bit by bit."""
    hvd.init()
    try:
        torch.manual_seed(context.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            schedule.step()

        def everything() -> str:
            objects = (model, optimizer, schedule)
            return repr([o.state_dict() for o in objects])

        step()
        state.commit()
        before = everything()
        for _ in range(2):
            step()
            assert everything() != before
            state.restore()
            assert everything() == before
        if context.rank == 0:
            step()
        state.sync()
        assert len(set(hvd.allgather_object(everything()))) == 1
        assert (everything() != before) or context.rank != 0
        after = everything()
        step()
        state.restore()
        assert everything() == after
        state.model = torch.nn.Linear(2, 2)
        assert state.model.in_features == 2
        state.sync()
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("processed", [0, 3, 11, 12, 15])
def test_sampler_divides_what_is_left(
    replicas: int, processed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample once but for the padding, and all ranks as many; also with fewer than ranks."""
    monkeypatch.setattr(hvd, "size", lambda: replicas)
    parts = []
    for rank in range(replicas):
        monkeypatch.setattr(hvd, "rank", lambda rank=rank: rank)
        sampler = hvd.elastic.ElasticSampler(range(12), seed=1)
        sampler.load_state_dict({"epoch": 2, "processed_num": processed})
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler)
    order = list(range(12))
    random.Random(3).shuffle(order)
    left = order[processed:]
    together = [index for indices in zip(*parts) for index in indices]
    assert together[: len(left)] == left
    assert 0 <= len(together) - len(left) < replicas
    assert set(together) == set(left)


def test_without_the_launcher_an_error_goes_through() -> None:
    """Under torchrun or alone there is nobody to meet again."""

    class Nothing(hvd.elastic.State):
        def sync(self) -> None:
            pass

        save = restore = sync

    @hvd.elastic.run
    def fails(state: hvd.elastic.State) -> None:
        raise hvd.HorovodInternalError("lost")

    with pytest.raises(hvd.HorovodInternalError, match="lost"):
        fails(Nothing())
