"""Ranks that die, stop or disagree while an optimizer steps."""

from __future__ import annotations

import signal
import time

import pytest

import harness
from checks import optim_faults
from checks.optim_faults import MODES
from fuzz.resources import unowned
from test_faults import wait_for

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

TIMEOUT = 8  # seconds, of the group


def survive(workers: harness.Workers, mode: str, victim: int, since: float) -> None:
    """The others have raised soon and can start anew."""
    others = [rank for rank in range(workers.world_size) if rank != victim]
    for answer in workers.collect(25, ranks=others):
        assert not isinstance(answer, harness.RemoteError | harness.Died), answer
        text, when, _ = answer
        assert "fused:" in text, text
        assert f"rank {victim}" in text, text
        # At once, not when the timeout is over.
        assert when - since < TIMEOUT - 3, when - since
    workers.start(optim_faults.train_anew, others, mode, ranks=others)
    answers = workers.collect(30, ranks=others)
    assert isinstance(answers[0], str), answers
    assert answers[0] == answers[1]


@pytest.mark.parametrize("where", ["backward", "step"])
@pytest.mark.parametrize("mode", [MODES[0], harness.slow(MODES[1]), MODES[2]])
def test_killed_inside(mode: str, where: str) -> None:
    before = unowned()
    with harness.Workers(3, timeout=TIMEOUT, oracle=False) as workers:
        workers.start(optim_faults.train_until_failure, mode, 1, where)
        wait_for(workers, "running", [0, 1, 2])
        workers.processes[1].join(20)
        survive(workers, mode, 1, time.monotonic())
        for rank in (0, 2):
            workers.signal(rank, signal.SIGKILL)
    assert unowned() <= before, "something stays in /dev/shm"


@pytest.mark.parametrize(
    ("mode", "delay"),
    [
        harness.slow(MODES[0], 0.003),
        (MODES[1], 0.003),
        harness.slow(MODES[1], 0.017),
        (MODES[2], 0.017),
    ],
)
def test_killed_at_some_time(mode: str, delay: float) -> None:
    with harness.Workers(3, timeout=TIMEOUT, oracle=False) as workers:
        workers.start(optim_faults.train_until_failure, mode, 2, "outside")
        wait_for(workers, "running", [0, 1, 2])
        time.sleep(delay)
        workers.signal(2, signal.SIGKILL)
        survive(workers, mode, 2, time.monotonic())


@pytest.mark.parametrize("mode", [harness.slow(MODES[0]), MODES[1], harness.slow(MODES[2])])
def test_stopped_past_the_timeout(mode: str) -> None:
    with harness.Workers(3, timeout=3, oracle=False) as workers:
        workers.start(optim_faults.train_until_failure, mode, 1, "outside")
        wait_for(workers, "running", [0, 1, 2])
        stopped = time.monotonic()
        workers.signal(1, signal.SIGSTOP)
        try:
            answers = workers.collect(25, ranks=[0, 2])
            for text, when, _ in answers:
                assert "rank 1" in text and "time" in text, text
                assert 2 < when - stopped < 9, when - stopped
            workers.start(optim_faults.train_anew, [0, 2], mode, ranks=[0, 2])
            first, second = workers.collect(30, ranks=[0, 2])
            assert isinstance(first, str), first
            assert first == second
        finally:
            workers.signal(1, signal.SIGCONT)
        # The one that slept finds that the others have given up.
        [(text, *_)] = workers.collect(25, ranks=[1])
        assert "fused:" in text, text


def test_late_rank() -> None:
    with harness.Workers(2, timeout=1, oracle=False) as workers:
        workers.run(optim_faults.late, "ddp", 1, 3)


@pytest.fixture(params=[2, 3], ids=lambda size: f"world{size}")
def disagreeing(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool(request.param, timeout=20, oracle=False)


@pytest.mark.parametrize("what", ["lr", "weight_decay", "betas", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_disagreement(disagreeing: harness.Workers, mode: str, what: str) -> None:
    for error in disagreeing.errors(optim_faults.other_lr, mode, what):
        assert error.kind in ("DistBackendError", "RuntimeError"), error.trace
        assert "disagree" in error.text and "fused_adamw_" in error.text, error.trace
    assert len(set(disagreeing.run(optim_faults.train_again, mode))) == 1


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw"])
@pytest.mark.parametrize("mode", MODES)
def test_nan_everywhere(pair: harness.Workers, mode: str, kind: str) -> None:
    assert len(set(pair.run(optim_faults.nan, mode, kind))) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_one_bad_element(workers: harness.Workers, kind: str, value: float) -> None:
    workers.run(optim_faults.one_nan, kind, value)
