"""Ranks that die, stop, disagree or are late."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import harness
from checks import faults
from fuzz.resources import unowned
from harness import Context

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

SEQUENCE = re.compile(r"seq\w*( number)?\W*\d+|#\d+", re.IGNORECASE)


def wait_for(workers: harness.Workers, name: str, ranks: list[int]) -> None:
    """Waits until ranks have marked that they are under way."""
    deadline = time.monotonic() + 60
    while not all((workers.scratch / f"{name}{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, f"no {name} from {ranks}"
        time.sleep(0.005)


def kill_last(workers: harness.Workers, op: str) -> None:
    """Kills rank 2 of three in a loop of an operation: the others name it, and soon."""
    wait_for(workers, "running", [0, 1])
    time.sleep(0.05)
    killed = time.monotonic()
    workers.signal(2, signal.SIGKILL)
    for text, when in workers.collect(20, ranks=[0, 1]):
        assert when - killed < 2, when - killed
        names(text, op, 2)


def stop_second(workers: harness.Workers, op: str) -> None:
    """Stops rank 1 of three in a loop, in groups with a deadline of 3 s: the others name it."""
    wait_for(workers, "running", [0, 1, 2])
    stopped = time.monotonic()
    workers.signal(1, signal.SIGSTOP)
    for text, when in workers.collect(20, ranks=[0, 2]):
        assert 2 < when - stopped < 7, when - stopped
        names(text, op, 1)
        assert "time" in text, text


def names(text: str, op: str, rank: int) -> None:
    assert text.startswith("fused:"), text
    assert op in text, text
    assert f"rank {rank}" in text, text
    # Messages between two ranks are matched by tag; they have no number.
    assert op == "recv" or SEQUENCE.search(text), text


@pytest.mark.parametrize(
    ("what", "numel", "arena"),
    [
        ("all_reduce", 100, False),
        ("all_reduce", 1_000_000, False),
        ("all_reduce", 1_000_000, True),
        ("all_reduce async", 100_000, False),
        ("all_gather", 100_000, False),
        ("barrier", 1, False),
        ("recv", 100, False),
        ("fused_adamw_", 100_003, False),
    ],
)
def test_killed_peer(what: str, numel: int, arena: bool) -> None:
    before = unowned()
    with harness.Workers(3, oracle=False) as workers:
        workers.start(faults.loop, what, numel, arena)
        kill_last(workers, what.split()[0])
        workers.start(faults.after_failure, [0, 1], "destroy", ranks=[0, 1])
        assert workers.collect(30, ranks=[0, 1]) == [None, None]
        for rank in (0, 1):
            workers.signal(rank, signal.SIGKILL)
    assert unowned() <= before, "something stays in /dev/shm"


def test_peer_leaves_without_a_word() -> None:
    with harness.Workers(2, oracle=False) as workers:
        workers.start(faults.loop, "all_reduce", 10, False, ranks=[0])
        begin = time.monotonic()
        workers.start(faults.leave, ranks=[1])
        [(text, when)] = workers.collect(20, ranks=[0])
        assert when - begin < 2
        names(text, "all_reduce", 1)


@pytest.mark.parametrize(
    ("how", "numel"),
    [
        ("abort", 1_000_000),
        ("destroy", 100),
        harness.slow("abort", 100),
        harness.slow("destroy", 1_000_000),
    ],
)
def test_stopped_peer(numel: int, how: str) -> None:
    with harness.Workers(3, timeout=3, oracle=False) as workers:
        workers.start(faults.loop, "all_reduce", numel, True)
        try:
            stop_second(workers, "all_reduce")
            workers.start(faults.after_failure, [0, 2], how, ranks=[0, 2])
            assert workers.collect(30, ranks=[0, 2]) == [None, None]
        finally:
            workers.signal(1, signal.SIGCONT)
        # The one that slept finds that the others have given up.
        [(text, _)] = workers.collect(20, ranks=[1])
        assert text.startswith("fused:")


@pytest.mark.parametrize("seed", [0, harness.slow(1), harness.slow(2)])
def test_stopped_peer_cannot_write(seed: int) -> None:
    """A rank stopped in the middle of a write, continued after recovery."""
    with harness.Workers(3, timeout=2, oracle=False) as workers:
        workers.start(faults.large_loop, 6_000_011, seed)
        wait_for(workers, f"large{seed}-", [0, 1, 2])
        time.sleep(0.003 + 0.007 * seed)
        workers.signal(2, signal.SIGSTOP)
        try:
            for text in workers.collect(20, ranks=[0, 1]):
                assert "rank 2" in text, text
            workers.start(faults.recover, [0, 1], "recovered", ranks=[0, 1])
            digests = workers.collect(30, ranks=[0, 1])
            assert all(isinstance(one, str) for one in digests), digests
        finally:
            workers.signal(2, signal.SIGCONT)
        # It finishes its write, into memory that nobody else has any more.
        [text] = workers.collect(20, ranks=[2])
        assert text.startswith("fused:")
        for rank in (0, 1):
            workers.start(faults.recovered, digests[rank], ranks=[rank])
        assert workers.collect(30, ranks=[0, 1]) == [None, None]


def test_sender_dies_within_a_message_from_any_rank() -> None:
    """Others live, but only this one can send the rest."""
    with harness.Workers(3, timeout=60, oracle=False) as workers:
        workers.start(faults.send_large, 20_000_000, ranks=[1])
        workers.start(faults.hear, 1, ranks=[0])
        assert workers.collect(60, ranks=[0]) == [None]
        workers.signal(1, signal.SIGSTOP)
        workers.start(faults.receive_from_any, 20_000_000, ranks=[0])
        wait_for(workers, "receives", [0])
        time.sleep(0.5)  # rank 0 reads the first part; the same error is due if it has not
        workers.signal(1, signal.SIGKILL)
        [text] = workers.collect(20, ranks=[0])
        assert "rank 1" in text, text


MISMATCHES = {
    "op": ("all_reduce", "broadcast"),
    "dtype": ("float32", "float64"),
    "size": ("{0}", "{1}"),
    "root": ("root", "0", "1"),
    "redop": ("SUM", "MAX"),
    "gather size": ("all_gather", "{2}", "{3}"),
    "learning rate": ("fused_adamw",),
}


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"world{size}")
def disagreeing(request: pytest.FixtureRequest) -> Iterator[harness.Workers]:
    with harness.Workers(request.param, timeout=20, oracle=False) as workers:
        yield workers


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("numel", [10, 300_000])
@pytest.mark.parametrize("what", MISMATCHES)
def test_disagreement(disagreeing: harness.Workers, what: str, numel: int, async_op: bool) -> None:
    begin = time.monotonic()
    ranks = disagreeing.world_size
    for error in disagreeing.errors(faults.mismatch, what, numel, async_op):
        assert error.kind == "DistBackendError", error.trace
        assert error.text.startswith("fused:"), error.text
        assert SEQUENCE.search(error.text), error.text
        for word in MISMATCHES[what]:
            sizes = numel, numel + 1, numel * ranks, (numel + 1) * ranks
            assert word.format(*sizes) in error.text, error.text
    assert time.monotonic() - begin < 5
    disagreeing.run(faults.still_works)


def test_absent_rank_breaks_only_its_group() -> None:
    with harness.Workers(3, timeout=20, oracle=False) as workers:
        workers.run(faults.sleep_through, 1, 3)


def test_monitored_barrier_names_the_missing_rank() -> None:
    with harness.Workers(3, timeout=10, oracle=False) as workers:
        assert "2" in workers.run(faults.monitored, 2)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nan_check(dtype: torch.dtype) -> None:
    with harness.Workers(2, env={"FUSEDPG_NAN_CHECK": "1"}, oracle=False) as workers:
        for numel in (7, 200_001):
            for error in workers.errors(faults.nan, dtype, numel):
                assert error.kind in ("DistBackendError", "ValueError"), error.trace
                assert "nan" in error.text.lower()
            workers.run(faults.still_works)


@harness.on_ranks(2)
def test_nan_check_by_option(context: Context) -> None:
    """The NaN check as an option of one group."""
    import fusedpg

    options = fusedpg.Options(nan_check=True)
    group = dist.new_group(pg_options=options)
    with pytest.raises((dist.DistBackendError, ValueError), match=r"(?i)nan"):
        dist.all_reduce(torch.full((5,), torch.nan), group=group)
    tensor = torch.full((5,), torch.nan)
    dist.all_reduce(tensor)
    assert bool(tensor.isnan().all())


def test_full_arena() -> None:
    with harness.Workers(2, env={"FUSEDPG_ARENA_BYTES": str(24 << 20)}, oracle=False) as workers:
        for text in workers.run(faults.full_arena):
            assert "arena" in text, text
            assert "FUSEDPG_ARENA_BYTES" in text or "arena_bytes" in text, text
        workers.run(faults.ddp_without_arena)


def test_tensors_outlive_their_group() -> None:
    with harness.Workers(2, oracle=False) as workers:
        workers.run(faults.outlive)


@pytest.mark.parametrize("size", [1, 3])
def test_groups_one_after_the_other_on_one_store(size: int) -> None:
    with harness.Workers(size, oracle=False) as workers:
        workers.run(faults.again_and_again, 4)


def flat(before: dict[str, int], after: dict[str, int]) -> None:
    slack = {"fds": 3, "threads": 2, "maps": 40, "shared": 4, "rss": 40}
    grown = {
        key: after[key] - before[key] for key in before if after[key] - before[key] > slack[key]
    }
    assert not grown, (grown, before, after)


@pytest.mark.long
def test_two_hundred_groups() -> None:
    before = unowned()
    with harness.Workers(2, oracle=False) as workers:
        for answer in workers.run(faults.churn, 200, timeout=110):
            flat(*answer)
    assert unowned() <= before


def test_calls_leak_nothing() -> None:
    with harness.Workers(2, oracle=False) as workers:
        for answer in workers.run(faults.calls_leak_nothing, 500):
            flat(*answer)


def test_more_ranks_than_cores() -> None:
    assert max(harness.pool(4).run(faults.small_calls, 200)) < 20
    with harness.Workers(8, oracle=False) as workers:
        assert max(workers.run(faults.small_calls, 200)) < 20


def test_forked_children() -> None:
    with harness.Workers(2, oracle=False) as workers:
        workers.run(faults.forked_children)
        workers.run(faults.data_loader)


@pytest.mark.parametrize("permuted", [False, True], ids=["in order", "permuted"])
@pytest.mark.parametrize("file_store", [False, True], ids=["tcp", "file"])
def test_groups_of_changing_size_on_one_store(file_store: bool, permuted: bool) -> None:
    with harness.Workers(3, init=False) as workers:
        workers.run(faults.resized, [3, 2, 3, 2, 2, 3, 1, 3], file_store, permuted)


def test_without_descriptors() -> None:
    with harness.Workers(3, oracle=False) as workers:
        for texts in workers.run(faults.short_of_descriptors):
            assert len(texts) == 2
            assert all("RLIMIT_NOFILE" in text for text in texts), texts


@pytest.mark.parametrize("call", ["memfd_create", "fallocate"])
def test_without_shared_memory(call: str) -> None:
    """All ranks raise what the system refuses, and what to do instead."""
    with harness.Workers(2, init=False, oracle=False) as workers:
        for text in workers.run(faults.without_shared_memory, call):
            assert call in text, text
            assert "FUSEDPG_HOST_ID" in text, text


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("raise ValueError('no more data')", ["ended", "ValueError: no more data"]),
        ("sys.exit(3)", ["ended", "without destroy_process_group"]),
        ("dist.destroy_process_group()", ["has left the group (destroy_process_group"]),
        ("import os; os._exit(3)", ["ended"]),
    ],
    ids=["exception", "sys.exit", "destroy", "os._exit"],
)
def test_error_says_how_a_rank_ended(how: str, parts: list[str]) -> None:
    with harness.Workers(2, init=False, oracle=False) as workers:
        text = workers.run(faults.ends_by, how)[0]
        for part in ["all_reduce", "rank 1", *parts]:
            assert part in text, text
        assert ("left the group" in text) == ("destroy" in how)
