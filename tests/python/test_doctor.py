"""``python -m fusedpg check`` and ``bench``: that they pass here, and that they can fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import harness
from fusedpg import _doctor

pytestmark = pytest.mark.fused_only


@pytest.mark.long
def test_check() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusedpg", "check"],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[-1] == "all right"
    passed = [line.removesuffix("ok").strip() for line in lines if line.endswith(" ok")]
    gpus = [] if torch.cuda.device_count() >= _doctor.RANKS else ["GPUs"]
    assert [name for name, *_ in _doctor.SHARED_MEMORY if name not in passed] == gpus
    between = [name for name, *_ in _doctor.BETWEEN_HOSTS]
    assert passed.count(between[0]) == done.stdout.count("two hosts:") == 1
    assert "times Gloo's" in done.stdout


def test_a_wrong_number_is_found() -> None:
    right = torch.ones(10)
    wrong = right.clone()
    wrong[3] = 1.001
    _doctor.same("x", right, right.clone())
    for tolerance in (0.0, 1e-4):
        with pytest.raises(AssertionError, match="x: differs from what torch computes"):
            _doctor.same("x", wrong, right, tolerance)


def test_a_check_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    # The ranks have no such list, as if the check had raised.
    monkeypatch.setattr(_doctor, "BROKEN", [_doctor.check("nothing", print)], raising=False)
    assert not _doctor._scenario("title", "BROKEN", _doctor._one_host)
    assert "nothing                            FAILED" in capsys.readouterr().out
    monkeypatch.setattr(_doctor, "_scenario", lambda *_: False)
    assert _doctor.run_check() == 1
    assert capsys.readouterr().out == "FAILED\n"


def hangs(rank: _doctor.Rank, say: Callable[..., None]) -> None:
    say("here", rank.rank)
    if rank.rank == 1:
        time.sleep(1000)


@pytest.mark.slow
def test_ranks_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "SCENARIO", 25.0)
    heard: list[Any] = []
    _doctor.run(hangs, _doctor._one_host, lambda *words: heard.append(words))
    assert {(0, "here", 0), (1, "here", 1), (0, "end")} < set(heard)
    assert heard[-1] == (-1, "error", "ranks [1] hang")


def test_figures() -> None:
    rows = _doctor._rows((4096, 1 << 20), 0.05)
    assert [(name, size) for name, size, _ in rows] == [
        (name, size) for size in (4096, 1 << 20) for name in ("all_reduce", "AdamW step")
    ]
    for name, _, times in rows:
        arms = {"arena", "ordinary", "gloo", "copy"} - (
            {"ordinary"} if name != "all_reduce" else set()
        )
        assert set(times) == arms
        assert min(times.values()) > 0
