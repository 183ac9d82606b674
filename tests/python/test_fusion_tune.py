"""The tuner of fused functions."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks.compiled import compiles, environment
from checks.refused import refused
from fusedpg import fusion
from fusedpg.fusion import tune
from fuzz.tuning import everyone
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only


def momentum(g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float) -> Any:
    m = 0.9 * m + fusion.all_reduce(g, "mean")
    return w - lr * m, m


def normed(g: fusion.Partial, b: fusion.Replicate) -> Any:
    return torch.nn.functional.layer_norm(fusion.all_reduce(g) + b, (8,))


@contextlib.contextmanager
def cache(context: Context) -> Iterator[Path]:
    """Nothing is tuned at first; the ranks share a directory."""
    place: list[Any] = [tempfile.mkdtemp() if context.rank == 0 else None]
    if context.rank == 0:
        harness.share_compiled(Path(place[0]))
    dist.broadcast_object_list(place, group=context.oracle)
    tune._memory.clear()
    with compiles(context), environment(FUSEDPG_CACHE_DIR=place[0]):
        yield Path(place[0])
    tune._memory.clear()


def arguments(context: Context, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    g = torch.randn(context.world_size, numel, generator=generator)[context.rank]
    w, m = torch.randn(2, numel, generator=generator)
    begin, length = fusedpg.shard_range(numel, context.world_size, context.rank)
    mine = context.empty(numel, arena=True).copy_(w), m[begin : begin + length].clone()
    return [context.empty(numel, arena=True).copy_(g), *mine]


def choices(context: Context, numel: int) -> None:
    """All choose alike, nothing is changed, results are those of an untuned call."""
    given = arguments(context, numel)
    before = [tensor.clone() for tensor in given]
    fused = fusedpg.fuse(momentum)
    with cache(context) as place:
        expected = fused(*given, lr=0.1)
        report = fused.tune(*given, lr=0.1, seconds=20)
        assert report.source == "timed"
        assert len(set(everyone(context, report.chosen.title))) == 1
        titles = {schedule.title for schedule in fused.schedules(*given, lr=0.1)}
        assert {row.schedule.title for row in report.rows} == titles
        timed = {row.schedule.title: row.seconds for row in report.rows if row.seconds}
        assert min(timed, key=lambda title: timed[title]) == report.chosen.title
        assert len(set(everyone(context, tuple(timed.values())))) == 1
        for tensor, old in zip(given, before):
            assert torch.equal(tensor, old)
        assert fused.schedule(*given, lr=0.3) is report.chosen
        assert all(title in fused.report() for title in titles), fused.report()
        for schedule in fused.schedules(*given, lr=0.1):  # each has these bits
            again = fused.scheduled(*schedule.transformations)(*given, lr=0.1)
            assert all(torch.equal(x, y) for x, y in zip(again, expected)), schedule.title
        assert all(torch.equal(x, y) for x, y in zip(fused(*given, lr=0.1), expected))
        # In place, by the first call.
        auto = fusedpg.fuse(schedule="auto")(momentum)
        mine = [tensor.clone() for tensor in given]
        auto.into(mine[1:], *mine, lr=0.1)
        assert "tuned in" in auto.report()
        assert all(torch.equal(x, y) for x, y in zip(mine[1:], expected))
        assert torch.equal(mine[0], before[0])
        assert len(set(everyone(context, auto.schedule(*mine, lr=0.1).title))) == 1
        remembered(context, report, given, place)


def remembered(
    context: Context, report: fusion.Report, given: list[torch.Tensor], place: Path
) -> None:
    """In the process, and on disk; on which rank 0 alone looks."""
    other = fusedpg.fuse(momentum)
    assert other.tune(*given, lr=0.1).source == "memory"
    tune._memory.clear()
    found = other.tune(*given, lr=0.1)
    assert found.source == "disk" and found.chosen.title == report.chosen.title
    assert other.tune(*given, lr=0.1, again=True).source == "timed"
    dist.barrier(group=context.oracle)
    for file in (place / "tuned").iterdir():
        file.write_text("Nothing()\n")
    tune._memory.clear()
    dist.barrier(group=context.oracle)
    assert fusedpg.fuse(momentum).tune(*given, lr=0.1).source == "timed"


@on_ranks(2)
def test_a_schedule_that_raises(context: Context) -> None:
    """A schedule that raises, on all ranks or on one, is shown and not chosen."""
    given = arguments(context, 1000)
    original = tune._call
    last = context.world_size - 1

    def broken(schedule: fusion.Schedule, *rest: Any) -> Any:
        call = original(schedule, *rest)
        title = schedule.title

        def instead() -> None:
            if title == "as written":
                raise RuntimeError("on all ranks")
            call()
            if "FuseCollective" in title and context.rank == last:
                raise RuntimeError("on the last rank")

        return instead

    with cache(context):
        tune._call = broken
        try:
            fused = fusedpg.fuse(momentum)
            report = fused.tune(*given, lr=0.1, seconds=20)
        finally:
            tune._call = original
    notes = {row.schedule.title: row.note for row in report.rows if row.seconds is None}
    assert notes["as written"] == "RuntimeError: on all ranks"
    word = "on the last rank" if context.rank == last else "another rank raised"
    one = [note for title, note in notes.items() if "FuseCollective" in title]
    assert one and all(word in note for note in one), notes
    assert report.chosen.title not in notes
    assert len(set(everyone(context, report.chosen.title))) == 1
    assert "on all ranks" in fused.report()


@on_ranks(2)
def test_limits(context: Context) -> None:
    """With no time at all one schedule is timed, the same on all ranks."""
    given = arguments(context, 1000)
    with cache(context):
        report = fusedpg.fuse(momentum).tune(*given, lr=0.1, seconds=0)
    assert sum(row.seconds is not None for row in report.rows) == 1
    assert any("time was over" in row.note for row in report.rows)
    assert len(set(everyone(context, report.chosen.title))) == 1
    fixed = fusedpg.fuse(momentum).scheduled()
    try:
        fixed.tune(*given, lr=0.1)
    except ValueError as error:
        assert "schedule of its own" in str(error)
    else:
        raise AssertionError


@on_ranks(2)
def test_gradients(context: Context) -> None:
    """Forward and backward are tuned; the numbers are within rounding of the untuned ones."""
    drawn = torch.Generator().manual_seed(5)
    g = torch.randn(context.world_size, 16, 8, generator=drawn)[context.rank]
    b = torch.randn(8, generator=drawn)
    results = []
    with cache(context):
        for auto in (None, "auto"):
            fused = fusedpg.fuse(normed, schedule=auto)  # type: ignore[call-overload]
            mine = g.clone().requires_grad_(), b.clone().requires_grad_()
            y = fused(*mine)
            (y * y * y).sum().backward()
            results.append((y.detach(), mine[0].grad, mine[1].grad))
            assert fused.report().count("tuned in") == (2 if auto else 0), fused.report()
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)


@on_ranks(2)
def test_a_rank_leaves(context: Context) -> None:
    """Where a rank leaves, the others hear of it, and nothing is chosen."""
    group = dist.new_group(backend=context.backend, timeout=datetime.timedelta(seconds=20))
    given = arguments(context, 1000)
    fused = fusedpg.fuse(momentum)
    with cache(context):
        fused(*given, lr=0.1, group=group)
        if context.rank:
            dist.destroy_process_group(group)
            return
        begun = time.monotonic()
        with refused("", dist.DistBackendError):
            fused.tune(*given, lr=0.1, group=group)
        assert time.monotonic() - begun < 30
        assert fused.report() == "nothing has been tuned"
        dist.destroy_process_group(group)


@on_ranks(2)
def test_with_gloo(context: Context) -> None:
    """Any backend can be tuned."""
    given = arguments(context, 1000)
    fused = fusedpg.fuse(momentum)
    with cache(context):
        report = fused.tune(*given, lr=0.1, group=context.oracle)
    assert report.source == "timed"
    assert len(set(everyone(context, report.chosen.title))) == 1


@pytest.mark.parametrize(
    ("world_size", "numel"), [(1, 1000), harness.slow(2, 1), (2, 100_003), harness.slow(3, 5000)]
)
def test_choices(world_size: int, numel: int) -> None:
    harness.pool(world_size).run(choices, numel)
