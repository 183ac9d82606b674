"""A group's reports: counters, late ranks, OpenMetrics text, a line in the log."""

from __future__ import annotations

import io
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only

LINE = re.compile(r'(fusedpg_\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\d+(?:\.\d+)?)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    lines = text.split("\n")
    assert lines[-2:] == ["# EOF", ""]
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    result = {}
    for line in lines[:-2]:
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match, line
        key = (match[1], frozenset(LABEL.findall(match[2])))
        assert key not in result, line
        assert match[1].removesuffix("_total").removesuffix("_info") in families
        result[key] = float(match[3])
    return result


@on_ranks(2, 3)
def test_openmetrics(context: Context) -> None:
    group = dist.new_group(group_desc="by hand")
    dist.all_reduce(torch.ones(1000), group=group)
    fusedpg.sparse_all_reduce(torch.zeros(100_000), group=group)
    stats, info = fusedpg.stats(group), fusedpg.group_info(group)
    found = samples(fusedpg.openmetrics(group))
    where = {"group": group.group_name, "rank": str(context.rank)}

    def value(name: str, **labels: str) -> float:
        return found[f"fusedpg_{name}", frozenset((where | labels).items())]

    waited = stats.pop("waited")
    assert set(waited) == set(range(context.world_size)) - {context.rank}
    for peer, seconds in waited.items():
        found_seconds = value("waited_seconds_total", peer=str(peer))
        assert found_seconds == pytest.approx(seconds, abs=1e-9)
    assert set(stats) == {"all_reduce", "sparse_all_reduce"}
    for op, counts in stats.items():
        assert sum(counts["paths"].values()) == counts["calls"] == 1
        for path, calls in counts["paths"].items():
            assert value("calls_total", op=op, path=path) == calls
        for name in ("bytes_sent", "bytes_received", "messages_sent"):
            assert value(f"{name}_total", op=op) == counts[name]
    assert stats["all_reduce"]["bytes_sent"] >= 4000
    assert value("sequence_number") == info["sequence_number"] > 0
    assert value("arena_reserved_bytes") == info["arena_reserved"] > 0
    assert value("failed") == 0
    assert value("group_info", engine="shm", transport="", isa=info["isa"]) == 1
    assert fusedpg.openmetrics() != fusedpg.openmetrics(group)
    dist.destroy_process_group(group)


def test_labels_are_escaped() -> None:
    from fusedpg import _metrics

    line = _metrics._line("x", {"group": 'a"b\\c\nd'}, 3)
    assert line == 'fusedpg_x{group="a\\"b\\\\c\\nd"} 3'


# --- who is late --------------------------------------------------------------

OPERATIONS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1000), group=group),
    "all_gather": lambda group: dist.all_gather_into_tensor(
        torch.empty(4 * dist.get_world_size(group)), torch.ones(4), group=group
    ),
    "barrier": lambda group: dist.barrier(group),
}


def waits(context: Context, late: int, operation: str) -> list[dict[int, float]]:
    """The reports of all ranks when one of them comes late to a collective."""
    group = dist.new_group()
    call = OPERATIONS[operation]
    call(group)  # connects hosts
    dist.barrier(group)
    fusedpg.stats(group, reset=True)
    assert all(seconds == 0 for seconds in fusedpg.stats(group)["waited"].values())
    key = f"{group.group_name}/there/"
    if context.rank == late:
        for rank in set(range(context.world_size)) - {late}:
            context.store.get(f"{key}{rank}")
        time.sleep(0.5)
    else:
        context.store.set(f"{key}{context.rank}", "")
    call(group)
    found: list[Any] = [None] * context.world_size
    mine = fusedpg.stats(group)["waited"]
    dist.all_gather_object(found, mine)
    dist.destroy_process_group(group)
    return found


def names_the_late(found: list[dict[int, float]], late: int) -> None:
    for rank, waited in enumerate(found):
        assert set(waited) == set(range(len(found))) - {rank}
        if rank != late:
            assert max(waited, key=lambda peer: waited[peer]) == late, found
            assert 0.1 < waited[late] > sum(found[late].values()), found


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_who_is_late(size: int, operation: str) -> None:
    for late in range(size):
        names_the_late(harness.pool(size).run(waits, late, operation)[0], late)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
