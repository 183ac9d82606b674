"""A group's reports: counters, late ranks, OpenMetrics text, a line in the log."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks.faults import rejoin
from harness import Context, on_ranks


def _dump(**arguments: bool) -> dict[str, Any]:
    from torch._C import _distributed_c10d as c10d

    return pickle.loads(c10d._dump_fr_trace(**arguments))  # type: ignore[no-any-return]


def _operations(rank: int) -> None:
    pair = [torch.ones(2), torch.ones(2)]
    dist.all_reduce(torch.ones(4, 2, dtype=torch.float16))
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.all_gather(pair, torch.ones(2))
    dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
    dist.reduce_scatter(torch.ones(2), pair)
    dist.broadcast(torch.ones(3), 0)
    dist.all_to_all_single(torch.ones(4), torch.ones(4))
    dist.gather(torch.ones(2), pair if rank == 0 else None)
    dist.barrier()
    part = fusedpg.shard_range(10, 2, rank)[1]
    state = [torch.zeros(part), torch.zeros(part)]
    params, grads, steps = [torch.ones(10)], [torch.ones(10)], [torch.zeros(())]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    fusedpg.fused_adamw_(params, grads, state[:1], state[1:], [], steps, **hyper)
    # In one order on rank 0, in the other on rank 1; the last one of whom it comes.
    for _ in range(2):
        works = [dist.isend(torch.ones(5), 1 - rank), dist.irecv(torch.ones(5), 1 - rank)]
        for work in works:
            assert work is not None
            work.wait()
    if rank == 0:
        dist.send(torch.ones(7), 1)
    else:
        dist.recv(torch.ones(7))


FAULTS: dict[str, Callable[[int], Any]] = {
    "none": lambda rank: None,
    "operations": lambda rank: (
        dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0)
    ),
    "sizes": lambda rank: dist.all_reduce(torch.ones(4 + rank)),
    "absent": lambda rank: dist.all_reduce(torch.ones(4)) if rank == 0 else time.sleep(1.5),
}


def arguments(context: Context) -> None:
    """What the dumps' arguments leave out, and the same as JSON."""
    from torch._C import _distributed_c10d as c10d

    assert "entries" not in _dump(includeCollectives=False)
    active = _dump(onlyActive=True).get("entries", [])
    # What Gloo has done stays "scheduled" in torch's recorder.
    assert not [e for e in active if "operation" in e and e["retired"]]
    dist.all_reduce(torch.ones(3))
    last = json.loads(c10d._dump_fr_trace_json())["entries"][-1]
    assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[3]])
    assert last["state"] == "completed"
    assert "frames" not in last


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
@pytest.mark.parametrize("names", ["two", "two and one"])
def test_who_is_late_between_hosts(names: str, operation: str) -> None:
    workers = harness.pool_of_hosts(names)
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
    first, *others = harness.pool_of_hosts("two and one").run(new_groups)
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
    workers = harness.pool_of_hosts(names) if names else harness.pool(2)
    written = workers.run(late)
    assert not any(written), written


def _connections_to(port: int) -> int:
    """Sockets of this process that are connected to a port."""
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in own for row in rows)


@on_ranks("three")
def test_groups_between_hosts_have_one_client_of_the_store(context: Context) -> None:
    """A store looks up the name of each that connects, which takes seconds without a DNS."""
    port = context.store.port
    before = _connections_to(port), len(os.listdir("/proc/self/fd"))
    assert before[0] > 0
    groups = [dist.new_group() for _ in range(5)]
    after = _connections_to(port), len(os.listdir("/proc/self/fd"))
    dist.barrier()
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)
    assert after[0] == before[0]
    assert after[1] - before[1] <= 5 * 5  # a group between hosts has its two endpoints at once


def nothing(context: Context) -> None:
    dist.barrier()


def test_the_variable_shows_it() -> None:
    with harness.Workers(2, oracle=False, env={"FUSEDPG_LOG": "info"}) as workers:
        workers.run(nothing)
        assert workers.log(0).count("[fusedpg] group ") == 1
        assert "[fusedpg] group" not in workers.log(1)


def run(context: Context, fault: str, served: bool, folder: str) -> dict[str, Any]:
    """All kinds of operations, a fault, and this rank's dump in the folder; returns it."""
    fusedpg.serve_gloo(served)
    seconds, backend = 1 if fault == "absent" else 20, "gloo" if served else "fused"
    rejoin(context, Path(folder).name, None, seconds, backend)
    try:
        _operations(context.rank)
        named = dist.new_group([0, 1], group_desc="a description")
        dist.all_reduce(torch.ones(1), group=named)
        error = ""
        try:
            FAULTS[fault](context.rank)
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
        assert bool(error) == (fault != "none" and (fault, context.rank) != ("absent", 1)), error
        dump = _dump()
        Path(folder, f"rank_{context.rank}").write_bytes(pickle.dumps(dump))
        return dump
    finally:
        dist.destroy_process_group()
        fusedpg.serve_gloo(False)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("absent", "Not all ranks joining collective"),
        ("operations", "does not match found collective type"),
        ("sizes", "Expected input sizes"),
        ("none", ""),
    ],
)
@pytest.mark.parametrize("served", [False, True], ids=["fused", "served"])
def test_flight_recorder(fault: str, says: str, served: bool, tmp_path: Path) -> None:
    """torch's analyser of the ranks' dumps says what was wrong, and nothing else is."""
    with harness.Workers(2, init=False, oracle=False) as workers:
        dumps = workers.run(run, fault, served, str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert says in report, report
    assert ("Not all ranks" in report) == (fault == "absent"), report
    assert ("has errors" in report) == (fault in ("operations", "sizes")), report
    entries = dumps[0]["entries"]
    assert [entry["record_id"] for entry in entries] == list(range(len(entries)))
    names = [entry["operation"] for entry in entries]
    assert names.count("all_reduce") == (3 if fault == "none" else 4), "each of them once"
    assert "fused_adamw_" in names
    assert entries[0]["input_sizes"] == [[4, 2]]
    assert entries[0]["input_dtypes"] == ["Half"]
    assert all(entry["state"] == "completed" for entry in entries[:-1])
    assert entries[-1]["state"] == ("completed" if fault == "none" else "started")


@on_ranks(2)
def test_flight_recorder_arguments(context: Context) -> None:
    arguments(context)


@on_ranks("two")
def test_tensors_of_one_call_between_hosts(context: Context) -> None:
    """Each is an operation, of which its own bytes count and no earlier one's."""
    sent = []
    for count in (1, 3):
        fusedpg.stats(reset=True)
        dist.all_reduce_coalesced([torch.ones(1000) for _ in range(count)])
        sent.append(fusedpg.stats()["all_reduce"]["bytes_sent"])
    assert sent[1] == 3 * sent[0] > 0
