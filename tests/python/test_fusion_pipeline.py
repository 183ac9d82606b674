"""Fused functions that send to the next pipeline stage, and receive from the previous one."""

from __future__ import annotations

import pytest
import torch

import fusedpg
import harness
from checks import pipeline, pipeline_told
from fusedpg import fusion
from fusedpg.fusion import IllegalProgram, recv, send


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_schedules(world_size: int, dtype: torch.dtype) -> None:
    seen = 0
    for shape in ((6, 40), (33,), (1,), (3, 0)):
        counts = harness.pool(world_size).run(pipeline.values, shape, dtype)
        assert len(set(counts)) == 1
        seen += counts[0]
    assert seen > 20 * (world_size // 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_as_they_are(world_size: int) -> None:
    for shape in ((6, 40), (7,)):
        harness.pool(world_size).run(pipeline.shards, shape)


@pytest.mark.parametrize(
    ("order", "async_op"),
    # Waited for at once, a forward and a backward would wait for each other one by one.
    [("all forward first", True), ("all forward first", False), ("one by one", True)],
)
@pytest.mark.parametrize(
    ("world_size", "stages"), [(4, 2), (3, 3), harness.slow(6, 3), harness.slow(4, 4)]
)
def test_training(world_size: int, stages: int, async_op: bool, order: str) -> None:
    harness.pool(world_size).run(pipeline.train, stages, torch.float64, order, async_op)


@pytest.mark.parametrize("seed", [1, 2, 3, harness.slow(4), harness.slow(5)])
def test_sequences(seed: int) -> None:
    harness.pool(4).run(pipeline.sequence, seed)


def test_mismatches() -> None:
    harness.pool(4).run(pipeline.mismatches)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sends_first", "answers"),
        ("answers", "receives_first"),
        harness.slow("receives_first", "receives_first"),
        harness.slow("sends_first", "receives_first"),
        harness.slow("sends_first", "sends_first"),
    ],
)
def test_mismatches_both_ways(first: str, second: str) -> None:
    harness.pool(4).run(pipeline_told.differ, first, second)


def test_others_hear() -> None:
    harness.pool(3).run(pipeline_told.others_hear)


def test_refused_at_once() -> None:
    harness.pool(4).run(pipeline_told.refused_at_once)


def test_numbers_again() -> None:
    harness.pool(4).run(pipeline_told.numbers_again)


@pytest.mark.parametrize("schedules", [False, harness.slow(True)])
def test_both_ways(schedules: bool) -> None:
    harness.pool(4).run(pipeline_told.both_ways, schedules)


def test_arguments() -> None:
    harness.pool(4).run(pipeline.arguments)


@pytest.mark.long
@pytest.mark.fused_only
@pytest.mark.parametrize("sends", [True, False])
def test_killed(sends: bool) -> None:
    with harness.Workers(4) as workers:
        workers.start(pipeline.dies, sends, 8.0)
        answers = workers.collect(50)
    dead = 2 if sends else 0
    assert isinstance(answers.pop(dead), harness.Died), answers
    assert all(isinstance(answer, harness.RemoteError) for answer in answers), answers
    counterpart = answers[0 if sends else 1]
    assert "DistBackendError" in counterpart.bases, counterpart


@pytest.mark.fused_only
def test_between_hosts() -> None:
    workers = harness.pool_of_hosts("two of two")
    workers.run(pipeline.values, (6, 4000), torch.float32)
    workers.run(pipeline.train, 2, torch.float64, "one by one", True)
    workers.run(pipeline.mismatches)


def test_printed() -> None:
    """A slice is sent after one operation, and its gradient comes as one."""
    x = torch.ones(4, 60)
    schedule = pipeline.first.schedule(x, x[0], x, 3, world_size=2)
    program = schedule.program
    assert "send(add_1, dst='next', tag=0)" in str(program)
    assert [str(group) for group in program.groups] == ["fused collective"]
    assert (program.crossing(), program.bytes()) == (480, 480)
    received = pipeline.last.schedule(x, x, world_size=2).program
    assert (received.crossing(), received.bytes()) == (480, 480)
    assert "recv_slice = recv(like, src='previous', tag=0)" in str(received)
    backward = fusion.schedules(pipeline.first.derivative(x, x[0], x, 3, world_size=2).program)
    assert "recv(src='next', tag=0, gradient=True)" in str(backward[0])
    assert min(schedule.program.crossing() for schedule in backward) == 480
    back = pipeline.last.derivative(x, x, world_size=2).program
    assert "send(grad_recv_1, dst='previous', tag=0, gradient=True)" in str(back)


def test_no_gradient_to_send_back() -> None:
    def signs(like):
        return torch.sign(recv(like))

    with pytest.raises(IllegalProgram, match=r"test_fusion_pipeline.py:\d+: `recv`: no result"):
        fusedpg.fuse(signs).derivative(torch.ones(3), world_size=2)


def test_names() -> None:
    with pytest.raises(TypeError, match=r"send of fusedpg\.fusion"):
        send(torch.ones(3))
