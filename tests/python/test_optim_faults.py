"""Ranks that die, stop or disagree while an optimizer steps."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import harness
from checks import optim_faults
from checks.cases import digest, distance, same
from checks.faults import works
from checks.optim_faults import MODES, Trainer
from checks.optim_state import KINDS, Net, fused, set_gradients
from fuzz.resources import unowned
from harness import Context, on_ranks
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
@on_ranks(2)
def test_nan_everywhere(context: Context, mode: str, kind: str) -> str:
    """NaN in the gradients of one rank goes where it goes in torch's optimizer."""
    trainer = Trainer(context, mode, kind)
    trainer.step(0)
    last = context.rank == context.world_size - 1
    trainer.step(1, torch.nan if last else 1.0)
    params = list(trainer.module.parameters())
    # Each parameter has a gradient here, and all of it is NaN.
    assert all(bool(param.isnan().all()) for param in params)
    for state in trainer.optimizer.state.values():
        for key, value in state.items():
            if key == "step":
                assert float(value) == 2
            else:
                assert bool(value.isnan().all()), key
    works()
    return str(torch.stack([param.isnan().sum() for param in params]).tolist())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@on_ranks(1, 2, 3, harness.slow(4))
def test_one_bad_element(context: Context, kind: str, value: float) -> str:
    """One element of one gradient on one rank: the rest is as if nothing had happened."""
    name, arguments = KINDS[kind]
    module, twin = Net(), Net()
    optimizer = fused(module, kind)
    oracle = getattr(torch.optim, name)(twin.parameters(), foreach=False, **arguments)
    for step in range(3):
        set_gradients(module, step, context.rank, context.world_size)
        set_gradients(twin, step, 0, 1)
        if step == 1:
            assert module.body.grad is not None and twin.body.grad is not None
            twin.body.grad[1000] = value
            if context.rank == context.world_size - 1:
                module.body.grad[1000] = value
        optimizer.step()
        oracle.step()
    for mine, want in zip(module.parameters(), twin.parameters(), strict=True):
        assert same(mine.isnan(), want.isnan())
        assert same(mine.isinf(), want.isinf())
        good = want.isfinite()
        assert distance(mine[good].detach(), want[good].detach()) <= 1e-6
    return digest([param.detach() for param in module.parameters()])