@pytest.mark.parametrize("names", ["two", "two and one"])
def test_who_is_late_between_hosts(names: str, transport: str, operation: str) -> None:
    workers = harness.pool_of_hosts(names, transport)
    late = len(harness.HOSTS[names]) - 1  # alone on its host
    names_the_late(workers.run(waits, late, operation)[0], late)


@on_ranks(2)
def test_no_wait_where_nobody_is_late(context: Context) -> None:
    """A rank's own computing between calls is no wait."""
    group = dist.new_group()
    dist.barrier(group)
    fusedpg.stats(group, reset=True)
    time.sleep(0.2)  # both
    assert set(fusedpg.stats(group)["waited"].values()) == {0.0}
    dist.destroy_process_group(group)


# --- the log ------------------------------------------------------------------


def new_groups(context: Context) -> list[str]:
    """Lines of Python's log while groups are created."""
    from fusedpg import _serve_gloo

    logger, stream = logging.getLogger("fusedpg"), io.StringIO()
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    try:
        dist.destroy_process_group(dist.new_group())  # nobody listens
        logger.setLevel(logging.INFO)
        dist.destroy_process_group(dist.new_group())
        dist.destroy_process_group(dist.new_group([1, 0]))
        _serve_gloo.serve_gloo()
        dist.destroy_process_group(dist.new_group(backend="gloo"))
    finally:
        _serve_gloo.serve_gloo(False)
        logger.setLevel(level)
        logger.removeHandler(handler)
    return stream.getvalue().splitlines()


def test_a_line_for_each_group() -> None:
    first, *others = harness.pool(2).run(new_groups)
    assert others == [[]]
    own = r'\[fusedpg\] group "\w+" of backend fused: 2 ranks in shared memory; \d+ thread.*kernels'
    served = r"\[fusedpg\] group of backend gloo: 2 ranks in shared memory; .*"
    assert len(first) == 3, first
    for line, pattern in zip(first, [own, own, served], strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


def test_the_line_says_which_transport() -> None:
    first, *others = harness.pool_of_hosts("two and one", "tcp").run(new_groups)
    assert others == [[], []]
    two, *all_three = first[1], first[0], first[2]
    assert "2 ranks in shared memory;" in two
    for line in all_three:
        assert "3 ranks on several hosts by tcp, 2 of them with rank 0 (at 127.0.0.1);" in line


def late(context: Context) -> str:
    """What libraries write on the terminal while the last rank comes late."""
    path = Path(context.scratch) / f"stderr.{context.rank}"
    saved = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            pause = 0.4 if context.rank == context.world_size - 1 else 0.0
            time.sleep(pause)
            group = dist.new_group()
            for use in (dist.barrier, lambda group: dist.all_reduce(torch.ones(4), group=group)):
                time.sleep(pause)
                use(group)
            ranks = [0, context.world_size - 1]
            if context.rank in ranks:
                time.sleep(pause)
                value = torch.ones(4)
                other = ranks[context.rank == 0]
                (dist.send if context.rank else dist.recv)(value, other, group)
            dist.barrier()
            dist.destroy_process_group(group)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    return path.read_text()


@pytest.mark.parametrize("names", ["", "two and one", "two of two"])
def test_who_waits_for_a_late_rank_prints_nothing(names: str) -> None:
    """c10d's store warns of each of its waits that ends in vain."""
    workers = harness.pool_of_hosts(names, "tcp") if names else harness.pool(2)
    written = workers.run(late)
    assert not any(written), written


def unused_groups(context: Context) -> int:
    """Descriptors that groups open which are not used."""
    before = len(os.listdir("/proc/self/fd"))
    groups = [dist.new_group() for _ in range(5)]
    opened = len(os.listdir("/proc/self/fd")) - before
    dist.barrier()
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)
    return opened


def test_groups_between_hosts_have_one_client_of_the_store() -> None:
    """A store looks up the name of each that connects, which takes seconds without a DNS."""
    assert harness.pool_of_hosts("three", "tcp").run(unused_groups) == [0, 0, 0]


def nothing(context: Context) -> None:
    dist.barrier()


def test_the_variable_shows_it() -> None:
    with harness.Workers(2, oracle=False, env={"FUSEDPG_LOG": "info"}) as workers:
        workers.run(nothing)
        assert workers.log(0).count("[fusedpg] group ") == 1
        assert "[fusedpg] group" not in workers.log(1)
